//! The order in which a mount goes live.
//!
//! A REGISTER that fails is not local: the kernel gives up io_uring for the whole connection. Once
//! every queue has an entry, requests travel in the rings for good, and a failure after that ends
//! the mount. So all queues but the last are registered and looked at first; the last one follows
//! only when none has failed. Where there are pools, every thread registers the memory with its
//! ring before any queue is made, since all rings must agree on whether it is.
//!
//! Promises: a mount that cannot go live is given up, and the caller makes another.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use ringdisk_ring::Errno;

use super::entry::{Begin, add_pool, live};
use super::pool::Pool;
use super::queue::RingQueue;
use super::rings::Rings;

/// How long all threads may take to register: a few milliseconds, unless the machine is overloaded.
const WAIT: Duration = Duration::from_secs(10);
/// How often the thread of the last queue looks whether it may go on.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// What the starting thread has decided, in this order.
const WAITING: u8 = 0;
/// All threads have registered the memory of the pools, or none uses it registered.
const PREPARED: u8 = 1;
/// All queues but the last are there.
const GO: u8 = 2;
const STOP: u8 = 3;

/// A start under way, as its threads see it.
#[derive(Clone, Debug)]
pub(crate) struct Starting {
    pub(crate) rings: Arc<Rings>,
    decision: Arc<AtomicU8>,
    registered: Sender<()>,
}

/// The mount cannot go live: what an entry was refused with, or `None` when the threads were not
/// ready in time.
#[derive(Debug)]
pub(crate) struct Refused(pub(crate) Option<Errno>);

impl Starting {
    /// * the answer's other half waits for the threads.
    pub(crate) fn new(rings: Arc<Rings>) -> (Starting, Receiver<()>) {
        let (registered, receiver) = channel();
        (Starting { rings, decision: Arc::new(AtomicU8::new(WAITING)), registered }, receiver)
    }

    /// Waits until all queues are registered. By the thread that starts the export.
    ///
    /// * `threads`: how many were given this start.
    ///
    /// Errors: [`Refused`].
    pub(crate) fn finish(self, threads: usize, registered: &Receiver<()>) -> Result<(), Refused> {
        let Starting { rings, decision, registered: sender } = self;
        drop(sender);
        let decide = |what| decision.store(what, Ordering::Release);
        let steps: &[u8] = if rings.pool().is_some() { &[PREPARED, GO] } else { &[GO] };
        for step in steps {
            for _ in 0..threads {
                let told = registered.recv_timeout(WAIT);
                if told.is_err() || rings.failure().is_some() {
                    decide(STOP);
                    return Err(Refused(rings.failure()));
                }
            }
            decide(*step);
        }
        let told = registered.recv_timeout(WAIT);
        if told.is_err() {
            return Err(Refused(rings.failure()));
        }
        rings.go_live().map_err(|errno| Refused(Some(errno)))
    }
}

/// Registers the entries of this thread's queues. A task of the queue thread.
pub(crate) async fn register(queue: Rc<RingQueue>, starting: Starting) {
    let Starting { rings, decision, registered } = starting;
    let last = rings.plan.0.len() - 1;
    if let Some(pool) = rings.pool() {
        if let Err(errno) = register_memory(&queue, &rings, pool) {
            rings.fail(errno);
        }
        let _ = registered.send(());
        if !decided(&queue, &decision, PREPARED).await {
            return;
        }
        for (number, plan) in (0..).zip(&rings.plan.0) {
            if plan.thread == queue.thread
                && let Err(errno) = add_pool(&queue, pool, number).await
            {
                rings.fail(errno);
                let _ = registered.send(());
                return;
            }
        }
    }
    spawn(&queue, &rings, |number| number != last).await;
    let _ = registered.send(());
    if rings.plan.0[last].thread != queue.thread || !decided(&queue, &decision, GO).await {
        return;
    }
    spawn(&queue, &rings, |number| number == last).await;
    let _ = registered.send(());
}

/// Waits for a decision. False: the start was given up.
async fn decided(queue: &RingQueue, decision: &AtomicU8, wanted: u8) -> bool {
    loop {
        match decision.load(Ordering::Acquire) {
            STOP => return false,
            so_far if so_far >= wanted => return true,
            _ => queue.ring.sleep(POLL_INTERVAL).await,
        }
    }
}

/// Makes the table of registered buffers of this thread's ring. That the memory cannot be in it is
/// noted; it then serves unregistered.
///
/// Errors: there is no table at all, which client pages need.
fn register_memory(queue: &RingQueue, rings: &Rings, pool: &Pool) -> Result<(), Errno> {
    let slots = match pool.zero_copy {
        true => u16::try_from(rings.entries.len()).map_err(|_| Errno::NOSPC)?,
        false => 0,
    };
    if !pool.is_pinned() {
        return if pool.zero_copy { queue.ring.register_buffers(None, slots) } else { Ok(()) };
    }
    pool.memory.advise_huge_pages();
    let Err(errno) = queue.ring.register_buffers(Some(&pool.memory), slots) else { return Ok(()) };
    tracing::debug!("buffer pools are not registered ({errno})");
    pool.refuse_pin();
    if pool.zero_copy { queue.ring.register_buffers(None, slots) } else { Ok(()) }
}

/// Gives entries to the kernel and waits until it has seen them.
async fn spawn(queue: &Rc<RingQueue>, rings: &Arc<Rings>, wanted: impl Fn(usize) -> bool) {
    for (index, entry) in rings.entries.iter().enumerate() {
        let number = usize::from(entry.queue);
        if wanted(number) && rings.plan.0[number].thread == queue.thread {
            queue.ring.spawn(live(Rc::clone(queue), index, Begin::Register));
        }
    }
    // A refusal completes in the enter that submits it, and is taken in the turn after that.
    let start = queue.ring.turn();
    while queue.ring.turn() < start + 3 {
        queue.ring.sleep(POLL_INTERVAL).await;
    }
}
