//! The control thread of an export: it hears why a queue ended, stops all, removes the mount, and
//! says how the export ended.
//!
//! Promises: every end flushes the disk and removes the mount, within a limit. The thread serves no
//! request, so it may touch the mount.

mod hand_over;

use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ringdisk_disk::Disk;
use ringdisk_export::{Clock, HaltReason, close_disk, stop_threads, wait_drained};
use ringdisk_ring::{Config, Errno, Runtime, SetupError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::ErrorKind;
use crate::dev::Place;
use crate::events::{EndReason, Event};
use crate::file::FileServer;
use crate::mount::{Mount, Unmount};
use crate::negotiate::Negotiated;
use crate::reply::notify_inval_inode;
use crate::thread::FuseThread;
use crate::uring::Rings;

/// How long a clean stop waits for requests in flight before it ends them with errors.
const GRACE: Duration = Duration::from_secs(2);
/// So many times the I/O timeout requests may wait for a change of the disk: it may be the change
/// that waits for the storage.
const CHANGE_LIMITS: u32 = 10;
/// How long the queue threads may take to end after that.
const JOIN: Duration = Duration::from_millis(1500);
/// How long the last flush of the disk may take. A disk that answers may have gigabytes in the page
/// cache to write; the mount is gone by then, so no client waits.
const LAST_FLUSH: Duration = Duration::from_secs(300);
/// The same when requests did not end: the storage does not answer.
const LAST_FLUSH_STUCK: Duration = Duration::from_millis(500);
/// After this long the log says what the process waits for.
const LAST_FLUSH_QUIET: Duration = Duration::from_secs(2);
/// How often the queues look for requests after a process has died.
const REQUEST_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// So long the kernel must have had no request for us before those of a process that has died count
/// as taken.
const QUIET: Duration = Duration::from_millis(100);
/// How often the control thread looks whether requests are still in flight.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long a mount may be busy because of a client that is about to close it: a program that has
/// just ended, whose RELEASE is on its way.
const CLOSING: Duration = Duration::from_millis(300);
/// How often a stopped mount that is in use is looked at: whether its last user has closed it, and
/// whether the time is up.
const IN_USE_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How often the last flush looks whether the end is to come at once.
const LAST_FLUSH_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Called with the number of open files when a stop has to wait for clients.
type InUse = Box<dyn Fn(u64) + Send + Sync>;

/// Called when a mount that is to stop is in use, before its name goes; empty: it is logged.
/// Clones share it.
#[derive(Clone, Default)]
pub(crate) struct InUseSlot(Arc<OnceLock<InUse>>);

impl InUseSlot {
    /// The first one stays.
    pub(crate) fn set(&self, report: InUse) {
        let _ = self.0.set(report);
    }

    fn report(&self, open_files: u64) {
        match self.0.get() {
            Some(report) => report(open_files),
            None => tracing::warn!("a mount that is to stop is in use: {open_files} open files"),
        }
    }
}

impl fmt::Debug for InUseSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("InUseSlot").field(&self.0.get().is_some()).finish()
    }
}

/// How an export ends.
#[derive(Debug)]
enum End {
    /// By a stop, and no client uses the mount.
    Stopped,
    /// Clients use it, and get errors from now on.
    Forced(HaltReason),
    Discarded,
    Unmounted,
    /// With so many open files.
    Aborted(u64),
    Halted(HaltReason),
    /// Another process serves the mount.
    HandedOver,
}

/// A stop that waits until the last user of the mount has closed it.
#[derive(Clone, Copy, Debug)]
struct Draining {
    since: Instant,
}

