//! A connection: handshake, reading, writing.
//!
//! Promises: one task reads and one writes at a time, the same or two; no lock is held while a task
//! waits. A peer fills no memory but that of [`STREAM_BYTES_MAX`]. The end of the peer's bytes is
//! an end also where it did not announce it: messages of NBD have a length, so nothing can be cut
//! off without being seen.

use std::fmt;
use std::io::{self, BufRead, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringdisk_ring::{Errno, Fd, IoBuf, Ring, SharedMemory};
use rustls::{Connection, ServerConnection};

use crate::name;
use crate::server::ServerTls;

/// Bytes of a record before they are encrypted: the most that TLS has.
const RECORD_BYTES: usize = 16 << 10;
/// Room for an encrypted record, and for a message of TLS itself before it.
const SEALED_BYTES_MAX: usize = RECORD_BYTES + (2 << 10);
/// Encrypted bytes that are read at once.
const INPUT_BYTES: usize = 128 << 10;
/// Encrypted bytes that are sent at once: a reply of 256 KiB with what TLS adds.
const OUTPUT_BYTES: usize = 320 << 10;

/// Memory of a connection at most, bytes: input, output, a record before it is encrypted, and what
/// rustls keeps: a handshake message of at most 64 KiB, and two records.
pub const STREAM_BYTES_MAX: usize =
    INPUT_BYTES + OUTPUT_BYTES + RECORD_BYTES + (64 << 10) + 2 * SEALED_BYTES_MAX;

/// Why a connection ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamError {
    /// The socket failed.
    Socket(Errno),
    /// The peer ended the connection in the handshake.
    Ended,
    /// The peer's bytes, or its certificate, are not as they should be; or it refuses us.
    Tls(String),
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamError::Socket(errno) => errno.fmt(f),
            StreamError::Ended => f.write_str("the connection ended in the handshake of TLS"),
            StreamError::Tls(why) => write!(f, "TLS: {why}"),
        }
    }
}

impl std::error::Error for StreamError {}

impl From<rustls::Error> for StreamError {
    fn from(error: rustls::Error) -> StreamError {
        use rustls::{AlertDescription as Alert, Error};
        StreamError::Tls(match error {
            Error::NoCertificatesPresented => String::from("the client has no certificate"),
            Error::AlertReceived(Alert::CertificateRequired) => {
                String::from("the server wants a certificate of the client")
            }
            Error::AlertReceived(Alert::CertificateExpired) => {
                String::from("the peer says that our certificate has expired")
            }
            Error::AlertReceived(Alert::CertificateRevoked) => {
                String::from("the peer says that our certificate was revoked")
            }
            Error::AlertReceived(Alert::UnknownCA) => {
                String::from("the peer does not know the authority of our certificate")
            }
            Error::AlertReceived(alert) => format!("the peer refuses: {alert:?}"),
            Error::InvalidMessage(_) => {
                String::from("what the peer sends is not TLS, or was damaged")
            }
            error => error.to_string(),
        })
    }
}

impl From<Errno> for StreamError {
    fn from(errno: Errno) -> StreamError {
        StreamError::Socket(errno)
    }
}

fn of_io(error: &io::Error) -> StreamError {
    match error.raw_os_error() {
        Some(code) => StreamError::Socket(Errno::from_raw_os_error(code)),
        None => StreamError::Tls(error.to_string()),
    }
}

/// An encrypted connection after its handshake. Clones are the same connection.
#[derive(Clone)]
pub struct TlsStream(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    /// Encrypted bytes of the peer.
    input: Arc<SharedMemory>,
    /// Encrypted bytes of ours: used by the task that writes.
    output: Arc<SharedMemory>,
}

struct State {
    connection: Connection,
    /// Which bytes of the input were not taken.
    start: usize,
    end: usize,
    /// A record before it is encrypted.
    plain: Vec<u8>,
    /// The peer has said that it sends no more.
    has_ended: bool,
}

impl fmt::Debug for TlsStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsStream").finish_non_exhaustive()
    }
}

/// Reads from a buffer.
struct Unread<'a> {
    buf: &'a IoBuf,
    start: &'a mut usize,
    end: usize,
}

impl Read for Unread<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = to.len().min(self.end - *self.start);
        self.buf.copy_to_slice(*self.start, &mut to[..count]);
        *self.start += count;
        Ok(count)
    }
}

/// Writes to a buffer.
struct Room<'a> {
    buf: &'a IoBuf,
    end: &'a mut usize,
}

