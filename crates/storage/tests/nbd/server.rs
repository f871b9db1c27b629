//! An NBD server on a Unix socket, whose every answer a test can replace.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ringdisk_nbd_protocol::handshake::{ExportInfo, OptionHead, greeting};
use ringdisk_nbd_protocol::numbers::{
    chunk, command, context, export_flags, extent_flags, handshake_flags, option, option_reply,
};
use ringdisk_nbd_protocol::options::{
    BlockSizes, InfoReply, InfoRequest, MetaContext, MetaRequest, push_reply,
};
use ringdisk_nbd_protocol::reply::{Chunk, SimpleReply};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_nbd_protocol::status::{Extent, push_extents};
use ringdisk_storage::{Error, NbdAddress, NbdOptions, Storage};

/// What the server offers.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    pub(crate) size: u64,
    pub(crate) flags: u16,
    pub(crate) style: Style,
    pub(crate) blocks: Option<BlockSizes>,
}

pub(crate) const FLAGS: u16 = export_flags::HAS_FLAGS
    | export_flags::FLUSH
    | export_flags::FUA
    | export_flags::TRIM
    | export_flags::WRITE_ZEROES;

impl Default for Offer {
    fn default() -> Offer {
        Offer { size: 1 << 20, flags: FLAGS, style: Style::Extended, blocks: None }
    }
}

/// What is done with a request.
pub(crate) enum Act {
    /// What it asks for.
    Serve,
    /// These bytes are sent, and nothing else.
    Send(Vec<u8>),
    /// The same, and the connection ends.
    SendAndClose(Vec<u8>),
    /// Nothing.
    Ignore,
    /// The connection ends.
    Close,
}

pub(crate) struct Server {
    directory: tempfile::TempDir,
    pub(crate) disk: Arc<Mutex<Vec<u8>>>,
    pub(crate) connections: Arc<AtomicUsize>,
    pub(crate) requests: Arc<AtomicUsize>,
}

impl Server {
    pub(crate) fn new(offer: Offer) -> Server {
        Server::scripted(offer, |_, _| Act::Serve)
    }

    /// A server with a script.
    pub(crate) fn scripted(
        offer: Offer,
        script: impl Fn(usize, &Request) -> Act + Send + Sync + 'static,
    ) -> Server {
        let size = usize::try_from(offer.size).expect("a size for memory");
        let disk = Arc::new(Mutex::new(vec![0; size]));
        let requests = Arc::new(AtomicUsize::new(0));
        let (theirs, script, count) = (Arc::clone(&disk), Arc::new(script), Arc::clone(&requests));
        let server = Server::raw(move |number, mut stream| {
            let style = shake_hands(&mut stream, &offer)?;
            serve(&mut stream, style, &theirs, |request| {
                count.fetch_add(1, Ordering::SeqCst);
                script(number, request)
            })
        });
        Server { disk, requests, ..server }
    }

    /// A server that does with each connection what it is told.
    pub(crate) fn raw(
        each: impl Fn(usize, UnixStream) -> io::Result<()> + Send + Sync + 'static,
    ) -> Server {
        let directory = tempfile::tempdir().expect("directory");
        let listener = UnixListener::bind(directory.path().join("socket")).expect("bind");
        let (each, connections) = (Arc::new(each), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&connections);
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let (each, number) = (Arc::clone(&each), count.fetch_add(1, Ordering::SeqCst));
                std::thread::spawn(move || {
                    let _ = each(number, stream);
                });
            }
        });
        let disk = Arc::default();
        Server { directory, disk, connections, requests: Arc::default() }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    pub(crate) fn address(&self) -> NbdAddress {
        address(&self.path())
    }

    pub(crate) fn open(&self) -> Storage {
        self.try_open(&NbdOptions::default()).expect("open")
    }

    pub(crate) fn open_for(&self, reconnect: Duration) -> Storage {
        self.try_open(&NbdOptions { reconnect, ..NbdOptions::default() }).expect("open")
    }

    pub(crate) fn try_open(&self, options: &NbdOptions) -> Result<Storage, Error> {
        Storage::open_nbd(&self.address(), options)
    }
}

pub(crate) fn address(path: &std::path::Path) -> NbdAddress {
    NbdAddress::unix(path.to_str().expect("UTF-8").into(), Vec::new()).expect("an address")
}

