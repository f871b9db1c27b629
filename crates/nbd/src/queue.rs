//! What a queue thread has for itself, and what the threads of an export share.
//!
//! Promises: a connection counts as one of its thread until its [`Place`] is dropped, and as one
//! that uses the export until its [`InUse`] is dropped, never more of them than there may be; at
//! the end of an export requests in flight are answered before clients are sent away.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use ringdisk_export::stats::QueueCells;
use ringdisk_export::{Admission, QueueWork, Running, ThreadHandle};
use ringdisk_ring::{Parker, Ring, SetupError};
use rustix::net::{Shutdown, shutdown};

use crate::client_limit::{InLine, Places};
use crate::exported_disk::{Exported, Exports};
use crate::idle::Idle;
use crate::log_rate::Rarely;
use crate::options::{AllowedUsers, NbdOptions, TlsOptions};
use crate::peers::Peers;
use crate::stop_request::Ending;
use crate::suspended_connections::{Moved, Moving, Standing};
use crate::transport::Transport;

/// How often an export that nobody uses looks whether a hand-over of its disks is over.
const STANDING_POLL_INTERVAL: Duration = Duration::from_millis(20);
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
    pub(crate) places: Places,
    /// Copies of the listening sockets, for a successor.
    listeners: Mutex<Vec<OwnedFd>>,
    /// Disks that stand still for successors, each by itself
    /// ([`DiskHandle`](crate::DiskHandle)): all connections do as long as there is one.
    standing: Mutex<usize>,
    /// All threads; the first one accepts.
    threads: OnceLock<Vec<ThreadHandle<Work>>>,
}

impl Shared {
    /// * `sockets_max`: clients at once, with those in their handshakes.
    pub(crate) fn new(
        exports: Arc<Exports>,
        options: &NbdOptions,
        threads: usize,
        sockets_max: usize,
    ) -> Shared {
        Shared {
            exports,
            handshake_limit: options.handshake_limit,
            idle: Idle::new(options.idle_exit),
            peers: Arc::default(),
            tls: options.tls.clone(),
            allowed_users: options.allowed_users.clone(),
            places: Places::new(options.max_connections, sockets_max, threads),
            listeners: Mutex::default(),
            standing: Mutex::default(),
            threads: OnceLock::new(),
        }
    }

    /// Sets the copies of the listening sockets; none: nobody listens from here any more.
    pub(crate) fn set_listeners(&self, listeners: Vec<OwnedFd>) {
        *self.listeners.lock().unwrap_or_else(PoisonError::into_inner) = listeners;
    }

    /// Copies of the listening sockets.
    ///
    /// Errors: descriptors are short.
    pub(crate) fn listeners(&self) -> io::Result<Vec<OwnedFd>> {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.iter().map(OwnedFd::try_clone).collect()
    }

    /// Disks that stand still for successors. To be held while the threads hear of a change.
    pub(crate) fn standing(&self) -> MutexGuard<'_, usize> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names all threads; the first one accepts. Once.
    pub(crate) fn set_threads(&self, threads: Vec<ThreadHandle<Work>>) {
        let _ = self.threads.set(threads);
    }

    /// All threads; none where the ring is the caller's.
    fn threads(&self) -> &[ThreadHandle<Work>] {
        self.threads.get().map_or(&[], Vec::as_slice)
    }

    /// Does something on the thread that accepts, soon.
    pub(crate) fn tell_first(&self, closure: impl FnOnce(&Rc<Queue>) + Send + 'static) {
        if let Some(first) = self.threads().first() {
            first.send(closure);
        }
    }

    /// A connection has ended where there was no room for another one.
    ///
    /// * `but`: the number of a thread that knows.
    fn tell_of_room(&self, but: Option<usize>) {
        let threads = self.threads().iter().enumerate();
        for (_, thread) in threads.filter(|(number, _)| Some(*number) != but) {
            thread.send(|queue| queue.has_room());
        }
    }
}

/// A connection counts as one of its thread as long as this lives.
#[derive(Debug)]
pub(crate) struct Place {
    shared: Arc<Shared>,
    thread: usize,
    has_left: bool,
    /// Of a client over TCP.
    pub(crate) address: Option<String>,
}

impl Place {
    /// * `address`: of a client over TCP.
    pub(crate) fn take(shared: &Arc<Shared>, thread: usize, address: Option<String>) -> Place {
        shared.places.take(thread);
        Place { shared: Arc::clone(shared), thread, has_left: false, address }
    }

    /// The connection has ended.
    pub(crate) fn leave(mut self, queue: &Queue) {
        self.has_left = true;
        if self.shared.places.leave(self.thread) {
            queue.has_room_everywhere();
        }
    }
}

impl Drop for Place {
    /// The connection has not begun, or its thread ends.
    fn drop(&mut self) {
        if !self.has_left && self.shared.places.leave(self.thread) {
            self.shared.tell_of_room(None);
        }
    }
}

