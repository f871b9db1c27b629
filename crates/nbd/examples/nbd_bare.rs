//! The least that a server of a null disk can do: the bound that `bench/nbd` names.
//!
//! A thread for each connection reads what is there, answers every request of it with zeroes, and
//! sends all answers with one system call. No disk, no rings, no limits, no drain, hardly a check.
//!
//! ```text
//! nbd_bare SOCKET
//! ```

#![forbid(unsafe_code)]

use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use ringdisk_nbd_protocol::handshake::{ExportInfo, OPTION_BYTES, OptionHead, greeting};
use ringdisk_nbd_protocol::numbers::{
    chunk, chunk_flags, command, export_flags, option, option_reply,
};
use ringdisk_nbd_protocol::options::{InfoReply, push_reply};
use ringdisk_nbd_protocol::reply::{Chunk, DATA_OFFSET_BYTES, EXTENDED_CHUNK_BYTES, SimpleReply};
use ringdisk_nbd_protocol::request::{COMPACT_BYTES, Request, Style};

type Failure = Box<dyn Error + Send + Sync>;

/// What is read at once, bytes.
const INPUT_BYTES: usize = 256 << 10;
/// Size of the disk, bytes.
const DISK_BYTES: u64 = 1 << 30;
/// Fixed newstyle, and no zeroes after the handshake.
const GREETING_FLAGS: u16 = 3;

fn main() -> Result<(), Failure> {
    let socket = std::env::args().nth(1).ok_or("nbd_bare SOCKET")?;
    for stream in UnixListener::bind(socket)?.incoming() {
        let stream = stream?;
        std::thread::spawn(move || {
            if let Err(error) = serve(stream) {
                eprintln!("nbd_bare: {error}");
            }
        });
    }
    Ok(())
}

/// Serves one client to its end.
fn serve(mut stream: UnixStream) -> Result<(), Failure> {
    handshake(&mut stream)?;
    let (mut input, mut len, mut out) = (vec![0; INPUT_BYTES], 0, Vec::new());
    loop {
        let count = stream.read(&mut input[len..])?;
        if count == 0 {
            return Ok(());
        }
        len += count;
        let mut at = 0;
        out.clear();
        while len - at >= COMPACT_BYTES {
            let request =
                Request::parse(Style::Structured, &input[at..]).map_err(|_| "no request")?;
            let bytes = usize::try_from(request.len)?;
            let payload = if request.command == command::WRITE { bytes } else { 0 };
            if len - at < COMPACT_BYTES + payload {
                break;
            }
            at += COMPACT_BYTES + payload;
            if request.command == command::DISCONNECT {
                return Ok(());
            }
            answer(&request, bytes, &mut out);
        }
        input.copy_within(at..len, 0);
        len -= at;
        stream.write_all(&out)?;
    }
}

/// Appends the answer to a read or a write.
fn answer(request: &Request, bytes: usize, out: &mut Vec<u8>) {
    let Request { cookie, offset, .. } = *request;
    if request.command == command::WRITE {
        out.extend(SimpleReply { error: 0, cookie }.to_bytes());
        return;
    }
    let len = (DATA_OFFSET_BYTES + bytes) as u64;
    let chunk =
        Chunk { flags: chunk_flags::DONE, kind: chunk::OFFSET_DATA, cookie, offset: 0, len };
    let mut head = [0; EXTENDED_CHUNK_BYTES];
    let head_bytes = chunk.put(Style::Structured, &mut head);
    out.extend(&head[..head_bytes]);
    out.extend(offset.to_be_bytes());
    out.resize(out.len() + bytes, 0);
}

/// Takes options until the client begins.
fn handshake(stream: &mut UnixStream) -> Result<(), Failure> {
    stream.write_all(&greeting(GREETING_FLAGS))?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; OPTION_BYTES];
        stream.read_exact(&mut head)?;
        let head = OptionHead::parse(&head).map_err(|error| error.0)?;
        stream.read_exact(&mut vec![0; head.len as usize])?;
        let mut out = Vec::new();
        if head.option == option::GO {
            let flags = export_flags::HAS_FLAGS | export_flags::CAN_MULTI_CONN;
            let mut info = Vec::new();
            InfoReply::Export(ExportInfo { size: DISK_BYTES, flags }).push(&mut info);
            push_reply(&mut out, head.option, option_reply::INFO, &info);
        }
        push_reply(&mut out, head.option, option_reply::ACK, &[]);
        stream.write_all(&out)?;
        if head.option == option::GO {
            return Ok(());
        }
    }
}