/// The handshake of a server with one export of any name.
pub(crate) fn shake_hands(stream: &mut UnixStream, offer: &Offer) -> io::Result<Style> {
    stream.write_all(&greeting(handshake_flags::FIXED_NEWSTYLE | handshake_flags::NO_ZEROES))?;
    stream.read_exact(&mut [0; 4])?;
    let mut style = Style::Simple;
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let head = OptionHead::parse(&head).expect("an option");
        let mut data = vec![0; head.len as usize];
        stream.read_exact(&mut data)?;
        let mut out = Vec::new();
        let mut reply = |kind: u32, data: &[u8]| push_reply(&mut out, head.option, kind, data);
        match head.option {
            option::EXTENDED_HEADERS if offer.style == Style::Extended => {
                style = Style::Extended;
                reply(option_reply::ACK, &[]);
            }
            option::STRUCTURED_REPLY if offer.style == Style::Structured => {
                style = Style::Structured;
                reply(option_reply::ACK, &[]);
            }
            option::SET_META_CONTEXT => {
                MetaRequest::parse(&data).expect("contexts");
                let mut context = Vec::new();
                MetaContext { id: 7, name: context::ALLOCATION.as_bytes() }.push(&mut context);
                reply(option_reply::META_CONTEXT, &context);
                reply(option_reply::ACK, &[]);
            }
            option::GO => {
                InfoRequest::parse(&data).expect("a name");
                let export = ExportInfo { size: offer.size, flags: offer.flags };
                let blocks = offer.blocks.map(InfoReply::BlockSizes);
                for info in [Some(InfoReply::Export(export)), blocks].into_iter().flatten() {
                    let mut data = Vec::new();
                    info.push(&mut data);
                    reply(option_reply::INFO, &data);
                }
                reply(option_reply::ACK, &[]);
                stream.write_all(&out)?;
                return Ok(style);
            }
            _ => reply(option_reply::UNSUPPORTED, b"not here"),
        }
        stream.write_all(&out)?;
    }
}

/// Serves until the client or the script ends the connection.
pub(crate) fn serve(
    stream: &mut UnixStream,
    style: Style,
    disk: &Mutex<Vec<u8>>,
    script: impl Fn(&Request) -> Act,
) -> io::Result<()> {
    loop {
        let mut head = vec![0; style.request_bytes()];
        stream.read_exact(&mut head)?;
        let request = Request::parse(style, &head).expect("a request");
        let mut payload = Vec::new();
        if request.command == command::WRITE {
            payload.resize(usize::try_from(request.len).expect("a length"), 0);
            stream.read_exact(&mut payload)?;
        }
        match script(&request) {
            Act::Serve if request.command == command::DISCONNECT => return Ok(()),
            Act::Serve => {
                let reply = answer(style, &request, &payload, &mut disk.lock().expect("no panic"));
                stream.write_all(&reply)?;
            }
            Act::Send(bytes) => stream.write_all(&bytes)?,
            Act::SendAndClose(bytes) => return stream.write_all(&bytes),
            Act::Ignore => {}
            Act::Close => return Ok(()),
        }
    }
}

/// Carries a request out.
fn answer(style: Style, request: &Request, payload: &[u8], disk: &mut [u8]) -> Vec<u8> {
    let start = usize::try_from(request.offset).expect("an offset");
    let end = start + usize::try_from(request.len).expect("a length");
    match request.command {
        command::READ if style == Style::Simple => {
            let mut out = SimpleReply { error: 0, cookie: request.cookie }.to_bytes().to_vec();
            out.extend(&disk[start..end]);
            out
        }
        command::READ => data_chunk(style, request, request.offset, &disk[start..end], true),
        command::WRITE => {
            disk[start..end].copy_from_slice(payload);
            done(style, request)
        }
        command::WRITE_ZEROES | command::TRIM => {
            disk[start..end].fill(0);
            done(style, request)
        }
        command::BLOCK_STATUS => {
            // Blocks of 4 KiB.
            let mut extents = Vec::new();
            for block in disk[start..end].chunks(4096) {
                let is_zero = block.iter().all(|byte| *byte == 0);
                let flags = if is_zero { extent_flags::ZERO | extent_flags::HOLE } else { 0 };
                extents.push(Extent { len: block.len() as u64, flags });
            }
            status_chunk(style, request, 7, &extents)
        }
        _ => done(style, request),
    }
}

/// A chunk.
pub(crate) fn chunk(
    style: Style,
    request: &Request,
    kind: u16,
    payload: &[u8],
    is_done: bool,
) -> Vec<u8> {
    let mut head = [0; 32];
    let flags = u16::from(is_done);
    let (cookie, offset, len) = (request.cookie, request.offset, payload.len() as u64);
    let len = Chunk { flags, kind, cookie, offset, len }.put(style, &mut head);
    [&head[..len], payload].concat()
}

pub(crate) fn data_chunk(
    style: Style,
    request: &Request,
    offset: u64,
    data: &[u8],
    is_done: bool,
) -> Vec<u8> {
    let payload = [&offset.to_be_bytes()[..], data].concat();
    chunk(style, request, chunk::OFFSET_DATA, &payload, is_done)
}

pub(crate) fn status_chunk(
    style: Style,
    request: &Request,
    id: u32,
    extents: &[Extent],
) -> Vec<u8> {
    let mut payload = Vec::new();
    let is_extended = style == Style::Extended;
    push_extents(&mut payload, is_extended, id, extents);
    let kind = if is_extended { chunk::BLOCK_STATUS_EXTENDED } else { chunk::BLOCK_STATUS };
    chunk(style, request, kind, &payload, true)
}

/// The reply of a command that has no data.
pub(crate) fn done(style: Style, request: &Request) -> Vec<u8> {
    match style {
        Style::Simple => SimpleReply { error: 0, cookie: request.cookie }.to_bytes().to_vec(),
        Style::Structured | Style::Extended => chunk(style, request, chunk::NONE, &[], true),
    }
}
