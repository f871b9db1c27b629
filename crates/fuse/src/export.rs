//! An export: a disk served as a file, from its mount to its end.
//!
//! Control path; any thread. Several exports live in one process independently of each other.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringdisk_disk::{Disk, SizeWatch};
use ringdisk_ring::{SetupError, Topology};

use crate::abi::flags::{INIT_HAS_IO_URING_BUFPOOL, INIT_OVER_IO_URING};
use crate::dev::{Place, QueueSetup, QueueThread, Serve, answer_init};
use crate::file::{FileOptions, FileServer};
use crate::keeper::{Event, EventSender, HaltReason, Keeper};
use crate::kept::{self, Keep, Parked};
use crate::mount::{Method, MountOptions, clone_device, mount};
use crate::negotiate::Profile;
use crate::stats::{QueueView, Stats};
use crate::uring::{
    Plan, Refuse, Refused, RingMode, Rings, Starting, ZeroCopy, is_enabled, online_cpus, plan,
    possible_cpus,
};
use crate::{Error, ErrorKind};

/// Requests that one queue serves at once unless the user says otherwise. The memory is 1 MiB each, taken when it is touched.
pub const QUEUE_DEPTH_DEFAULT: u32 = 128;
/// Largest queue depth: 4096 × 1 MiB of address space for each queue.
pub const QUEUE_DEPTH_MAX: u32 = 4096;
/// Queues at most.
pub const THREADS_MAX: usize = 64;
/// How long the first answer of a mount may take: it needs no storage.
const FIRST_ANSWER: Duration = Duration::from_secs(10);
/// How long the queues of a process that goes on with a mount look for requests by themselves.
const LOOK_AFTER_DEATH: Duration = Duration::from_secs(10);
/// Queues that `auto` makes at most: more readers of one shared input queue only get in each other's way.
pub const THREADS_AUTO_MAX: usize = 4;

/// How many queue threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Threads {
    /// One for each CPU that this process may use, up to 4.
    #[default]
    Auto,
    /// This many, 1..=64.
    Count(usize),
}

/// How requests travel between the kernel and us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// The best that the kernel offers.
    #[default]
    Auto,
    /// `/dev/fuse`.
    Dev,
    /// FUSE over io_uring (Linux 6.14, with the module parameter `enable_uring`).
    Uring,
}

impl Transport {
    /// As users write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Dev => "dev",
            Transport::Uring => "uring",
        }
    }
}

/// How to serve a disk as a file.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// An existing regular file.
    pub mountpoint: PathBuf,
    /// How requests travel.
    pub transport: Transport,
    /// Whether requests over io_uring use pages of the client.
    pub zero_copy: ZeroCopy,
    /// Queue threads.
    pub threads: Threads,
    /// Requests that each queue serves at once, 1..=4096; `None`: [`QUEUE_DEPTH_DEFAULT`], and what memory allows on rings.
    pub queue_depth: Option<u32>,
    /// Writes past the end grow the disk.
    pub growable: bool,
    /// Refuse writes although the disk would take them.
    pub read_only: bool,
    /// Let other users in.
    pub allow_other: bool,
    /// Let the kernel cache pages.
    pub kernel_cache: bool,
    /// End the export when a request takes longer.
    pub io_timeout: Option<Duration>,
    /// Source in the mount table.
    pub name: String,
    /// The mount outlives this process; over `/dev/fuse` only.
    pub keep: Option<Keep>,
    /// Moves the fetching between queues all the time. For tests of just that.
    #[doc(hidden)]
    pub restless: bool,
    /// Entries of a ring stay with the thread on their CPU. For measurements of just that.
    #[doc(hidden)]
    pub fixed_entries: bool,
    /// Makes the kernel refuse a step of the start over io_uring. For tests of what follows.
    #[doc(hidden)]
    pub refuse: Option<Refuse>,
}

