//! A connection from its first byte to its last.
//!
//! Promises: a handshake has a limit in time; whatever the client does ends this connection and
//! nothing else. Task of a queue thread.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use ringdisk_ring::Fd;
use rustix::net::{Shutdown, shutdown};

use crate::handshake::handshake;
use crate::input::{End, Input};
use crate::queue::{Place, Queue};
use crate::session;

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
    let served = Box::pin(speak(queue, socket, address)).await;
    let _ = shutdown(&**socket, Shutdown::Both);
    if let Err(end) = served
        && let Some(why) = end.text()
    {
        tracing::info!("a client is disconnected: {why}");
    }
}

async fn speak(
    queue: &Rc<Queue>,
    socket: &Rc<OwnedFd>,
    address: Option<String>,
) -> Result<(), End> {
    let mut input = Input::new(&queue.ring, Fd::of(&**socket));
    let agreed = {
        let handshake = handshake(queue, &mut input);
        match queue.shared.handshake_limit {
            Some(limit) => {
                queue.ring.within(limit, handshake).await.map_err(|_| End::TooSlow)??
            }
            None => handshake.await?,
        }
    };
    let Some(agreed) = agreed else { return Ok(()) };
    queue.shared.idle.begin();
    let listed = queue.shared.peers.enter(
        &agreed.export.name,
        address,
        &**socket,
        Arc::clone(agreed.export.disk.events()),
    );
    let served = session::run(queue, socket, agreed, input).await;
    drop(listed);
    queue.client_has_gone();
    served
}
