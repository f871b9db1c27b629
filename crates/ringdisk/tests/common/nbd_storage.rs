//! An NBD server for tests, whose export is the storage of a disk: memory that knows what was
//! flushed, and that stands still where a test wants it. Written from the text of the protocol, not
//! with code of ours: fixed newstyle, `GO`, simple replies. It goes silent where a test wants that.
//!
//! Promises: requests of all connections are carried out one after the other, so a flush covers
//! what was answered on any of them. Dropping it ends all of its threads.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use ringdisk_testkit::mount::{scratch, text};
use tempfile::TempDir;

/// Options and kinds of replies to them.
const EXPORT_NAME: u32 = 1;
const ABORT: u32 = 2;
const GO: u32 = 7;
const ACK: u32 = 1;
const INFO: u32 = 3;
const UNSUPPORTED: u32 = 1 << 31 | 1;
/// Commands.
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
/// The flag of a request that is durable when it is answered.
const FUA: u16 = 1;
/// `HAS_FLAGS`, FLUSH, FUA, TRIM, `WRITE_ZEROES`, `CAN_MULTI_CONN`.
const EXPORT_FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 8;

/// A server at a socket.
pub(crate) struct NbdStorage {
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
    directory: TempDir,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    now: Vec<u8>,
    durable: Vec<u8>,
    unflushed: Vec<Range<usize>>,
    /// Requests that change something, or flush, and were carried out.
    changes: usize,
    /// After so many of them nothing is answered.
    stops_at: Option<usize>,
    /// The request that came then.
    last: Option<Request>,
    /// Longer reads, in bytes, stand still.
    reads_max: Option<u32>,
    /// Reads that stand still.
    held_reads: usize,
    silence: Option<Silence>,
    has_ended: bool,
    connections: Vec<UnixStream>,
}

/// From where on nothing more comes on a connection, which stays open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Silence {
    /// A client that connects is not greeted.
    Greeting,
    /// A client is greeted, and its first option is not answered.
    Handshake,
    /// A reply to a read ends in the middle of its data.
    Reply,
    /// The end of a client that disconnects is not noticed.
    Disconnect,
}

#[derive(Clone)]
struct Request {
    flags: u16,
    command: u16,
    cookie: [u8; 8],
    range: Range<usize>,
    payload: Vec<u8>,
}