impl ExportOptions {
    /// Defaults for a mountpoint.
    #[must_use]
    pub fn new(mountpoint: impl Into<PathBuf>) -> ExportOptions {
        ExportOptions {
            mountpoint: mountpoint.into(),
            transport: Transport::Auto,
            zero_copy: ZeroCopy::Auto,
            threads: Threads::Auto,
            queue_depth: None,
            growable: false,
            read_only: false,
            allow_other: false,
            kernel_cache: false,
            io_timeout: None,
            name: String::from("ringdisk"),
            keep: None,
            restless: false,
            fixed_entries: false,
            refuse: None,
        }
    }
}

/// Asks an export to stop. Any thread.
#[derive(Clone, Debug)]
pub struct StopHandle(EventSender);

impl StopHandle {
    /// Asks for a clean stop: the mount goes, requests in flight get 2 s to end, the image is flushed. Returns at once.
    pub fn stop(&self) {
        self.0.send(Event::Stop);
    }
}

/// A disk that is being served. Dropping it stops it.
#[derive(Debug)]
pub struct Export {
    keeper: Option<JoinHandle<Result<(), HaltReason>>>,
    events: EventSender,
    queues: Vec<QueueView>,
    notes: Vec<String>,
    transport: Transport,
    mode: Option<RingMode>,
    parked: Option<Parked>,
    _size_watch: SizeWatch,
}

impl Export {
    /// Mounts and serves; when it returns, the file answers.
    ///
    /// Errors: those of [`crate::mount::mount`]; [`ErrorKind::RingForbidden`] and [`ErrorKind::System`] when no ring can be made.
    pub fn start(disk: Arc<Disk>, options: ExportOptions) -> Result<Export, Error> {
        Export::start_with_devices(disk, options, Vec::new())
    }

    /// As [`Export::start`], with one queue more for each of `devices`, whose messages it takes for requests of the kernel. For
    /// tests of what a broken device does.
    #[doc(hidden)]
    pub fn start_with_devices(
        disk: Arc<Disk>,
        options: ExportOptions,
        devices: Vec<OwnedFd>,
    ) -> Result<Export, Error> {
        let wanted = match (options.transport, &options.keep) {
            (Transport::Uring, Some(_)) => return Err(kept::no_rings()),
            (_, Some(_)) => Transport::Dev,
            (wanted, None) => wanted,
        };
        let mut notes = Vec::new();
        let mut rung = match why_no_rings(wanted) {
            None => Some(first_mode(options.zero_copy)?),
            Some(_) if wanted == Transport::Dev => None,
            Some(reason) if wanted == Transport::Uring => {
                return Err(Error::new(ErrorKind::Unsupported, reason.what).hint(reason.hint));
            }
            Some(reason) => {
                tracing::info!("served over /dev/fuse: {}; {}", reason.what, reason.hint);
                None
            }
        };
        if rung.is_none() && options.zero_copy == ZeroCopy::On {
            return Err(Error::new(ErrorKind::Unsupported, "zero-copy needs FUSE over io_uring")
                .hint(
                    "leave `--zero-copy on` away, or see `ringdisk mount --help` on --transport",
                ));
        }
        let mut devices = Some(devices);
        loop {
            let devices = devices.take().unwrap_or_default();
            let started =
                Export::start_over(Arc::clone(&disk), options.clone(), devices, rung, &mut notes)?;
            let (mode, why) = match started {
                Started::Done(export) => return Ok(*export),
                Started::RingsRefused(mode, why) => (mode, why),
            };
            rung = mode.below();
            if options.zero_copy == ZeroCopy::On && mode == RingMode::ZeroCopy {
                return Err(Error::new(ErrorKind::Unsupported, format!("no zero-copy: {why}"))
                    .hint("use `--zero-copy auto`, which takes it where it works"));
            }
            match rung {
                Some(RingMode::Pools) => tracing::info!("no zero-copy: {why}"),
                Some(_) => tracing::info!("no buffer pools: {why}"),
                None if wanted == Transport::Uring => {
                    return Err(Error::new(ErrorKind::Unsupported, why)
                        .hint("use `--transport dev`, or `auto`, which takes what works"));
                }
                None => notes.push(format!("{why}: served over /dev/fuse")),
            }
        }
    }

