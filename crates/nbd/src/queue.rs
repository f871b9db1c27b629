//! What a queue thread has for itself, and what the threads of an export share.
//!
//! Promises: a connection counts as one of its thread until its [`Place`] is dropped; at the end of
//! an export requests in flight are answered before clients are sent away.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use ringdisk_export::stats::QueueCells;
use ringdisk_export::{Admission, QueueWork, Running, ThreadHandle};
use ringdisk_ring::{Parker, Ring, SetupError};
use rustix::net::{Shutdown, shutdown};

use crate::ending::Ending;
use crate::exported::{Exported, Exports};
use crate::idle::Idle;
use crate::options::{AllowedUsers, NbdOptions, TlsOptions};
use crate::peers::Peers;

/// How often the end of an export looks whether the last replies have left.
const DRAIN_POLL: Duration = Duration::from_millis(2);

/// What the queue threads of an export share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) exports: Arc<Exports>,
    pub(crate) handshake_limit: Option<Duration>,
    pub(crate) idle: Idle,
    pub(crate) peers: Arc<Peers>,
    pub(crate) tls: Option<TlsOptions>,
    pub(crate) allowed_users: Option<AllowedUsers>,
    max_connections: usize,
    /// A client waits for room.
    is_crowded: AtomicBool,
    /// Connections of each thread.
    counts: Vec<AtomicUsize>,
    /// The thread that accepts.
    first: OnceLock<ThreadHandle<Work>>,
}

impl Shared {
    pub(crate) fn new(exports: Arc<Exports>, options: &NbdOptions, threads: usize) -> Shared {
        Shared {
            exports,
            handshake_limit: options.handshake_limit,
            idle: Idle::new(options.idle_exit),
            peers: Arc::default(),
            tls: options.tls.clone(),
            allowed_users: options.allowed_users.clone(),
            max_connections: options.max_connections,
            is_crowded: AtomicBool::new(false),
            counts: (0..threads).map(|_| AtomicUsize::new(0)).collect(),
            first: OnceLock::new(),
        }
    }

    /// Names the thread that accepts. Once.
    pub(crate) fn set_first(&self, first: ThreadHandle<Work>) {
        let _ = self.first.set(first);
    }

    /// Does something on the thread that accepts, soon.
    pub(crate) fn tell_first(&self, job: impl FnOnce(&Rc<Queue>) + Send + 'static) {
        if let Some(first) = self.first.get() {
            first.send(job);
        }
    }

    /// Connections of all threads.
    pub(crate) fn connections(&self) -> usize {
        self.counts.iter().map(|count| count.load(Ordering::Acquire)).sum()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.connections() >= self.max_connections
    }

    /// Whether a client waits for room: handshakes have to hurry then.
    pub(crate) fn is_crowded(&self) -> bool {
        self.is_crowded.load(Ordering::Acquire)
    }

    pub(crate) fn set_crowded(&self, is_crowded: bool) {
        self.is_crowded.store(is_crowded, Ordering::Release);
    }

    /// The thread with the fewest connections.
    pub(crate) fn emptiest(&self) -> usize {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Acquire));
        counts.enumerate().min_by_key(|(_, count)| *count).map_or(0, |(number, _)| number)
    }
}

/// A connection counts as one of its thread as long as this lives.
#[derive(Debug)]
pub(crate) struct Place {
    shared: Arc<Shared>,
    thread: usize,
    /// Of a client over TCP.
    pub(crate) address: Option<String>,
}

impl Place {
    /// * `address`: of a client over TCP.
    pub(crate) fn take(shared: &Arc<Shared>, thread: usize, address: Option<String>) -> Place {
        shared.counts[thread].fetch_add(1, Ordering::AcqRel);
        Place { shared: Arc::clone(shared), thread, address }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let was_full = self.shared.is_full();
        self.shared.counts[self.thread].fetch_sub(1, Ordering::AcqRel);
        if was_full {
            self.shared.tell_first(|queue| queue.has_room());
        }
    }
}

/// A client counts as one that uses the export as long as this lives: from before it hears that its
/// transmission phase begins.
#[derive(Debug)]
pub(crate) struct InUse(Rc<Queue>);

impl InUse {
    pub(crate) fn begin(queue: &Rc<Queue>) -> InUse {
        queue.shared.idle.begin();
        InUse(Rc::clone(queue))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        // At the end of the thread no task begins any more.
        if !self.0.is_ending.get() && !std::thread::panicking() {
            self.0.client_has_gone();
        }
    }
}

/// What runs on a queue thread.
#[derive(Debug)]
pub(crate) struct Work {
    number: usize,
    shared: Arc<Shared>,
    ending: Arc<Ending>,
}

impl Work {
    pub(crate) fn new(number: usize, shared: Arc<Shared>, ending: Arc<Ending>) -> Work {
        Work { number, shared, ending }
    }
}

impl QueueWork for Work {
    type Shared = ();
    type Local = Queue;

    fn run(&mut self, thread: &mut Running<Work>) -> Result<(), SetupError> {
        let (shared, ending) = (Arc::clone(&self.shared), Arc::clone(&self.ending));
        let (ring, cells) = (thread.ring().clone(), Arc::clone(thread.cells()));
        let queue = Rc::new(Queue::new(ring, cells, shared, ending, self.number));
        if thread.ready((), queue) {
            thread.until_stopped(|| {});
        }
        Ok(())
    }

