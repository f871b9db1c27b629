//! One queue: its thread, ring and entries.

use std::cell::Cell;
use std::future::poll_fn;
use std::os::fd::{OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringdisk_ring::{
    Config, Counters, CpuList, Errno, Fd, IoBuf, Parker, Remote, Ring, Runtime, SetupError,
    SharedMemory, cpus_of_thread, pin_to_cpus,
};

use crate::file::FileServer;
use crate::idle::{IdleMemory, give_back};
use crate::keeper::{EndReason, Event, EventSender};
use crate::placement::{Buffers, ThreadPlace};
use crate::uring::{MESSAGE_ENTRY, Rings, Starting, register, take_over};
use ringdisk_export::stats::{QueueCells, QueueView};

use super::entry::serve_entry;
use super::fetch::Fetch;
use super::place::{MESSAGE_LOOK_AGAIN, MESSAGE_UPDATE, Place};

/// Completions and submissions for each entry: a fetch is two entries (poll and read), a request of
/// several extents a few more.
const SLOTS_PER_ENTRY: u32 = 4;

/// What a queue is made of.
#[derive(Debug)]
pub(crate) struct QueueSetup {
    pub(crate) index: usize,
    /// Requests in flight at most.
    pub(crate) entries: usize,
    /// Where the thread runs.
    pub(crate) thread: ThreadPlace,
    pub(crate) place: Arc<Place>,
    /// Number of this queue in its place.
    pub(crate) place_index: usize,
    pub(crate) events: EventSender,
    /// Entries of the transport over io_uring, if that is wanted.
    pub(crate) rings: Option<Arc<Rings>>,
    /// The thread's ring does nothing but what serving takes.
    pub(crate) restricted: bool,
}

/// Start times of the requests in flight, for the watchdog: as [`Place::nanos`], 0 for an idle
/// entry.
#[derive(Debug)]
pub(crate) struct InFlight(Box<[AtomicU64]>);

impl InFlight {
    fn new(entries: usize) -> InFlight {
        InFlight((0..entries).map(|_| AtomicU64::new(0)).collect())
    }

    /// Age of the oldest request at `now` (as [`Place::nanos`]). Any thread.
    pub(crate) fn oldest(&self, now: u64) -> Option<Duration> {
        let started = self.0.iter().map(|started| started.load(Ordering::Relaxed));
        let first = started.filter(|&started| started != 0).min()?;
        Some(Duration::from_nanos(now.saturating_sub(first)))
    }

    /// Requests in flight. Any thread.
    pub(crate) fn count(&self) -> usize {
        self.0.iter().filter(|started| started.load(Ordering::Relaxed) != 0).count()
    }
}

/// The thread-local side of a queue, shared by its tasks.
pub(crate) struct Queue {
    pub(crate) ring: Ring,
    pub(crate) device: Fd,
    pub(crate) server: Arc<FileServer>,
    pub(super) fetch: Fetch,
    pub(crate) memory: IdleMemory,
    pub(crate) cells: Arc<QueueCells>,
    buffers: Arc<Buffers>,
    /// Where it runs, and the node for the memory of its own entries.
    place_of_thread: ThreadPlace,
    /// It may leave its CPU at the moment.
    is_free: Cell<bool>,
    /// It was bound from outside, and is left alone.
    is_bound_by_others: Cell<bool>,
    index: usize,
    /// Entries of `dev`; those of the rings are counted behind them.
    entries: usize,
    rings: Option<Arc<Rings>>,
    place_index: usize,
    in_flight: Arc<InFlight>,
    place: Arc<Place>,
    announce: Parker,
    events: EventSender,
    ended: Cell<bool>,
}

impl Queue {
    /// A request was fetched.
    pub(super) fn begin(&self, entry: usize, now: Instant) {
        let nanos = self.place.nanos(now);
        self.in_flight.0[entry].store(nanos, Ordering::Relaxed);
        self.cells.begin();
        self.hold_polling();
        if self.place.is_due(nanos) && self.place.step(nanos) {
            self.place_changed();
        }
    }

    /// Its reply is ready.
    pub(super) fn end(&self, entry: usize, started: Instant) {
        self.in_flight.0[entry].store(0, Ordering::Relaxed);
        let nanos = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.cells.end(nanos);
        self.hold_polling();
    }

    /// A request came through the ring.
    pub(crate) fn begin_ring(&self, rings: &Rings, index: usize, now: Instant) {
        let nanos = self.place.nanos(now);
        self.in_flight.0[self.entries + index].store(nanos, Ordering::Relaxed);
        self.cells.begin();
        self.hold_polling();
        rings.look(index, self.index, nanos, self.ring.turn());
        if rings.is_free(self.index) != self.is_free.get() {
            self.set_free(!self.is_free.get());
        }
    }

    /// Leaves the thread's CPU to the scheduler, or binds it again. Stops doing so where somebody
    /// else has bound the thread meanwhile (taskset, a cpuset), or where the system refuses.
    fn set_free(&self, is_free: bool) {
        let was_free = self.is_free.replace(is_free);
        let ThreadPlace { cpus, away, roam, .. } = &self.place_of_thread;
        let ours = if was_free { roam } else { cpus };
        if ours.is_empty() || self.is_bound_by_others.get() {
            return;
        }
        let now = cpus_of_thread();
        if now != *ours {
            self.is_bound_by_others.set(true);
            tracing::info!("queue {}: somebody bound it to CPU {now}; it stays there", self.index);
            return;
        }
        // The scheduler alone would leave it where it is for some ms, and a trial sees just those.
        let steps: &[&CpuList] = if is_free { &[away, roam] } else { &[cpus] };
        for cpus in steps.iter().filter(|cpus| !cpus.is_empty()) {
            if let Err(errno) = pin_to_cpus(cpus) {
                self.is_bound_by_others.set(true);
                tracing::info!("queue {}: stays where it is: CPU {cpus}: {errno}", self.index);
                return;
            }
        }
    }

    /// Its reply is ready.
    ///
    /// * `turn`: of the thread's loop, when it began.
    pub(crate) fn end_ring(&self, index: usize, started: Instant, turn: u64) {
        self.in_flight.0[self.entries + index].store(0, Ordering::Relaxed);
        let nanos = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if self.ring.turn() == turn {
            self.cells.end(nanos);
        } else {
            self.cells.end_waited(nanos);
        }
        self.hold_polling();
    }

    /// Number of a ring's entry among all that the queue may have.
    pub(crate) fn number_of_ring(&self, index: usize) -> usize {
        self.entries + index
    }

    /// Memory for an entry of `dev`, on this thread's node. Pages would come from there by
    /// themselves, but a huge page that another thread touched first may reach into it.
    pub(super) fn new_buffer(&self, len_bytes: usize) -> IoBuf {
        let memory = SharedMemory::mapped(len_bytes);
        memory.advise_small_pages();
        if let Some(node) = self.place_of_thread.memory_node {
            // That the system binds to this node was tried before the start; without it the page is
            // as good.
            let _ = memory.prefer_node(0..memory.len(), node);
        }
        self.buffers.add(memory.address(), memory.len());
        memory.buffer().slice(0..len_bytes)
    }

    /// The entries of the transport over io_uring, if that was wanted.
    pub(crate) fn rings(&self) -> Option<&Arc<Rings>> {
        self.rings.as_ref()
    }

    /// Number of this thread among those of the export.
    pub(crate) fn thread(&self) -> usize {
        self.index
    }

    /// Over `/dev/fuse` polling is for the next request: a single one that is in flight when the
    /// thread waits is with the storage, and nothing comes before that ends. Over rings it is for
    /// the storage: with nothing in flight there is nothing to poll for.
    fn hold_polling(&self) {
        let in_flight = self.cells.in_flight.get();
        let is_held = if self.place.is_settled() { in_flight == 0 } else { in_flight == 1 };
        self.ring.hold_polling(is_held);
    }

    /// This queue cannot go on; told once.
    pub(crate) fn finish(&self, reason: EndReason) {
        if !self.ended.replace(true) {
            self.fetch.stop(&self.ring);
            self.events.send(Event::QueueEnded(self.index, reason));
        }
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
    fn apply_place(&self) {
        if self.ended.get() {
            return;
        }
        self.ring.set_polling(self.place.polls());
        self.hold_polling();
        let fetches = self.place.fetches(self.place_index);
        if fetches && !self.fetch.is_enabled() {
            self.fetch.start(&self.ring);
        } else if !fetches && self.fetch.is_enabled() {
            self.fetch.stop(&self.ring);
            if self.fetch.is_quiet() {
                self.announce.unpark(&self.ring);
            }
        }
    }
}

/// Hears of changes of the place.
async fn listen(queue: Rc<Queue>) {
    loop {
        let message = queue.ring.receive().await;
        if message & MESSAGE_ENTRY != 0 {
            take_over(&queue, message);
            continue;
        }
        queue.apply_place();
        if message == MESSAGE_LOOK_AGAIN {
            queue.fetch.look_again(&queue.ring);
        }
    }
}

/// Tells the other queues: that the place has changed, and, once this queue has stopped fetching,
/// to look for a request whose wake-up it may have swallowed.
async fn announce(queue: Rc<Queue>) {
    let mut told = 0;
    loop {
        queue.announce.park(&queue.ring).await;
        if queue.ended.get() {
            continue;
        }
        let change = queue.place.changes();
        let message = if queue.fetch.is_quiet() { MESSAGE_LOOK_AGAIN } else { MESSAGE_UPDATE };
        if message == MESSAGE_UPDATE && change == told {
            continue;
        }
        told = change;
        for fd in queue.place.others(queue.place_index) {
            // A message that is lost may be the one that a client waits for. The other ring goes
            // only when the export ends.
            while let Err(errno) = queue.ring.send_message(fd, message).await {
                if errno == Errno::BADF || errno == Errno::BADFD || queue.ended.get() {
                    break;
                }
                queue.ring.sleep(Duration::from_millis(1)).await;
            }
        }
    }
}

/// A running queue, as its export sees it.
#[derive(Debug)]
pub(crate) struct QueueThread {
    thread: Option<JoinHandle<()>>,
    device: SyncSender<Serve>,
    remote: Remote,
    stop: Arc<AtomicBool>,
    look: Arc<AtomicBool>,
    done: Receiver<()>,
    pub(crate) ring_fd: RawFd,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) view: QueueView,
    /// Where its own buffers are.
    pub(crate) buffers: Arc<Buffers>,
    /// Why the thread could not be bound to its CPU.
    pub(crate) pin_error: Option<String>,
}

/// What a queue serves, given once the mount is there.
#[derive(Debug)]
pub(crate) struct Serve {
    pub(crate) device: Arc<OwnedFd>,
    pub(crate) server: Arc<FileServer>,
    /// The kernel has agreed to io_uring.
    pub(crate) starting: Option<Starting>,
}

struct Ready {
    remote: Remote,
    counters: Arc<Counters>,
    cells: Arc<QueueCells>,
    in_flight: Arc<InFlight>,
    ring_fd: RawFd,
    pin_error: Option<String>,
}

impl QueueThread {
    /// Starts the thread and makes its ring; it serves nothing yet.
    ///
    /// Errors: [`SetupError`].
    pub(crate) fn start(setup: QueueSetup) -> Result<QueueThread, SetupError> {
        let (device, device_receiver) = sync_channel(1);
        let (ready_sender, ready) = sync_channel(1);
        let (done_sender, done) = sync_channel(1);
        let stop = Arc::new(AtomicBool::new(false));
        let look = Arc::new(AtomicBool::new(false));
        let buffers = Arc::new(Buffers::default());
        let (thread_stop, thread_look) = (Arc::clone(&stop), Arc::clone(&look));
        let thread_buffers = Arc::clone(&buffers);
        let (index, cpu) = (setup.index, setup.thread.cpus.only());
        let thread = std::thread::Builder::new()
            .name(format!("queue-{index}"))
            .spawn(move || {
                let events = setup.events.clone();
                let served = catch_unwind(AssertUnwindSafe(|| {
                    run(
                        setup,
                        &ready_sender,
                        &device_receiver,
                        thread_buffers,
                        &thread_stop,
                        &thread_look,
                    );
                }));
                if served.is_err() {
                    // A defect of ours: the clients of this export get errors, and the process goes
                    // on.
                    events.send(Event::QueueEnded(index, EndReason::Panicked));
                }
                let _ = done_sender.send(());
            })
            .map_err(SetupError::Limit)?;
        let ready: Ready = match ready.recv() {
            Ok(result) => result?,
            Err(_) => {
                return Err(SetupError::Other(std::io::Error::other("the queue thread ended")));
            }
        };
        let cpu = cpu.filter(|_| ready.pin_error.is_none());
        Ok(QueueThread {
            thread: Some(thread),
            device,
            remote: ready.remote.clone(),
            stop,
            look,
            done,
            ring_fd: ready.ring_fd,
            in_flight: ready.in_flight,
            view: QueueView { cells: ready.cells, ring: ready.counters, remote: ready.remote, cpu },
            buffers,
            pin_error: ready.pin_error,
        })
    }

    /// Begins to serve.
    pub(crate) fn serve(&self, serve: Serve) {
        let _ = self.device.try_send(serve);
    }

    /// Makes the thread look at its place again.
    pub(crate) fn wake(&self) {
        self.remote.run(|_| {});
    }

    /// Makes the thread look at the kernel's input queue again: a wake-up may have gone to somebody
    /// who cannot use it.
    pub(crate) fn look_again(&self) {
        self.look.store(true, Ordering::Release);
        self.remote.run(|_| {});
    }

    /// Asks the thread to end: no more fetches, requests in flight are dropped.
    pub(crate) fn ask_to_stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.remote.run(|_| {});
    }

    /// Waits for the end of the thread. False when it did not end in time; it is left behind then.
    pub(crate) fn join(&mut self, deadline: Instant) -> bool {
        // A thread that still waits for its device ends when the sender is gone; one that serves
        // has it.
        let left = deadline.saturating_duration_since(Instant::now());
        let ended = self.done.recv_timeout(left).is_ok();
        if let Some(thread) = self.thread.take()
            && ended
        {
            let _ = thread.join();
        }
        ended
    }
}