    /// One attempt.
    ///
    /// * `rung`: the most that rings shall do; `None`: no rings.
    fn start_over(
        disk: Arc<Disk>,
        options: ExportOptions,
        devices: Vec<OwnedFd>,
        rung: Option<RingMode>,
        notes: &mut Vec<String>,
    ) -> Result<Started, Error> {
        let with_rings = rung.is_some();
        let give_up =
            |why: String| Ok(Started::RingsRefused(rung.unwrap_or(RingMode::Entries), why));
        let resume = options.keep.as_ref().and_then(|keep| keep.resume.clone());
        let mut profile = match &resume {
            Some(parked) => parked.terms.profile,
            None => Profile::detect(options.kernel_cache),
        };
        profile.over_io_uring = with_rings;
        let (sender, receiver) = channel();
        let events = EventSender(sender);

        // Rings first: without them there is nothing to mount.
        let topology = Topology::read();
        let cpus = topology.spread();
        let most = if with_rings { THREADS_MAX } else { THREADS_AUTO_MAX };
        let count = match &resume {
            Some(parked) => parked.terms.queues,
            None => thread_count(options.threads, cpus.len(), most, notes),
        };
        let place = if options.restless { Place::restless(count) } else { Place::new(count) };
        let place = Arc::new(place);
        let rings = with_rings.then(|| {
            let threads: Vec<usize> = (0..count).map(|index| cpus[index % cpus.len()]).collect();
            let payload = profile.transfer_bytes() as usize;
            let depth = options.queue_depth.map(|depth| depth.clamp(1, QUEUE_DEPTH_MAX) as usize);
            let plan = Plan::new(possible_cpus(), &online_cpus(), &threads, depth, payload);
            let beside = plan::beside(&topology, &threads);
            let zero_copy = options.zero_copy;
            let rings = Rings::new(plan, &beside, payload, options.fixed_entries, zero_copy);
            Arc::new(rings.refusing(options.refuse))
        });
        let mut queues = Vec::with_capacity(count + devices.len());
        for index in 0..count + devices.len() {
            let injected = index >= count;
            let started = QueueThread::start(QueueSetup {
                index,
                entries: options
                    .queue_depth
                    .unwrap_or(QUEUE_DEPTH_DEFAULT)
                    .clamp(1, QUEUE_DEPTH_MAX) as usize,
                cpu: (count > 1 && !injected).then(|| cpus[index % cpus.len()]),
                // An injected device has an input queue of its own, so its queue always fetches.
                place: if injected { Arc::new(Place::new(1)) } else { Arc::clone(&place) },
                place_index: if injected { 0 } else { index },
                events: events.clone(),
                rings: rings.clone().filter(|_| !injected),
            });
            match started {
                Ok(queue) => queues.push(queue),
                // No lower mode of rings would go either.
                Err(error) if with_rings => {
                    let why = ring_error(error).to_string();
                    return Ok(Started::RingsRefused(RingMode::Entries, why));
                }
                Err(error) => return Err(ring_error(error)),
            }
        }
        notes.extend(queues.iter().filter_map(|queue| queue.pin_error.clone()));
        let peers: Vec<_> =
            queues[..count].iter().map(|q| (q.ring_fd, Arc::clone(&q.view.cells))).collect();
        if let Some(rings) = &rings {
            rings.set_peers(peers.clone());
        }
        place.set_peers(peers);

        let read_only = options.read_only || disk.is_read_only();
        let (mount, negotiated) = match &resume {
            Some(parked) => (kept::adopt(parked)?, parked.terms.negotiated),
            None => {
                let mount = mount(
                    &options.mountpoint,
                    &MountOptions {
                        source: options.name.clone().into(),
                        read_only,
                        allow_other: options.allow_other,
                        max_read: profile.transfer_bytes(),
                        method: Method::Auto,
                    },
                )?;
                let negotiated = answer_init(mount.device(), &profile)?;
                (mount, negotiated)
            }
        };
        let start = match &rings {
            Some(rings) if negotiated.has(INIT_OVER_IO_URING) => {
                let offered = negotiated.offered & INIT_HAS_IO_URING_BUFPOOL != 0;
                match rung.filter(|mode| *mode > RingMode::Entries) {
                    Some(_) if !offered && options.zero_copy == ZeroCopy::On => {
                        return give_up(String::from("Linux 7.3 or newer has it"));
                    }
                    Some(mode) if offered => {
                        let zero_copy =
                            mode == RingMode::ZeroCopy && may_zero_copy(&disk, options.zero_copy);
                        let asked = options.queue_depth.is_some();
                        let bytes = profile.transfer_bytes() as usize;
                        if !rings.make_pool(asked, bytes, zero_copy) {
                            return give_up(String::from("too many entries for a ring"));
                        }
                    }
                    _ => {}
                }
                Some(Starting::new(Arc::clone(rings)))
            }
            Some(_) => {
                // Nothing of the rings has reached the kernel: this connection serves over /dev/fuse.
                let why = "the kernel did not offer io_uring for this mount";
                if options.transport == Transport::Uring || options.zero_copy == ZeroCopy::On {
                    return Ok(Started::RingsRefused(RingMode::Entries, String::from(why)));
                }
                notes.push(format!("{why}: served over /dev/fuse"));
                None
            }
            None => None,
        };

        let server = FileServer::new(
            Arc::clone(&disk),
            &FileOptions {
                growable: options.growable,
                read_only,
                allow_other: options.allow_other,
                profile,
                uid: rustix::process::getuid().as_raw(),
                gid: rustix::process::getgid().as_raw(),
            },
        );
        let server = Arc::new(match &options.keep {
            Some(keep) => server.recording(Arc::clone(&keep.record)),
            None => server,
        });
        let own_devices = match &resume {
            Some(parked) => kept::devices(parked)?,
            None => queue_devices(&mount, count, notes)?,
        };
        let parked = match &options.keep {
            Some(_) => Some(kept::park(&mount, &own_devices, profile, negotiated)?),
            None => None,
        };
        if resume.is_some() {
            kept::ask_again(&mount)?;
        }
        for (queue, device) in queues.iter().zip(own_devices) {
            let starting = start.as_ref().map(|(starting, _)| starting.clone());
            queue.serve(Serve { device, server: Arc::clone(&server), starting });
        }
        for (queue, device) in queues[count..].iter().zip(devices) {
            let device = Arc::new(device);
            queue.serve(Serve { device, server: Arc::clone(&server), starting: None });
        }
        let mut transport = Transport::Dev;
        let mut refused = None;
        if let Some((starting, registered)) = start {
            match starting.finish(count, &registered) {
                Ok(()) => {
                    transport = Transport::Uring;
                    place.settle();
                    queues.iter().for_each(QueueThread::wake);
                }
                // Whether the kernel has gone back to /dev/fuse by itself cannot be told for every kind of refusal, and clients of a
                // connection that waits for rings hang: another connection.
                Err(Refused(errno)) => refused = Some(refusal(errno)),
            }
        }

        let views = queues.iter().map(|queue| queue.view.clone()).collect();
        let (resized, watched) = (events.clone(), Arc::clone(&server));
        let size_watch = disk.watch_size(move |_| {
            if !watched.is_resized_by_client() {
                resized.send(Event::Resized);
            }
        });
        let mountpoint = mount.mountpoint().to_owned();
        let mode = rings.as_ref().filter(|_| transport == Transport::Uring).map(|r| r.mode());
        let keeper = Keeper {
            mount,
            queues,
            disk,
            place,
            rings: rings.filter(|_| transport == Transport::Uring),
            events: receiver,
            io_timeout: options.io_timeout,
            kernel_cache: options.kernel_cache,
            is_kept: options.keep.is_some(),
            look_until: resume.is_some().then(|| Instant::now() + LOOK_AFTER_DEATH),
        };
        let keeper = std::thread::Builder::new()
            .name(String::from("keeper"))
            .spawn(move || keeper.run())
            .map_err(|error| {
                Error::new(ErrorKind::System, "no thread for the export").source(error)
            })?;
        if let Some(why) = refused {
            // The connection cannot be used any more: away with it.
            events.send(Event::Discard);
            let _ = keeper.join();
            return give_up(why);
        }
        // The kernel learns the size only when it is asked for; until then asynchronous reads find an empty file.
        if resume.is_none() && !answers(&mountpoint) && transport == Transport::Uring {
            events.send(Event::Discard);
            let _ = keeper.join();
            return give_up(String::from("the rings of this mount do not answer"));
        }
        let notes = std::mem::take(notes);
        Ok(Started::Done(Box::new(Export {
            keeper: Some(keeper),
            events,
            queues: views,
            notes,
            transport,
            mode,
            parked,
            _size_watch: size_watch,
        })))
    }

