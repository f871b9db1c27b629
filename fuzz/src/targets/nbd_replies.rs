//! Any bytes of a server, as replies to requests: nothing panics or waits for ever, and a request
//! gets no more than it asked for.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use ringdisk_nbd_protocol::handshake::{ExportInfo, OptionHead, greeting};
use ringdisk_nbd_protocol::numbers::{chunk, command, context, export_flags, option, option_reply};
use ringdisk_nbd_protocol::options::{InfoReply, MetaContext, push_reply};
use ringdisk_nbd_protocol::reply::{Chunk, SimpleReply};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_ring::{IoBuf, Ring};
use ringdisk_storage::{NbdAddress, NbdOptions, Storage};

use crate::{Input, with_ring};

/// Size of the export, bytes.
const SIZE: u64 = 1 << 20;
/// Longest wait for a request.
const LIMIT: Duration = Duration::from_secs(10);
/// The server ends a connection on which nothing has come for so long: the client waits for what
/// an input left out.
const SILENCE: Duration = Duration::from_millis(100);
/// Bytes of an input that choose the style of replies and the requests; the rest is the server's.
const REQUEST_BYTES: usize = 1 + 4 * 7;
/// Bytes around the memory of a read that must stay as they are.
const GUARD: usize = 512;
/// Most parts of the replies to one request.
const PARTS_MAX: usize = 16;

/// What the server does with the connections of the input that runs.
#[derive(Clone, Default)]
struct Script {
    style: u8,
    bytes: Vec<u8>,
}

static SCRIPT: Mutex<Option<Arc<Script>>> = Mutex::new(None);

/// Address of a server that lives as long as the process.
fn address() -> &'static NbdAddress {
    static ADDRESS: OnceLock<NbdAddress> = OnceLock::new();
    ADDRESS.get_or_init(|| {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).expect("a socket");
        std::thread::spawn(move || {
            // The directory goes when the process ends by itself.
            let _directory = directory;
            while let Ok((stream, _)) = listener.accept() {
                let script = SCRIPT.lock().unwrap_or_else(PoisonError::into_inner).clone();
                if let Some(script) = script {
                    // A connection that breaks is what the client is to see.
                    let _ = serve(stream, &script);
                }
            }
        });
        let path = path.to_str().expect("UTF-8").as_bytes().to_vec();
        NbdAddress::unix(path, Vec::new()).expect("an address")
    })
}

fn serve(mut stream: UnixStream, script: &Script) -> std::io::Result<()> {
    stream.set_read_timeout(Some(SILENCE))?;
    let style = shake_hands(&mut stream, script.style)?;
    let mut input = Input(&script.bytes);
    // Requests past the input are not answered: the connection ends.
    while !input.is_empty() {
        let mut head = vec![0; style.request_bytes()];
        stream.read_exact(&mut head)?;
        let request = Request::parse(style, &head).expect("a client of ours");
        if request.command == command::WRITE {
            let mut payload = vec![0; usize::try_from(request.len).expect("a length")];
            stream.read_exact(&mut payload)?;
        }
        if request.command == command::DISCONNECT {
            return Ok(());
        }
        let mut out = Vec::new();
        replies(&mut input, style, &request, &mut out);
        stream.write_all(&out)?;
    }
    stream.shutdown(Shutdown::Both)
}

fn shake_hands(stream: &mut UnixStream, wanted: u8) -> std::io::Result<Style> {
    stream.write_all(&greeting(3))?;
    stream.read_exact(&mut [0; 4])?;
    let mut style = Style::Simple;
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let head = OptionHead::parse(&head).expect("a client of ours");
        let mut data = vec![0; usize::try_from(head.len).expect("a length")];
        stream.read_exact(&mut data)?;
        let (mut out, mut body) = (Vec::new(), Vec::new());
        match (head.option, wanted % 3) {
            (option::EXTENDED_HEADERS, 2) => style = Style::Extended,
            (option::STRUCTURED_REPLY, 1) => style = Style::Structured,
            (option::SET_META_CONTEXT, _) => {
                MetaContext { id: 7, name: context::ALLOCATION.as_bytes() }.push(&mut body);
                push_reply(&mut out, head.option, option_reply::META_CONTEXT, &body);
            }
            (option::GO, _) => {
                let flags = export_flags::HAS_FLAGS | export_flags::FLUSH | export_flags::TRIM;
                InfoReply::Export(ExportInfo { size: SIZE, flags }).push(&mut body);
                push_reply(&mut out, head.option, option_reply::INFO, &body);
            }
            _ => {
                push_reply(&mut out, head.option, option_reply::UNSUPPORTED, &[]);
                stream.write_all(&out)?;
                continue;
            }
        }
        push_reply(&mut out, head.option, option_reply::ACK, &[]);
        stream.write_all(&out)?;
        if head.option == option::GO {
            return Ok(style);
        }
    }
}

