//! One attempt to start an export, in phases: place, start the threads, mount, agree on rings,
//! serve, go live.
//!
//! Promises: what a phase has made is undone when a later one fails, by the values that hold it:
//! the threads end, and a mount that this attempt has made goes. A mount that another process has
//! made stays until this one answers. Control path.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;

use ringdisk_disk::ClientErrors;
use ringdisk_export::{Clock, Error};
use ringdisk_ring::{Errno, SharedMemory, Topology};

use super::Export;
use super::control_thread::{ask_first, control_thread};
use super::fallback::{
    is_direct, lend, may_zero_copy, no_passthrough, queue_devices, refusal, why_no_zero_copy,
};
use super::phases::{Attempt, Connection, Layout, Outcome, RingStart, Stop, Threads};
use crate::abi::flags::{INIT_HAS_IO_URING_BUFPOOL, INIT_OVER_IO_URING, INIT_PASSTHROUGH};
use crate::dev::{Place, answer_init};
use crate::events::{Event, EventSender};
use crate::file::{FileOptions, FileServer};
use crate::kept::{self, Parked};
use crate::mount::{Method, MountOptions, mount, open_backing};
use crate::negotiate::Profile;
use crate::placement;
use crate::queue::{QUEUE_DEPTH_DEFAULT, QUEUE_DEPTH_MAX};
use crate::thread::{FuseThread, QueueSetup, Serve};
use crate::topology::{Sizes, describe};
use crate::uring::{Plan, PoolUses, Refused, RingMode, Rings, Starting, SwitchWatch, ZeroCopy};

/// Entries of each thread's reader of `/dev/fuse` beside rings: what comes there needs no data and
/// is rare (FORGET, INTERRUPT, what was queued before the start). An idle entry costs 6 KiB, so 64
/// threads with [`QUEUE_DEPTH_DEFAULT`] would take 50 MiB.
const DEPTH_BESIDE_RINGS: usize = 16;

