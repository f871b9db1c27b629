//! Takes clients: tasks of the first queue thread, one for each listening socket.
//!
//! Promises: a new connection goes to the thread that has the fewest; while as many are served as
//! the options allow, no client is accepted; while handshakes take all the room that is left, they
//! have less time; a crowd of clients is a few lines of the log. No part of a request.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use ringdisk_export::ThreadHandle;
use ringdisk_ring::{Errno, Fd, POLL_IN, Parker};
use rustix::net::{AddressFamily, SocketFlags, acceptfrom_with, sockopt};

use crate::connection;
use crate::hand_over::HandedClient;
use crate::log_rate::Crowd;
use crate::peers::address_of;
use crate::queue::{Place, Queue, Work};

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

/// Goes on with clients that another process has served, where they may use the disks here, too:
/// that process may have been taken over, or have had other rules.
///
/// * `peers`: as for [`listen`].
pub(crate) fn take_up(queue: &Rc<Queue>, clients: Vec<HandedClient>, peers: &[ThreadHandle<Work>]) {
    let tls = queue.shared.tls.as_ref();
    if tls.is_some_and(|tls| tls.required) && !clients.is_empty() {
        let count = clients.len();
        tracing::warn!("{count} NBD clients without TLS are disconnected: it is required now");
        return;
    }
    for HandedClient { socket, address, before } in clients {
        if !may_come(queue, &socket) {
            continue;
        }
        let thread = queue.shared.places.emptiest();
        let place = Place::take(&queue.shared, thread, address);
        if thread == queue.number {
            connection::take_up(queue, socket, place, before);
        } else if let Some(peer) = peers.get(thread) {
            peer.send(move |queue| connection::take_up(queue, socket, place, before));
        }
    }
}

/// Takes clients. Ends with the export.
async fn accept(
    queue: Rc<Queue>,
    listener: OwnedFd,
    peers: Vec<ThreadHandle<Work>>,
    room: Rc<Parker>,
) {
    let (ring, shared, places) = (&queue.ring, &queue.shared, &queue.shared.places);
    while !queue.is_ending.get() {
        if ring.poll(Fd::of(&listener), POLL_IN).await.is_err() {
            return;
        }
        // Another process may come to take them.
        queue.moving.wait(ring).await;
        if queue.is_ending.get() {
            return;
        }
        if places.is_full() {
            say_crowded(&queue);
            // Where as many use the export as may, the end of a handshake makes no room.
            let hurry = (!places.is_used_up()).then(|| places.hurry());
            room.park(ring).await;
            drop(hurry);
            continue;
        }
        match acceptfrom_with(&listener, SocketFlags::CLOEXEC) {
            Ok((socket, address)) => {
                if !may_come(&queue, &socket) {
                    continue;
                }
                let thread = places.emptiest();
                let place = Place::take(shared, thread, address.and_then(address_of));
                if thread == queue.number {
                    connection::serve(&queue, socket, place);
                } else if let Some(peer) = peers.get(thread) {
                    peer.send(move |queue| connection::serve(queue, socket, place));
                }
            }
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => {}
            Err(errno) => {
                queue.log.warn(ring, || format!("a client cannot be accepted: {errno}"));
                let hurry = places.hurry();
                ring.sleep(RETRY).await;
                drop(hurry);
            }
        }
    }
}

/// No client can be accepted, and one waits.
fn say_crowded(queue: &Queue) {
    let places = &queue.shared.places;
    let (in_use, count) = (places.max_connections(), places.connections());
    if !places.is_used_up() && places.all_sockets_are_in_use() {
        queue.log.crowded(Crowd::Files, || {
            format!(
                "{count} NBD clients are served: the limit of open files (RLIMIT_NOFILE) allows no \
                 more, further ones wait"
            )
        });
    } else if !places.is_used_up() {
        queue.log.crowded(Crowd::Handshakes, || {
            format!(
                "{count} NBD clients are connected, not all of them past their handshakes: those \
                 that say nothing are sent away, the others and further ones wait"
            )
        });
    } else if in_use > 1 {
        // Of one client it is what was asked for.
        queue.log.crowded(Crowd::Served, || {
            format!("{in_use} NBD clients are served (--max-connections): further ones wait")
        });
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
                queue.log.warn(&queue.ring, || {
                    format!(
                        "process {process} is sent away: user {user}, group {group} is not allowed"
                    )
                });
            }
            allows
        }
        Err(errno) => {
            queue.log.warn(&queue.ring, || {
                format!("a client is sent away: the system does not say whose it is: {errno}")
            });
            false
        }
    }
}
