//! A run: an image on simulated storage, clients, and power cuts at any time.
//!
//! Nothing in a run depends on time or chance but through the seed: storage operations wait until
//! the driver lets them go, one after the other in random order, and what would be decompressed on
//! helper threads is decompressed at once.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_qcow2::Qcow2;
use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Limits;
use ringdisk_testkit::layout::Layout;
use ringdisk_testkit::oracle::Oracle;
use ringdisk_testkit::sim::{Fault, Prng, SimStorage, When};

use crate::barrier::Barrier;
use crate::client::{Client, Shore};
use crate::config::{Config, Medium, index};
use crate::live::{Base, Shared, open};

/// Number of the disk in its stamps.
pub(crate) const DISK: u16 = 7;
/// Room on a block device besides the empty image, bytes: more than any run takes.
const DEVICE_ROOM: u64 = 64 << 20;
/// Clusters of room on one that gets full: fewest, and how many more at most.
const FULL_ROOM: (u64, u64) = (6, 24);
/// States that are taken at each power cut.
const STATES: u64 = 5;
/// Looks without any progress before a run counts as hanging: some of them sleep a millisecond.
const IDLE_ROUNDS_MAX: u32 = 3000;

/// A state that a power cut may leave, with what may be in it.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) file: SimStorage,
    pub(crate) data: Option<SimStorage>,
    pub(crate) expected: Rc<Expected>,
    /// When it was taken.
    pub(crate) label: String,
    /// The barrier that is missing.
    pub(crate) barrier: Option<Barrier>,
    /// Nothing was lost and the image was closed: it must have no leaks.
    pub(crate) closed: bool,
}

/// What may be in a state.
#[derive(Debug)]
pub(crate) struct Expected {
    /// What the disk may be: one of these.
    pub(crate) worlds: Vec<Oracle>,
    /// Snapshots that may exist, with their content.
    pub(crate) snapshots: BTreeMap<String, Oracle>,
    /// Those of them that must exist.
    pub(crate) required: BTreeSet<String>,
}

/// Which states a run collects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Those that a power cut may leave.
    Honest,
    /// Those that it could leave if the last flush had been a lie.
    WithoutLastFlush,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) config: Rc<Config>,
    pub(crate) ring: Ring,
    pub(crate) file: SimStorage,
    pub(crate) data: Option<SimStorage>,
    pub(crate) shore: Rc<Shore>,
    pub(crate) snapshots: BTreeMap<String, Oracle>,
    /// Those that must exist.
    pub(crate) required: BTreeSet<String>,
    pub(crate) cases: Vec<Case>,
    /// Other worlds that a power cut may lead to: while a change of everything is under way.
    pub(crate) also: Vec<Oracle>,
    pub(crate) prng: Prng,
    taken: Taken,
    /// The open image, while it is changed without a close.
    live: Option<Shared>,
    running: Rc<Cell<u64>>,
    stream: u64,
    cuts: u64,
}

impl World {
    pub(crate) fn new(ring: Ring, config: Config, taken: Taken) -> World {
        let (seed, shape) = (config.seed, &config.shape);
        ring.offload_here();
        let file = medium(&config);
        let data = shape.data_file.as_ref().map(|_| SimStorage::new(0, seed + 1));
        let oracle = Oracle::new(DISK, shape.size, config.below);
        World {
            ring,
            file,
            data,
            shore: Shore::new(oracle, config.medium == Medium::FullDevice),
            snapshots: BTreeMap::new(),
            required: BTreeSet::new(),
            cases: Vec::new(),
            also: Vec::new(),
            prng: Prng::new(seed),
            taken,
            live: None,
            running: Rc::default(),
            stream: 0,
            cuts: 0,
            config: Rc::new(config),
        }
    }

    /// Errors of storage are part of the game: a client gets one, no more.
    #[allow(dead_code, reason = "not every test program has faults")]
    pub(crate) fn tolerate_faults(&mut self) {
        let oracle = self.shore.oracle.borrow().clone();
        self.shore = Shore::new(oracle, true);
    }

    /// A flush by itself. Errors: it hangs.
    #[allow(dead_code, reason = "not every test program flushes by itself")]
    pub(crate) async fn flush(&mut self, image: &Shared) -> Result<Result<(), Errno>, String> {
        let (ring, image, shore) = (self.ring.clone(), image.clone(), self.shore.clone());
        self.drive("flush", async move {
            let begun = shore.oracle.borrow_mut().begin_flush();
            let result = image.flush(&ring).await;
            if result.is_ok() {
                shore.oracle.borrow_mut().end_flush(&begun);
            }
            result
        })
        .await
    }

    pub(crate) fn base(&self) -> Base {
        Base(self.config.below)
    }

