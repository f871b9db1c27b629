//! A queue thread of a mount: what joins the transports on it.
//!
//! Promises: the thread is made and ends as those of every export
//! ([`ringdisk_export::QueueThread`]); it serves nothing before it is given the mount; what the
//! kernel knows the addresses of is let go of after its ring is closed.

use std::cell::OnceCell;
use std::os::fd::{OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use ringdisk_export::{
    Clock, EndThread, InFlight, Pending, QueueThread, QueueWork, Running, ThreadSetup,
};
use ringdisk_ring::{Config, Fd, Ring, SetupError};

use crate::dev::{DevQueue, Fetch, Place, announce, serve_entry};
use crate::events::{EndReason, Event, EventSender};
use crate::file::FileServer;
use crate::placement::ThreadPlace;
use crate::queue::{Buffers, Queue, QueueParts};
use crate::uring::{MESSAGE_ENTRY, RingQueue, Rings, Starting, register, take_over};

/// Completions and submissions for each entry: a fetch is two entries (poll and read), a request of
/// several extents a few more.
const SLOTS_PER_ENTRY: u32 = 4;

/// What a queue thread is made of.
#[derive(Debug)]
pub(crate) struct QueueSetup {
    /// Number of the thread.
    pub(crate) index: usize,
    /// Requests in flight at most, over `/dev/fuse`.
    pub(crate) entries: usize,
    /// Where the thread runs.
    pub(crate) thread: ThreadPlace,
    pub(crate) place: Arc<Place>,
    /// Number of this queue in its place.
    pub(crate) place_index: usize,
    pub(crate) clock: Clock,
    pub(crate) events: EventSender,
    /// Entries of the transport over io_uring, if that is wanted.
    pub(crate) rings: Option<Arc<Rings>>,
    /// The thread's ring does nothing but what serving takes.
    pub(crate) restricted: bool,
}

/// What a queue serves, given once the mount is there.
#[derive(Debug)]
pub(crate) struct Serve {
    pub(crate) device: Arc<OwnedFd>,
    pub(crate) server: Arc<FileServer>,
    /// The kernel has agreed to io_uring.
    pub(crate) starting: Option<Starting>,
}

/// What the thread has for the closures of the control thread.
#[derive(Default)]
pub(crate) struct Local {
    /// Empty: it serves nothing yet.
    dev: OnceCell<Rc<DevQueue>>,
}

/// A running queue thread, as its export sees it.
#[derive(Debug)]
pub(crate) struct FuseThread {
    pub(crate) thread: QueueThread<FuseWork>,
    device: SyncSender<Serve>,
    look: Arc<AtomicBool>,
    pub(crate) ring_fd: RawFd,
    pub(crate) in_flight: Arc<InFlight>,
    /// Where its own buffers are.
    pub(crate) buffers: Arc<Buffers>,
}

impl FuseThread {
    /// Starts the thread and makes its ring; it serves nothing yet.
    ///
    /// Errors: [`SetupError`].
    pub(crate) fn start(setup: QueueSetup) -> Result<FuseThread, SetupError> {
        let (device, device_receiver) = sync_channel(1);
        let look = Arc::new(AtomicBool::new(false));
        let buffers = Arc::new(Buffers::default());
        let thread = ThreadSetup {
            number: setup.index,
            cpus: setup.thread.cpus.clone(),
            ring: ring_config(&setup),
        };
        let work = FuseWork {
            setup,
            serve: device_receiver,
            look: Arc::clone(&look),
            buffers: Arc::clone(&buffers),
            device: None,
        };
        let (thread, (ring_fd, in_flight)) = QueueThread::start(thread, work)?;
        Ok(FuseThread { thread, device, look, ring_fd, in_flight, buffers })
    }

    /// Begins to serve.
    pub(crate) fn serve(&self, serve: Serve) {
        let _ = self.device.try_send(serve);
    }

    /// Makes the thread look at its place again.
    pub(crate) fn wake(&self) {
        self.thread.wake();
    }

    /// Makes the thread look at the kernel's input queue again: a wake-up may have gone to a
    /// process that has ended.
    pub(crate) fn look_again(&self) {
        self.look.store(true, Ordering::Release);
        self.thread.wake();
    }
}

impl FuseThread {
    /// Waits until the thread, which fetches no longer, has answered all that it has fetched.
    pub(crate) fn drained(&self) -> Pending<()> {
        self.thread.ask_task(|local| async move {
            if let Some(dev) = local.dev.get() {
                dev.drained().await;
            }
        })
    }

    /// Does something on the ring of the thread. `None`: it serves nothing yet.
    pub(crate) fn on_ring<T, F>(
        &self,
        closure: impl FnOnce(Ring) -> F + Send + 'static,
    ) -> Pending<Option<T>>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        self.thread.ask_task(|local| async move {
            let ring = local.dev.get()?.ring.clone();
            Some(closure(ring).await)
        })
    }
}

