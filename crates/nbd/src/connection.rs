//! A connection from its first byte to its last.
//!
//! Promises: a handshake has a limit in time; whatever the client does ends this connection and
//! nothing else. Task of a queue thread.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};

use crate::end::End;
use crate::handshake::handshake;
use crate::input::Input;
use crate::queue::{Place, Queue};
use crate::session;
use crate::transport::Transport;

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
        converse(&queue, &socket).await;
        queue.sockets.borrow_mut().retain(|other| !Rc::ptr_eq(other, &socket));
        drop(place);
    });
}

/// Serves a client until one of the two ends it.
async fn converse(queue: &Rc<Queue>, socket: &Rc<OwnedFd>) {
    // A handshake suspends for long and its state is large: apart from the task's own.
    let transport = Transport::new(&queue.ring, socket);
    let served = Box::pin(speak(queue, &transport)).await;
    if transport.is_encrypted() {
        let closed = Box::pin(transport.close());
        let _ = queue.ring.within(CLOSE_LIMIT, closed).await;
    }
    let _ = shutdown(&**socket, Shutdown::Both);
    if let Err(end) = served
        && let Some(why) = end.text()
    {
        tracing::info!("a client is disconnected: {why}");
    }
}

async fn speak(queue: &Rc<Queue>, transport: &Rc<Transport>) -> Result<(), End> {
    let mut input = Input::new(transport);
    let agreed = {
        let handshake = handshake(queue, transport, &mut input);
        match queue.shared.handshake_limit {
            Some(limit) => {
                queue.ring.within(limit, handshake).await.map_err(|_| End::TooSlow)??
            }
            None => handshake.await?,
        }
    };
    let Some(agreed) = agreed else { return Ok(()) };
    queue.shared.idle.begin();
    let served = session::run(queue, transport, agreed, input).await;
    queue.client_has_gone();
    served
}
