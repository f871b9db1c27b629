//! A queue as the transport over `/dev/fuse` sees it: which entry fetches, and whether the queue
//! fetches at all.
//!
//! Promises: what the shared [`Place`] says is done when the thread is woken; a request reads one
//! word of it. Queue thread only; never allocates, locks or blocks for a request.

use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_ring::{Errno, IoBuf, Parker, SharedMemory};

use super::fetch::Fetch;
use super::fetching_queues::{MESSAGE_LOOK_AGAIN, MESSAGE_UPDATE, Place};
use crate::queue::{Buffers, PollsFor, Queue};

/// How often a queue that is being drained looks whether it is.
const STILL_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// A queue and how it fetches from `/dev/fuse`.
pub(crate) struct DevQueue {
    queue: Rc<Queue>,
    pub(super) fetch: Rc<Fetch>,
    place: Arc<Place>,
    /// Number of this queue in its place.
    number: usize,
    announce: Parker,
    buffers: Arc<Buffers>,
    /// The node that its buffers shall be on.
    memory_node: Option<usize>,
}

impl Deref for DevQueue {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.queue
    }
}

impl DevQueue {
    /// * `number`: of this queue in its place.
    /// * `memory_node`: the node that its buffers shall be on.
    pub(crate) fn new(
        queue: &Rc<Queue>,
        fetch: &Rc<Fetch>,
        place: &Arc<Place>,
        number: usize,
        buffers: &Arc<Buffers>,
        memory_node: Option<usize>,
    ) -> DevQueue {
        DevQueue {
            queue: Rc::clone(queue),
            fetch: Rc::clone(fetch),
            place: Arc::clone(place),
            number,
            announce: Parker::default(),
            buffers: Arc::clone(buffers),
            memory_node,
        }
    }

    /// A request was fetched.
    pub(super) fn begin(&self, entry: usize, now: Instant) {
        let nanos = self.queue.begin(entry, now);
        if self.place.is_due(nanos) && self.place.step(nanos) {
            self.place_changed();
        }
    }

    /// Memory for an entry, on the node of this thread. Pages would come from there by themselves,
    /// but a huge page that another thread touched first may reach into it.
    pub(super) fn new_buffer(&self, len_bytes: usize) -> IoBuf {
        let memory = SharedMemory::mapped(len_bytes);
        memory.advise_small_pages();
        if let Some(node) = self.memory_node {
            // That the system binds to this node was tried before the start; without it the page is
            // as good.
            let _ = memory.prefer_node(0..memory.len(), node);
        }
        self.buffers.add(memory.address(), memory.len());
        memory.buffer().slice(0..len_bytes)
    }

    /// A fetch ended, with a request or without.
    pub(super) fn fetch_ended(&self) {
        if self.fetch.is_exhausted() {
            self.cells.exhausted.add(1);
            if self.place.exhausted() {
                self.place_changed();
            }
        }
        if self.fetch.is_quiet() {
            self.announce.unpark(&self.ring);
        }
    }

    /// This queue changed the place: acts on it, and tells the others.
    fn place_changed(&self) {
        self.apply_place();
        self.announce.unpark(&self.ring);
    }

    /// Does what the shared place says.
    pub(crate) fn apply_place(&self) {
        if self.has_ended() {
            return;
        }
        let is_settled = self.place.is_settled();
        self.polls_for.set(if is_settled { PollsFor::Storage } else { PollsFor::Requests });
        self.ring.set_polling(self.place.polls());
        self.hold_polling();
        let fetches = self.place.fetches(self.number);
        if fetches && !self.fetch.is_enabled() {
            self.fetch.start(&self.ring);
        } else if !fetches && self.fetch.is_enabled() {
            self.stop_fetching();
        }
    }

    fn stop_fetching(&self) {
        self.fetch.stop(&self.ring);
        if self.fetch.is_quiet() {
            self.announce.unpark(&self.ring);
        }
    }

    /// Looks at the kernel's input queue again, if this queue fetches: a wake-up may have gone to a
    /// poll that cannot use it.
    pub(crate) fn look_again(&self) {
        if self.fetch.is_enabled() {
            self.fetch.look_again(&self.ring);
        }
    }

    /// Waits until this queue, which fetches no longer, has answered all that it has fetched, or
    /// until queues fetch again.
    pub(crate) async fn drained(&self) {
        while self.place.is_draining() && !self.has_ended() && !self.fetch.is_still() {
            // Also fetches that were not in the ring yet when they were cancelled.
            self.fetch.stop(&self.ring);
            self.ring.sleep(STILL_POLL_INTERVAL).await;
        }
    }

    /// Another queue has sent a message.
    pub(crate) fn receive(&self, message: u32) {
        self.apply_place();
        if message == MESSAGE_LOOK_AGAIN {
            self.fetch.look_again(&self.ring);
        }
    }
}

/// Sends messages to the other queues: that the place has changed, and, once this queue has stopped
/// fetching, to look for a request whose wake-up it may have swallowed. A task of the queue thread.
pub(crate) async fn announce(queue: Rc<DevQueue>) {
    let mut announced = 0;
    loop {
        queue.announce.park(&queue.ring).await;
        if queue.has_ended() {
            continue;
        }
        let change = queue.place.changes();
        let message = if queue.fetch.is_quiet() { MESSAGE_LOOK_AGAIN } else { MESSAGE_UPDATE };
        if message == MESSAGE_UPDATE && change == announced {
            continue;
        }
        announced = change;
        for fd in queue.place.others(queue.number) {
            // A message that is lost may be the one that a client waits for. The other ring goes
            // only when the export ends.
            while let Err(errno) = queue.ring.send_message(fd, message).await {
                if errno == Errno::BADF || errno == Errno::BADFD || queue.has_ended() {
                    break;
                }
                queue.ring.sleep(Duration::from_millis(1)).await;
            }
        }
    }
}