    /// How requests travel: never [`Transport::Auto`].
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// What the rings do; `None` without rings.
    #[must_use]
    pub fn ring_mode(&self) -> Option<RingMode> {
        self.mode
    }

    /// What somebody has to keep so that another process can go on with this mount; once, and only with [`ExportOptions::keep`].
    pub fn take_parked(&mut self) -> Option<Parked> {
        self.parked.take()
    }

    /// What was asked for and could not be had, each with what would enable it.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Counters of all queues. Any thread, any time.
    #[must_use]
    pub fn stats(&self) -> Stats {
        stats_of(&self.queues)
    }

    /// Reads the counters later and from elsewhere.
    pub fn stats_reader(&self) -> impl Fn() -> Stats + Send + Sync + 'static {
        let queues = self.queues.clone();
        move || stats_of(&queues)
    }

    /// A handle that asks for a clean stop.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle(self.events.clone())
    }

    /// Makes a queue thread panic.
    #[doc(hidden)]
    pub fn panic_for_test(&self) {
        self.queues[0].remote.run(|_| panic!("asked to panic"));
    }

    /// Waits until the export has ended: unmounted or stopped.
    ///
    /// Errors: [`HaltReason`] when it ended by itself; the process and its other exports go on.
    pub fn wait(mut self) -> Result<Stats, HaltReason> {
        self.join()?;
        Ok(self.stats())
    }

    fn join(&mut self) -> Result<(), HaltReason> {
        match self.keeper.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if self.keeper.is_some() {
            self.events.send(Event::Stop);
            if let Err(reason) = self.join() {
                tracing::warn!("{reason}");
            }
        }
    }
}