impl EndThread for FuseThread {
    fn ask_to_stop(&self) {
        self.thread.ask_to_stop();
    }

    fn join(&mut self, deadline: Instant) -> bool {
        self.thread.join(deadline, || {})
    }
}

/// The ring of a thread.
fn ring_config(setup: &QueueSetup) -> Config {
    let ring_entries = setup.rings.as_ref().map_or(0, |rings| rings.entries_of(setup.index));
    let entries = setup.entries + ring_entries;
    let entries = u32::try_from(entries).unwrap_or(u32::MAX / SLOTS_PER_ENTRY);
    Config {
        entries: (entries * 2).clamp(64, 4096),
        slots: entries.saturating_mul(SLOTS_PER_ENTRY).max(64),
        sqe128: setup.rings.is_some(),
        restricted: setup.restricted,
        name: format!("queue-{}", setup.index),
        ..Config::default()
    }
}

/// What runs on the thread. Its rings and its device are let go of after its ring is closed, which
/// knows the addresses of the entries.
pub(crate) struct FuseWork {
    setup: QueueSetup,
    serve: Receiver<Serve>,
    look: Arc<AtomicBool>,
    buffers: Arc<Buffers>,
    device: Option<Arc<OwnedFd>>,
}

impl QueueWork for FuseWork {
    type Shared = (RawFd, Arc<InFlight>);
    type Local = Local;

    fn run(&mut self, thread: &mut Running<FuseWork>) -> Result<(), SetupError> {
        let entries = self.setup.entries + self.setup.rings.as_ref().map_or(0, |r| r.entry_count());
        let in_flight = Arc::new(InFlight::new(entries));
        let shared = (thread.ring().raw_fd(), Arc::clone(&in_flight));
        let local = Rc::new(Local::default());
        let is_awaited = thread.ready(shared, Rc::clone(&local));
        let Ok(Serve { device, server, starting }) = self.serve.recv() else { return Ok(()) };
        let device = &*self.device.insert(device);
        if !is_awaited || thread.is_stopped() {
            return Ok(());
        }
        let ring = thread.ring().clone();
        let fetch = Rc::new(Fetch::new(self.setup.entries));
        let fetches = Rc::clone(&fetch);
        let parts = QueueParts {
            device: ring.register_file(&**device).unwrap_or_else(|| Fd::of(&**device)),
            server,
            cells: Arc::clone(thread.cells()),
            clock: self.setup.clock,
            thread: self.setup.index,
            entries,
            in_flight,
            events: self.setup.events.clone(),
            stop_fetching: Box::new(move |ring| fetches.stop(ring)),
        };
        let queue = Rc::new(Queue::new(&ring, parts));
        let dev = self.dev_queue(&queue, &fetch);
        let _ = local.dev.set(Rc::clone(&dev));
        let rings = self.ring_queue(&queue);
        for entry in 0..self.setup.entries {
            ring.spawn(serve_entry(Rc::clone(&dev), entry));
        }
        ring.spawn(receive(Rc::clone(&dev), rings.clone()));
        ring.spawn(announce(Rc::clone(&dev)));
        ring.spawn(async move { queue.memory.give_back(&queue.ring, &queue.cells).await });
        if let (Some(starting), Some(rings)) = (starting, rings) {
            ring.spawn(register(rings, starting));
        }
        let look = &self.look;
        thread.until_stopped(|| {
            dev.apply_place();
            if look.swap(false, Ordering::AcqRel) {
                dev.look_again();
            }
        });
        fetch.stop(&ring);
        Ok(())
    }

    fn panicked(&self) {
        let QueueSetup { index, events, .. } = &self.setup;
        events.send(Event::QueueEnded(*index, EndReason::Panicked));
    }
}

impl FuseWork {
    fn dev_queue(&self, queue: &Rc<Queue>, fetch: &Rc<Fetch>) -> Rc<DevQueue> {
        let QueueSetup { place, place_index, thread, .. } = &self.setup;
        let node = thread.memory_node;
        Rc::new(DevQueue::new(queue, fetch, place, *place_index, &self.buffers, node))
    }

    fn ring_queue(&self, queue: &Rc<Queue>) -> Option<Rc<RingQueue>> {
        let QueueSetup { rings, entries, thread, .. } = &self.setup;
        let rings = rings.as_ref()?;
        Some(Rc::new(RingQueue::new(queue, rings, *entries, thread.clone())))
    }
}

/// Receives the messages of other queue threads. A task of the queue thread.
async fn receive(dev: Rc<DevQueue>, rings: Option<Rc<RingQueue>>) {
    loop {
        let message = dev.ring.receive().await;
        if message & MESSAGE_ENTRY == 0 {
            dev.receive(message);
        } else if let Some(rings) = &rings {
            take_over(rings, message);
        }
    }
}
