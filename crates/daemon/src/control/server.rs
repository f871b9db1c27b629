//! The server's side: one thread with a ring of its own, one task for each client.
//!
//! Promises: a client waits for its own command only; a client that leaves cancels the command it
//! waits for; more than [`CLIENTS_MAX`] clients are told so and sent away; peers that are neither
//! our user nor root get no word. The thread sleeps while no client says anything.

use std::cell::Cell;
use std::future::{Future, poll_fn, ready};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use ringdisk_disk::Progress;
use ringdisk_ring::{Config, Fd, POLL_IN, Ring, Runtime};
use rustix::net::sockopt::socket_peercred;
use serde_json::Value;

use crate::control::follow::Follower;
use crate::control::lines::{Line, Lines};
use crate::control::protocol::{self, Refusal, Request};
use crate::control::registry::{Listening, user};

/// Clients at once; each costs a descriptor, a task and what it sent of a line.
const CLIENTS_MAX: usize = 32;

/// Submission entries and operations in flight of the control ring: two polls a client, and the
/// reads and writes of one job.
const ENTRIES: u32 = 128;
const SLOTS: u32 = 512;

/// How often progress is reported.
const REPORT: Duration = Duration::from_millis(200);

/// How long the end waits for a command that is under way, after it was cancelled.
const END_WAIT: Duration = Duration::from_secs(30);

/// Pause after a failed accept (no descriptors left): trying again at once would burn a CPU.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// What a server can do.
pub trait Commands: Send + Sync + 'static {
    /// Does what a request asks for, on the server's ring.
    ///
    /// * `given`: descriptors that came with it.
    /// * `progress`: to be kept up to date by what takes long, and looked at: cancelled when the
    ///   client has left or the server ends.
    ///
    /// Errors: why it was not done.
    fn execute(
        &self,
        ring: &Ring,
        request: &Request,
        given: Vec<OwnedFd>,
        progress: &Arc<Progress>,
    ) -> impl Future<Output = Result<Value, Refusal>>;

    /// What a client is to follow from now on, where the request asks for that.
    fn follow(&self, _request: &Request) -> Option<Result<Follower, Refusal>> {
        None
    }

    /// Begins what goes on without a client; a task of its own.
    fn begin(&self, _ring: &Ring) -> impl Future<Output = ()> {
        ready(())
    }

    /// Ends what goes on without a client, and waits for that; asked at the end.
    fn end(&self, _ring: &Ring) -> impl Future<Output = ()> {
        ready(())
    }

    /// How what is served has ended, in the words of [`protocol::ended`]; asked at the end.
    fn ended(&self) -> Option<Value> {
        None
    }
}

/// A running server; dropping it ends it.
#[derive(Debug)]
pub struct Server {
    thread: Option<JoinHandle<()>>,
    ending: Arc<Ending>,
    /// Disconnected when the thread serves no more.
    ended: Receiver<()>,
}

/// Says that the end has come, and wakes those who wait for that.
#[derive(Debug, Default)]
pub(super) struct Ending {
    begun: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

impl Ending {
    pub(super) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    pub(super) fn begin(&self) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        self.begun.store(true, Ordering::Release);
        waiting.drain(..).for_each(Waker::wake);
    }

