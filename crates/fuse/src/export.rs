//! An export: a disk served as a file, from its mount to its end.
//!
//! Control path; any thread. Several exports live in one process independently of each other.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringdisk_disk::{ClientErrors, Disk, SizeWatch};
use ringdisk_ring::{Errno, SharedMemory, Topology};

use crate::abi::flags::{INIT_HAS_IO_URING_BUFPOOL, INIT_OVER_IO_URING, INIT_PASSTHROUGH};
use crate::dev::{Place, QueueSetup, QueueThread, Serve, answer_init};
use crate::file::{FileOptions, FileServer};
use crate::keeper::{Event, EventSender, HaltReason, InUseSlot, Keeper};
use crate::kept::{self, Parked};
use crate::mount::{FirstLook, Method, MountOptions, Remover, RemoverSlot, mount, open_backing};
use crate::negotiate::Profile;
use crate::placement::{self, Live, MountTopology, Sizes, describe, watch};
use crate::uring::{
    Plan, PoolUses, Refused, RingMode, Rings, Starting, SwitchWatch, ZeroCopy, is_enabled,
};
use crate::{Error, ErrorKind};
use ringdisk_export::stats::{QueueView, Stats};

mod ladder;
mod options;

pub(crate) use ladder::choose_transport;
use ladder::{
    first_mode, is_direct, lend, may_zero_copy, no_passthrough, queue_devices, refusal,
    why_no_zero_copy,
};
pub use options::{ExportOptions, Transport};

/// Requests that one queue serves at once unless the user says otherwise. The memory is 1 MiB each,
/// taken when it is touched.
pub const QUEUE_DEPTH_DEFAULT: u32 = 128;
/// Largest queue depth: 4096 × 1 MiB of address space for each queue.
pub const QUEUE_DEPTH_MAX: u32 = 4096;
/// Entries of each thread's reader of `/dev/fuse` beside rings: what comes there needs no data and
/// is rare (FORGET, INTERRUPT, what was queued before the start). An idle entry costs 6 KiB, so 64
/// threads with [`QUEUE_DEPTH_DEFAULT`] would take 50 MiB.
const DEPTH_BESIDE_RINGS: usize = 16;
/// How long the first answer of a mount may take: it needs no storage.
const FIRST_ANSWER: Duration = Duration::from_secs(10);
/// How often a mount begins again over io_uring when the switch of the kernel is turned at that
/// moment.
const TURNS_MAX: u32 = 3;
/// How long the queues of a process that goes on with a mount look for requests by themselves.
const LOOK_AFTER_DEATH: Duration = Duration::from_secs(10);

/// Asks an export to stop. Any thread.
#[derive(Clone, Debug)]
pub struct StopHandle(EventSender);

impl StopHandle {
    /// Asks for a clean stop: the name goes, clients that have the file open are served until the
    /// last one has closed it ([`ExportOptions::stop_timeout`]), and the image is flushed. Returns
    /// at once.
    pub fn stop(&self) {
        self.0.send(Event::Stop);
    }

    /// Asks for the end now: clients get errors, requests in flight get 2 s to end, the image is
    /// flushed. Returns at once.
    pub fn force(&self) {
        self.0.send(Event::Force);
    }
}

/// A disk that is being served. Dropping it ends it at once, also while clients use it.
#[derive(Debug)]
pub struct Export {
    keeper: Option<JoinHandle<Result<(), HaltReason>>>,
    events: EventSender,
    queues: Vec<QueueView>,
    topology: MountTopology,
    live: Vec<Live>,
    parked: Option<Parked>,
    remover: RemoverSlot,
    in_use: InUseSlot,
    connection: Option<u32>,
    _size_watch: SizeWatch,
}

impl Export {
    /// Mounts and serves; when it returns, the file answers.
    ///
    /// Errors: those of [`crate::mount::mount`]; [`ErrorKind::Usage`] for CPUs that cannot be used;
    /// [`ErrorKind::RingForbidden`] and [`ErrorKind::System`] when no ring can be made.
    pub fn start(disk: Arc<Disk>, options: ExportOptions) -> Result<Export, Error> {
        Export::start_with_devices(disk, options, Vec::new())
    }

