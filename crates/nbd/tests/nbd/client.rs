//! A client that sends what a test wants, and an export to send it to.
//!
//! Promises: nothing waits for longer than [`LIMIT`]; the client judges nothing itself.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::{Bytes, Disk, Format, ImageOptions, NullOptions, Source};
use ringdisk_nbd::{CommonOptions, Export, NamedDisk, NbdOptions};
use ringdisk_nbd_protocol::handshake::{
    ExportInfo, GREETING_BYTES, OPTION_REPLY_BYTES, OptionReplyHead, client_flags, parse_greeting,
};
use ringdisk_nbd_protocol::numbers::{info, option, option_reply};
use ringdisk_nbd_protocol::options::{
    InfoReply, InfoRequest, MetaContext, MetaRequest, is_error, push_option,
};
use ringdisk_nbd_protocol::reply::{Chunk, ErrorPayload, ReplyHead};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::process::LIMIT;
use tempfile::TempDir;

pub(crate) const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

/// An export at a socket. Dropping it stops it.
pub(crate) struct Server {
    pub(crate) export: Option<Export>,
    pub(crate) socket: PathBuf,
    _directory: TempDir,
}

impl Server {
    pub(crate) fn start(disks: Vec<NamedDisk>, options: NbdOptions) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("nbd.sock");
        let listeners = vec![UnixListener::bind(&socket).unwrap().into()];
        let export = Some(Export::start(disks, listeners, options).unwrap());
        Server { export, socket, _directory: directory }
    }

    /// One disk without a name.
    pub(crate) fn of(disk: Arc<Disk>) -> Server {
        Server::start(vec![NamedDisk::new("", disk)], options(2))
    }

    pub(crate) fn connect(&self) -> Client {
        Client::to(&self.socket)
    }

    /// A client that has entered transmission.
    pub(crate) fn client(&self, style: Style) -> Client {
        Client::entered(&self.socket, style)
    }

    /// Stops, and gives the result of the end.
    pub(crate) fn stop(&mut self) -> Result<(), String> {
        let export = self.export.take().unwrap();
        export.stop_handle().stop();
        export.wait().map(|_| ()).map_err(|error| error.to_string())
    }
}

pub(crate) fn options(threads: usize) -> NbdOptions {
    NbdOptions { common: CommonOptions::with_threads(threads), ..NbdOptions::default() }
}

pub(crate) fn null(latency: Duration) -> Arc<Disk> {
    Disk::null(&NullOptions { size: Bytes(64 << 20), read_zeroes: true, latency })
}

/// A raw disk of 64 MiB, without data.
pub(crate) fn raw(directory: &TempDir) -> (Arc<Disk>, PathBuf) {
    let path = directory.path().join("image");
    std::fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    (open(&path, Format::Raw), path)
}

pub(crate) fn open(path: &Path, format: Format) -> Arc<Disk> {
    let mut runtime = Runtime::new(Config::default()).unwrap();
    let ring = runtime.ring().clone();
    let options = ImageOptions { format: Some(format), ..ImageOptions::default() };
    runtime.block_on(Disk::open(&ring, Source::Path(path.to_owned()), &options)).unwrap()
}

/// A reply to an option.
#[derive(Debug)]
pub(crate) struct OptionReply {
    pub(crate) kind: u32,
    pub(crate) data: Vec<u8>,
}

impl OptionReply {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.data.clone()).unwrap()
    }
}

/// A whole reply to a request.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    pub(crate) cookie: u64,
    pub(crate) error: u32,
    pub(crate) text: String,
    /// Chunks without errors; none after a simple reply.
    pub(crate) chunks: Vec<(u16, Vec<u8>)>,
}

/// A connection of a client.
pub(crate) trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

pub(crate) struct Client<S = UnixStream>(pub(crate) S);

impl Client {
    pub(crate) fn to(socket: &Path) -> Client {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        Client(stream)
    }

    /// One that has entered transmission.
    pub(crate) fn entered(socket: &Path, style: Style) -> Client {
        let mut client = Client::to(socket);
        client.greet();
        client.agree(style);
        client.go("");
        client
    }
}