/// A client counts as one that uses the export as long as this lives: from before it hears that its
/// transmission phase begins.
#[derive(Debug)]
pub(crate) struct InUse(Rc<Queue>);

impl InUse {
    /// Waits until one more client may use the export. `None`: the export ends.
    pub(crate) async fn begin(queue: &Rc<Queue>) -> Option<InUse> {
        let places = &queue.shared.places;
        let mut waits: Option<(InLine<'_>, Rc<Parker>)> = None;
        while !queue.is_ending.get() {
            if places.try_use(waits.as_ref().map(|(line, _)| line)) {
                if let Some((line, place)) = waits {
                    queue.stop_waiting(&place);
                    drop(line);
                }
                queue.shared.idle.begin();
                // Of several that left, only the first one has told of it, and the next in line may
                // be another thread's.
                if !places.is_used_up() {
                    queue.has_room_everywhere();
                }
                return Some(InUse(Rc::clone(queue)));
            }
            match &waits {
                Some((_, place)) => place.park(&queue.ring).await,
                // A place may have been given back before it waited.
                None => waits = Some((places.wait_in_line(), queue.begin_waiting())),
            }
        }
        None
    }

    /// A client that another process has let use the export, however many there are here.
    pub(crate) fn taken_over(queue: &Rc<Queue>) -> InUse {
        queue.shared.places.use_anyway();
        queue.shared.idle.begin();
        InUse(Rc::clone(queue))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if self.0.shared.places.end_use() {
            self.0.has_room_everywhere();
        }
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

/// A connection in its transmission phase.
#[derive(Debug)]
struct Used {
    export: Arc<Exported>,
    socket: Rc<OwnedFd>,
    transport: Rc<Transport>,
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
    /// Those in their transmission phase.
    sessions: RefCell<Vec<Used>>,
    /// Requests of connections wait for a successor, or to go on here.
    pub(crate) moving: Moving,
    /// Replies that have not left, on all connections.
    pub(crate) unsent: Cell<usize>,
    /// Requests that come are answered with ESHUTDOWN.
    pub(crate) is_ending: Cell<bool>,
    /// Where the tasks that accept wait for room.
    pub(crate) acceptors: RefCell<Vec<Rc<Parker>>>,
    /// Where clients that have asked for a disk wait for room, in their order.
    waiting: RefCell<Vec<Rc<Parker>>>,
    /// For lines of the log that clients cause.
    pub(crate) log: Rc<Rarely>,
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
            moving: Moving::default(),
            unsent: Cell::new(0),
            is_ending: Cell::new(false),
            acceptors: RefCell::default(),
            waiting: RefCell::default(),
            log: Rc::default(),
        }
    }

    /// A connection has ended where there was no room for another one. The first in line looks; it
    /// wakes the next one if there is more room.
    fn has_room(&self) {
        self.wake_next();
        self.wake_acceptors();
    }

    /// The same, for those on all threads.
    fn has_room_everywhere(&self) {
        self.has_room();
        self.shared.tell_of_room(Some(self.number));
    }

    /// The client that has waited longest on this thread looks for room.
    fn wake_next(&self) {
        self.waiting.borrow().first().iter().for_each(|place| place.unpark(&self.ring));
    }

    /// One for each listening socket.
    fn wake_acceptors(&self) {
        self.acceptors.borrow().iter().for_each(|room| room.unpark(&self.ring));
    }

    /// A client waits for room, behind all others of this thread.
    fn begin_waiting(&self) -> Rc<Parker> {
        let place = Rc::new(Parker::default());
        self.waiting.borrow_mut().push(Rc::clone(&place));
        place
    }

    fn stop_waiting(&self, place: &Rc<Parker>) {
        self.waiting.borrow_mut().retain(|other| !Rc::ptr_eq(other, place));
    }

    /// A client that had come to its first request has gone: if it was the last one, the export
    /// ends unless another one comes in time.
    fn client_has_gone(self: &Rc<Queue>) {
        if self.shared.idle.end() {
            self.end_if_idle();
        }
    }

    /// No client has come yet: the export ends unless one does in time. Where the limit is zero
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
            // A disk that goes to another process takes its clients along: that one is not idle.
            while *queue.shared.standing() > 0 && !queue.ending.has_ended() {
                queue.ring.sleep(STANDING_POLL_INTERVAL).await;
            }
            if queue.shared.idle.is_since(came) && !queue.ending.has_ended() {
                queue.ending.stopped();
            }
        });
    }

    /// A connection uses a disk from now on. `false`: the disk has left the export.
    pub(crate) fn begin_session(
        &self,
        export: &Arc<Exported>,
        socket: &Rc<OwnedFd>,
        transport: &Rc<Transport>,
    ) -> bool {
        if export.is_leaving() {
            return false;
        }
        if self.moving.is_held() {
            transport.stand_still();
        }
        self.sessions.borrow_mut().push(Used {
            export: Arc::clone(export),
            socket: Rc::clone(socket),
            transport: Rc::clone(transport),
        });
        true
    }

    /// The connection uses no disk any more.
    pub(crate) fn end_session(&self, socket: &Rc<OwnedFd>) {
        self.sessions.borrow_mut().retain(|used| !Rc::ptr_eq(&used.socket, socket));
    }

    /// Ends the connections that use a disk which leaves the export: requests in flight are
    /// answered, and later ones are not read. Returns when no request of theirs is in flight.
    ///
    /// * `limit`: for the last replies to leave.
    pub(crate) async fn dismiss(&self, export: &Arc<Exported>, limit: Duration) {
        let shut = |how| {
            let sessions = self.sessions.borrow();
            for used in sessions.iter().filter(|used| Arc::ptr_eq(&used.export, export)) {
                let _ = shutdown(&*used.socket, how);
            }
        };
        let gone = async || {
            while self.sessions.borrow().iter().any(|used| Arc::ptr_eq(&used.export, export)) {
                self.ring.sleep(DRAIN_POLL).await;
            }
        };
        shut(Shutdown::Read);
        if self.ring.within(limit, gone()).await.is_err() {
            shut(Shutdown::Both);
            gone().await;
        }
    }

    /// Lets all connections stand still between two messages: requests in flight are answered, no
    /// further one is begun, and no client is taken. Clients that do not take their replies are
    /// disconnected.
    ///
    /// * `limit`: for replies to leave.
    ///
    /// Returns the connections that can go to another process; `None`: they go on here meanwhile.
    pub(crate) async fn suspend(&self, limit: Duration) -> Option<Vec<Moved>> {
        let was_held = self.moving.is_held();
        let turn = self.moving.hold();
        self.sessions.borrow().iter().for_each(|used| used.transport.stand_still());
        self.admission.hold(&self.ring).await;
        if was_held {
            // For another disk: one hold is for all.
            self.admission.release(&self.ring);
        }
        let stands = async || {
            while self.moving.is_turn(turn) && !self.all_stand_still() {
                self.ring.sleep(DRAIN_POLL).await;
            }
        };
        let shut = |is_late: &dyn Fn(&Used) -> bool| {
            for used in self.sessions.borrow().iter().filter(|used| is_late(used)) {
                let _ = shutdown(&*used.socket, Shutdown::Both);
            }
        };
        if self.ring.within(limit, stands()).await.is_err() {
            shut(&|used| !self.stands_still(used));
            // What is left to be sent then is for connections that do not go along anyway.
            if self.ring.within(limit, stands()).await.is_err() {
                shut(&|used| used.transport.is_encrypted());
                stands().await;
            }
        }
        self.moving.is_turn(turn).then(|| self.moving.pack())
    }

    /// Whether nothing of a connection is in flight that is to leave.
    fn stands_still(&self, used: &Used) -> bool {
        used.transport.is_encrypted() || self.moving.has(&used.socket)
    }

    fn all_stand_still(&self) -> bool {
        let sessions = self.sessions.borrow();
        self.unsent.get() == 0 && sessions.iter().all(|used| self.stands_still(used))
    }

    /// Ends [`Queue::suspend`]: all connections go on here.
    pub(crate) fn go_on(&self) {
        if self.moving.release(&self.ring) {
            self.sessions.borrow().iter().for_each(|used| used.transport.go_on());
            self.admission.release(&self.ring);
        }
    }

    /// Another process has the connections. Those that could not go end.
    pub(crate) fn leave(&self) {
        self.is_ending.set(true);
        for used in self.sessions.borrow().iter().filter(|used| used.transport.is_encrypted()) {
            let _ = shutdown(&*used.socket, Shutdown::Both);
        }
    }

    /// Another process has a disk and the connections that use it. Those that could not go end; the
    /// others do when connections go on here.
    pub(crate) fn leave_disk(&self, export: &Arc<Exported>) {
        let sessions = self.sessions.borrow();
        let of_disk = sessions.iter().filter(|used| Arc::ptr_eq(&used.export, export));
        for used in of_disk.filter(|used| used.transport.is_encrypted()) {
            let _ = shutdown(&*used.socket, Shutdown::Both);
        }
    }

    /// A connection waits until it is clear which process goes on. Gives its bytes back if it is
    /// this one.
    pub(crate) async fn stand_still(&self, standing: Standing) -> Vec<u8> {
        self.moving.stand(&self.ring, standing).await
    }

    /// Takes no more requests, waits for those in flight, then sends clients away.
    ///
    /// * `limit`: for the last replies to leave.
    pub(crate) async fn drain(&self, limit: Duration) {
        self.is_ending.set(true);
        self.waiting.borrow().iter().for_each(|place| place.unpark(&self.ring));
        self.wake_acceptors();
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