impl NbdStorage {
    /// Storage with this content, all of it durable.
    pub(crate) fn new(content: Vec<u8>) -> NbdStorage {
        let directory = scratch();
        let listener = UnixListener::bind(directory.path().join("storage")).expect("a socket");
        let state = State { durable: content.clone(), now: content, ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), ..Shared::default() });
        let its = Arc::clone(&shared);
        let accepting = std::thread::spawn(move || its.accept(&listener));
        NbdStorage { shared, accepting: Some(accepting), directory }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("storage")
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", text(&self.socket()))
    }

    /// The bytes that a server would read now: of requests that were carried out.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.shared.state().now.clone()
    }

    /// The same, with the request that came when it stopped.
    pub(crate) fn bytes_with_last(&self) -> Vec<u8> {
        let mut state = self.shared.state();
        if let Some(last) = state.last.take() {
            state.carry_out(&last);
        }
        state.now.clone()
    }

    /// The bytes that were flushed.
    pub(crate) fn durable(&self) -> Vec<u8> {
        self.shared.state().durable.clone()
    }

    /// How many requests that change something, or flush, were carried out.
    pub(crate) fn changes(&self) -> usize {
        self.shared.state().changes
    }

    /// After so many of them it stands still for good, with what comes then.
    pub(crate) fn stop_at(&self, changes: usize) {
        self.shared.state().stops_at = Some(changes);
    }

    /// Whether it stands still for good.
    pub(crate) fn has_stopped(&self) -> bool {
        self.shared.state().last.is_some()
    }

    /// Reads of more bytes than that stand still, until [`NbdStorage::go_on`].
    pub(crate) fn hold_reads_over(&self, bytes: u32) {
        self.shared.state().reads_max = Some(bytes);
    }

    /// How many reads stand still.
    pub(crate) fn held_reads(&self) -> usize {
        self.shared.state().held_reads
    }

    /// Goes silent there.
    pub(crate) fn fall_silent(&self, silence: Silence) {
        self.shared.state().silence = Some(silence);
    }

    /// Ends all connections.
    pub(crate) fn cut(&self) {
        for connection in self.shared.state().connections.drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Reads go on, also those that stand still, and the server is silent no more: connections on
    /// which it was end.
    pub(crate) fn go_on(&self) {
        let mut state = self.shared.state();
        state.reads_max = None;
        state.silence = None;
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl Drop for NbdStorage {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state();
            state.has_ended = true;
            for connection in &state.connections {
                let _ = connection.shutdown(Shutdown::Both);
            }
        }
        self.shared.changed.notify_all();
        // Wakes the thread that accepts.
        let _ = UnixStream::connect(self.socket());
        let ended = self.accepting.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(matches!(ended, Some(Ok(()))), "a client broke the protocol");
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Shared>, listener: &UnixListener) {
        std::thread::scope(|scope| {
            for stream in listener.incoming() {
                let stream = stream.expect("a connection");
                let mut state = self.state();
                if state.has_ended {
                    break;
                }
                state.connections.push(stream.try_clone().expect("a descriptor"));
                drop(state);
                // An error is the end of the connection.
                scope.spawn(move || drop(self.serve(stream)));
            }
        });
    }

    fn serve(&self, mut stream: UnixStream) -> io::Result<()> {
        if !self.shake_hands(&mut stream)? {
            return Ok(());
        }
        loop {
            let request = Request::read(&mut stream)?;
            if request.command == DISCONNECT {
                self.is_silent(Silence::Disconnect);
                return Ok(());
            }
            let Some(data) = self.answer(&request) else { return Ok(()) };
            let head = [&0x6744_6698_u32.to_be_bytes()[..], &[0; 4], &request.cookie];
            let reply = [&head.concat()[..], &data].concat();
            let (first, rest) = reply.split_at(reply.len() - data.len() / 2);
            stream.write_all(first)?;
            if request.command == READ && self.is_silent(Silence::Reply) {
                return Ok(());
            }
            stream.write_all(rest)?;
        }
    }

    /// Whether the server was silent there; waits until it is no more.
    fn is_silent(&self, there: Silence) -> bool {
        let state = self.state();
        let was_silent = state.silence == Some(there);
        let is_silent = |state: &mut State| state.silence == Some(there) && !state.has_ended;
        drop(self.changed.wait_while(state, is_silent).unwrap_or_else(PoisonError::into_inner));
        was_silent
    }

    /// Whether the client wants the export.
    fn shake_hands(&self, stream: &mut UnixStream) -> io::Result<bool> {
        if self.is_silent(Silence::Greeting) {
            return Ok(false);
        }
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
        if self.is_silent(Silence::Handshake) {
            return Ok(false);
        }
        let flags = u32::from_be_bytes(read(stream)?);
        let size = self.state().now.len() as u64;
        let export = [&size.to_be_bytes()[..], &EXPORT_FLAGS.to_be_bytes()].concat();
        loop {
            assert_eq!(&read::<8>(stream)?, b"IHAVEOPT");
            let option = u32::from_be_bytes(read(stream)?);
            let len = u32::from_be_bytes(read(stream)?);
            stream.read_exact(&mut vec![0; len as usize])?;
            let mut reply = |kind: u32, data: &[u8]| {
                let len = u32::try_from(data.len()).expect("short").to_be_bytes();
                let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
                let head = [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len];
                stream.write_all(&[&head.concat()[..], data].concat())
            };
            match option {
                EXPORT_NAME => {
                    let zeroes = if flags & 2 == 0 { 124 } else { 0 };
                    stream.write_all(&[&export[..], &[0; 124][..zeroes]].concat())?;
                    return Ok(true);
                }
                GO => {
                    reply(INFO, &[&[0, 0][..], &export].concat())?;
                    reply(ACK, &[])?;
                    return Ok(true);
                }
                ABORT => return reply(ACK, &[]).map(|()| false),
                _ => reply(UNSUPPORTED, &[])?,
            }
        }
    }

    /// Carries a request out. Gives the data of its reply; `None`: there is none, for good.
    fn answer(&self, request: &Request) -> Option<Vec<u8>> {
        let mut state = self.state();
        if request.command == READ {
            let stands = |state: &mut State| {
                let is_long = |max| request.range.len() > max as usize;
                !state.has_ended && (state.last.is_some() || state.reads_max.is_some_and(is_long))
            };
            state.held_reads += 1;
            state = self.changed.wait_while(state, stands).unwrap_or_else(PoisonError::into_inner);
            state.held_reads -= 1;
            return (!state.has_ended).then(|| state.now[request.range.clone()].to_vec());
        }
        if state.stops_at == Some(state.changes) {
            state.last.get_or_insert_with(|| request.clone());
        }
        if state.last.is_some() {
            let goes_on = |state: &mut State| !state.has_ended;
            drop(self.changed.wait_while(state, goes_on).unwrap_or_else(PoisonError::into_inner));
            return None;
        }
        state.changes += 1;
        state.carry_out(request);
        Some(Vec::new())
    }
}

impl State {
    /// One that is no read.
    fn carry_out(&mut self, request: &Request) {
        let range = request.range.clone();
        match request.command {
            WRITE => self.now[range.clone()].copy_from_slice(&request.payload),
            TRIM | WRITE_ZEROES => self.now[range.clone()].fill(0),
            FLUSH => {
                for range in std::mem::take(&mut self.unflushed) {
                    self.durable[range.clone()].copy_from_slice(&self.now[range]);
                }
                return;
            }
            command => panic!("command {command} was not offered"),
        }
        match request.flags & FUA {
            0 => self.unflushed.push(range),
            _ => self.durable[range.clone()].copy_from_slice(&self.now[range]),
        }
    }
}

impl Request {
    fn read(stream: &mut UnixStream) -> io::Result<Request> {
        let head = read::<28>(stream)?;
        let short = |at: usize| u16::from_be_bytes(head[at..at + 2].try_into().expect("2 bytes"));
        assert_eq!(head[..4], 0x2560_9513_u32.to_be_bytes());
        let (flags, command) = (short(4), short(6));
        let start = u64::from_be_bytes(head[16..24].try_into().expect("8 bytes"));
        let start = usize::try_from(start).expect("small");
        let len = u32::from_be_bytes(head[24..].try_into().expect("4 bytes")) as usize;
        let mut payload = vec![0; if command == WRITE { len } else { 0 }];
        stream.read_exact(&mut payload)?;
        let cookie = head[8..16].try_into().expect("8 bytes");
        Ok(Request { flags, command, cookie, range: start..start + len, payload })
    }
}

fn read<const N: usize>(stream: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The bytes of an image, and as much room behind them as it may need: an export does not grow.
pub(crate) fn with_room(image: &Path, bytes: usize) -> Vec<u8> {
    let mut content = std::fs::read(image).expect("the image");
    assert!(content.len() <= bytes, "{} bytes", content.len());
    content.resize(bytes, 0);
    content
}
