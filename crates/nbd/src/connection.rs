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

use crate::end::End;
use crate::handshake::handshake;
use crate::input::Input;
use crate::queue::{Place, Queue};
use crate::session;
use crate::transport::Transport;

/// While a client waits for room, a handshake may take so long: those who say nothing take no place
/// from those who would. A handshake with TLS takes nine round trips at most.
const HURRIED: Duration = Duration::from_secs(2);
/// Or so long, when it has not sent a byte: clients speak one round trip after the greeting.
const SILENT: Duration = Duration::from_millis(200);
/// At the end of an encrypted connection its client may take so long to read that.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Serves a client, as a task of this thread.
pub(crate) fn serve(queue: &Rc<Queue>, socket: OwnedFd, place: Place) {
    if queue.is_ending.get() {
        return;
    }
    let (queue, socket) = (Rc::clone(queue), Rc::new(socket));
    queue.sockets.borrow_mut().push(Rc::clone(&socket));
    let ring = queue.ring.clone();
    ring.spawn(async move {
        converse(&queue, &socket, place.address.clone()).await;
        queue.sockets.borrow_mut().retain(|other| !Rc::ptr_eq(other, &socket));
        drop(place);
    });
}

/// Serves a client until one of the two ends it.
///
/// * `address`: of a client over TCP.
async fn converse(queue: &Rc<Queue>, socket: &Rc<OwnedFd>, address: Option<String>) {
    // A handshake suspends for long and its state is large: apart from the task's own.
    let transport = Transport::new(&queue.ring, socket);
    let served = Box::pin(speak(queue, (&transport, socket), address)).await;
    if transport.is_encrypted() {
        let closed = Box::pin(transport.close());
        let _ = queue.ring.within(CLOSE_LIMIT, closed).await;
    }
    let _ = shutdown(&**socket, Shutdown::Both);
    if let Err(end) = served
        && let Some(why) = end.text()
    {
        match end {
            // Whoever lets clients in by certificates wants to know whom that keeps out.
            End::Tls(_) => tracing::warn!("a client is sent away: {why}"),
            _ => tracing::info!("a client is disconnected: {why}"),
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
    let Some((agreed, in_use)) = agreed else { return Ok(()) };
    let listed = queue.shared.peers.enter(
        &agreed.export.name,
        address,
        &**socket,
        Arc::clone(agreed.export.disk.events()),
    );
    let export = Arc::clone(&agreed.export);
    if sockopt::socket_domain(socket) == Ok(AddressFamily::UNIX) {
        // Refused, it is slower and nothing else.
        let _ = sockopt::set_socket_send_buffer_size(socket, session::SEND_BYTES);
    }
    let served = match queue.begin_session(&export, socket) {
        true => session::run(queue, transport, agreed, input).await,
        // It has left since it was found.
        false => Ok(()),
    };
    queue.end_session(socket);
    drop(listed);
    drop(in_use);
    served
}

/// Awaits a handshake for so long, and less while a client waits for room.
async fn in_time<T>(
    queue: &Queue,
    transport: &Transport,
    limit: Duration,
    handshake: impl Future<Output = Result<T, End>>,
) -> Result<T, End> {
    let mut handshake = pin!(handshake);
    let begun = Instant::now();
    loop {
        let left = limit.saturating_sub(begun.elapsed());
        let ended = queue.ring.within(left.min(SILENT), handshake.as_mut()).await;
        let has_to_hurry = || begun.elapsed() >= HURRIED || !transport.has_heard();
        match ended {
            Ok(result) => return result,
            Err(_) if left <= SILENT => return Err(End::TooSlow),
            Err(_) if queue.shared.is_crowded() && has_to_hurry() => return Err(End::TooSlow),
            Err(_) => {}
        }
    }
}