impl<S: Stream> Client<S> {
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    pub(crate) fn receive(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        self.receive(N).try_into().unwrap()
    }

    /// Whether the server has closed the connection, after what it has sent before.
    pub(crate) fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.0.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    /// Greeting, without zeroes.
    pub(crate) fn greet(&mut self) {
        self.greet_with(3);
    }

    pub(crate) fn greet_with(&mut self, flags: u16) {
        let greeting = self.array::<GREETING_BYTES>();
        assert_eq!(parse_greeting(&greeting), Ok(3));
        self.send(&client_flags(flags));
    }

    pub(crate) fn option(&mut self, option: u32, data: &[u8]) {
        let mut out = Vec::new();
        push_option(&mut out, option, data);
        self.send(&out);
    }

    pub(crate) fn option_reply(&mut self, option: u32) -> OptionReply {
        let head = OptionReplyHead::parse(&self.array::<OPTION_REPLY_BYTES>()).unwrap();
        assert_eq!(head.option, option);
        OptionReply { kind: head.kind, data: self.receive(head.len as usize) }
    }

    /// An option and all of its replies.
    pub(crate) fn ask(&mut self, option: u32, data: &[u8]) -> Vec<OptionReply> {
        self.option(option, data);
        let mut replies = Vec::new();
        loop {
            let reply = self.option_reply(option);
            let is_last = reply.kind == option_reply::ACK || is_error(reply.kind);
            replies.push(reply);
            if is_last {
                return replies;
            }
        }
    }

    /// An option whose only reply is an error.
    pub(crate) fn refused(&mut self, option: u32, data: &[u8]) -> (u32, String) {
        let replies = self.ask(option, data);
        let [only] = replies.as_slice() else { panic!("{replies:?}") };
        assert!(is_error(only.kind), "{only:?}");
        (only.kind, only.text())
    }

    pub(crate) fn agree(&mut self, style: Style) {
        let wanted = match style {
            Style::Simple => return,
            Style::Structured => option::STRUCTURED_REPLY,
            Style::Extended => option::EXTENDED_HEADERS,
        };
        assert_eq!(self.ask(wanted, &[]).last().unwrap().kind, option_reply::ACK);
    }

    /// `SET_META_CONTEXT` for the export without a name. Gives the contexts.
    pub(crate) fn set_contexts(&mut self, queries: &[&str]) -> Vec<(u32, String)> {
        self.contexts(option::SET_META_CONTEXT, queries)
    }

    pub(crate) fn contexts(&mut self, option: u32, queries: &[&str]) -> Vec<(u32, String)> {
        let queries = queries.iter().map(|query| query.as_bytes()).collect();
        let mut data = Vec::new();
        MetaRequest { export: b"", queries }.push(&mut data);
        let mut replies = self.ask(option, &data);
        assert_eq!(replies.pop().unwrap().kind, option_reply::ACK);
        let context = |reply: &OptionReply| {
            assert_eq!(reply.kind, option_reply::META_CONTEXT);
            let context = MetaContext::parse(&reply.data).unwrap();
            (context.id, String::from_utf8(context.name.to_vec()).unwrap())
        };
        replies.iter().map(context).collect()
    }

    /// `GO` or `INFO`. Gives the replies before the acknowledgement, or the error.
    pub(crate) fn info(
        &mut self,
        option: u32,
        name: &str,
        wanted: &[u16],
    ) -> Result<Vec<Vec<u8>>, (u32, String)> {
        let mut data = Vec::new();
        InfoRequest { name: name.as_bytes(), wanted: wanted.to_vec() }.push(&mut data);
        let mut replies = self.ask(option, &data);
        let last = replies.pop().unwrap();
        if is_error(last.kind) {
            return Err((last.kind, last.text()));
        }
        assert!(replies.iter().all(|reply| reply.kind == option_reply::INFO));
        Ok(replies.into_iter().map(|reply| reply.data).collect())
    }

    /// Enters transmission.
    pub(crate) fn go(&mut self, name: &str) -> ExportInfo {
        let infos = self.info(option::GO, name, &[info::BLOCK_SIZE]).unwrap();
        let export = infos.iter().find_map(|data| match InfoReply::parse(data).unwrap() {
            InfoReply::Export(export) => Some(export),
            _ => None,
        });
        export.unwrap()
    }

