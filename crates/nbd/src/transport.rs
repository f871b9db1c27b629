//! The bytes of a connection, plain or encrypted.
//!
//! Promises: nothing above this module knows whether a connection is encrypted. A plain one costs
//! one branch for each system call; once it is encrypted it never is plain again, so what a third
//! party put into the stream before that is not taken for the client's.

use std::cell::{Cell, OnceCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;

use ringdisk_ring::{Errno, Fd, IoBuf, Ring, Scatter};
use ringdisk_tls::{ServerTls, TlsStream};

use crate::end::End;

/// See the module.
#[derive(Debug)]
pub(crate) struct Transport {
    ring: Ring,
    socket: Rc<OwnedFd>,
    tls: OnceCell<TlsStream>,
    has_heard: Cell<bool>,
}

impl Transport {
    pub(crate) fn new(ring: &Ring, socket: &Rc<OwnedFd>) -> Rc<Transport> {
        let (ring, socket) = (ring.clone(), Rc::clone(socket));
        Rc::new(Transport { ring, socket, tls: OnceCell::new(), has_heard: Cell::new(false) })
    }

    fn fd(&self) -> Fd {
        Fd::of(&*self.socket)
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        self.tls.get().is_some()
    }

    /// Whether the client has sent anything.
    pub(crate) fn has_heard(&self) -> bool {
        self.has_heard.get()
    }

    /// Encrypts all from now on. Panics when it is encrypted already.
    ///
    /// Errors: the client is not let in, or does not speak TLS.
    pub(crate) async fn encrypt(&self, tls: &ServerTls) -> Result<(), End> {
        let stream = Box::pin(TlsStream::accept(&self.ring, self.fd(), tls)).await?;
        assert!(self.tls.set(stream).is_ok(), "a connection is encrypted once");
        Ok(())
    }

    /// Reads once. Gives the number of bytes; 0: the client sends no more.
    ///
    /// Errors: those of the socket; bytes that cannot be decrypted.
    pub(crate) async fn read(&self, to: &IoBuf) -> Result<usize, End> {
        if let Some(tls) = self.tls.get() {
            return Ok(Box::pin(tls.read(&self.ring, self.fd(), to)).await?);
        }
        loop {
            match self.ring.read(self.fd(), 0, to).await {
                Ok(count) => {
                    self.has_heard.set(count > 0 || self.has_heard.get());
                    return Ok(count as usize);
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Sends all parts. For one task at a time.
    ///
    /// * `scatter`: room for as many parts.
    ///
    /// Errors: those of the socket.
    pub(crate) async fn write_all(
        &self,
        parts: &[IoBuf],
        scatter: &mut Scatter,
    ) -> Result<(), End> {
        if let Some(tls) = self.tls.get() {
            let parts = parts.iter().cloned();
            return Ok(Box::pin(tls.write_all(&self.ring, self.fd(), parts)).await?);
        }
        let (mut first, mut skip) = (0, 0);
        while first < parts.len() {
            let head = parts[first].slice(skip..parts[first].len());
            let rest = parts[first + 1..].iter().cloned();
            let buf = scatter.fill(std::iter::once(head).chain(rest));
            let written = self.ring.write(self.fd(), 0, &buf).await;
            drop(buf);
            let mut sent = match written {
                Ok(0) => return Err(Errno::PIPE.into()),
                Ok(count) => count as usize,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            while first < parts.len() && sent >= parts[first].len() - skip {
                sent -= parts[first].len() - skip;
                (first, skip) = (first + 1, 0);
            }
            skip += sent;
        }
        Ok(())
    }

    /// Sends all bytes. For the handshake: allocates.
    pub(crate) async fn send(&self, bytes: &[u8]) -> Result<(), End> {
        if bytes.is_empty() {
            return Ok(());
        }
        let buf = IoBuf::new(bytes.len(), 16);
        buf.copy_from_slice(0, bytes);
        let mut scatter = Scatter::with_capacity(1);
        self.write_all(std::slice::from_ref(&buf), &mut scatter).await
    }

    /// Tells the client that nothing more comes, where there are words for it.
    pub(crate) async fn close(&self) {
        if let Some(tls) = self.tls.get() {
            Box::pin(tls.close(&self.ring, self.fd())).await;
        }
    }
}
