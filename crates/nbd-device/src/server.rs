//! A server that this process asks: the part of the handshake that needs no data.
//!
//! Promises: nothing that the server says makes this wait for longer than [`SERVER_LIMIT`] at a
//! time, or take more memory than [`ANSWERS_MAX`] answers of [`ANSWER_BYTES_MAX`] bytes.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use ringdisk_daemon::failure::words;
use ringdisk_nbd_protocol::handshake::{
    ExportInfo, GREETING_BYTES, OPTION_REPLY_BYTES, OptionReplyHead, client_flags, parse_greeting,
};
use ringdisk_nbd_protocol::numbers::{info, option_reply};
use ringdisk_nbd_protocol::options::{BlockSizes, InfoReply, InfoRequest, is_error, push_option};

/// How long the server may take for each answer (30 s).
const SERVER_LIMIT: Duration = Duration::from_secs(30);
/// Longest answer that is read, bytes: a name, a description and their lengths.
const ANSWER_BYTES_MAX: u32 = 2 * 4096 + 64;
/// Most answers to one option: names, or contexts of an export.
const ANSWERS_MAX: usize = 10_000;

/// A stream of either kind.
pub(crate) trait Stream: Read + Write {}
impl Stream for UnixStream {}
impl Stream for TcpStream {}

/// The server at a Unix socket.
///
/// Errors: those of connect(2).
pub(crate) fn unix(path: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(SERVER_LIMIT))?;
    stream.set_write_timeout(Some(SERVER_LIMIT))?;
    Ok(stream)
}

/// The server at `HOST:PORT`.
///
/// Errors: as [`unix`], and a name that nobody has.
pub(crate) fn tcp(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(SERVER_LIMIT))?;
    stream.set_write_timeout(Some(SERVER_LIMIT))?;
    Ok(stream)
}

/// A server that is asked.
///
/// `None`: the connection has ended.
pub(crate) struct Server<S>(pub(crate) Option<S>);

/// An answer that is not an acknowledgement.
pub(crate) type Answer = (u32, Vec<u8>);

/// What is known of an export.
#[derive(Default)]
pub(crate) struct Known {
    pub(crate) export: Option<ExportInfo>,
    pub(crate) blocks: Option<BlockSizes>,
}

impl<S: Read + Write> Server<S> {
    /// The greeting and its answer, in the newest style that both sides know.
    pub(crate) fn greet(&mut self) -> Result<(), String> {
        let greeting = self.bytes::<GREETING_BYTES>()?;
        let offered = parse_greeting(&greeting).map_err(|error| error.to_string())?;
        self.send(&client_flags(offered & 3))
    }

    /// Sends an option. Gives the answers without the last one, or the error alone; and whether the
    /// option was taken.
    pub(crate) fn ask(&mut self, option: u32, data: &[u8]) -> Result<(Vec<Answer>, bool), String> {
        let mut out = Vec::new();
        push_option(&mut out, option, data);
        self.send(&out)?;
        let mut answers = Vec::new();
        loop {
            let head = OptionReplyHead::parse(&self.bytes::<OPTION_REPLY_BYTES>()?);
            let head = head.map_err(|error| error.to_string())?;
            if head.option != option || head.len > ANSWER_BYTES_MAX {
                return Err(String::from("the server does not keep to the protocol"));
            }
            let mut answer = vec![0; head.len as usize];
            self.stream()?.read_exact(&mut answer).map_err(|error| words(&error))?;
            match head.kind {
                option_reply::ACK => return Ok((answers, true)),
                kind if is_error(kind) => return Ok((vec![(kind, answer)], false)),
                kind => answers.push((kind, answer)),
            }
            if answers.len() > ANSWERS_MAX {
                return Err(format!("the server gives more than {ANSWERS_MAX} answers"));
            }
        }
    }

    /// What the server says of an export.
    ///
    /// * `option`: `INFO`; or `GO`, after which the connection is the export's if this gives
    ///   anything.
    pub(crate) fn export(&mut self, option: u32, name: &[u8]) -> Result<Known, String> {
        let mut data = Vec::new();
        InfoRequest { name, wanted: vec![info::BLOCK_SIZE] }.push(&mut data);
        let mut known = Known::default();
        for (kind, answer) in self.ask(option, &data)?.0 {
            if kind != option_reply::INFO {
                continue;
            }
            match InfoReply::parse(&answer).map_err(|error| error.to_string())? {
                InfoReply::Export(export) => known.export = Some(export),
                InfoReply::BlockSizes(blocks) => known.blocks = Some(blocks),
                _ => {}
            }
        }
        Ok(known)
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.stream()?.write_all(bytes).map_err(|error| words(&error))
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.stream()?.read_exact(&mut bytes).map_err(|error| words(&error))?;
        Ok(bytes)
    }

    fn stream(&mut self) -> Result<&mut S, String> {
        self.0.as_mut().ok_or_else(|| String::from("the connection has ended"))
    }
}