/// Binds the calling thread to its CPUs. Returns why it could not be.
fn pin(setup: &QueueSetup) -> Option<String> {
    let cpus = &setup.thread.cpus;
    if cpus.is_empty() {
        return None;
    }
    let errno = pin_to_cpus(cpus).err()?;
    Some(format!("queue {} runs unbound: CPU {cpus}: {errno}", setup.index))
}

/// The thread.
fn run(
    setup: QueueSetup,
    ready: &SyncSender<Result<Ready, SetupError>>,
    device: &Receiver<Serve>,
    buffers: Arc<Buffers>,
    stop: &Arc<AtomicBool>,
    look: &AtomicBool,
) {
    // First the CPU, then the memory: pages are taken from the node of the thread that touches
    // them.
    let pin_error = pin(&setup);
    let cells = Arc::new(QueueCells::default());
    let all_entries = setup.rings.as_ref().map_or(0, |rings| rings.entry_count());
    let in_flight = Arc::new(InFlight::new(setup.entries + all_entries));
    // Held until the ring is closed, which knows the addresses of the entries.
    let rings = setup.rings.clone();
    let ring_entries = rings.as_ref().map_or(0, |rings| rings.entries_of(setup.index));
    let entries = setup.entries + ring_entries;
    let entries = u32::try_from(entries).unwrap_or(u32::MAX / SLOTS_PER_ENTRY);
    let config = Config {
        entries: (entries * 2).clamp(64, 4096),
        slots: entries.saturating_mul(SLOTS_PER_ENTRY).max(64),
        sqe128: rings.is_some(),
        restricted: setup.restricted,
        name: format!("queue-{}", setup.index),
        ..Config::default()
    };
    let mut runtime = match Runtime::new(config) {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    let ring = runtime.ring().clone();
    cells.thread_id.set(u64::from(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()));
    let told = ready.send(Ok(Ready {
        remote: ring.remote(),
        counters: ring.counters(),
        cells: Arc::clone(&cells),
        in_flight: Arc::clone(&in_flight),
        ring_fd: ring.raw_fd(),
        pin_error,
    }));
    let Ok(serve) = device.recv() else { return };
    if told.is_err() || stop.load(Ordering::Acquire) {
        return;
    }
    let fd = ring.register_file(&*serve.device).unwrap_or_else(|| Fd::of(&*serve.device));
    let queue = Rc::new(Queue {
        ring: ring.clone(),
        device: fd,
        server: serve.server,
        fetch: Fetch::new(setup.entries),
        memory: IdleMemory::new(setup.entries + rings.as_ref().map_or(0, |r| r.entry_count())),
        cells: Arc::clone(&cells),
        buffers,
        place_of_thread: setup.thread.clone(),
        is_free: Cell::new(false),
        is_bound_by_others: Cell::new(false),
        index: setup.index,
        entries: setup.entries,
        rings: rings.clone(),
        place_index: setup.place_index,
        in_flight,
        place: setup.place,
        announce: Parker::default(),
        events: setup.events,
        ended: Cell::new(false),
    });
    for entry in 0..setup.entries {
        ring.spawn(serve_entry(Rc::clone(&queue), entry));
    }
    ring.spawn(listen(Rc::clone(&queue)));
    ring.spawn(announce(Rc::clone(&queue)));
    ring.spawn(give_back(Rc::clone(&queue)));
    if let Some(starting) = serve.starting {
        ring.spawn(register(Rc::clone(&queue), starting));
    }
    // Polled again whenever another thread sends a job.
    runtime.block_on(poll_fn(|_| {
        queue.apply_place();
        if look.swap(false, Ordering::AcqRel) && queue.fetch.is_enabled() {
            queue.fetch.look_again(&queue.ring);
        }
        if stop.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }));
    queue.fetch.stop(&ring);
    drop(queue);
    drop(runtime);
    drop(rings);
    let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let nanos = cpu.tv_sec.unsigned_abs() * 1_000_000_000 + cpu.tv_nsec.unsigned_abs();
    cells.cpu_ns.set(nanos.max(1));
    drop(serve.device);
}