impl Write for Room<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let count = from.len().min(self.buf.len() - *self.end);
        self.buf.copy_from_slice(*self.end, &from[..count]);
        *self.end += count;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl State {
    /// Takes encrypted bytes that are there, until a record is complete or none is left. `false`:
    /// none is left.
    fn feed(&mut self, input: &IoBuf) -> Result<bool, StreamError> {
        if self.start == self.end {
            return Ok(false);
        }
        let mut from = Unread { buf: input, start: &mut self.start, end: self.end };
        let taken = self.connection.read_tls(&mut from).map_err(|error| of_io(&error))?;
        let state = self.connection.process_new_packets()?;
        if state.peer_has_closed() || taken == 0 {
            self.has_ended = true;
            self.start = self.end;
        }
        Ok(self.start < self.end)
    }

    /// Moves bytes that were decrypted to a buffer, from its byte `at` on. Gives their number.
    fn drain(&mut self, to: &IoBuf, at: usize) -> usize {
        let mut done = at;
        while done < to.len() {
            let mut reader = self.connection.reader();
            let Ok(bytes) = reader.fill_buf() else { break };
            let count = bytes.len().min(to.len() - done);
            if count == 0 {
                break;
            }
            to.copy_from_slice(done, &bytes[..count]);
            reader.consume(count);
            done += count;
        }
        done - at
    }

    /// Appends what TLS has to send, as far as it fits.
    fn seal(&mut self, output: &IoBuf, end: &mut usize) -> Result<(), StreamError> {
        while self.connection.wants_write() && *end < output.len() {
            let mut to = Room { buf: output, end };
            self.connection.write_tls(&mut to).map_err(|error| of_io(&error))?;
        }
        Ok(())
    }
}

