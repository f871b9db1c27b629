//! The bytes of a connection, plain or encrypted.
//!
//! Promises: nothing above this module knows whether a connection is encrypted. A plain one costs
//! one branch for each system call; once it is encrypted it never is plain again, so what a third
//! party put into the stream before that is not taken for the client's.

use std::cell::{Cell, OnceCell, RefCell};
use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;

use ringdisk_ring::{Errno, Fd, IoBuf, Ring, Scatter};
use ringdisk_tls::{ServerTls, TlsStream};

use crate::end_reason::End;

/// See the module.
#[derive(Debug)]
pub(crate) struct Transport {
    ring: Ring,
    socket: Rc<OwnedFd>,
    tls: OnceCell<TlsStream>,
    /// How often the client has sent something.
    heard: Cell<u64>,
    /// A handshake of TLS goes on.
    shakes_hands: Cell<bool>,
    /// Nothing more is read: the connection stands still for a successor.
    stands_still: Cell<bool>,
    /// What is being received cannot be taken up later, so it is read to its end all the same.
    must_finish: Cell<bool>,
    /// The read in flight.
    reading: Cell<Option<u64>>,
    /// It was cancelled here.
    is_cancelled: Cell<bool>,
    /// Bytes that were read and are read again before those of the socket.
    again: RefCell<Vec<u8>>,
}

impl Transport {
    pub(crate) fn new(ring: &Ring, socket: &Rc<OwnedFd>) -> Rc<Transport> {
        let (ring, socket) = (ring.clone(), Rc::clone(socket));
        Rc::new(Transport {
            ring,
            socket,
            tls: OnceCell::new(),
            heard: Cell::new(0),
            shakes_hands: Cell::new(false),
            stands_still: Cell::new(false),
            must_finish: Cell::new(false),
            reading: Cell::new(None),
            is_cancelled: Cell::new(false),
            again: RefCell::default(),
        })
    }

    fn fd(&self) -> Fd {
        Fd::of(&*self.socket)
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        self.tls.get().is_some()
    }

    /// How often the client has sent something, apart from TLS's own words.
    pub(crate) fn heard(&self) -> u64 {
        self.heard.get()
    }

    /// Whether a handshake of TLS goes on.
    pub(crate) fn shakes_hands(&self) -> bool {
        self.shakes_hands.get()
    }

    /// Reads nothing more; a read in flight ends, with what came before ([`End::StandsStill`]). Of
    /// an encrypted connection it does not: what comes then is kept.
    pub(crate) fn stand_still(&self) {
        self.stands_still.set(true);
        self.cancel_read();
    }

    /// Ends a read in flight that is to end.
    fn cancel_read(&self) {
        let is_wanted = self.stands_still.get() && !self.must_finish.get();
        let id = self.reading.get().filter(|_| is_wanted && !self.is_cancelled.get());
        if let Some(id) = id {
            self.is_cancelled.set(true);
            self.ring.cancel(id);
        }
    }

    /// Reads on.
    pub(crate) fn go_on(&self) {
        self.stands_still.set(false);
    }

    /// Whether it stands still for a successor.
    pub(crate) fn stands_still(&self) -> bool {
        self.stands_still.get()
    }

    /// Awaits something that is read to its end also when the connection is to stand still.
    pub(crate) async fn to_the_end<T>(&self, reading: impl Future<Output = T>) -> T {
        self.must_finish.set(true);
        let read = reading.await;
        self.must_finish.set(false);
        read
    }

    /// These bytes are read next, in place of those of the socket. None may be left from before.
    pub(crate) fn put_back(&self, bytes: Vec<u8>) {
        let before = self.again.replace(bytes);
        debug_assert!(before.is_empty(), "{} bytes are lost", before.len());
    }

    /// Takes the bytes that would be read next, in place of those of the socket.
    pub(crate) fn take_back(&self) -> Vec<u8> {
        self.again.take()
    }

    /// Reads once from what was put back. `None`: there is nothing.
    fn read_again(&self, to: &IoBuf) -> Option<usize> {
        let mut again = self.again.borrow_mut();
        if again.is_empty() {
            return None;
        }
        let count = again.len().min(to.len());
        to.copy_from_slice(0, &again[..count]);
        again.drain(..count);
        Some(count)
    }

    /// Encrypts all from now on. Panics when it is encrypted already.
    ///
    /// Errors: the client is not let in, or does not speak TLS.
    pub(crate) async fn encrypt(&self, tls: &ServerTls) -> Result<(), End> {
        self.shakes_hands.set(true);
        let stream = Box::pin(TlsStream::accept(&self.ring, self.fd(), tls)).await?;
        self.shakes_hands.set(false);
        assert!(self.tls.set(stream).is_ok(), "a connection is encrypted once");
        Ok(())
    }

    /// Reads once. Gives the number of bytes; 0: the client sends no more.
    ///
    /// Errors: those of the socket; bytes that cannot be decrypted; [`End::StandsStill`].
    pub(crate) async fn read(&self, to: &IoBuf) -> Result<usize, End> {
        if self.stands_still.get() && !self.must_finish.get() {
            return Err(End::StandsStill);
        }
        if let Some(count) = self.read_again(to) {
            return Ok(count);
        }
        if let Some(tls) = self.tls.get() {
            let count = Box::pin(tls.read(&self.ring, self.fd(), to)).await?;
            self.heard.set(self.heard.get() + 1);
            return Ok(count);
        }
        loop {
            match self.read_socket(to).await {
                Ok(count) => {
                    self.heard.set(self.heard.get() + 1);
                    return Ok(count as usize);
                }
                Err(Errno::INTR) => {}
                // It may go on here by now, after a hand-over that failed.
                Err(Errno::CANCELED) if self.is_cancelled.get() => {}
                Err(errno) => return Err(errno.into()),
            }
            if self.stands_still.get() && !self.must_finish.get() {
                return Err(End::StandsStill);
            }
        }
    }

    /// Reads once, so that [`Transport::stand_still`] can end it.
    async fn read_socket(&self, to: &IoBuf) -> Result<u32, Errno> {
        let mut read = pin!(self.ring.read(self.fd(), 0, to));
        self.is_cancelled.set(false);
        poll_fn(|cx| {
            let polled = read.as_mut().poll(cx);
            self.reading.set(read.id());
            // It may have waited for a slot of the ring when it was to end.
            if polled.is_pending() {
                self.cancel_read();
            }
            polled
        })
        .await
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
