//! The socket on which we speak first: "configuration space has changed".
//!
//! Promises: never blocks, keeps at most one message; a front end that does not read loses nothing
//! but the news that there was more than one change, because it then reads all of configuration
//! space anyway.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use crate::closing::Held;
use crate::protocol::{HEADER_BYTES, config_change};
use crate::wire;
use crate::{Error, ErrorKind};

/// The back end's channel to the front end (SET_BACKEND_REQ_FD).
#[derive(Debug)]
pub struct BackChannel {
    socket: Held,
    /// Bytes that are left of a message whose beginning was sent.
    left: usize,
    /// A message is to be sent after that.
    pending: bool,
}

impl BackChannel {
    /// * `socket`: the front end's, blocking or not.
    #[must_use]
    pub fn new(socket: OwnedFd) -> BackChannel {
        BackChannel { socket: socket.into(), left: 0, pending: false }
    }

    /// The socket, for another process to go on with; `None` while a message is half out.
    #[must_use]
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        (self.left == 0).then_some(self.socket.as_fd())
    }

    /// Tells the front end to read configuration space again. No answer is asked for. Returns
    /// whether it was sent; if the socket is full, it is sent by the next call of this or of
    /// [`BackChannel::push`].
    ///
    /// Errors: the front end has closed its side, or the descriptor is no socket.
    pub fn config_changed(&mut self) -> Result<bool, Error> {
        self.pending = true;
        self.push()
    }

    /// Sends what is left. Returns whether nothing is.
    ///
    /// Errors: as [`BackChannel::config_changed`].
    pub fn push(&mut self) -> Result<bool, Error> {
        let message = config_change();
        loop {
            if self.left == 0 {
                if !self.pending {
                    return Ok(true);
                }
                self.left = HEADER_BYTES;
                self.pending = false;
            }
            match wire::send(self.socket.as_fd(), &message[HEADER_BYTES - self.left..], &[]) {
                Ok(sent) => self.left -= sent,
                Err(Errno::AGAIN) => {
                    // Nothing of it is out: it may as well be the next one.
                    if self.left == HEADER_BYTES {
                        (self.left, self.pending) = (0, true);
                    }
                    return Ok(false);
                }
                Err(errno) => {
                    let error = Error::new(ErrorKind::System, "sending CONFIG_CHANGE_MSG");
                    return Err(error.errno(errno));
                }
            }
        }
    }
}