    fn panicked(&self) {
        tracing::error!("a queue thread panicked: its connections are closed");
        self.ending.panicked();
    }
}

/// What a queue thread has for itself.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) ring: Ring,
    pub(crate) cells: Arc<QueueCells>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) ending: Arc<Ending>,
    pub(crate) number: usize,
    pub(crate) admission: Admission,
    /// Of all connections.
    pub(crate) sockets: RefCell<Vec<Rc<OwnedFd>>>,
    /// Those in their transmission phase, with the disk that each uses.
    sessions: RefCell<Vec<(Arc<Exported>, Rc<OwnedFd>)>>,
    /// Replies that have not left, on all connections.
    pub(crate) unsent: Cell<usize>,
    /// Requests that come are answered with ESHUTDOWN.
    pub(crate) is_ending: Cell<bool>,
    /// Where the tasks that accept wait for room.
    pub(crate) acceptors: RefCell<Vec<Rc<Parker>>>,
}

impl Queue {
    /// * `number`: of the thread among those of its export.
    pub(crate) fn new(
        ring: Ring,
        cells: Arc<QueueCells>,
        shared: Arc<Shared>,
        ending: Arc<Ending>,
        number: usize,
    ) -> Queue {
        Queue {
            ring,
            cells,
            shared,
            ending,
            number,
            admission: Admission::default(),
            sockets: RefCell::default(),
            sessions: RefCell::default(),
            unsent: Cell::new(0),
            is_ending: Cell::new(false),
            acceptors: RefCell::default(),
        }
    }

    /// A connection has ended where there was no room for another one.
    fn has_room(&self) {
        self.acceptors.borrow().iter().for_each(|room| room.unpark(&self.ring));
    }

    /// A client that had come to its first request has gone: if it was the last one, the export
    /// ends unless another one comes in time.
    fn client_has_gone(self: &Rc<Queue>) {
        if self.shared.idle.end() {
            self.end_if_idle();
        }
    }

    /// Nobody has come yet: the export ends unless somebody does in time. Where the limit is zero
    /// it waits for the first client however long that takes.
    pub(crate) fn nobody_has_come(self: &Rc<Queue>) {
        if self.shared.idle.limit.is_some_and(|limit| !limit.is_zero()) {
            self.end_if_idle();
        }
    }

    pub(crate) fn end_if_idle(self: &Rc<Queue>) {
        let Some(limit) = self.shared.idle.limit else { return };
        let queue = Rc::clone(self);
        self.ring.spawn(async move {
            let came = queue.shared.idle.came();
            if !limit.is_zero() {
                queue.ring.sleep(limit).await;
            }
            if queue.shared.idle.is_since(came) {
                queue.ending.stopped();
            }
        });
    }

    /// A connection uses a disk from now on. `false`: the disk has left the export.
    pub(crate) fn begin_session(&self, export: &Arc<Exported>, socket: &Rc<OwnedFd>) -> bool {
        if export.is_leaving() {
            return false;
        }
        self.sessions.borrow_mut().push((Arc::clone(export), Rc::clone(socket)));
        true
    }

    /// The connection uses no disk any more.
    pub(crate) fn end_session(&self, socket: &Rc<OwnedFd>) {
        self.sessions.borrow_mut().retain(|(_, other)| !Rc::ptr_eq(other, socket));
    }

    /// Ends the connections that use a disk which leaves the export: requests in flight are
    /// answered, and later ones are not read. Returns when no request of theirs is in flight.
    ///
    /// * `limit`: for the last replies to leave.
    pub(crate) async fn dismiss(&self, export: &Arc<Exported>, limit: Duration) {
        let shut = |how| {
            let sessions = self.sessions.borrow();
            let theirs = sessions.iter().filter(|(used, _)| Arc::ptr_eq(used, export));
            for (_, socket) in theirs {
                let _ = shutdown(&**socket, how);
            }
        };
        let gone = async || {
            while self.sessions.borrow().iter().any(|(used, _)| Arc::ptr_eq(used, export)) {
                self.ring.sleep(DRAIN_POLL).await;
            }
        };
        shut(Shutdown::Read);
        if self.ring.within(limit, gone()).await.is_err() {
            shut(Shutdown::Both);
            gone().await;
        }
    }

    /// Takes no more requests, waits for those in flight, then sends clients away.
    ///
    /// * `limit`: for the last replies to leave.
    pub(crate) async fn drain(&self, limit: Duration) {
        self.is_ending.set(true);
        self.has_room();
        self.admission.hold(&self.ring).await;
        let sent = async {
            while self.unsent.get() > 0 {
                self.ring.sleep(DRAIN_POLL).await;
            }
        };
        if self.ring.within(limit, sent).await.is_err() {
            let count = self.unsent.get();
            tracing::warn!("clients did not take their last replies ({count}): they are cut off");
        }
        for socket in self.sockets.borrow().iter() {
            let _ = shutdown(&**socket, Shutdown::Both);
        }
    }
}