    /// Ready when the end has begun. A task that stops waiting leaves a waker behind, which is
    /// replaced when the same task waits again, so there are never more wakers than tasks.
    pub(super) async fn wait(&self) {
        poll_fn(|cx| {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if self.has_begun() {
                return Poll::Ready(());
            }
            if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}

/// What the tasks of the thread share.
struct Hub<C> {
    commands: Arc<C>,
    ending: Arc<Ending>,
    clients: Cell<usize>,
}

impl Server {
    /// Serves from now on.
    ///
    /// * `restricted`: its ring does nothing but what it is for.
    ///
    /// Errors: no ring, no thread.
    pub fn start<C: Commands>(
        listening: Listening,
        commands: Arc<C>,
        restricted: bool,
    ) -> io::Result<Server> {
        let ending = Arc::new(Ending::default());
        let theirs = Arc::clone(&ending);
        let (tell, told) = channel();
        let (end, ended) = channel::<()>();
        let thread =
            std::thread::Builder::new().name(String::from("control")).spawn(move || {
                let config = Config {
                    entries: ENTRIES,
                    slots: SLOTS,
                    name: String::from("control"),
                    restricted,
                    ..Config::default()
                };
                match Runtime::new(config) {
                    Ok(mut runtime) => {
                        let ring = runtime.ring().clone();
                        let _ = tell.send(Ok(()));
                        let hub = Rc::new(Hub { commands, ending: theirs, clients: Cell::new(0) });
                        runtime.block_on(serve(&ring, &listening, &hub));
                    }
                    Err(error) => drop(tell.send(Err(io::Error::other(error)))),
                }
                // The name goes before clients hear of the end.
                drop(listening);
                drop(end);
            })?;
        match told.recv() {
            Ok(Ok(())) => Ok(Server { thread: Some(thread), ending, ended }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::Error::other("the control thread ended")),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ending.begin();
        // Nothing is ever sent: this waits for the other end to go.
        let waited = self.ended.recv_timeout(END_WAIT);
        match self.thread.take() {
            Some(thread) if waited != Err(RecvTimeoutError::Timeout) => drop(thread.join()),
            _ => tracing::warn!("a command on the control socket did not end; it is left behind"),
        }
    }
}

/// Which of two futures was ready first.
pub(in crate::control) enum First<A, B> {
    Left(A),
    Right(B),
}

/// Waits for the first of two.
pub(in crate::control) async fn first<A: Future + Unpin, B: Future + Unpin>(
    mut left: A,
    mut right: B,
) -> First<A::Output, B::Output> {
    use std::pin::Pin;
    poll_fn(|cx| {
        if let Poll::Ready(output) = Pin::new(&mut left).poll(cx) {
            return Poll::Ready(First::Left(output));
        }
        Pin::new(&mut right).poll(cx).map(First::Right)
    })
    .await
}

/// Accepts clients until the end, and then waits until all have gone.
async fn serve<C: Commands>(ring: &Ring, listening: &Listening, hub: &Rc<Hub<C>>) {
    let fd = Fd::of(&listening.listener);
    let (commands, own) = (Arc::clone(&hub.commands), ring.clone());
    ring.spawn(async move { commands.begin(&own).await });
    while !hub.ending.has_begun() {
        let ending = pin!(hub.ending.wait());
        let poll = pin!(ring.poll(fd, POLL_IN));
        if matches!(first(ending, poll).await, First::Left(())) {
            break;
        }
        match listening.listener.accept() {
            Ok((stream, _)) => welcome(ring, stream, hub),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::debug!("control socket: {error}");
                ring.sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    hub.commands.end(ring).await;
    while hub.clients.get() > 0 {
        ring.sleep(Duration::from_millis(5)).await;
    }
}

/// Whether the peer is our user or root.
fn is_allowed(stream: &UnixStream) -> bool {
    socket_peercred(stream.as_fd())
        .is_ok_and(|peer| peer.uid.as_raw() == user() || peer.uid.is_root())
}

/// Takes a client in.
fn welcome<C: Commands>(ring: &Ring, stream: UnixStream, hub: &Rc<Hub<C>>) {
    if !is_allowed(&stream) {
        tracing::debug!("a process of another user at the control socket was sent away");
        return;
    }
    let Ok(lines) = Lines::new(stream, protocol::REQUEST_BYTES_MAX) else { return };
    let (own, hub) = (ring.clone(), Rc::clone(hub));
    hub.clients.set(hub.clients.get() + 1);
    ring.spawn(async move {
        let full = hub.clients.get() > CLIENTS_MAX;
        if full {
            let refusal = Refusal::usage(format!("{CLIENTS_MAX} clients are connected already"));
            let _ = lines.send(&own, &protocol::refused(None, &refusal).to_string()).await;
        } else {
            attend(&own, lines, &hub).await;
        }
        hub.clients.set(hub.clients.get() - 1);
    });
}

/// Serves one client until it leaves or talks rubbish without end. At the end it is told how that
/// came.
async fn attend<C: Commands>(ring: &Ring, mut lines: Lines, hub: &Hub<C>) {
    if lines.send(ring, &protocol::greeting().to_string()).await.is_err() {
        return;
    }
    while !hub.ending.has_begun() {
        let line = {
            let ending = pin!(hub.ending.wait());
            let next = pin!(lines.next(ring));
            match first(next, ending).await {
                First::Left(line) => line,
                First::Right(()) => break,
            }
        };
        let reply = match line {
            Line::Whole(line) if line.iter().all(u8::is_ascii_whitespace) => continue,
            Line::Whole(line) => match Request::read(&line) {
                Ok(request) => {
                    let given = lines.given();
                    match hub.commands.follow(&request) {
                        Some(Ok(follower)) => {
                            let done = protocol::done(request.id.as_ref(), Value::Null);
                            if lines.send(ring, &done.to_string()).await.is_err()
                                || !follow(ring, &lines, follower, hub).await
                            {
                                return;
                            }
                            break;
                        }
                        Some(Err(refusal)) => {
                            Some(protocol::refused(request.id.as_ref(), &refusal))
                        }
                        None => answer(ring, &lines, &request, given, hub).await,
                    }
                }
                Err(refusal) => Some(protocol::refused(None, &refusal)),
            },
            Line::Bad(why) => {
                let refusal = protocol::refused(None, &Refusal::usage(why));
                let _ = lines.send(ring, &refusal.to_string()).await;
                return;
            }
            Line::End => return,
        };
        match reply {
            Some(reply) if lines.send(ring, &reply.to_string()).await.is_ok() => {}
            _ => return,
        }
    }
    if let Some(ended) = hub.commands.ended() {
        let _ = lines.send_if_room(ring, &ended.to_string()).await;
    }
}

/// Sends what happens until the client has gone or the end has come; gives whether it is the
/// latter. It gets what was told until then. A client that does not read costs nothing: events are
/// dropped, and it is told how many.
async fn follow<C>(ring: &Ring, lines: &Lines, mut follower: Follower, hub: &Hub<C>) -> bool {
    let mut gone = pin!(lines.gone(ring));
    loop {
        // Asked first: what was told before the end is sent.
        let is_last = hub.ending.has_begun();
        if lines.has_room(ring).await {
            for line in follower.take() {
                if lines.send(ring, &line.to_string()).await.is_err() {
                    return false;
                }
            }
        }
        if is_last {
            return true;
        }
        let pause = pin!(ring.sleep(REPORT));
        let ending = pin!(hub.ending.wait());
        match first(gone.as_mut(), pin!(first(pause, ending))).await {
            First::Left(()) => return false,
            First::Right(_) => {}
        }
    }
}

/// Does what a request asks for. `None`: nobody waits for the answer any more.
async fn answer<C: Commands>(
    ring: &Ring,
    lines: &Lines,
    request: &Request,
    given: Vec<OwnedFd>,
    hub: &Hub<C>,
) -> Option<Value> {
    let id = request.id.as_ref();
    let progress = Arc::new(Progress::new());
    let mut work = pin!(hub.commands.execute(ring, request, given, &progress));
    let mut gone = pin!(lines.gone(ring));
    let mut left = false;
    let mut reported = (0, 0);
    let result = loop {
        let pause = pin!(ring.sleep(REPORT));
        let event = if left {
            match first(work.as_mut(), pause).await {
                First::Left(result) => break result,
                First::Right(()) => continue,
            }
        } else {
            first(work.as_mut(), pin!(first(gone.as_mut(), pause))).await
        };
        match event {
            First::Left(result) => break result,
            First::Right(First::Left(())) => {
                left = true;
                progress.cancel();
            }
            First::Right(First::Right(())) => {
                if hub.ending.has_begun() {
                    progress.cancel();
                }
                let now = (progress.done().0, progress.total().0);
                if now != reported && now.1 > 0 {
                    reported = now;
                    let line = protocol::progress(id, now.0, now.1).to_string();
                    let _ = lines.send_if_room(ring, &line).await;
                }
            }
        }
    };
    (!left).then(|| match result {
        Ok(value) => protocol::done(id, value),
        Err(refusal) => protocol::refused(id, &refusal),
    })
}