/// Asks for the attributes of the file, from a thread that may be left behind. False: no answer came in time.
fn answers(mountpoint: &std::path::Path) -> bool {
    let (tell, told) = channel();
    let path = mountpoint.to_owned();
    let asked = std::thread::Builder::new().name(String::from("first look")).spawn(move || {
        if let Err(error) = std::fs::metadata(&path) {
            tracing::debug!("{}: {error}", path.display());
        }
        let _ = tell.send(());
    });
    asked.is_err() || told.recv_timeout(FIRST_ANSWER).is_ok()
}

/// What came of an attempt.
enum Started {
    Done(Box<Export>),
    /// Rings of this mode could not be had; nothing is mounted. With the reason.
    RingsRefused(RingMode, String),
}

/// The highest mode to try.
///
/// Errors: [`ErrorKind::PermissionDenied`] for zero-copy that was asked for and is root's.
fn first_mode(zero_copy: ZeroCopy) -> Result<RingMode, Error> {
    let allowed = rustix::process::geteuid().is_root();
    match zero_copy {
        ZeroCopy::Off => Ok(RingMode::Pools),
        ZeroCopy::On if !allowed => {
            Err(Error::new(ErrorKind::PermissionDenied, "zero-copy is for root (CAP_SYS_ADMIN)")
                .hint("run as root, or leave `--zero-copy on` away"))
        }
        ZeroCopy::Auto if !allowed => Ok(RingMode::Pools),
        ZeroCopy::On | ZeroCopy::Auto => Ok(RingMode::ZeroCopy),
    }
}