impl TlsStream {
    pub(crate) fn new(connection: Connection) -> TlsStream {
        let state = State { connection, start: 0, end: 0, plain: Vec::new(), has_ended: false };
        TlsStream(Arc::new(Inner {
            state: Mutex::new(state),
            input: SharedMemory::new(INPUT_BYTES, 4096),
            output: SharedMemory::new(OUTPUT_BYTES, 4096),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shakes hands with a client on a ring, and looks whether its name is allowed. The arithmetic
    /// of keys is done by helper threads.
    ///
    /// Errors: the socket's; the client is not let in, or does not speak TLS.
    pub async fn accept(
        ring: &Ring,
        socket: Fd,
        tls: &ServerTls,
    ) -> Result<TlsStream, StreamError> {
        let connection = ServerConnection::new(Arc::clone(&tls.config))?;
        let stream = TlsStream::new(connection.into());
        stream.shake(ring, socket).await?;
        if let Some(allow) = &tls.allow {
            let name = stream.peer_name().unwrap_or_default();
            if !allow.allows(&name) {
                return Err(StreamError::Tls(format!(
                    "x509 authz check for {name} is denied: the name is not on the list"
                )));
            }
        }
        Ok(stream)
    }

    async fn shake(&self, ring: &Ring, socket: Fd) -> Result<(), StreamError> {
        loop {
            self.flush(ring, socket).await?;
            let (is_over, is_empty) = {
                let state = self.state();
                (!state.connection.is_handshaking(), state.start == state.end)
            };
            if is_over {
                return Ok(());
            }
            if is_empty && !self.fill(ring, socket).await? {
                return Err(StreamError::Ended);
            }
            let stream = self.clone();
            let fed = ring.offload(move || stream.feed_handshake()).await;
            if let Err(error) = fed {
                // The peer shall hear why.
                let _ = self.flush(ring, socket).await;
                return Err(error);
            }
        }
    }

    /// Takes what has come, up to the end of the handshake. Bytes behind it stay.
    fn feed_handshake(&self) -> Result<(), StreamError> {
        let input = self.0.input.buffer();
        let mut state = self.state();
        while state.connection.is_handshaking() && state.feed(&input)? {}
        if state.has_ended { Err(StreamError::Ended) } else { Ok(()) }
    }

    /// The distinguished name of the peer's certificate.
    #[must_use]
    pub fn peer_name(&self) -> Option<String> {
        let state = self.state();
        let certificate = state.connection.peer_certificates()?.first()?;
        name::of_certificate(certificate)
    }

    /// Reads encrypted bytes, when none are left. `false`: the peer sends no more.
    async fn fill(&self, ring: &Ring, socket: Fd) -> Result<bool, StreamError> {
        let input = self.0.input.buffer();
        loop {
            match ring.read(socket, 0, &input).await {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    let mut state = self.state();
                    (state.start, state.end) = (0, count as usize);
                    return Ok(true);
                }
                Err(Errno::INTR | Errno::AGAIN) => ring.yield_now().await,
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Reads into a buffer. Gives the number of bytes; 0: the peer sends no more.
    ///
    /// Errors: the socket's; bytes that cannot be decrypted.
    pub async fn read(&self, ring: &Ring, socket: Fd, to: &IoBuf) -> Result<usize, StreamError> {
        loop {
            if let Some(count) = self.take(to)? {
                return Ok(count);
            }
            if !self.fill(ring, socket).await? {
                return Ok(0);
            }
        }
    }

    /// Decrypts what is there, as far as it fits. `None`: more has to be read.
    fn take(&self, to: &IoBuf) -> Result<Option<usize>, StreamError> {
        let input = self.0.input.buffer();
        let mut state = self.state();
        let mut done = 0;
        loop {
            done += state.drain(to, done);
            if done == to.len() {
                break;
            }
            if !state.feed(&input)? {
                done += state.drain(to, done);
                break;
            }
        }
        Ok((done > 0 || state.has_ended || to.is_empty()).then_some(done))
    }

    /// Writes all bytes of some buffers, in records that are as long as possible.
    ///
    /// Errors: the socket's.
    pub async fn write_all(
        &self,
        ring: &Ring,
        socket: Fd,
        parts: impl Iterator<Item = IoBuf>,
    ) -> Result<(), StreamError> {
        let output = self.0.output.buffer();
        let mut plain = std::mem::take(&mut self.state().plain);
        plain.clear();
        plain.resize(RECORD_BYTES, 0);
        let (mut filled, mut end) = (0, 0);
        for part in parts {
            let mut at = 0;
            while at < part.len() {
                let count = (RECORD_BYTES - filled).min(part.len() - at);
                part.copy_to_slice(at, &mut plain[filled..filled + count]);
                (at, filled) = (at + count, filled + count);
                if filled == RECORD_BYTES {
                    if output.len() - end < SEALED_BYTES_MAX {
                        send(ring, socket, &output.slice(0..end)).await?;
                        end = 0;
                    }
                    self.encrypt(&plain, &output, &mut end)?;
                    filled = 0;
                }
            }
        }
        if filled > 0 {
            if output.len() - end < SEALED_BYTES_MAX {
                send(ring, socket, &output.slice(0..end)).await?;
                end = 0;
            }
            self.encrypt(&plain[..filled], &output, &mut end)?;
        }
        self.state().plain = plain;
        if end > 0 {
            send(ring, socket, &output.slice(0..end)).await?;
        }
        Ok(())
    }

    /// Encrypts one record.
    fn encrypt(&self, plain: &[u8], output: &IoBuf, end: &mut usize) -> Result<(), StreamError> {
        let mut state = self.state();
        state.connection.writer().write_all(plain).map_err(|error| of_io(&error))?;
        state.seal(output, end)
    }

    /// Sends what TLS itself has to send.
    async fn flush(&self, ring: &Ring, socket: Fd) -> Result<(), StreamError> {
        let output = self.0.output.buffer();
        loop {
            let mut end = 0;
            self.state().seal(&output, &mut end)?;
            if end == 0 {
                return Ok(());
            }
            send(ring, socket, &output.slice(0..end)).await?;
        }
    }

    /// Tells the peer that nothing more comes. For the task that writes.
    pub async fn close(&self, ring: &Ring, socket: Fd) {
        self.state().connection.send_close_notify();
        let _ = self.flush(ring, socket).await;
    }

    /// Some last bytes and the end, encrypted, for a caller that sends them itself.
    ///
    /// * `plain`: at most 16 KiB.
    #[must_use]
    pub fn farewell(&self, plain: &[u8]) -> Vec<u8> {
        let (mut state, mut out) = (self.state(), Vec::new());
        let _ = state.connection.writer().write_all(plain);
        state.connection.send_close_notify();
        while state.connection.wants_write() && state.connection.write_tls(&mut out).is_ok() {}
        out
    }

    /// For a thread that blocks, over `io`. Bytes of the peer that this has read ahead are there
    /// for [`TlsStream::read`].
    pub fn blocking<'a, T: Read + Write>(&'a self, io: &'a mut T) -> Blocking<'a, T> {
        Blocking { stream: self, io }
    }

    /// Shakes hands, as a client.
    pub(crate) fn shake_blocking(&self, io: &mut (impl Read + Write)) -> Result<(), StreamError> {
        let mut state = self.state();
        loop {
            while state.connection.wants_write() {
                state.connection.write_tls(io).map_err(|error| of_io(&error))?;
            }
            io.flush().map_err(|error| of_io(&error))?;
            if !state.connection.is_handshaking() {
                return Ok(());
            }
            match state.connection.read_tls(io) {
                Ok(0) => return Err(StreamError::Ended),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(of_io(&error)),
            }
            if let Err(error) = state.connection.process_new_packets() {
                let _ = state.connection.write_tls(io);
                return Err(error.into());
            }
        }
    }
}

async fn send(ring: &Ring, socket: Fd, bytes: &IoBuf) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match ring.write(socket, 0, &bytes.slice(done..bytes.len())).await {
            Ok(0) => return Err(Errno::PIPE),
            Ok(count) => done += count as usize,
            Err(Errno::INTR | Errno::AGAIN) => ring.yield_now().await,
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// See [`TlsStream::blocking`].
#[derive(Debug)]
pub struct Blocking<'a, T> {
    stream: &'a TlsStream,
    io: &'a mut T,
}

impl<T: Read + Write> Read for Blocking<'_, T> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let mut state = self.stream.state();
        loop {
            match state.connection.reader().read(to) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                result => return result,
            }
            if state.connection.read_tls(self.io)? == 0 {
                return Ok(0);
            }
            let processed = state.connection.process_new_packets();
            processed.map_err(|error| io::Error::other(StreamError::from(error)))?;
        }
    }
}

impl<T: Read + Write> Write for Blocking<'_, T> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let mut state = self.stream.state();
        let count = from.len().min(RECORD_BYTES);
        state.connection.writer().write_all(&from[..count])?;
        while state.connection.wants_write() {
            state.connection.write_tls(self.io)?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.io.flush()
    }
}
