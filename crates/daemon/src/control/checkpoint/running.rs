//! The checkpoints of one disk, in the process that serves it.
//!
//! Promises: a begin that fails, or whose client goes, leaves the disk as it was, and requests of
//! clients waited for at most [`HOLD_MAX`]. A checkpoint ends once: by a command, by the end of its
//! client where it is leased, or with the disk. All of it runs on the control thread of the disk.

use std::future::pending;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ringdisk_disk::{
    Bytes, Checkpoint, CheckpointEnd, CheckpointOptions, CheckpointState, Disk, NewBitmap,
    Prepared, Progress,
};
use ringdisk_nbd::{CommonOptions, DirtyBitmap, NamedDisk, NbdOptions, RingExport};
use ringdisk_qcow2::Bitmap;
use ringdisk_ring::Ring;
use ringdisk_storage::{Lock, OpenOptions, Storage};
use rustix::net::{AddressFamily, sockopt};
use serde_json::{Value, json};

use super::accel::Accel;
use super::exports;
use super::steps::Steps;
use crate::control::protocol::checkpoint::{
    Begin, Bitmaps, DRAIN_MAX, Dirty, End, GIVEN, HOLD_MAX, LISTENERS_MAX, Listed, RANGES_MAX,
    STEP_MAX, Step, check_name,
};
use crate::control::server::{Ending, First, first};
use crate::control::serving::Serving;
use crate::failure::{Exit, Failure};
use crate::terminal::visible;

/// Readers of a checkpoint at once, on the ring of the control thread.
const CONNECTIONS: usize = 16;
/// The end of a checkpoint waits so long for its readers to be sent away.
const READERS_GO: Duration = Duration::from_secs(3);
/// How often the end of the process looks for that.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The checkpoints of a disk.
#[derive(Debug, Default)]
pub(crate) struct Checkpoints {
    all: Mutex<Vec<Place>>,
    /// Acceleration was switched off by a command: the end of a checkpoint leaves it off.
    is_accel_off: Arc<AtomicBool>,
}

/// The name of a checkpoint, and the checkpoint once it is there.
#[derive(Debug)]
struct Place {
    name: String,
    running: Option<Arc<Running>>,
}

/// One that is there.
#[derive(Debug)]
struct Running {
    begin: Begin,
    checkpoint: Arc<Checkpoint>,
    /// Asks the task that looks after it to end.
    stop: Arc<Ending>,
    /// That task has ended: no reader is served.
    ended: Arc<Ending>,
    /// Gives the data path back to the kernel when this is dropped.
    _accel: Option<Accel>,
}

/// Signals when it is dropped, also with the ring of its task.
struct Signals(Arc<Ending>);

impl Drop for Signals {
    fn drop(&mut self) {
        self.0.begin();
    }
}

/// Keeps a name from being used twice; dropping it gives the name back.
struct Name<'a> {
    of: &'a Checkpoints,
    name: String,
    is_kept: bool,
}

impl Drop for Name<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.of.all().retain(|place| place.name != self.name);
        }
    }
}

impl Checkpoints {
    /// A panic elsewhere leaves it valid, so poison is ignored.
    fn all(&self) -> MutexGuard<'_, Vec<Place>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins one. Returns when it is there, with its size.
    ///
    /// * `given`: as [`GIVEN`] says; with what says that the client has gone.
    ///
    /// Errors: why it is not there; nothing of it is left.
    pub(crate) async fn begin(
        self: &Arc<Checkpoints>,
        ring: &Ring,
        disk: Arc<Disk>,
        serving: &Arc<dyn Serving>,
        begin: Begin,
        (given, progress): (Vec<OwnedFd>, &Arc<Progress>),
    ) -> Result<Value, Failure> {
        check_name(&begin.name).map_err(|text| Failure::new(Exit::Usage, text))?;
        let (steps, fleece, listeners) = sort(given, begin.listeners, progress)?;
        if serving.requires_tls() && listeners.iter().any(is_of_network) {
            let text = "the disk is served with TLS only, and readers of a checkpoint have none";
            return Err(Failure::new(Exit::Usage, text).hint(
                "let them come to a Unix socket (--nbd unix:PATH), which `ssh -L` can forward",
            ));
        }
        let mut name = self.take(&begin.name)?;
        let accel = self.take_accel_back(ring, &disk, serving).await?;
        let (checkpoint, paused) = freeze(ring, &disk, &begin, fleece, &steps).await?;
        let export = match serve(ring, &begin, &checkpoint, listeners, &steps).await {
            Ok(export) => export,
            Err(failure) => return Err(undo(ring, &checkpoint, failure).await),
        };
        let running = Arc::new(Running {
            begin,
            checkpoint,
            stop: Arc::default(),
            ended: Arc::default(),
            _accel: accel,
        });
        let size = running.checkpoint.disk().size();
        tracing::info!("the checkpoint '{}' has begun", running.begin.name);
        let lease = running.begin.is_leased.then_some(steps);
        name.is_kept = true;
        for place in self.all().iter_mut().filter(|place| place.name == running.begin.name) {
            place.running = Some(Arc::clone(&running));
        }
        ring.spawn(attend(ring.clone(), Arc::clone(self), running, export, lease));
        Ok(json!({ "size": size.0, "paused-us": paused.as_micros() }))
    }

