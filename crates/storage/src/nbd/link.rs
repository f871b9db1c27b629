//! One connection to the server, used by one ring at a time.
//!
//! Promises: a link without requests in flight belongs to no ring, and any ring may take it with
//! one atomic operation; no bytes of it are then on their way, in either direction. A link that was
//! lost is never taken again.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use ringdisk_nbd_protocol::numbers::command;
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_ring::{Fd, IoBuf, Ring};
use ringdisk_tls::{StreamError, TlsStream};
use rustix::net::{SendFlags, Shutdown, send, shutdown};

use super::handshake::Agreed;

/// No ring has the link.
const FREE: u64 = 0;

/// A connection after the handshake.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    tls: Option<TlsStream>,
    pub(super) agreed: Agreed,
    /// Number of the driver that uses it; [`FREE`].
    owner: AtomicU64,
    is_lost: AtomicBool,
}

impl Link {
    /// * `owner`: the driver that uses it at first.
    pub(super) fn new(
        socket: OwnedFd,
        tls: Option<TlsStream>,
        agreed: Agreed,
        owner: Option<u64>,
    ) -> Link {
        let owner = owner.unwrap_or(FREE).into();
        Link { socket, tls, agreed, owner, is_lost: false.into() }
    }

    fn fd(&self) -> Fd {
        Fd::of(&self.socket)
    }

    /// Reads once, on the ring of the owner. Gives the number of bytes; 0: the server sends no
    /// more.
    ///
    /// Errors: the socket's; bytes that cannot be decrypted.
    pub(super) async fn read(&self, ring: &Ring, buf: &IoBuf) -> Result<usize, StreamError> {
        match &self.tls {
            None => Ok(ring.read(self.fd(), 0, buf).await? as usize),
            Some(tls) => Box::pin(tls.read(ring, self.fd(), buf)).await,
        }
    }

    /// Writes once; all bytes, where they are encrypted. Gives the number of bytes.
    ///
    /// Errors: the socket's.
    pub(super) async fn write(&self, ring: &Ring, buf: &IoBuf) -> Result<usize, StreamError> {
        match &self.tls {
            None => Ok(ring.write(self.fd(), 0, buf).await? as usize),
            Some(tls) => {
                let parts = buf.pieces();
                Box::pin(tls.write_all(ring, self.fd(), parts)).await?;
                Ok(buf.len())
            }
        }
    }

    /// Takes the link for a driver, if no other has it.
    pub(super) fn take(&self, driver: u64) -> bool {
        self.owner.compare_exchange(FREE, driver, SeqCst, SeqCst).is_ok()
    }

    /// Whether no driver uses it.
    pub(super) fn is_free(&self) -> bool {
        self.owner.load(SeqCst) == FREE
    }

    /// The driver has no request in flight any more.
    pub(super) fn release(&self) {
        self.owner.store(FREE, SeqCst);
    }

    /// The link is of no use any more. Its owner keeps it.
    pub(super) fn lose(&self) {
        self.is_lost.store(true, SeqCst);
        // Ends what the kernel may still do with it.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(SeqCst)
    }

    /// Says good-bye, if no driver uses it, and ends the connection. Does not wait.
    pub(super) fn close(&self) {
        if self.take(u64::MAX) && !self.is_lost() {
            let request = Request { command: command::DISCONNECT, ..Request::default() };
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let bytes = match self.agreed.style {
                Style::Simple | Style::Structured => request.to_compact().to_vec(),
                Style::Extended => request.to_extended().to_vec(),
            };
            let bytes = self.tls.as_ref().map_or(bytes.clone(), |tls| tls.farewell(&bytes));
            // A server that does not read sees the end of the stream.
            let _ = send(&self.socket, &bytes, flags);
        }
        self.lose();
    }
}