    /// The whole run. Errors: what went wrong besides power cuts.
    pub(crate) async fn run(&mut self) -> Result<(), String> {
        if self.config.bitmap {
            self.add_bitmap().await?;
        }
        for storage in [Some(&self.file), self.data.as_ref()].into_iter().flatten() {
            storage.on(When::any().chance(self.config.held_per_mille), Fault::Hold);
        }
        for stream in 0..self.config.streams {
            self.stream = stream;
            let image = match self.live.take() {
                Some(image) => image,
                None => self.open().await?,
            };
            self.stream(&image).await?;
            let is_last = stream + 1 == self.config.streams;
            if self.config.live && !is_last {
                self.live = Some(image);
            } else {
                self.close(image).await?;
            }
            if !is_last {
                self.between().await?;
            }
        }
        self.only_space_was_missing()
    }

    /// Where storage fails at all here, it is full.
    fn only_space_was_missing(&self) -> Result<(), String> {
        let no_space = format!(": {}", Errno::NOSPC);
        let errors = self.shore.errors.borrow();
        let other = errors.iter().find(|error| !error.ends_with(&no_space));
        other.map_or(Ok(()), |other| Err(format!("a full device is told as {other:?}")))
    }

    pub(crate) async fn open(&mut self) -> Result<Shared, String> {
        let (ring, file, data) = (self.ring.clone(), self.file.clone(), self.data.clone());
        let options = self.config.options.clone();
        let opening = async move { open(&ring, &file, data.as_ref(), &options).await };
        Ok(Arc::new(self.drive("open", opening).await??))
    }

    /// All clients at once, to their end.
    pub(crate) async fn stream(&mut self, image: &Shared) -> Result<(), String> {
        let client = Client {
            ring: self.ring.clone(),
            image: image.clone(),
            base: self.base(),
            shore: self.shore.clone(),
            config: self.config.clone(),
        };
        for _ in 1..self.config.clients {
            let work = client.clone().work(self.prng.next_u64());
            self.spawn(work);
        }
        let last = client.work(self.prng.next_u64());
        self.drive("stream", last).await?;
        match self.shore.wrong.borrow().first() {
            Some(wrong) => Err(wrong.clone()),
            None => Ok(()),
        }
    }

    pub(crate) async fn close(&mut self, image: Shared) -> Result<(), String> {
        let ring = self.ring.clone();
        let closing = image.clone();
        let result = self.drive("close", async move { closing.close(&ring).await }).await?;
        result.map_err(|errno| format!("close: {errno}"))?;
        drop(image);
        self.shore.oracle.borrow_mut().settle();
        self.closed("stream");
        Ok(())
    }

    /// Starts a task that the driver waits for.
    fn spawn(&self, work: impl Future<Output = ()> + 'static) {
        self.running.set(self.running.get() + 1);
        let running = self.running.clone();
        self.ring.spawn(async move {
            work.await;
            running.set(running.get() - 1);
        });
    }