    /// Brings the data path of a disk that the host kernel serves back to this process, as long as
    /// what this gives is there.
    ///
    /// Errors: it stays in the kernel.
    pub(crate) async fn take_accel_back(
        &self,
        ring: &Ring,
        disk: &Arc<Disk>,
        serving: &Arc<dyn Serving>,
    ) -> Result<Option<Accel>, Failure> {
        Accel::take_back(ring, disk, serving, &self.is_accel_off).await
    }

    /// A command switches acceleration on or off: that is what the end of a checkpoint leaves.
    pub(crate) fn accel_is_wanted(&self, on: bool) {
        self.is_accel_off.store(!on, Ordering::Relaxed);
    }

    /// Errors: there is one of this name.
    fn take(&self, name: &str) -> Result<Name<'_>, Failure> {
        let mut all = self.all();
        if all.iter().any(|place| place.name == name) {
            let text = format!("the disk has a checkpoint '{name}' already");
            return Err(Failure::new(Exit::Locked, text)
                .hint(format!("end it with `checkpoint --end {name}`, or give another name")));
        }
        all.push(Place { name: name.to_owned(), running: None });
        drop(all);
        Ok(Name { of: self, name: name.to_owned(), is_kept: false })
    }

    /// Errors: there is none of this name, or with another id.
    fn find(&self, name: &str, id: Option<&str>) -> Result<Arc<Running>, Failure> {
        let all = self.all();
        let running = all.iter().filter(|place| place.name == name);
        let mut running = running.filter_map(|place| place.running.as_ref());
        let found = running.find(|running| id.is_none_or(|id| running.begin.id == id));
        found.cloned().ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|place| place.name.as_str()).collect();
            let text = format!("the disk has no checkpoint '{}'", visible(name));
            let failure = Failure::new(Exit::Usage, text);
            match names.as_slice() {
                [] => failure.hint("it has none; a checkpoint ends with its server, too"),
                names => failure.hint(format!("it has: {}", names.join(", "))),
            }
        })
    }

    /// Ends one by a command.
    ///
    /// Errors: there is none; the bitmaps could not be changed.
    pub(crate) async fn end(&self, ring: &Ring, wanted: &End) -> Result<Value, Failure> {
        let running = self.find(&wanted.name, wanted.id.as_deref())?;
        let failed = failed(&running.checkpoint.state());
        let end = match wanted.bitmaps {
            // No reader has got all of it, so the old bitmap is still needed.
            Bitmaps::Drop if failed.is_some() => CheckpointEnd::Merge,
            bitmaps => bitmaps.into(),
        };
        self.finish(ring, &running, end).await?;
        Ok(json!({ "targets": running.begin.targets, "failed": failed }))
    }

    /// Sends readers away, ends the checkpoint and forgets it.
    async fn finish(
        &self,
        ring: &Ring,
        running: &Running,
        end: CheckpointEnd,
    ) -> Result<(), Failure> {
        running.stop.begin();
        let _ = ring.within(READERS_GO, running.ended.wait()).await;
        running.checkpoint.end(ring, end).await?;
        self.all().retain(|place| place.name != running.begin.name);
        tracing::info!("the checkpoint '{}' has ended", running.begin.name);
        Ok(())
    }

    /// Those that are there, and the bitmaps of the image on top of the disk.
    pub(crate) fn list(&self, disk: &Disk) -> Value {
        let all = self.all();
        let running = all.iter().filter_map(|place| place.running.as_ref());
        let listed = running.map(|running| {
            let Running { begin, checkpoint, .. } = &**running;
            json!(Listed {
                name: begin.name.clone(),
                id: begin.id.clone(),
                export: begin.export.clone(),
                uri: begin.uri.clone(),
                socket: begin.socket.clone(),
                size: checkpoint.disk().size().0,
                bitmap: begin.bitmap.clone(),
                since: begin.since.clone(),
                fleeced: checkpoint.fleeced_bytes().0,
                fleece_max: checkpoint.fleece_max().0,
                failed: failed(&checkpoint.state()),
                targets: begin.targets.clone(),
            })
        });
        json!({ "checkpoints": listed.collect::<Vec<Value>>(), "image": image(disk) })
    }

    /// What the bitmap of one has marked.
    ///
    /// Errors: there is no such checkpoint, or it has no bitmap.
    pub(crate) fn dirty(&self, wanted: &Dirty) -> Result<Value, Failure> {
        let running = self.find(&wanted.name, None)?;
        let Some(dirty) = running.checkpoint.dirty() else {
            let text = format!("the checkpoint '{}' has no bitmap to read", running.begin.name);
            return Err(Failure::new(Exit::Usage, text));
        };
        let rest = dirty.ranges.get(wanted.first..).unwrap_or_default();
        let some = rest.get(..RANGES_MAX).unwrap_or(rest);
        let pairs: Vec<_> = some.iter().map(|range| (range.start, range.end)).collect();
        Ok(json!({
            "granularity": dirty.granularity_bytes.0,
            "ranges": pairs,
            "more": rest.len() > some.len(),
        }))
    }

    /// Lets go of all of them at the end of the disk, whose end they are. Blocks until no reader is
    /// served. Any thread but the control thread.
    pub(crate) fn let_go(&self) {
        let all = std::mem::take(&mut *self.all());
        let all: Vec<Arc<Running>> = all.into_iter().filter_map(|place| place.running).collect();
        all.iter().for_each(|running| running.stop.begin());
        let deadline = Instant::now() + READERS_GO;
        while all.iter().any(|running| !running.ended.has_begun()) && Instant::now() < deadline {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Tells the descriptors of a request apart.
fn sort(
    given: Vec<OwnedFd>,
    listeners: usize,
    progress: &Arc<Progress>,
) -> Result<(Steps, OwnedFd, Vec<OwnedFd>), Failure> {
    let wrong = || Failure::new(Exit::Usage, "a checkpoint comes with descriptors of its client");
    if listeners > LISTENERS_MAX || given.len() != GIVEN + listeners {
        return Err(wrong());
    }
    let mut given = given.into_iter();
    match (given.next(), given.next(), given.next()) {
        (Some(steps), Some(verdict), Some(fleece)) => {
            Ok((Steps::new(steps, verdict, progress), fleece, given.collect()))
        }
        _ => Err(wrong()),
    }
}

/// Whether a socket is none of this machine alone.
fn is_of_network(listener: &OwnedFd) -> bool {
    !sockopt::socket_domain(listener).is_ok_and(|domain| domain == AddressFamily::UNIX)
}

/// Keeps the state of the disk, in step with those of other disks.
async fn freeze(
    ring: &Ring,
    disk: &Arc<Disk>,
    begin: &Begin,
    fleece: OwnedFd,
    steps: &Steps,
) -> Result<(Arc<Checkpoint>, Duration), Failure> {
    let options = OpenOptions { lock: Lock::None, no_flush: true, ..OpenOptions::default() };
    let fleece = Arc::new(Storage::from_fd(fleece, "the fleecing file", &options)?);
    let bitmap = begin.bitmap.clone();
    let options = CheckpointOptions {
        bitmap: bitmap.map(|name| NewBitmap { name, granularity_bytes: None }),
        since: begin.since.clone(),
        ..CheckpointOptions::new(fleece, Bytes(begin.fleece_max))
    };
    let prepared = disk.prepare_checkpoint(ring, options).await?;
    let frozen = freeze_in_step(ring, disk, &prepared, steps).await;
    match frozen {
        Ok(frozen) => Ok(frozen),
        Err(failure) => {
            if let Err(error) = prepared.abandon(ring).await {
                tracing::warn!("a bitmap of a checkpoint that was given up stays: {error}");
            }
            Err(failure)
        }
    }
}

/// The steps during which requests of clients wait. Gives how long they waited at most, too.
///
/// Errors: as those of a step; the state is not kept then.
async fn freeze_in_step(
    ring: &Ring,
    disk: &Disk,
    prepared: &Prepared,
    steps: &Steps,
) -> Result<(Arc<Checkpoint>, Duration), Failure> {
    steps.say(Step::Prepared)?;
    steps.wait(ring, Step::Hold, STEP_MAX).await?;
    let begun = Instant::now();
    let mut held = disk.hold(ring, DRAIN_MAX).await?;
    let deadline = Instant::now() + HOLD_MAX;
    let left = || deadline.saturating_duration_since(Instant::now());
    steps.say(Step::Held)?;
    steps.wait(ring, Step::Freeze, left()).await?;
    let checkpoint = held.freeze(prepared)?;
    let all_are = match steps.say(Step::Frozen) {
        Ok(()) => steps.wait(ring, Step::Go, left()).await,
        Err(failure) => Err(failure),
    };
    drop(held);
    let paused = begun.elapsed();
    match all_are {
        Ok(()) => Ok((checkpoint, paused)),
        Err(failure) => Err(undo(ring, &checkpoint, failure).await),
    }
}

/// Gives a checkpoint up that does not come to be. Passes the reason on.
async fn undo(ring: &Ring, checkpoint: &Checkpoint, failure: Failure) -> Failure {
    if let Err(error) = checkpoint.end(ring, CheckpointEnd::Merge).await {
        tracing::warn!("the bitmaps of a checkpoint that was given up stay: {error}");
    }
    failure
}

/// Serves the disk to readers, or leaves that to the control thread that has the sockets.
async fn serve(
    ring: &Ring,
    begin: &Begin,
    checkpoint: &Checkpoint,
    listeners: Vec<OwnedFd>,
    steps: &Steps,
) -> Result<Option<RingExport>, Failure> {
    let disk = named(begin, checkpoint);
    if listeners.is_empty() {
        let _waits = exports::wait(&begin.id, disk);
        steps.say(Step::Waiting)?;
        steps.wait(ring, Step::Serve, STEP_MAX).await?;
        steps.say(Step::Ready)?;
        return match steps.verdict(ring, STEP_MAX).await {
            true => Ok(None),
            false => Err(given_up()),
        };
    }
    steps.say(Step::Waiting)?;
    steps.wait(ring, Step::Serve, STEP_MAX).await?;
    let mut disks = exports::take(&begin.id);
    disks.insert(0, disk);
    let options = NbdOptions {
        common: CommonOptions { read_only: true, ..CommonOptions::default() },
        max_connections: CONNECTIONS,
        ..NbdOptions::default()
    };
    let export = RingExport::start(ring, disks, listeners, &options)?;
    let stays = match steps.say(Step::Ready) {
        Ok(()) => steps.verdict(ring, STEP_MAX).await,
        Err(_) => false,
    };
    if stays {
        return Ok(Some(export));
    }
    export.end().await;
    Err(given_up())
}

fn given_up() -> Failure {
    Failure::new(Exit::General, "the client gave the checkpoint up")
}

/// Looks after a checkpoint until its end.
///
/// * `lease`: it ends when the client goes.
async fn attend(
    ring: Ring,
    of: Arc<Checkpoints>,
    running: Arc<Running>,
    export: Option<RingExport>,
    lease: Option<Steps>,
) {
    let signals = Signals(Arc::clone(&running.ended));
    let lost = async {
        match &lease {
            Some(steps) => steps.until_gone(&ring).await,
            None => pending().await,
        }
    };
    let failed = async {
        if let Some(why) = failed(&running.checkpoint.over().await) {
            let name = &running.begin.name;
            tracing::warn!("the checkpoint '{name}' of '{}' failed: {why}", running.begin.export);
        }
        pending::<()>().await;
    };
    let (stopped, lost, failed) = (pin!(running.stop.wait()), pin!(lost), pin!(failed));
    let unasked = pin!(first(lost, failed));
    let is_lost = matches!(first(stopped, unasked).await, First::Right(_));
    if let Some(export) = export {
        export.end().await;
    }
    drop(signals);
    if is_lost {
        tracing::info!("the client of the checkpoint '{}' has gone", running.begin.name);
        if let Err(failure) = of.finish(&ring, &running, CheckpointEnd::Merge).await {
            tracing::warn!("the bitmaps of the checkpoint stay: {}", failure.message());
        }
    }
}

/// The bitmaps of the image on top.
fn image(disk: &Disk) -> Value {
    let layers = disk.layers();
    let Some(image) = layers.first().and_then(|top| top.qcow2()) else {
        return json!({ "has-bitmaps": false, "bitmaps": [] });
    };
    let bitmap = |bitmap: &Bitmap| {
        let records = image.bitmap_records(&bitmap.name);
        json!({
            "name": bitmap.name,
            "granularity": bitmap.granularity_bytes.0,
            "records": records,
            "inconsistent": bitmap.in_use && !records,
        })
    };
    let bitmaps: Vec<Value> = image.bitmaps().iter().map(bitmap).collect();
    json!({ "has-bitmaps": true, "bitmaps": bitmaps })
}

/// Why a checkpoint cannot be read.
fn failed(state: &CheckpointState) -> Option<String> {
    match state {
        CheckpointState::Failed(why) => Some(why.to_string()),
        CheckpointState::Running | CheckpointState::Ended => None,
    }
}

/// The disk as readers get it.
fn named(begin: &Begin, checkpoint: &Checkpoint) -> NamedDisk {
    let dirty = checkpoint.dirty();
    let bitmaps = dirty.map(|dirty| DirtyBitmap { name: dirty.name, ranges: dirty.ranges });
    NamedDisk {
        description: format!("checkpoint {}", begin.name),
        bitmaps: bitmaps.into_iter().collect(),
        read_only: true,
        ..NamedDisk::new(begin.export.clone(), Arc::clone(checkpoint.disk()))
    }
}