impl Attempt<'_> {
    /// Tries.
    ///
    /// * `devices`: as [`crate::testing::start_with_devices`].
    /// * `notes`: what was asked for and cannot be had; added to.
    ///
    /// Errors: no attempt can do better.
    pub(super) fn run(
        &self,
        devices: Vec<OwnedFd>,
        notes: &mut Vec<String>,
    ) -> Result<Outcome, Error> {
        match self.phases(devices, notes) {
            Ok(export) => Ok(Outcome::Serves(Box::new(export))),
            Err(Stop::Outcome(outcome)) => Ok(outcome),
            Err(Stop::Error(error)) => Err(error),
        }
    }

    fn phases(&self, devices: Vec<OwnedFd>, notes: &mut Vec<String>) -> Result<Export, Stop> {
        let lent = match self.options.passthrough {
            true => Some(lend(self.disk)?),
            false => None,
        };
        let mut layout = self.lay_out()?;
        // Rings first: without them there is nothing to mount.
        let mut threads = self.start_threads(&mut layout, devices.len())?;
        let connection = self.connect(&mut layout, lent)?;
        let start = self.agree_on_rings(&mut layout, &threads, &connection)?;
        let server = Arc::new(self.file_server(&layout, &connection));
        let own = self.queue_devices(&threads, &connection, notes)?;
        let parked = self.park(&connection, &own, &layout)?;
        let control = control_thread()?;
        threads.serve(own, devices, &server, start.as_ref().map(|(starting, _)| starting));
        let (has_rings, refused) = match start {
            None => (false, None),
            Some(start) => match threads.go_live(start) {
                Ok(()) => (true, None),
                Err(why) => (false, Some(why)),
            },
        };
        if !has_rings {
            threads.rings = None;
        }
        let (mut export, mountpoint) =
            self.look_after(layout, threads, connection, server, control);
        if let Some(why) = refused {
            return Err(self.discard(export, why));
        }
        if has_rings && let Some(_look) = ask_first(&mountpoint) {
            return Err(self.discard(export, String::from("the rings of this mount do not answer")));
        }
        export.parked = parked;
        notes.append(&mut export.topology.warnings);
        export.topology.warnings.clone_from(notes);
        Ok(export)
    }

    /// The mount that another process has made, with which this one goes on.
    fn found(&self) -> Option<&Parked> {
        let taken = self.taken.map(|taken| &taken.parked);
        taken.or_else(|| self.left())
    }

    /// Such a mount of a process that is gone.
    pub(super) fn left(&self) -> Option<&Parked> {
        self.options.keep.as_ref()?.resume.as_deref()
    }

    /// This mode of rings cannot be had.
    fn refused(&self, why: impl Into<String>) -> Stop {
        let mode = self.mode.unwrap_or(RingMode::Entries);
        Stop::Outcome(Outcome::RingsRefused(mode, why.into()))
    }

    /// Gives an export up that serves and whose connection cannot be used any more.
    fn discard(&self, mut export: Export, why: String) -> Stop {
        export.events.send(Event::Discard);
        let _ = export.join();
        self.refused(why)
    }

    /// Phase 1: decides where threads, queues and buffers will be.
    ///
    /// Errors: CPUs that cannot be used.
    pub(super) fn lay_out(&self) -> Result<Layout, Error> {
        let (options, with_rings) = (self.options, self.mode.is_some());
        let mut profile = match self.found() {
            Some(parked) => parked.terms.profile,
            None => Profile::detect(options.kernel_cache),
        };
        profile.over_io_uring = with_rings;
        profile.passthrough = options.passthrough;
        let machine = Topology::read();
        let wanted = options.common.threads.clone();
        let mut placement = match self.left() {
            Some(parked) => placement::place_again(&machine, &wanted, parked.terms.queues),
            None => placement::place(&machine, &wanted, with_rings)?,
        };
        placement
            .try_nodes(machine.nodes.len(), |node| SharedMemory::mapped(1).prefer_node(0..1, node));
        let depth = options.queue_depth.map(|depth| depth.clamp(1, QUEUE_DEPTH_MAX) as usize);
        let entries = depth.unwrap_or(QUEUE_DEPTH_DEFAULT as usize);
        let entries = if with_rings { entries.min(DEPTH_BESIDE_RINGS) } else { entries };
        let payload_bytes = profile.transfer_bytes() as usize;
        let plan = with_rings.then(|| Plan::new(&placement, depth, payload_bytes));
        let sizes = Sizes { entries, plan: plan.as_ref(), payload_bytes };
        let topology = describe(&placement, options.common.threads.numa, sizes);
        Ok(Layout { placement, plan, entries, profile, topology })
    }

    /// Phase 2: starts the queue threads, which serve nothing yet.
    ///
    /// * `injected`: queues beside those of the mount.
    ///
    /// Errors: a thread or its ring cannot be made.
    pub(super) fn start_threads(
        &self,
        layout: &mut Layout,
        injected: usize,
    ) -> Result<Threads, Stop> {
        let (options, placement) = (self.options, &layout.placement);
        let count = placement.threads.len();
        let place = if self.forced.restless { Place::restless(count) } else { Place::new(count) };
        let (place, clock) = (Arc::new(place), Clock::start());
        let rings = layout.plan.take().map(|plan| {
            let bytes = layout.profile.transfer_bytes() as usize;
            let rings = Rings::new(plan, placement, bytes, self.forced.stay, options.zero_copy);
            Arc::new(rings.refusing(self.forced.refuse))
        });
        let (sender, received) = channel();
        let events = EventSender(sender);
        let mut queues = Vec::with_capacity(count + injected);
        for index in 0..count + injected {
            let is_injected = index >= count;
            let started = FuseThread::start(QueueSetup {
                index,
                entries: layout.entries,
                thread: placement.threads.get(index).cloned().unwrap_or_default(),
                // An injected device has an input queue of its own, so its queue always fetches.
                place: if is_injected { Arc::new(Place::new(1)) } else { Arc::clone(&place) },
                place_index: if is_injected { 0 } else { index },
                clock,
                events: events.clone(),
                rings: rings.clone().filter(|_| !is_injected),
                restricted: options.common.restricted,
            });
            match (started.map_err(Error::of_ring), &rings) {
                (Ok(queue), _) => queues.push(queue),
                // No lower mode of rings would go either.
                (Err(error), Some(_)) => {
                    let why = error.to_string();
                    return Err(Stop::Outcome(Outcome::RingsRefused(RingMode::Entries, why)));
                }
                (Err(error), None) => return Err(error.into()),
            }
        }
        let unbound = queues.iter().filter_map(|queue| queue.thread.pin_error.clone());
        layout.topology.warnings.extend(unbound);
        let peers: Vec<_> =
            queues[..count].iter().map(|q| (q.ring_fd, Arc::clone(&q.thread.view.cells))).collect();
        if let Some(rings) = &rings {
            rings.set_peers(peers.clone());
        }
        place.set_peers(peers);
        Ok(Threads { queues, count, place, rings, clock, events, received })
    }

    /// Whether clients cannot write.
    fn is_read_only(&self) -> bool {
        self.options.common.read_only || self.disk.is_read_only()
    }

    /// Phase 3: mounts, or takes the mount of another process, and agrees on the protocol.
    ///
    /// * `lent`: the image, for passthrough.
    ///
    /// Errors: those of mounting; no passthrough.
    pub(super) fn connect(
        &self,
        layout: &mut Layout,
        lent: Option<OwnedFd>,
    ) -> Result<Connection, Error> {
        let (options, profile) = (self.options, &layout.profile);
        let switch = self.mode.map(|_| SwitchWatch::new());
        let (mount, negotiated) = match self.found() {
            Some(parked) => (kept::adopt(parked)?, parked.terms.negotiated),
            None => {
                let wanted = MountOptions {
                    source: options.common.name.clone().into(),
                    read_only: self.is_read_only(),
                    allow_other: options.allow_other,
                    max_read: profile.transfer_bytes(),
                    method: Method::Auto,
                };
                let mount = mount(&options.mountpoint, &wanted)?;
                let negotiated = answer_init(mount.device(), profile)?;
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
            layout.topology.remarks.push(String::from(line));
        }
        let switch_stayed_on = switch.is_none_or(SwitchWatch::stayed_on);
        Ok(Connection { mount, negotiated, backing_id, switch_stayed_on })
    }

    /// Phase 4: prepares the rings, if the kernel has agreed to them.
    ///
    /// Errors: another attempt is needed.
    fn agree_on_rings(
        &self,
        layout: &mut Layout,
        threads: &Threads,
        connection: &Connection,
    ) -> Result<Option<RingStart>, Stop> {
        let Some(rings) = &threads.rings else { return Ok(None) };
        if !connection.negotiated.has(INIT_OVER_IO_URING) {
            // The threads of this attempt are placed for rings, and no lower mode would be offered
            // either: another attempt.
            let why = String::from("the kernel did not offer io_uring for this mount");
            return Err(match self.options.zero_copy {
                ZeroCopy::On => self.refused(why),
                _ => Stop::Outcome(Outcome::RingsRefused(RingMode::Entries, why)),
            });
        }
        if !connection.switch_stayed_on {
            // Whether the kernel has noted that rings are wanted cannot be told.
            return Err(Stop::Outcome(Outcome::SwitchTurned));
        }
        let offered = connection.negotiated.offered & INIT_HAS_IO_URING_BUFPOOL != 0;
        match self.mode.filter(|mode| *mode > RingMode::Entries) {
            Some(mode) if offered => self.make_pool(mode, rings, layout)?,
            Some(_) if self.options.zero_copy == ZeroCopy::On => {
                return Err(self.refused("Linux 7.3 or newer has it"));
            }
            Some(_) => layout.topology.remarks.push(String::from(
                "no buffer pools and no zero-copy: Linux 7.3 or newer has them",
            )),
            None => {}
        }
        let topology = &mut layout.topology;
        if self.mode == Some(RingMode::Pools) && self.options.zero_copy == ZeroCopy::Auto {
            topology.remarks.extend(why_no_zero_copy());
        }
        let payload_bytes = layout.profile.transfer_bytes() as usize;
        topology.memory_bytes_max = rings.memory_bytes_max(payload_bytes) as u64;
        if let Err(errno) = rings.bind_memory() {
            tracing::debug!("some memory of the queues is not bound to its node: {errno}");
        }
        Ok(Some(Starting::new(Arc::clone(rings))))
    }

    /// Makes the buffers of the queues.
    ///
    /// Errors: another attempt is needed.
    fn make_pool(&self, mode: RingMode, rings: &Rings, layout: &Layout) -> Result<(), Stop> {
        let wanted = self.options.zero_copy;
        let zero_copy = mode == RingMode::ZeroCopy && may_zero_copy(self.disk, wanted);
        if zero_copy && wanted == ZeroCopy::On {
            tracing::warn!(
                "zero-copy for every open: a loop device with direct I/O over this file would \
                 damage the memory of the kernel (Linux 7.3), so use `--zero-copy auto` for one"
            );
        }
        let asked = self.options.queue_depth.is_some();
        let bytes = layout.profile.transfer_bytes() as usize;
        let uses = PoolUses { zero_copy, pinned: is_direct(self.disk) };
        match rings.make_pool(asked, bytes, uses) {
            true => Ok(()),
            false => Err(self.refused("too many entries for a ring")),
        }
    }

    /// Phase 5: what each operation does on the disk.
    pub(super) fn file_server(&self, layout: &Layout, connection: &Connection) -> FileServer {
        let options = self.options;
        let wanted = FileOptions {
            growable: options.growable,
            resizable: options.resizable,
            read_only: self.is_read_only(),
            allow_other: options.allow_other,
            profile: layout.profile,
            backing_id: connection.backing_id,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
        };
        let errors = ClientErrors::start(
            &options.mountpoint.to_string_lossy(),
            Arc::clone(self.disk.events()),
        );
        errors.watch(self.disk);
        let mut server = FileServer::new(Arc::clone(self.disk), &wanted).logging(errors);
        if let Some(taken) = self.taken {
            server = server.continuing(&taken.file);
            if let Some(keep) = &options.keep {
                keep.record.restore(&taken.file);
            }
        }
        match &options.keep {
            Some(keep) => server.recording(Arc::clone(&keep.record)),
            None => server,
        }
    }

    /// The descriptors of the queues of the mount.
    ///
    /// Errors: no descriptor is left.
    pub(super) fn queue_devices(
        &self,
        threads: &Threads,
        connection: &Connection,
        notes: &mut Vec<String>,
    ) -> Result<Vec<Arc<OwnedFd>>, Error> {
        match self.left() {
            Some(parked) => kept::devices(parked),
            None => queue_devices(&connection.mount, threads.count, notes),
        }
    }

    /// What another process can go on with, and the requests that the one before has left.
    ///
    /// Errors: the kernel cannot hand the mount over.
    pub(super) fn park(
        &self,
        connection: &Connection,
        devices: &[Arc<OwnedFd>],
        layout: &Layout,
    ) -> Result<Option<Parked>, Error> {
        let Connection { mount, negotiated, .. } = connection;
        let parked = match &self.options.keep {
            Some(_) => Some(kept::park(mount, devices, layout.profile, *negotiated)?),
            None => None,
        };
        if self.left().is_some() {
            kept::ask_again(mount)?;
        }
        Ok(parked)
    }
}