/// The state of the control thread.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) mount: Mount,
    pub(crate) queues: Vec<FuseThread>,
    pub(crate) disk: Arc<Disk>,
    pub(crate) server: Arc<FileServer>,
    /// The answer to INIT.
    pub(crate) negotiated: Negotiated,
    pub(crate) place: Arc<Place>,
    pub(crate) clock: Clock,
    /// Memory and entries that the kernel has, when requests travel in rings.
    pub(crate) rings: Option<Arc<Rings>>,
    pub(crate) events: Receiver<Event>,
    /// Events that came while a hand-over was going on.
    pub(crate) postponed: VecDeque<Event>,
    pub(crate) io_timeout: Option<Duration>,
    /// How long a stop waits for clients; `None`: as long as they take.
    pub(crate) stop_timeout: Option<Duration>,
    pub(crate) in_use: InUseSlot,
    pub(crate) kernel_cache: bool,
    /// The mount outlives the process.
    pub(crate) is_kept: bool,
    /// Rings are restricted to the operations that serving needs.
    pub(crate) restricted: bool,
    /// Until when the queues are made to look for requests: the process before this one has just
    /// died, and while the kernel takes its rings down, their polls still swallow wake-ups.
    pub(crate) look_until: Option<Instant>,
}

impl Control {
    /// Runs until the export has ended.
    ///
    /// * `prepared`: gets a message when everything has been made that the end will need.
    pub(crate) fn run(mut self, prepared: &Sender<()>) -> Result<(), HaltReason> {
        // Made now: at the end io_uring may be forbidden, or there may be no descriptor left.
        let runtime = if self.disk.is_read_only() { None } else { self.runtime().ok() };
        let _ = prepared.send(());
        let end = self.wait();
        self.finish(end, runtime)
    }

