//! Takes clients: tasks of the first queue thread, one for each listening socket.
//!
//! Promises: a new connection goes to the thread that has the fewest; while as many are served as
//! the options allow, no client is accepted, and handshakes have less time. No part of a request.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use ringdisk_export::ThreadHandle;
use ringdisk_ring::{Errno, Fd, Parker};
use rustix::net::{AddressFamily, SocketFlags, acceptfrom_with, sockopt};

use crate::connection;
use crate::peers::address_of;
use crate::queue::{Place, Queue, Work};

/// `EPOLLIN`.
const POLL_IN: u32 = 1;
/// After an accept that failed for want of descriptors or memory the next one waits so long.
const RETRY: Duration = Duration::from_millis(100);

/// Takes clients of a listening socket from now on.
///
/// * `peers`: all threads of the export, in their order.
pub(crate) fn listen(queue: &Rc<Queue>, listener: OwnedFd, peers: Vec<ThreadHandle<Work>>) {
    let room = Rc::new(Parker::default());
    queue.acceptors.borrow_mut().push(Rc::clone(&room));
    queue.ring.spawn(accept(Rc::clone(queue), listener, peers, room));
}

/// Takes clients. Ends with the export.
async fn accept(
    queue: Rc<Queue>,
    listener: OwnedFd,
    peers: Vec<ThreadHandle<Work>>,
    room: Rc<Parker>,
) {
    let (ring, shared) = (&queue.ring, &queue.shared);
    while !queue.is_ending.get() {
        if ring.poll(Fd::of(&listener), POLL_IN).await.is_err() {
            return;
        }
        if queue.is_ending.get() {
            return;
        }
        if shared.is_full() {
            shared.set_crowded(true);
            room.park(ring).await;
            shared.set_crowded(false);
            continue;
        }
        match acceptfrom_with(&listener, SocketFlags::CLOEXEC) {
            Ok((socket, address)) => {
                if !may_come(&queue, &socket) {
                    continue;
                }
                let thread = shared.emptiest();
                let place = Place::take(shared, thread, address.and_then(address_of));
                if thread == queue.number {
                    connection::serve(&queue, socket, place);
                } else if let Some(peer) = peers.get(thread) {
                    peer.send(move |queue| connection::serve(queue, socket, place));
                }
            }
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => {}
            Err(errno) => {
                tracing::warn!("a client cannot be accepted: {errno}");
                ring.sleep(RETRY).await;
            }
        }
    }
}

/// Whether the process at the other end of a Unix socket may connect; others are dropped.
fn may_come(queue: &Queue, socket: &OwnedFd) -> bool {
    let Some(allowed) = &queue.shared.allowed_users else { return true };
    if sockopt::socket_domain(socket) != Ok(AddressFamily::UNIX) {
        return true;
    }
    match sockopt::socket_peercred(socket) {
        Ok(peer) => {
            let (user, group) = (peer.uid.as_raw(), peer.gid.as_raw());
            let allows = allowed.allows(user, group);
            if !allows {
                let process = peer.pid.as_raw_nonzero();
                tracing::warn!(
                    "process {process} is sent away: user {user}, group {group} is not allowed"
                );
            }
            allows
        }
        Err(errno) => {
            tracing::warn!("a client is sent away: the system does not say whose it is: {errno}");
            false
        }
    }
}