impl Threads {
    /// Gives the threads what they serve.
    ///
    /// * `own`: descriptors of the mount, one for each of its threads.
    /// * `injected`: one for each other thread.
    pub(super) fn serve(
        &self,
        own: Vec<Arc<OwnedFd>>,
        injected: Vec<OwnedFd>,
        server: &Arc<FileServer>,
        starting: Option<&Starting>,
    ) {
        let (mounts, others) = self.queues.split_at(self.count);
        for (queue, device) in mounts.iter().zip(own) {
            let (server, starting) = (Arc::clone(server), starting.cloned());
            queue.serve(Serve { device, server, starting });
        }
        for (queue, device) in others.iter().zip(injected) {
            let (device, server) = (Arc::new(device), Arc::clone(server));
            queue.serve(Serve { device, server, starting: None });
        }
    }

    /// Phase 6, over io_uring: waits until requests travel in the rings.
    ///
    /// Errors: why they do not. Whether the kernel has gone back to `/dev/fuse` by itself cannot be
    /// told for every kind of refusal, and clients of a connection that waits for rings hang: it
    /// takes another connection.
    fn go_live(&self, (starting, registered): RingStart) -> Result<(), String> {
        starting.finish(self.count, &registered).map_err(|Refused(errno)| refusal(errno))?;
        self.place.settle();
        self.queues.iter().for_each(FuseThread::wake);
        Ok(())
    }
}