/// Replies that nearly fit a request, and any bytes.
fn replies(input: &mut Input<'_>, style: Style, request: &Request, out: &mut Vec<u8>) {
    for _ in 0..PARTS_MAX {
        let choice = input.byte();
        // Of another request, now and then.
        let cookie = request.cookie ^ u64::from(choice >> 6 == 3) * input.number(2);
        match choice % 8 {
            0 => {
                let simple = SimpleReply { error: input.number(1) as u32, cookie };
                out.extend(simple.to_bytes());
                out.resize(out.len() + (input.below(request.len + 100)) as usize, choice);
            }
            kind @ 1..=5 => {
                let is_done = choice & 8 != 0;
                let mut payload = Vec::new();
                let kind = match kind {
                    1 => {
                        let at = request.offset + input.below(request.len + 8);
                        payload.extend(at.to_be_bytes());
                        let len = if choice & 16 != 0 { request.len } else { input.below(9000) };
                        payload.resize(8 + len as usize, 0xdd);
                        chunk::OFFSET_DATA
                    }
                    2 => {
                        payload.extend((request.offset + input.below(9000)).to_be_bytes());
                        payload.extend((input.below(9000) as u32).to_be_bytes());
                        chunk::OFFSET_HOLE
                    }
                    3 => {
                        let len = usize::from(input.byte());
                        payload.extend(7u32.to_be_bytes());
                        (0..len).for_each(|_| payload.push(input.byte()));
                        chunk::BLOCK_STATUS + u16::from(style == Style::Extended)
                    }
                    4 => {
                        payload.extend((u32::from(input.byte())).to_be_bytes());
                        payload.extend(u16::from(input.byte()).to_be_bytes());
                        payload.push(input.byte());
                        chunk::ERROR_BIT | u16::from(input.byte() % 3)
                    }
                    _ => chunk::NONE,
                };
                let (flags, offset) = (u16::from(is_done), request.offset);
                let len = payload.len() as u64;
                let mut head = [0; 32];
                let count = Chunk { flags, kind, cookie, offset, len }.put(style, &mut head);
                out.extend(&head[..count]);
                out.extend(payload);
            }
            6 => (0..choice).for_each(|_| out.push(input.byte())),
            _ => return,
        }
        if input.is_empty() {
            return;
        }
    }
}

async fn requests(ring: &Ring, storage: &Storage, input: &mut Input<'_>) {
    for _ in 0..4 {
        let (offset, len) = (input.below(SIZE), 1 + input.below(20_000) as usize);
        match input.byte() % 4 {
            0 => {
                let _ = storage.write(ring, offset, &IoBuf::new(len, 1)).await;
            }
            1 => {
                let _ = storage.flush(ring).await;
            }
            2 => {
                let _ = storage.allocation(ring, offset, len as u64).await;
            }
            _ => {
                let all = IoBuf::new(len + 2 * GUARD, 1);
                all.fill(0x5a);
                let read = storage.read(ring, offset, &all.slice(GUARD..GUARD + len)).await;
                assert!(read.is_ok_and(|count| count <= len) || read.is_err());
                let bytes = all.to_vec();
                let guards = bytes[..GUARD].iter().chain(&bytes[GUARD + len..]);
                assert!(guards.into_iter().all(|byte| *byte == 0x5a), "bytes beside the request");
            }
        }
    }
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let (first, rest) = bytes.split_at(REQUEST_BYTES.min(bytes.len()));
    let mut input = Input(first);
    let script = Script { style: input.byte(), bytes: rest.to_vec() };
    *SCRIPT.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(script));
    let options = NbdOptions { reconnect: Duration::ZERO, ..NbdOptions::default() };
    let storage = Storage::open_nbd(address(), &options).expect("the server is there");
    with_ring(|ring| async move {
        let all = requests(&ring, &storage, &mut input);
        ring.within(LIMIT, all).await.expect("no request waits for ever");
    });
}