    /// As [`Export::start`], with one queue more for each of `devices`, whose messages it takes for
    /// requests of the kernel. For tests of what a broken device does.
    #[doc(hidden)]
    pub fn start_with_devices(
        disk: Arc<Disk>,
        options: ExportOptions,
        devices: Vec<OwnedFd>,
    ) -> Result<Export, Error> {
        let mut options = options;
        if options.keep.is_some()
            && let Some(why) =
                kept::refuse(options.transport, options.zero_copy, options.passthrough)
        {
            return Err(why);
        }
        if options.passthrough {
            // The two exclude each other, and the kernel's own reading is better still.
            options.zero_copy = ZeroCopy::Off;
        }
        let options = options;
        let wanted = options.transport;
        let mut notes = Vec::new();
        let (with_rings, mut reason) = match options.keep {
            Some(_) => (false, (wanted == Transport::Auto).then(kept::why_dev)),
            None => choose_transport(wanted)?,
        };
        if let Some(reason) = &reason {
            tracing::info!("served over /dev/fuse: {reason}");
        }
        let mut rung = match with_rings {
            true => Some(first_mode(options.zero_copy)?.min(options.ring_mode_max)),
            false => None,
        };
        if rung.is_none() && options.zero_copy == ZeroCopy::On {
            return Err(Error::new(
                ErrorKind::TransportMissing,
                "zero-copy needs FUSE over io_uring",
            )
            .hint("leave `--zero-copy on` away, or see `ringdisk mount --help` on --transport"));
        }
        let mut devices = Some(devices);
        let mut turns = 0;
        loop {
            let devices = devices.take().unwrap_or_default();
            let started =
                Export::start_over(Arc::clone(&disk), options.clone(), devices, rung, &mut notes)?;
            let (mode, why) = match started {
                Started::Done(export) => return Ok(export.placed(reason)),
                Started::RingsRefused(mode, why) => (mode, why),
                Started::SwitchTurned if turns < TURNS_MAX && is_enabled() == Some(true) => {
                    turns += 1;
                    continue;
                }
                Started::SwitchTurned => {
                    let is_must = options.zero_copy == ZeroCopy::On;
                    let mode = rung.filter(|_| is_must).unwrap_or(RingMode::Entries);
                    (mode, String::from("io_uring was switched off or on while this mount began"))
                }
            };
            rung = mode.below();
            if options.zero_copy == ZeroCopy::On && mode == RingMode::ZeroCopy {
                return Err(Error::new(
                    ErrorKind::TransportMissing,
                    format!("no zero-copy: {why}"),
                )
                .hint("use `--zero-copy auto`, which takes it where it works"));
            }
            match rung {
                Some(RingMode::Pools) => tracing::info!("no zero-copy: {why}"),
                Some(_) => tracing::info!("no buffer pools: {why}"),
                None if wanted == Transport::Uring => {
                    return Err(Error::new(ErrorKind::TransportMissing, why)
                        .hint("use `--transport dev`, or `auto`, which takes what works"));
                }
                None => {
                    notes.push(format!("{why}: served over /dev/fuse"));
                    reason = Some(why);
                }
            }
        }
    }