    /// Sends a request.
    pub(crate) fn start(&mut self, style: Style, request: Request, payload: &[u8]) {
        let mut bytes = match style {
            Style::Simple | Style::Structured => request.to_compact().to_vec(),
            Style::Extended => request.to_extended().to_vec(),
        };
        bytes.extend(payload);
        self.send(&bytes);
    }

    /// The head of the next reply.
    fn head(&mut self, style: Style) -> ReplyHead {
        let mut bytes = self.receive(16);
        loop {
            if let Some((head, len)) = ReplyHead::parse(style, &bytes).unwrap() {
                assert_eq!(len, bytes.len());
                return head;
            }
            bytes.extend(self.receive(4));
        }
    }

    /// The next whole reply.
    ///
    /// * `simple_bytes`: data that follows a simple reply, by its cookie.
    pub(crate) fn reply_of(&mut self, style: Style, simple_bytes: impl Fn(u64) -> usize) -> Reply {
        let mut reply = Reply::default();
        loop {
            match self.head(style) {
                ReplyHead::Simple(simple) => {
                    reply.cookie = simple.cookie;
                    reply.error = simple.error;
                    if simple.error == 0 {
                        let data = self.receive(simple_bytes(simple.cookie));
                        reply.chunks.push((u16::MAX, data));
                    }
                    return reply;
                }
                ReplyHead::Chunk(chunk) => {
                    reply.cookie = chunk.cookie;
                    self.payload(chunk, &mut reply);
                    if chunk.is_done() {
                        return reply;
                    }
                }
            }
        }
    }

    fn payload(&mut self, chunk: Chunk, reply: &mut Reply) {
        let payload = self.receive(chunk.len as usize);
        if chunk.is_error() {
            let error = ErrorPayload::parse(chunk.kind, &payload).unwrap();
            reply.error = error.error;
            reply.text = String::from_utf8(error.text.to_vec()).unwrap();
        } else {
            reply.chunks.push((chunk.kind, payload));
        }
    }

    /// A request and its reply, of a client that has one request in flight.
    pub(crate) fn call(&mut self, style: Style, request: Request, payload: &[u8]) -> Reply {
        let request = Request { cookie: request.cookie | 1 << 40, ..request };
        self.start(style, request, payload);
        let is_read = request.command == ringdisk_nbd_protocol::numbers::command::READ;
        let bytes = if is_read { request.len as usize } else { 0 };
        let reply = self.reply_of(style, |_| bytes);
        assert_eq!(reply.cookie, request.cookie);
        reply
    }
}

pub(crate) fn request(command: u16, offset: u64, len: u64) -> Request {
    Request { command, offset, len, ..Request::default() }
}

pub(crate) fn flagged(command: u16, flags: u16, offset: u64, len: u64) -> Request {
    Request { flags, ..request(command, offset, len) }
}

/// The bytes of a read, put together from a simple reply or from chunks.
pub(crate) fn data(reply: &Reply, offset: u64, len: usize) -> Vec<u8> {
    use ringdisk_nbd_protocol::numbers::chunk;
    use ringdisk_nbd_protocol::reply::{Hole, parse_data_offset};
    assert_eq!(reply.error, 0, "{reply:?}");
    let mut out = vec![0xee; len];
    let mut known = 0;
    for (kind, payload) in &reply.chunks {
        match *kind {
            u16::MAX => {
                out.copy_from_slice(payload);
                known += payload.len();
            }
            chunk::OFFSET_DATA => {
                let at = (parse_data_offset(payload).unwrap() - offset) as usize;
                let data = &payload[8..];
                out[at..at + data.len()].copy_from_slice(data);
                known += data.len();
            }
            chunk::OFFSET_HOLE => {
                let hole = Hole::parse(payload).unwrap();
                let at = (hole.offset - offset) as usize;
                out[at..at + hole.len as usize].fill(0);
                known += hole.len as usize;
            }
            other => assert_eq!((other, len), (chunk::NONE, 0), "an unexpected chunk"),
        }
    }
    assert_eq!(known, len, "each byte once");
    out
}