/// Whether zero-copy can be of use with this disk. Blocks for a few reads.
fn may_zero_copy(disk: &Disk, wanted: ZeroCopy) -> bool {
    // Also where it was asked for: what may be given to the kernel as it is has to be known.
    let takes = disk.probe_client_pages();
    if !takes && wanted == ZeroCopy::Auto {
        tracing::info!(
            "no zero-copy: with O_DIRECT, this storage was not seen to take memory of any alignment"
        );
    }
    takes || wanted == ZeroCopy::On
}

/// Why the rings are not used, and what would change that.
struct NoRings {
    what: String,
    hint: &'static str,
}

/// `None`: they may be.
fn why_no_rings(wanted: Transport) -> Option<NoRings> {
    if wanted == Transport::Dev {
        return Some(NoRings { what: String::from("--transport dev was given"), hint: "" });
    }
    match is_enabled() {
        Some(true) => None,
        Some(false) => Some(NoRings {
            what: String::from("FUSE over io_uring is switched off"),
            hint: "`echo Y > /sys/module/fuse/parameters/enable_uring` (as root) switches it on",
        }),
        None => Some(NoRings {
            what: String::from("this kernel has no FUSE over io_uring"),
            hint: "Linux 6.14 or newer with CONFIG_FUSE_IO_URING has it",
        }),
    }
}

fn refusal(errno: Option<ringdisk_ring::Errno>) -> String {
    match errno {
        Some(errno) => format!("the kernel refused a ring of this mount ({errno})"),
        None => String::from("the rings of this mount were not ready in time"),
    }
}

fn ring_error(error: SetupError) -> Error {
    let kind = match error {
        SetupError::Forbidden(_) => ErrorKind::RingForbidden,
        SetupError::Missing(_) => ErrorKind::Unsupported,
        SetupError::Limit(_) | SetupError::Other(_) => ErrorKind::System,
    };
    Error::new(kind, "the queues could not be started").source(error)
}

fn stats_of(queues: &[QueueView]) -> Stats {
    let queues = queues.iter().enumerate();
    Stats { queues: queues.map(|(index, q)| q.cells.snapshot(index, q.cpu, &q.ring)).collect() }
}

/// * `most`: what `auto` takes at most.
fn thread_count(threads: Threads, cpus: usize, most: usize, notes: &mut Vec<String>) -> usize {
    match threads {
        Threads::Auto => cpus.clamp(1, most),
        Threads::Count(count) if count > THREADS_MAX => {
            notes.push(format!(
                "{THREADS_MAX} threads instead of {count}, which is the most there can be"
            ));
            THREADS_MAX
        }
        Threads::Count(count) => count.max(1),
    }
}

/// One descriptor for each queue: clones, or the first one shared where cloning is not allowed (a user without access to /dev/fuse).
fn queue_devices(
    mount: &crate::mount::Mount,
    count: usize,
    notes: &mut Vec<String>,
) -> Result<Vec<Arc<OwnedFd>>, Error> {
    let first = mount.device().try_clone_to_owned().map_err(|source| {
        Error::new(ErrorKind::System, "cannot duplicate the FUSE descriptor").source(source)
    })?;
    let first = Arc::new(first);
    let mut devices = vec![Arc::clone(&first)];
    while devices.len() < count {
        match clone_device(mount.device()) {
            Ok(device) => devices.push(Arc::new(device)),
            Err(errno) => {
                notes.push(format!(
                    "all threads share one FUSE descriptor, since /dev/fuse cannot be opened ({errno}); \
                     `chmod 666 /dev/fuse` gives each its own"
                ));
                devices.resize(count, first);
                break;
            }
        }
    }
    Ok(devices)
}
