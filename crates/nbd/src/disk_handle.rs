//! One disk of an export, as the export that is in charge of the disk sees it.
//!
//! Promises: when [`DiskHandle::end`] returns `true`, no request of an NBD client is in flight on
//! the disk and none will come; other disks of the export go on. Where the disk goes to a
//! successor, its clients go along: the connections of all disks stand still until that is decided,
//! since they share queue threads. Control path, any thread.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel, sync_channel};
use std::time::{Duration, Instant};

use ringdisk_export::{Error, ErrorKind, HandOverState, SecondExport, ThreadHandle};

use crate::hand_over;
use crate::queue::{Queue, Shared, Work};
use crate::stop_request::Ending;
use crate::suspended_connections::{Moved, STANDING_LIMIT, STANDING_REPLIES};

/// When a disk leaves, its clients have so long to take their last replies.
const LAST_REPLIES: Duration = Duration::from_secs(2);
/// When a disk leaves, requests in flight have so long.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// One disk of an export, for other threads; also after the end of the export.
#[derive(Clone)]
pub struct DiskHandle {
    name: String,
    shared: Arc<Shared>,
    ending: Arc<Ending>,
    threads: Vec<ThreadHandle<Work>>,
}

impl DiskHandle {
    pub(crate) fn new(
        name: &str,
        shared: Arc<Shared>,
        ending: Arc<Ending>,
        threads: Vec<ThreadHandle<Work>>,
    ) -> DiskHandle {
        DiskHandle { name: name.to_owned(), shared, ending, threads }
    }

    /// Takes the disk out of the export: new clients do not find it, requests in flight are
    /// answered, and its clients are disconnected. Waits until that is done, 10 s at most. Gives
    /// whether it was.
    pub fn end(&self) -> bool {
        let Some(export) = self.shared.exports.remove(&self.name) else { return true };
        let _lifted = export.disk.lift_limits();
        // Each thread has a sender, which is dropped when the thread is done, or has ended.
        let (sender, receiver) = sync_channel::<()>(0);
        for thread in &self.threads {
            let (sender, export) = (sender.clone(), Arc::clone(&export));
            thread.send(move |queue| {
                let queue = Rc::clone(queue);
                let ring = queue.ring.clone();
                ring.spawn(async move {
                    queue.dismiss(&export, LAST_REPLIES).await;
                    drop((export, sender));
                });
            });
        }
        drop(sender);
        let is_done = receiver.recv_timeout(LEAVE_LIMIT) == Err(RecvTimeoutError::Disconnected);
        if !is_done {
            tracing::warn!(
                "NBD export '{}': requests are still in flight; the storage below the image does \
                 not answer",
                self.name.escape_debug()
            );
        }
        is_done
    }
}

/// The hand-over of the disk to a successor.
impl DiskHandle {
    /// Lets all connections stand still. Gives those that can go.
    ///
    /// Errors: requests in flight do not end; a queue thread does not answer.
    fn suspend(&self) -> Result<Vec<Moved>, Error> {
        let in_flight = || {
            let text = "requests of NBD clients are still in flight; try again later";
            Error::new(ErrorKind::Refused, text)
        };
        let disks = self.shared.exports.all();
        let _lifted: Vec<_> = disks.iter().map(|export| export.disk.lift_limits()).collect();
        let (sender, receiver) = channel();
        let mut standing = self.shared.standing();
        *standing += 1;
        for thread in &self.threads {
            let sender = sender.clone();
            thread.send(move |queue| {
                let queue = Rc::clone(queue);
                let ring = queue.ring.clone();
                ring.spawn(async move {
                    let _ = sender.send(queue.suspend(STANDING_REPLIES).await);
                });
            });
        }
        drop((sender, standing));
        let begun = Instant::now();
        let mut all = Vec::new();
        for _ in &self.threads {
            let left = STANDING_LIMIT.saturating_sub(begun.elapsed());
            let moved = receiver.recv_timeout(left).ok().flatten();
            all.extend(moved.ok_or_else(in_flight)?);
        }
        Ok(all)
    }

    /// The same, and packs those of this disk.
    ///
    /// Errors: descriptors or memory are short, too.
    fn suspend_and_pack(&self) -> Result<HandOverState, Error> {
        let mut clients = self.suspend()?;
        clients.retain(|client| client.before.export == self.name);
        let listeners = self.shared.listeners().map_err(|error| {
            Error::new(ErrorKind::System, "a listening socket cannot be handed over").source(error)
        })?;
        let names = self.shared.exports.all().iter().map(|export| export.name.clone()).collect();
        hand_over::pack(listeners, Vec::new(), names, clients)
    }

    /// No disk is left here.
    fn leave(&self) {
        let (sender, receiver) = sync_channel::<()>(0);
        for thread in &self.threads {
            let sender = sender.clone();
            thread.send(move |queue| {
                queue.leave();
                drop(sender);
            });
        }
        drop(sender);
        let _ = receiver.recv_timeout(LEAVE_LIMIT);
        self.ending.moved();
    }
}

impl SecondExport for DiskHandle {
    fn client_came(&self) {
        self.shared.idle.begin();
    }

    fn client_gone(&self) {
        if self.shared.idle.end() {
            self.shared.tell_first(Queue::end_if_idle);
        }
    }

    fn end(&self) {
        DiskHandle::end(self);
    }

    fn stand_still(&self) -> Result<Option<HandOverState>, Error> {
        if self.ending.has_ended() {
            return Ok(None);
        }
        let packed = self.suspend_and_pack();
        packed.map(Some).inspect_err(|_| SecondExport::go_on(self))
    }

    fn go_on(&self) {
        let mut standing = self.shared.standing();
        *standing = standing.saturating_sub(1);
        if *standing == 0 {
            self.threads.iter().for_each(|thread| thread.send(|queue| queue.go_on()));
        }
    }

    fn moved(&self) {
        self.shared.peers.have_moved(&self.name);
        if let Some(export) = self.shared.exports.remove_moved(&self.name) {
            for thread in &self.threads {
                let export = Arc::clone(&export);
                thread.send(move |queue| queue.leave_disk(&export));
            }
        }
        match self.shared.exports.all().is_empty() {
            true => self.leave(),
            false => SecondExport::go_on(self),
        }
    }
}

impl fmt::Debug for DiskHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskHandle").field("name", &self.name).finish_non_exhaustive()
    }
}
