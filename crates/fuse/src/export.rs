//! An export: a disk served as a file, from its mount to its end.
//!
//! Control path; any thread. Several exports live in one process independently of each other.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use ringdisk_disk::{Disk, SizeWatch};
use ringdisk_ring::{SetupError, Topology};

use crate::dev::{Place, QueueSetup, QueueThread, Serve, answer_init};
use crate::file::{FileOptions, FileServer};
use crate::keeper::{Event, EventSender, HaltReason, Keeper};
use crate::mount::{Method, MountOptions, clone_device, mount};
use crate::negotiate::Profile;
use crate::stats::{QueueView, Stats};
use crate::{Error, ErrorKind};

/// Requests that one queue serves at once unless the user says otherwise. The memory is 1 MiB each, taken when it is touched.
pub const QUEUE_DEPTH_DEFAULT: u32 = 128;
/// Largest queue depth: 4096 × 1 MiB of address space for each queue.
pub const QUEUE_DEPTH_MAX: u32 = 4096;
/// Queues at most.
pub const THREADS_MAX: usize = 64;
/// Queues that `auto` makes at most: more readers of one shared input queue only get in each other's way.
const THREADS_AUTO_MAX: usize = 4;

/// How many queue threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Threads {
    /// One for each CPU that this process may use, up to 4.
    #[default]
    Auto,
    /// This many, 1..=64.
    Count(usize),
}

/// How to serve a disk as a file.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// An existing regular file.
    pub mountpoint: PathBuf,
    /// Queue threads.
    pub threads: Threads,
    /// Requests that each queue serves at once, 1..=4096; `None`: [`QUEUE_DEPTH_DEFAULT`].
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
    /// Moves the fetching between queues all the time. For tests of just that.
    #[doc(hidden)]
    pub restless: bool,
}

impl ExportOptions {
    /// Defaults for a mountpoint.
    #[must_use]
    pub fn new(mountpoint: impl Into<PathBuf>) -> ExportOptions {
        ExportOptions {
            mountpoint: mountpoint.into(),
            threads: Threads::Auto,
            queue_depth: None,
            growable: false,
            read_only: false,
            allow_other: false,
            kernel_cache: false,
            io_timeout: None,
            name: String::from("ringdisk"),
            restless: false,
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
        let profile = Profile::detect(options.kernel_cache);
        let (sender, receiver) = channel();
        let events = EventSender(sender);
        let mut notes = Vec::new();

        // Rings first: without them there is nothing to mount.
        let cpus = Topology::read().spread();
        let count = thread_count(options.threads, cpus.len(), &mut notes);
        let place = if options.restless { Place::restless(count) } else { Place::new(count) };
        let place = Arc::new(place);
        let mut queues = Vec::with_capacity(count + devices.len());
        for index in 0..count + devices.len() {
            let injected = index >= count;
            queues.push(
                QueueThread::start(QueueSetup {
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
                })
                .map_err(ring_error)?,
            );
        }
        notes.extend(queues.iter().filter_map(|queue| queue.pin_error.clone()));
        place.set_peers(
            queues[..count].iter().map(|q| (q.ring_fd, Arc::clone(&q.view.cells))).collect(),
        );

        let read_only = options.read_only || disk.is_read_only();
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
        answer_init(mount.device(), &profile)?;

        let server = Arc::new(FileServer::new(
            Arc::clone(&disk),
            &FileOptions {
                growable: options.growable,
                read_only,
                allow_other: options.allow_other,
                profile,
                uid: rustix::process::getuid().as_raw(),
                gid: rustix::process::getgid().as_raw(),
            },
        ));
        for (queue, device) in queues.iter().zip(queue_devices(&mount, count, &mut notes)?) {
            queue.serve(Serve { device, server: Arc::clone(&server) });
        }
        for (queue, device) in queues[count..].iter().zip(devices) {
            queue.serve(Serve { device: Arc::new(device), server: Arc::clone(&server) });
        }

        let views = queues.iter().map(|queue| queue.view.clone()).collect();
        let (resized, watched) = (events.clone(), Arc::clone(&server));
        let size_watch = disk.watch_size(move |_| {
            if !watched.is_resized_by_client() {
                resized.send(Event::Resized);
            }
        });
        let mountpoint = mount.mountpoint().to_owned();
        let keeper = Keeper {
            mount,
            queues,
            disk,
            place,
            events: receiver,
            io_timeout: options.io_timeout,
            kernel_cache: options.kernel_cache,
        };
        let keeper = std::thread::Builder::new()
            .name(String::from("keeper"))
            .spawn(move || keeper.run())
            .map_err(|error| {
                Error::new(ErrorKind::System, "no thread for the export").source(error)
            })?;
        // The kernel learns the size only when it is asked for; until then asynchronous reads find an empty file.
        if let Err(error) = std::fs::metadata(&mountpoint) {
            tracing::debug!("{}: {error}", mountpoint.display());
        }
        Ok(Export { keeper: Some(keeper), events, queues: views, notes, _size_watch: size_watch })
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

fn thread_count(threads: Threads, cpus: usize, notes: &mut Vec<String>) -> usize {
    match threads {
        Threads::Auto => cpus.clamp(1, THREADS_AUTO_MAX),
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
