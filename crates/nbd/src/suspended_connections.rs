//! Connections that stand still so that another process can go on with them.
//!
//! Promises: a connection stands between two messages: all that was begun is answered, and what was
//! read of later requests is kept as bytes, so the other process receives them as if it had read
//! them itself. A connection that goes on here has lost nothing. [`Moving`] belongs to one queue
//! thread; no part of a request.

use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use ringdisk_nbd_protocol::request::Style;
use ringdisk_ring::{Parker, Ring};

use crate::end_reason::End;
use crate::exported_disk::Exports;
use crate::negotiated::Agreed;

/// Requests in flight, and then the disks, have so long to stand still for a hand-over: less than
/// the thread that asks for it waits, together.
pub(crate) const STANDING_LIMIT: Duration = Duration::from_secs(4);
/// Clients have so long to take their replies before a hand-over; others wait meanwhile.
pub(crate) const STANDING_REPLIES: Duration = Duration::from_secs(1);

/// What a connection has agreed on, and what it has sent, in words that another process
/// understands.
#[derive(Clone, Debug)]
pub(crate) struct Before {
    /// The name of its disk.
    pub(crate) export: String,
    pub(crate) style: Style,
    /// The names of its contexts, in the order of their numbers on the wire.
    pub(crate) contexts: Vec<String>,
    /// Bytes that were read and belong to requests that were not begun.
    pub(crate) unread: Vec<u8>,
}

impl Before {
    /// The same as this process knows it.
    ///
    /// Errors: a disk or a context that is not there.
    pub(crate) fn agreed(&self, exports: &Exports) -> Result<Agreed, End> {
        let gone = End::Protocol("what it uses is not exported any more");
        let Some(export) = exports.find(self.export.as_bytes()) else { return Err(gone) };
        let place = |name: &String| export.contexts.iter().position(|it| it.name() == *name);
        let contexts = self.contexts.iter().map(place).collect::<Option<Vec<usize>>>();
        let contexts = contexts.ok_or(gone)?;
        Ok(Agreed { export, style: self.style, contexts })
    }
}

/// A connection on its way to another process.
#[derive(Debug)]
pub(crate) struct Moved {
    pub(crate) socket: OwnedFd,
    pub(crate) before: Before,
}

/// A connection that stands still.
#[derive(Debug)]
pub(crate) struct Standing {
    socket: Rc<OwnedFd>,
    is_encrypted: bool,
    before: Before,
}

impl Standing {
    /// * `unread`: bytes of requests that were not begun.
    /// * `is_encrypted`: its keys stay in this process.
    pub(crate) fn new(
        agreed: &Agreed,
        socket: &Rc<OwnedFd>,
        unread: Vec<u8>,
        is_encrypted: bool,
    ) -> Standing {
        let Agreed { export, style, contexts } = agreed;
        let names = contexts.iter().map(|place| export.contexts[*place].name());
        let (export, style) = (export.name.clone(), *style);
        let before = Before { export, style, contexts: names.collect(), unread };
        Standing { socket: Rc::clone(socket), is_encrypted, before }
    }
}

/// Whether the connections of a queue thread have to stand still, and those that do.
#[derive(Debug, Default)]
pub(crate) struct Moving {
    is_held: Cell<bool>,
    /// Counts the attempts.
    turn: Cell<u64>,
    standing: RefCell<Vec<Standing>>,
    waiting: RefCell<Vec<Rc<Parker>>>,
}

impl Moving {
    pub(crate) fn is_held(&self) -> bool {
        self.is_held.get()
    }

    /// Connections have to stand still from now on. Gives the number of the attempt.
    pub(crate) fn hold(&self) -> u64 {
        self.is_held.set(true);
        self.turn.set(self.turn.get() + 1);
        self.turn.get()
    }

    /// Whether this attempt was not given up.
    pub(crate) fn is_turn(&self, turn: u64) -> bool {
        self.is_held.get() && self.turn.get() == turn
    }

    /// Connections go on here. Gives whether they had to stand still.
    pub(crate) fn release(&self, ring: &Ring) -> bool {
        self.waiting.take().iter().for_each(|parker| parker.unpark(ring));
        self.is_held.replace(false)
    }

    /// Waits while connections have to stand still.
    pub(crate) async fn wait(&self, ring: &Ring) {
        while self.is_held.get() {
            let parker = Rc::new(Parker::default());
            self.waiting.borrow_mut().push(Rc::clone(&parker));
            parker.park(ring).await;
        }
    }

    /// A connection stands still. Gives its unread bytes back when it goes on here.
    pub(crate) async fn stand(&self, ring: &Ring, standing: Standing) -> Vec<u8> {
        let socket = Rc::clone(&standing.socket);
        self.standing.borrow_mut().push(standing);
        self.wait(ring).await;
        let mut all = self.standing.borrow_mut();
        let place = all.iter().position(|standing| Rc::ptr_eq(&standing.socket, &socket));
        place.map_or_else(Vec::new, |place| all.swap_remove(place).before.unread)
    }

    /// Whether this connection stands still.
    pub(crate) fn has(&self, socket: &Rc<OwnedFd>) -> bool {
        self.standing.borrow().iter().any(|standing| Rc::ptr_eq(&standing.socket, socket))
    }

    /// Copies of those that stand still and can go.
    pub(crate) fn pack(&self) -> Vec<Moved> {
        let all = self.standing.borrow();
        let can_go = all.iter().filter(|standing| !standing.is_encrypted);
        let copy = |standing: &Standing| match standing.socket.as_fd().try_clone_to_owned() {
            Ok(socket) => Some(Moved { socket, before: standing.before.clone() }),
            Err(error) => {
                tracing::warn!("a client does not go to the next process: {error}");
                None
            }
        };
        can_go.filter_map(copy).collect()
    }
}