    /// Runs `work` and everything that was spawned to the end, with power cuts on the way.
    pub(crate) async fn drive<T: 'static>(
        &mut self,
        label: &str,
        work: impl Future<Output = T> + 'static,
    ) -> Result<T, String> {
        let result = Rc::new(RefCell::new(None));
        let place = result.clone();
        self.spawn(async move {
            let value = work.await;
            *place.borrow_mut() = Some(value);
        });
        let mut idle = 0;
        while self.running.get() > 0 {
            for _ in 0..3 {
                self.ring.yield_now().await;
            }
            let released = self.release_one();
            idle = if released { 0 } else { idle + 1 };
            // Changes of everything are short, and rich in moments that matter.
            let chance = if label == "stream" { 40 } else { 150 };
            if self.prng.below(1000) < chance {
                self.cut(label);
            }
            if idle > 20 {
                // A helper thread, or a sleep of the engine.
                self.ring.sleep(Duration::from_millis(1)).await;
            }
            if idle > IDLE_ROUNDS_MAX {
                return Err(format!(
                    "{label} hangs: {} tasks wait for nothing",
                    self.running.get()
                ));
            }
        }
        let value = result.borrow_mut().take();
        value.ok_or_else(|| format!("{label} was dropped"))
    }

    /// Lets one storage operation go. Returns whether there was one.
    fn release_one(&mut self) -> bool {
        let all = [Some(&self.file), self.data.as_ref()].into_iter().flatten();
        let held: Vec<(&SimStorage, u64)> = all
            .flat_map(|sim| sim.held().into_iter().map(move |held| (sim, held.number)))
            .collect();
        if held.is_empty() {
            return false;
        }
        let (sim, number) = held[index(&mut self.prng, held.len() as u64)];
        sim.release(number)
    }

    /// The power fails: some of the states that this may leave.
    pub(crate) fn cut(&mut self, label: &str) {
        self.cuts += 1;
        let expected = self.expected();
        let layout = Layout::of(&self.file);
        let lost = match self.taken {
            Taken::Honest => None,
            Taken::WithoutLastFlush => {
                Barrier::choose(&self.file, self.data.as_ref(), &layout, &mut self.prng)
            }
        };
        for _ in 0..STATES {
            let seed = self.prng.next_u64();
            let (stream, cut) = (self.stream, self.cuts);
            let label = format!("{label}, stream {stream}, cut {cut}, state {seed:#x}");
            let in_data_file = lost.as_ref().is_some_and(|barrier| barrier.in_data_file);
            let data = self.data.as_ref().and_then(|data| match in_data_file {
                true => data.crash_state_without_last_flush(seed ^ 0xda7a, |_, _| true),
                false => Some(data.crash_state(seed ^ 0xda7a)),
            });
            let file = match (self.taken, &lost) {
                (Taken::Honest, _) => Some(self.file.crash_state(seed)),
                (_, None) => None,
                (_, Some(barrier)) if barrier.in_data_file => Some(self.file.crash_state(seed)),
                (_, Some(barrier)) => self.file.crash_state_without_last_flush(seed, |at, _| {
                    layout.class_at(at) == barrier.lost
                }),
            };
            let Some(file) = file else { return };
            let (expected, barrier) = (expected.clone(), lost.clone());
            self.cases.push(Case { file, data, expected, label, barrier, closed: false });
        }
    }

    fn expected(&self) -> Rc<Expected> {
        let now = self.shore.oracle.borrow().clone();
        Rc::new(Expected {
            worlds: [vec![now], self.also.clone()].concat(),
            snapshots: self.snapshots.clone(),
            required: self.required.clone(),
        })
    }

    /// The image was closed: everything is there, also without a power cut.
    fn closed(&mut self, label: &str) {
        if self.taken == Taken::WithoutLastFlush {
            return;
        }
        self.cases.push(Case {
            file: self.file.fork(1),
            data: self.data.as_ref().map(|data| data.fork(1)),
            expected: self.expected(),
            label: format!("closed after {label}, stream {}", self.stream),
            barrier: None,
            closed: true,
        });
        self.cut(label);
    }

    /// Opens, changes the whole image with `change`, and closes. The image that is open with what
    /// it has not written yet is changed as it is, and stays open.
    ///
    /// * `after`: what the disk is when it has happened; until then it may be either.
    pub(crate) async fn change<F>(
        &mut self,
        label: &str,
        after: Oracle,
        change: impl FnOnce(Ring, Qcow2) -> F,
    ) -> Result<(), String>
    where
        F: Future<Output = Result<Qcow2, String>> + 'static,
    {
        let live = self.live.take();
        let is_live = live.is_some();
        let image = match live {
            Some(image) => image,
            None => self.open().await?,
        };
        let image = Arc::into_inner(image).ok_or("the image is used by nobody else")?;
        self.also = vec![after.clone()];
        let (ring, again) = (self.ring.clone(), self.ring.clone());
        self.shore.note(|| label.to_owned());
        let changing = change(ring, image);
        let work = async move {
            let image = changing.await?;
            if !is_live {
                image.close(&again).await.map_err(|errno| format!("close: {errno}"))?;
            }
            Ok::<_, String>(image)
        };
        let result = self.drive(label, work).await?;
        // After an error it may have happened or not.
        let image = result.map_err(|error| format!("{label}: {error}"))?;
        self.also.clear();
        *self.shore.oracle.borrow_mut() = after;
        if is_live {
            self.live = Some(Arc::new(image));
            self.cut(label);
        } else {
            self.closed(label);
        }
        Ok(())
    }
}

/// The storage of the image file.
fn medium(config: &Config) -> SimStorage {
    let (image, seed) = (config.shape.make(), config.seed);
    let device = |room: u64| {
        let device = SimStorage::device(image.len() as u64 + room, seed);
        device.put(0, &image);
        device
    };
    match config.medium {
        Medium::File => SimStorage::from_image(&image, seed),
        Medium::Direct => {
            let file = SimStorage::from_image(&image, seed);
            file.become_regular();
            file.set_limits(Limits { direct: true, ..Limits::byte_granular() });
            file
        }
        Medium::Device => device(DEVICE_ROOM),
        Medium::FullDevice => {
            let (least, more) = FULL_ROOM;
            device((least + Prng::new(seed ^ 0xf011).below(more)) * config.cluster())
        }
    }
}
