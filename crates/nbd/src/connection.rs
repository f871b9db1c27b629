//! A connection from its first byte to its last.
//!
//! Promises: a handshake has a limit in time; whatever the client does ends this connection and
//! nothing else. Task of a queue thread.

use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, Shutdown, shutdown, sockopt};

use crate::end_reason::End;
use crate::handshake::handshake;
use crate::input_buffer::Input;
use crate::negotiated::Agreed;
use crate::queue::{InUse, Place, Queue};
use crate::session;
use crate::suspended_connections::{Before, Standing};
use crate::transport::Transport;

/// While a client waits until handshakes end, one may take so long: those who say nothing take no
/// place from those who would. A handshake with TLS takes nine round trips at most.
const HURRIED: Duration = Duration::from_secs(2);
/// Or so long, when it sends nothing: clients speak one round trip after each word of ours. Not
/// while TLS shakes hands, whose arithmetic takes us time, too.
const SILENT: Duration = Duration::from_millis(200);
/// How often a handshake is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// At the end of an encrypted connection its client may take so long to read that.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Serves a client, as a task of this thread.
pub(crate) fn serve(queue: &Rc<Queue>, socket: OwnedFd, place: Place) {
    begin(queue, socket, place, None);
}

/// Goes on with a client that another process has served, as a task of this thread.
pub(crate) fn take_up(queue: &Rc<Queue>, socket: OwnedFd, place: Place, before: Before) {
    begin(queue, socket, place, Some(before));
}

fn begin(queue: &Rc<Queue>, socket: OwnedFd, place: Place, before: Option<Before>) {
    if queue.is_ending.get() {
        return;
    }
    let (queue, socket) = (Rc::clone(queue), Rc::new(socket));
    queue.sockets.borrow_mut().push(Rc::clone(&socket));
    let ring = queue.ring.clone();
    ring.spawn(async move {
        converse(&queue, &socket, place.address.clone(), before).await;
        queue.sockets.borrow_mut().retain(|other| !Rc::ptr_eq(other, &socket));
        drop(socket);
        place.leave(&queue);
    });
}

/// Serves a client until one of the two ends it.
///
/// * `address`: of a client over TCP.
/// * `before`: another process has served it.
async fn converse(
    queue: &Rc<Queue>,
    socket: &Rc<OwnedFd>,
    address: Option<String>,
    before: Option<Before>,
) {
    // A handshake suspends for long and its state is large: apart from the task's own.
    let transport = Transport::new(&queue.ring, socket);
    let served = match before {
        None => Box::pin(speak(queue, (&transport, socket), address)).await,
        Some(before) => Box::pin(go_on(queue, (&transport, socket), address, before)).await,
    };
    if served == Err(End::Moved) {
        // The socket is the other process's, too.
        return;
    }
    if transport.is_encrypted() {
        let closed = Box::pin(transport.close());
        let _ = queue.ring.within(CLOSE_LIMIT, closed).await;
    }
    let _ = shutdown(&**socket, Shutdown::Both);
    if let Err(end) = served
        && let Some(why) = end.text()
    {
        match end {
            // An administrator wants to know whom certificates keep out.
            End::Tls(_) => {
                queue.log.warn(&queue.ring, || format!("a client is sent away: {why}"));
            }
            _ => queue.log.info(&queue.ring, || format!("a client is disconnected: {why}")),
        }
    }
}

async fn speak(
    queue: &Rc<Queue>,
    (transport, socket): (&Rc<Transport>, &Rc<OwnedFd>),
    address: Option<String>,
) -> Result<(), End> {
    let mut input = Input::new(transport);
    let agreed = {
        let handshake = handshake(queue, transport, &mut input);
        match queue.shared.handshake_limit {
            Some(limit) => in_time(queue, transport, limit, handshake).await?,
            None => handshake.await?,
        }
    };
    let Some((agreed, last)) = agreed else { return Ok(()) };
    // Without a limit: it waits for others. Nothing is read meanwhile, so that a client which hangs
    // up here is not noticed until its turn. And before the client hears of it: another client may
    // go meanwhile, and be the last one.
    let Some(in_use) = InUse::begin(queue).await else { return Ok(()) };
    let begins = transport.send(&last);
    match queue.shared.handshake_limit {
        Some(limit) => in_time(queue, transport, limit, begins).await?,
        None => begins.await?,
    }
    transmit(queue, (transport, socket), address, (agreed, input), in_use).await
}

/// Goes on where another process has stopped.
async fn go_on(
    queue: &Rc<Queue>,
    (transport, socket): (&Rc<Transport>, &Rc<OwnedFd>),
    address: Option<String>,
    before: Before,
) -> Result<(), End> {
    let agreed = before.agreed(&queue.shared.exports)?;
    transport.put_back(before.unread);
    let (in_use, input) = (InUse::taken_over(queue), Input::new(transport));
    transmit(queue, (transport, socket), address, (agreed, input), in_use).await
}

/// The transmission phase of a connection.
async fn transmit(
    queue: &Rc<Queue>,
    (transport, socket): (&Rc<Transport>, &Rc<OwnedFd>),
    address: Option<String>,
    (agreed, mut input): (Agreed, Input),
    in_use: InUse,
) -> Result<(), End> {
    let export = &agreed.export;
    let events = Arc::clone(export.disk.events());
    let listed = queue.shared.peers.enter(&export.name, address, &**socket, events);
    if sockopt::socket_domain(socket) == Ok(AddressFamily::UNIX) {
        // Refused, it is slower and nothing else.
        let _ = sockopt::set_socket_send_buffer_size(socket, session::SEND_BYTES);
    }
    let served = match queue.begin_session(export, socket, transport) {
        true => loop {
            match session::run(queue, transport, agreed.clone(), &mut input).await {
                // Until it is clear which process goes on.
                Err(End::StandsStill) => {
                    let standing = {
                        let unread = input.take_all();
                        Standing::new(&agreed, socket, unread, transport.is_encrypted())
                    };
                    let unread = queue.stand_still(standing).await;
                    if export.has_moved() {
                        break Err(End::Moved);
                    }
                    transport.put_back(unread);
                }
                ended => break ended,
            }
        },
        // It has left since it was found.
        false => Ok(()),
    };
    queue.end_session(socket);
    drop(listed);
    drop(in_use);
    served
}

/// Awaits a handshake for so long, and less while a client waits until handshakes end.
async fn in_time<T>(
    queue: &Queue,
    transport: &Transport,
    limit: Duration,
    handshake: impl Future<Output = Result<T, End>>,
) -> Result<T, End> {
    let mut handshake = pin!(handshake);
    let begun = Instant::now();
    let (mut heard, mut spoken) = (transport.heard(), begun);
    loop {
        let left = limit.saturating_sub(begun.elapsed());
        let ended = queue.ring.within(left.min(POLL_INTERVAL), handshake.as_mut()).await;
        if let Ok(result) = ended {
            return result;
        }
        let now = Instant::now();
        if transport.heard() != heard || transport.shakes_hands() {
            (heard, spoken) = (transport.heard(), now);
        }
        let has_to_hurry = now.duration_since(spoken) >= SILENT || now - begun >= HURRIED;
        if left <= POLL_INTERVAL || queue.shared.places.is_crowded() && has_to_hurry {
            return Err(End::TooSlow);
        }
    }
}