    fn wait(&mut self) -> End {
        let mut draining = None;
        // Since when a change of the disk keeps all requests waiting, and when that was last seen.
        let mut held: Option<(Instant, Instant)> = None;
        loop {
            let looks = self.look_until.is_some_and(|end| Instant::now() < end);
            let pause = self.io_timeout.map(|limit| (limit / 4).max(Duration::from_millis(1)));
            let drains = draining.map(|_| IN_USE_POLL_INTERVAL);
            let pause =
                [pause, drains, looks.then_some(REQUEST_POLL_INTERVAL)].into_iter().flatten().min();
            let event = match (self.postponed.pop_front(), pause) {
                (Some(event), _) => Ok(event),
                (None, None) => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                (None, Some(pause)) => self.events.recv_timeout(pause),
            };
            if looks {
                self.queues.iter().for_each(FuseThread::look_again);
            }
            match event {
                Ok(Event::Stop) => match draining {
                    Some(_) => self.in_use.report(self.server.open_files()),
                    None if self.leave_tree() => return End::Stopped,
                    None => draining = Some(Draining { since: Instant::now() }),
                },
                Ok(Event::Force) | Err(RecvTimeoutError::Disconnected) => {
                    return self.forced(HaltReason::Forced);
                }
                Ok(Event::Discard) => return End::Discarded,
                Ok(Event::Resized) => self.tell_size(),
                Ok(Event::HandOver(request)) => {
                    if self.hand_over(request, draining.is_some()) {
                        return End::HandedOver;
                    }
                }
                Ok(Event::QueueEnded(queue, reason)) => return self.queue_ended(queue, reason),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some(limit) = self.io_timeout.filter(|limit| self.is_late(*limit, &mut held)) {
                return End::Halted(HaltReason::Timeout(limit));
            }
            if let Some(end) = draining.and_then(|draining| self.drained(draining)) {
                return end;
            }
        }
    }

    /// What the end of a queue thread means for the export.
    fn queue_ended(&mut self, queue: usize, reason: EndReason) -> End {
        let reason = match reason {
            EndReason::Device(errno) => HaltReason::Device("the FUSE device", errno),
            EndReason::Reply(errno) => HaltReason::Reply("the kernel", errno),
            EndReason::Protocol(error) => {
                HaltReason::Protocol("the FUSE device", error.to_string())
            }
            EndReason::Panicked => HaltReason::Panicked,
            EndReason::Unmounted | EndReason::Aborted => {
                // "Unmounted" is also what `/dev/fuse` says after `umount -f` of a mount in use,
                // which stays where it is. "Aborted" is what rings say when the last user has
                // closed the file of a mount that is gone, and `/dev/fuse` to a request of that
                // moment.
                self.mount.wait_closed(GRACE);
                return match self.mount.was_aborted() {
                    true => End::Aborted(self.open_files()),
                    false => End::Unmounted,
                };
            }
        };
        tracing::error!("queue {queue}: {reason}");
        if self.is_kept && reason == HaltReason::Panicked {
            // The helper process keeps the descriptors with its requests: the next process answers
            // them.
            std::process::abort();
        }
        End::Halted(reason)
    }

    /// Whether a request has been with the storage for longer than it may.
    ///
    /// * `held`: since when a change of the disk keeps all requests waiting, and when that was last
    ///   seen.
    fn is_late(&self, limit: Duration, held: &mut Option<(Instant, Instant)>) -> bool {
        if self.disk.is_held_by_a_change() {
            let now = Instant::now();
            *held = Some((held.map_or(now, |(since, _)| since), now));
        } else if held.is_some_and(|(_, seen)| seen.elapsed() > limit) {
            *held = None;
        }
        // Requests that waited for a change have not been with the storage. It may be the change
        // that waits for the storage.
        let longest = limit * CHANGE_LIMITS;
        let is_late = |age| age > limit && held.is_none_or(|(since, _)| since.elapsed() > longest);
        // Nor have those that wait for the limits of the disk.
        let is_limited = self.disk.limit_waits().now > 0;
        !is_limited && self.oldest().is_some_and(is_late)
    }

    /// A stop begins: takes the mount out of the tree. Returns whether no client uses
    /// it; else its users are reported, and it is served on.
    fn leave_tree(&mut self) -> bool {
        self.take_what_waits();
        let deadline = Instant::now() + CLOSING;
        let unmounted = loop {
            match self.mount.unmount(Unmount::Normal) {
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => {
                    std::thread::sleep(POLL_INTERVAL);
                }
                result => break result.is_ok(),
            }
        };
        // A copy of the mount elsewhere (a bind mount, another mount namespace) that no client has
        // open is no user.
        while !self.is_unused() {
            if unmounted && self.mount.is_gone() {
                return true;
            }
            if Instant::now() >= deadline {
                // Who uses it is found by its name as long as it has one.
                self.in_use.report(self.open_files());
                if let Err(error) = self.mount.unmount(Unmount::Lazy) {
                    tracing::warn!("{}", error.with_hint());
                }
                return false;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        if unmounted {
            return self.closes();
        }
        // No client uses it at this moment, and yet it was busy all the time: clients open and
        // close it again and again. One that opens it after the look is served to its end, so the
        // name goes before the look that counts.
        if let Err(error) = self.mount.unmount(Unmount::Lazy) {
            tracing::warn!("{}", error.with_hint());
        }
        self.closes()
    }

    /// For a mount that has left the tree: whether no client uses it, and from now on none can.
    /// Otherwise its users are reported.
    fn closes(&self) -> bool {
        let closes = self.closes_quietly();
        if !closes {
            self.in_use.report(self.open_files());
        }
        closes
    }

    /// As [`closes`](Control::closes), without a report.
    fn closes_quietly(&self) -> bool {
        // A client may have found the name before it went, and open the file only now.
        self.server.refuse_opens(true);
        let closes = self.is_unused();
        if !closes {
            self.server.refuse_opens(false);
        }
        closes
    }

    /// Whether a stop has waited long enough: the last user is gone, or the time is up.
    fn drained(&self, draining: Draining) -> Option<End> {
        if self.is_unused() && self.closes_quietly() {
            return Some(End::Stopped);
        }
        let limit = self.stop_timeout.filter(|limit| draining.since.elapsed() >= *limit)?;
        Some(self.forced(|count| HaltReason::StillInUse(limit, count)))
    }

    /// Ends the export at once.
    fn forced(&self, reason: impl FnOnce(u64) -> HaltReason) -> End {
        self.server.refuse_opens(true);
        match self.open_files() {
            0 => End::Stopped,
            count => End::Forced(reason(count)),
        }
    }

    /// Open files of clients. (Each mapping of the file and each loop device has one.)
    fn open_files(&self) -> u64 {
        self.server.open_files()
    }

    fn is_unused(&self) -> bool {
        self.open_files() == 0 && self.in_flight() == 0
    }

    fn oldest(&self) -> Option<Duration> {
        let now = self.clock.nanos(Instant::now());
        self.queues.iter().filter_map(|queue| queue.in_flight.oldest(now)).max()
    }

    fn in_flight(&self) -> usize {
        self.queues.iter().map(|queue| queue.in_flight.count()).sum()
    }

    /// Makes the kernel ask for the size again.
    fn tell_size(&self) {
        let frame = notify_inval_inode(self.kernel_cache);
        if let Err(errno) = rustix::io::write(self.mount.device(), &frame)
            && errno != Errno::NOENT
        {
            tracing::debug!("the kernel was not told of the new size: {errno}");
        }
    }

    fn finish(&mut self, end: End, runtime: Option<Runtime>) -> Result<(), HaltReason> {
        let mut result = Ok(());
        let keeps_disk = matches!(end, End::Discarded | End::HandedOver);
        let drained = match end {
            End::HandedOver => {
                self.mount.leave();
                true
            }
            End::Discarded => {
                self.mount.abort();
                self.remove_mount();
                true
            }
            End::Stopped => {
                self.take_what_waits();
                self.remove_mount();
                let drained = self.end_requests();
                // The mount may be in another mount namespace too: the kernel must let go of the
                // entries before their rings are closed. (Once: after an abort the number of the
                // connection may become another's.)
                if drained.is_err() || self.rings.is_some() || self.is_kept {
                    self.mount.abort();
                }
                result = drained;
                result.is_ok()
            }
            End::Forced(reason) => {
                // First the clients: each gets its error now, also those that wait for storage.
                self.mount.abort();
                self.remove_mount();
                let drained = self.end_requests();
                result = drained.and(Err(reason));
                !matches!(result, Err(HaltReason::StillInFlight(_)))
            }
            End::Unmounted => self.drain(GRACE).is_ok(),
            End::Aborted(open_files) => {
                self.remove_mount();
                if open_files > 0 {
                    result = Err(HaltReason::Aborted(open_files));
                }
                self.drain(GRACE).is_ok()
            }
            End::Halted(reason) => {
                // First the clients: each gets its error now. Then the mount goes.
                self.mount.abort();
                self.remove_mount();
                let answers = !matches!(reason, HaltReason::Timeout(_));
                result = Err(reason);
                answers && self.in_flight() == 0
            }
        };
        let name = self.mount.mountpoint().display().to_string();
        stop_threads(&mut self.queues, JOIN, &name);
        if keeps_disk {
            return result;
        }
        // With --passthrough clients that have the file open, or only mapped, go on writing to the
        // image, which stays locked for them: the kernel ends the file system with the last one.
        if self.mount.is_gone() {
            self.disk.end_loan();
        }
        let limit = if drained { LAST_FLUSH } else { LAST_FLUSH_STUCK };
        match self.last_flush(limit, drained, runtime) {
            // The loss of what was answered is worse than a client that was not done.
            Err(errno)
                if matches!(
                    result,
                    Ok(())
                        | Err(HaltReason::Forced(_)
                            | HaltReason::StillInUse(..)
                            | HaltReason::Aborted(_))
                ) =>
            {
                Err(HaltReason::Flush(errno))
            }
            _ => result,
        }
    }

    /// No new requests; those in flight get [`GRACE`]. Errors: some did not end.
    fn end_requests(&self) -> Result<(), HaltReason> {
        self.place.drain();
        if let Some(rings) = &self.rings {
            rings.drain();
        }
        for queue in &self.queues {
            queue.wake();
        }
        self.drain(GRACE).map_err(HaltReason::StillInFlight)
    }

    /// Whether the end was asked for at once since.
    fn is_forced_meanwhile(&self) -> bool {
        self.events.try_iter().any(|event| matches!(event, Event::Force))
    }

    /// Takes the mount out of the tree, also while it is in use.
    fn remove_mount(&mut self) {
        for how in [Unmount::Normal, Unmount::Lazy] {
            match self.mount.unmount(how) {
                Ok(()) => return,
                Err(error) if how == Unmount::Lazy => tracing::warn!("{}", error.with_hint()),
                Err(_) => {}
            }
        }
    }

    /// Just after a process has died: waits until the queues have taken the requests that it left.
    /// Clients that go on and on are not waited for longer than [`GRACE`].
    fn take_what_waits(&self) {
        let deadline = Instant::now() + GRACE;
        let is_over = |end: Instant| Instant::now() >= end;
        if self.look_until.is_none_or(is_over) {
            return;
        }
        let mut quiet_at = Instant::now() + QUIET;
        while !is_over(quiet_at) && !is_over(deadline) {
            let mut device = [PollFd::from_borrowed_fd(self.mount.device(), PollFlags::IN)];
            let _ = poll(&mut device, Some(&Timespec::default()));
            if device[0].revents().contains(PollFlags::IN) {
                quiet_at = Instant::now() + QUIET;
            }
            self.queues.iter().for_each(FuseThread::look_again);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits for the requests in flight. Errors: how many did not end.
    fn drain(&self, limit: Duration) -> Result<(), usize> {
        let _lifted = self.disk.lift_limits();
        wait_drained(|| self.in_flight(), limit)
    }

    /// What clients wrote reaches stable storage, and the image is closed, before the process says
    /// that all is well.
    ///
    /// * `drained`: no request is in flight. Otherwise a flush of its own comes first: closing,
    ///   which flushes too, waits for requests, and some may never end.
    fn last_flush(
        &self,
        limit: Duration,
        drained: bool,
        made: Option<Runtime>,
    ) -> Result<(), Errno> {
        if self.disk.is_read_only() {
            return Ok(());
        }
        let mut runtime = made.map_or_else(|| self.runtime(), Ok).map_err(|error| {
            tracing::error!("no ring for the last flush of the image: {error}");
            Errno::NOMEM
        })?;
        let ring = runtime.ring().clone();
        let flush = async {
            let mut flush = std::pin::pin!(close_disk(&self.disk, &ring, drained));
            let quiet = LAST_FLUSH_QUIET.min(limit);
            if let Ok(result) = ring.within(quiet, flush.as_mut()).await {
                return Ok(result);
            }
            if limit > quiet {
                tracing::warn!("writing what the page cache still holds of the image");
            }
            let end = Instant::now() + (limit - quiet);
            loop {
                let left = end.saturating_duration_since(Instant::now());
                match ring.within(left.min(LAST_FLUSH_POLL_INTERVAL), flush.as_mut()).await {
                    Ok(result) => return Ok(result),
                    Err(late) if left <= LAST_FLUSH_POLL_INTERVAL || self.is_forced_meanwhile() => {
                        return Err(late);
                    }
                    Err(_) => {}
                }
            }
        };
        match runtime.block_on(flush) {
            Ok(result) => result,
            Err(_) => Err(Errno::TIMEDOUT),
        }
    }

    /// The ring of the last flush.
    fn runtime(&self) -> Result<Runtime, SetupError> {
        let restricted = self.restricted;
        Runtime::new(Config { entries: 32, slots: 64, files: 0, restricted, ..Config::default() })
    }
}