    /// Says where everything is.
    ///
    /// * `reason`: why not over io_uring.
    fn placed(mut self, reason: Option<String>) -> Export {
        self.topology.reason = reason;
        tracing::info!("{}", self.topology.summary());
        self.topology.remarks.iter().for_each(|remark| tracing::info!("{remark}"));
        self
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
        profile.passthrough = options.passthrough;
        let lent = if options.passthrough { Some(lend(&disk)?) } else { None };
        let (sender, receiver) = channel();
        let events = EventSender(sender);

        // Rings first: without them there is nothing to mount.
        let machine = Topology::read();
        let mut placement = match &resume {
            Some(parked) => {
                placement::place_again(&machine, &options.thread_options(), parked.terms.queues)
            }
            None => placement::place(&machine, &options.thread_options(), with_rings)?,
        };
        placement
            .try_nodes(machine.nodes.len(), |node| SharedMemory::mapped(1).prefer_node(0..1, node));
        let count = placement.threads.len();
        let depth = options.queue_depth.map(|depth| depth.clamp(1, QUEUE_DEPTH_MAX) as usize);
        let entries = depth.unwrap_or(QUEUE_DEPTH_DEFAULT as usize);
        let entries = if with_rings { entries.min(DEPTH_BESIDE_RINGS) } else { entries };
        let payload_bytes = profile.transfer_bytes() as usize;
        let plan = with_rings.then(|| Plan::new(&placement, depth, payload_bytes));
        let sizes = Sizes { entries, plan: plan.as_ref(), payload_bytes };
        let mut topology = describe(&placement, options.numa, sizes);
        let place = if options.restless { Place::restless(count) } else { Place::new(count) };
        let place = Arc::new(place);
        let rings = plan.map(|plan| {
            let (stay, zero_copy) = (options.stay, options.zero_copy);
            let rings = Rings::new(plan, &placement, payload_bytes, stay, zero_copy);
            Arc::new(rings.refusing(options.refuse))
        });
        let mut queues = Vec::with_capacity(count + devices.len());
        for index in 0..count + devices.len() {
            let injected = index >= count;
            let started = QueueThread::start(QueueSetup {
                index,
                entries,
                thread: placement.threads.get(index).cloned().unwrap_or_default(),
                // An injected device has an input queue of its own, so its queue always fetches.
                place: if injected { Arc::new(Place::new(1)) } else { Arc::clone(&place) },
                place_index: if injected { 0 } else { index },
                events: events.clone(),
                rings: rings.clone().filter(|_| !injected),
                restricted: options.restricted,
            });
            match started {
                Ok(queue) => queues.push(queue),
                // No lower mode of rings would go either.
                Err(error) if with_rings => {
                    let why = Error::of_ring(error).to_string();
                    return Ok(Started::RingsRefused(RingMode::Entries, why));
                }
                Err(error) => return Err(Error::of_ring(error)),
            }
        }
        topology.warnings.extend(queues.iter().filter_map(|queue| queue.pin_error.clone()));
        let peers: Vec<_> =
            queues[..count].iter().map(|q| (q.ring_fd, Arc::clone(&q.view.cells))).collect();
        if let Some(rings) = &rings {
            rings.set_peers(peers.clone());
        }
        place.set_peers(peers);

        let read_only = options.read_only || disk.is_read_only();
        let switch = with_rings.then(SwitchWatch::new);
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
        let backing_id = match lent {
            Some(lent) if negotiated.has(INIT_PASSTHROUGH) => {
                open_backing(mount.device(), lent).map_err(no_passthrough)?
            }
            Some(_) => return Err(no_passthrough(Errno::NOSYS)),
            None => 0,
        };
        if backing_id != 0 {
            let line = "passthrough: the kernel reads and writes the image itself, uncounted here";
            topology.remarks.push(String::from(line));
        }
        let stayed_on = switch.is_none_or(SwitchWatch::stayed_on);
        let start = match &rings {
            Some(rings) if negotiated.has(INIT_OVER_IO_URING) && stayed_on => {
                let offered = negotiated.offered & INIT_HAS_IO_URING_BUFPOOL != 0;
                match rung.filter(|mode| *mode > RingMode::Entries) {
                    Some(_) if !offered && options.zero_copy == ZeroCopy::On => {
                        return give_up(String::from("Linux 7.3 or newer has it"));
                    }
                    Some(mode) if offered => {
                        let zero_copy =
                            mode == RingMode::ZeroCopy && may_zero_copy(&disk, options.zero_copy);
                        if zero_copy && options.zero_copy == ZeroCopy::On {
                            tracing::warn!(
                                "zero-copy for every open: a loop device with direct I/O over this file would damage the memory of the kernel (Linux 7.3), so use `--zero-copy auto` for one"
                            );
                        }
                        let asked = options.queue_depth.is_some();
                        let bytes = profile.transfer_bytes() as usize;
                        let uses = PoolUses { zero_copy, pinned: is_direct(&disk) };
                        if !rings.make_pool(asked, bytes, uses) {
                            return give_up(String::from("too many entries for a ring"));
                        }
                    }
                    Some(_) => topology.remarks.push(String::from(
                        "no buffer pools and no zero-copy: Linux 7.3 or newer has them",
                    )),
                    None => {}
                }
                if rung == Some(RingMode::Pools) && options.zero_copy == ZeroCopy::Auto {
                    topology.remarks.extend(why_no_zero_copy());
                }
                topology.memory_bytes_max = rings.memory_bytes_max(payload_bytes) as u64;
                if let Err(errno) = rings.bind_memory() {
                    tracing::debug!("some memory of the queues is not bound to its node: {errno}");
                }
                Some(Starting::new(Arc::clone(rings)))
            }
            // Whether the kernel has noted that rings are wanted cannot be told.
            Some(_) if negotiated.has(INIT_OVER_IO_URING) => return Ok(Started::SwitchTurned),
            // The threads of this attempt are placed for rings, and no lower mode would be offered
            // either: another attempt.
            Some(_) => {
                let why = String::from("the kernel did not offer io_uring for this mount");
                return match options.zero_copy {
                    ZeroCopy::On => give_up(why),
                    _ => Ok(Started::RingsRefused(RingMode::Entries, why)),
                };
            }
            None => None,
        };

        let server = FileServer::new(
            Arc::clone(&disk),
            &FileOptions {
                growable: options.growable,
                resizable: options.resizable,
                read_only,
                allow_other: options.allow_other,
                profile,
                backing_id,
                uid: rustix::process::getuid().as_raw(),
                gid: rustix::process::getgid().as_raw(),
            },
        );
        let server = server.logging(ClientErrors::start(&options.mountpoint.to_string_lossy()));
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
                // Whether the kernel has gone back to /dev/fuse by itself cannot be told for every
                // kind of refusal, and clients of a connection that waits for rings hang: another
                // connection.
                Err(Refused(errno)) => refused = Some(refusal(errno)),
            }
        }

        let views = queues.iter().map(|queue| queue.view.clone()).collect();
        let live = |(index, queue): (usize, &QueueThread)| {
            if let Some(rings) = rings.as_ref().filter(|_| transport == Transport::Uring) {
                let memory = rings.memory_of(index);
                memory.into_iter().for_each(|(start, len)| queue.buffers.add(start, len));
            }
            Live { cells: Arc::clone(&queue.view.cells), buffers: Arc::clone(&queue.buffers) }
        };
        let live = queues[..count].iter().enumerate().map(live).collect();
        let (resized, watched) = (events.clone(), Arc::clone(&server));
        let size_watch = disk.watch_size(move |_| {
            if !watched.is_resized_by_client() {
                resized.send(Event::Resized);
            }
        });
        let mountpoint = mount.mountpoint().to_owned();
        // Until now a mount that another process has made stays when this start fails: somebody
        // keeps it, and the next one may do better.
        let mount = mount.take_over();
        let (remover, connection) = (mount.remover(), mount.connection());
        topology.ring_mode =
            rings.as_ref().filter(|_| transport == Transport::Uring).map(|r| r.mode());
        let in_use = InUseSlot::default();
        let keeper = Keeper {
            mount,
            queues,
            disk,
            server,
            place,
            rings: rings.filter(|_| transport == Transport::Uring),
            events: receiver,
            io_timeout: options.io_timeout,
            stop_timeout: options.stop_timeout,
            in_use: in_use.clone(),
            kernel_cache: options.kernel_cache,
            is_kept: options.keep.is_some(),
            restricted: options.restricted,
            look_until: resume.is_some().then(|| Instant::now() + LOOK_AFTER_DEATH),
        };
        let (prepared, is_prepared) = channel();
        let keeper = std::thread::Builder::new()
            .name(String::from("keeper"))
            .spawn(move || keeper.run(&prepared))
            .map_err(|error| {
                Error::new(ErrorKind::System, "no thread for the export").source(error)
            })?;
        // When this returns nothing that needs more than serving takes is left to do: the process
        // may give up what it can.
        let _ = is_prepared.recv();
        if let Some(why) = refused {
            // The connection cannot be used any more: away with it.
            events.send(Event::Discard);
            let _ = keeper.join();
            return give_up(why);
        }
        // Whether rings answer is not known otherwise. (Over /dev/fuse nobody has to ask: the size,
        // without which asynchronous reads find an empty file, the kernel asks for at each first
        // open: `default_permissions`.)
        if transport == Transport::Uring {
            let look = FirstLook::start(&mountpoint);
            if let Err(errno) = &look {
                tracing::debug!("{}: not looked at: {errno}", mountpoint.display());
            }
            if look.as_ref().is_ok_and(|look| !look.is_answered(FIRST_ANSWER)) {
                // Aborts the connection, which ends the look.
                events.send(Event::Discard);
                let _ = keeper.join();
                return give_up(String::from("the rings of this mount do not answer"));
            }
        }
        notes.append(&mut topology.warnings);
        topology.warnings.clone_from(notes);
        Ok(Started::Done(Box::new(Export {
            keeper: Some(keeper),
            events,
            queues: views,
            topology,
            live,
            parked,
            remover,
            in_use,
            connection,
            _size_watch: size_watch,
        })))
    }

    /// How requests travel: never [`Transport::Auto`].
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.topology.transport
    }

    /// What the rings do; `None` without rings.
    #[must_use]
    pub fn ring_mode(&self) -> Option<RingMode> {
        self.topology.ring_mode
    }

    /// What somebody has to keep so that another process can go on with this mount; once, and only
    /// with [`ExportOptions::keep`].
    pub fn take_parked(&mut self) -> Option<Parked> {
        self.parked.take()
    }

    /// Number of the connection, if the mount was seen ([`crate::mount::Mount::connection`]).
    #[must_use]
    pub fn connection(&self) -> Option<u32> {
        self.connection
    }

    /// From now on the mount is taken away, and its connection aborted, by somebody else: this
    /// process gives up the right to do so. Once.
    pub fn remove_through(&self, remover: Arc<dyn Remover>) {
        // The first one stays.
        let _ = self.remover.set(remover);
    }

    /// Calls `tell`, with the number of open files, when the mount is to stop and is in use, before
    /// its name goes, and again for each further [`StopHandle::stop`]. Called by a thread that
    /// serves no request; the stop waits for it. The first one stays.
    pub fn watch_users(&self, tell: impl Fn(u64) + Send + Sync + 'static) {
        self.in_use.set(Box::new(tell));
    }

    /// What was asked for and could not be had, each with what would enable it.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.topology.warnings
    }

    /// Looks at the threads, queues and buffers of this export now, later and from elsewhere. Any
    /// thread; takes some milliseconds for each gigabyte in buffers.
    pub fn topology_reader(&self) -> impl Fn() -> MountTopology + Send + Sync + 'static {
        watch(self.topology.clone(), self.live.clone())
    }

    /// Counters of all queues. Any thread, any time.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::of(&self.queues)
    }

    /// Reads the counters later and from elsewhere.
    pub fn stats_reader(&self) -> impl Fn() -> Stats + Send + Sync + 'static {
        let queues = self.queues.clone();
        move || Stats::of(&queues)
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
            self.events.send(Event::Force);
            if let Err(reason) = self.join() {
                tracing::warn!("{reason}");
            }
        }
    }
}

/// What came of an attempt.
enum Started {
    Done(Box<Export>),
    /// Rings of this mode could not be had; nothing is mounted. With the reason.
    RingsRefused(RingMode, String),
    /// The kernel's switch was turned while the mount began; nothing is mounted.
    SwitchTurned,
}
