//! Loads an NBD server as hard as one can: the client of `bench/nbd`.
//!
//! Each connection is a thread that keeps so many requests in flight. It reads what is there, takes
//! all replies of it, and sends the next requests with one system call; so the server is measured
//! and not the client. Offsets are random and aligned.
//!
//! ```text
//! nbd_load SOCKET [--connections N] [--depth N] [--bytes N] [--write] [--seconds N]
//! ```
//!
//! Prints a line of JSON: requests and seconds.

#![forbid(unsafe_code)]

use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringdisk_nbd_protocol::handshake::{
    GREETING_BYTES, OPTION_REPLY_BYTES, OptionReplyHead, client_flags, parse_greeting,
};
use ringdisk_nbd_protocol::numbers::{command, option, option_reply};
use ringdisk_nbd_protocol::options::{InfoReply, InfoRequest, is_error, push_option};
use ringdisk_nbd_protocol::reply::ReplyHead;
use ringdisk_nbd_protocol::request::{Request, Style};

type Failure = Box<dyn Error + Send + Sync>;

/// What is read at once, bytes.
const INPUT_BYTES: usize = 1 << 20;

#[derive(Clone, Debug)]
struct Load {
    socket: String,
    connections: usize,
    depth: usize,
    bytes: usize,
    writes: bool,
    time: Duration,
}

fn main() -> Result<(), Failure> {
    let load = arguments()?;
    let begun = Instant::now();
    let threads: Vec<_> = (0..load.connections)
        .map(|number| {
            let load = load.clone();
            std::thread::spawn(move || run(&load, number as u64))
        })
        .collect();
    let mut requests = 0;
    for thread in threads {
        requests += thread.join().map_err(|_| "a thread panicked")??;
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!("{{\"requests\": {requests}, \"seconds\": {seconds:.3}}}");
    Ok(())
}

fn arguments() -> Result<Load, Failure> {
    let mut words = std::env::args().skip(1);
    let mut load = Load {
        socket: words.next().ok_or("nbd_load SOCKET [OPTION]…")?,
        connections: 1,
        depth: 32,
        bytes: 4096,
        writes: false,
        time: Duration::from_secs(1),
    };
    while let Some(word) = words.next() {
        let mut number = || -> Result<usize, Failure> {
            Ok(words.next().ok_or_else(|| format!("{word} wants a number"))?.parse()?)
        };
        match word.as_str() {
            "--connections" => load.connections = number()?,
            "--depth" => load.depth = number()?,
            "--bytes" => load.bytes = number()?,
            "--seconds" => load.time = Duration::from_secs(number()? as u64),
            "--write" => load.writes = true,
            other => return Err(format!("{other} is not known").into()),
        }
    }
    Ok(load)
}

/// One connection. Gives the number of requests that were answered.
fn run(load: &Load, number: u64) -> Result<u64, Failure> {
    let mut stream = UnixStream::connect(&load.socket)?;
    let blocks = handshake(&mut stream)? / load.bytes as u64;
    let mut random = Random(number + 1);
    let mut out = Vec::with_capacity(load.depth * (load.bytes + 32));
    let (mut input, mut len) = (vec![0; INPUT_BYTES.max(4 * load.bytes)], 0);
    let (mut due, mut answered) = (load.depth, 0);
    let end = Instant::now() + load.time;
    let mut in_flight = 0;
    loop {
        out.clear();
        for _ in 0..due {
            let offset = random.next() % blocks * load.bytes as u64;
            let command = if load.writes { command::WRITE } else { command::READ };
            let len = load.bytes as u64;
            out.extend(Request { flags: 0, command, cookie: 1, offset, len }.to_compact());
            if load.writes {
                out.resize(out.len() + load.bytes, 7);
            }
        }
        stream.write_all(&out)?;
        in_flight += due;
        len += stream.read(&mut input[len..]).and_then(|count| match count {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => Ok(count),
        })?;
        let mut at = 0;
        let mut replies = 0;
        while let Some((head, bytes)) =
            ReplyHead::parse(Style::Structured, &input[at..len]).map_err(|error| error.0)?
        {
            let (payload, is_last) = match &head {
                ReplyHead::Simple(reply) if reply.error == 0 => (0, true),
                ReplyHead::Chunk(chunk) if !chunk.is_error() => {
                    (usize::try_from(chunk.len)?, chunk.is_done())
                }
                other => return Err(format!("the server answered {other:?}").into()),
            };
            if len - at < bytes + payload {
                break;
            }
            at += bytes + payload;
            replies += usize::from(is_last);
        }
        input.copy_within(at..len, 0);
        len -= at;
        answered += replies as u64;
        in_flight -= replies;
        due = if Instant::now() < end { replies } else { 0 };
        if in_flight == 0 && due == 0 {
            stream.write_all(
                &Request { command: command::DISCONNECT, ..Request::default() }.to_compact(),
            )?;
            return Ok(answered);
        }
    }
}

/// Comes to the first request. Gives the size of the disk.
fn handshake(stream: &mut UnixStream) -> Result<u64, Failure> {
    let mut greeting = [0; GREETING_BYTES];
    stream.read_exact(&mut greeting)?;
    parse_greeting(&greeting).map_err(|error| error.0)?;
    stream.write_all(&client_flags(3))?;
    ask(stream, option::STRUCTURED_REPLY, &[])?;
    let mut data = Vec::new();
    InfoRequest { name: b"", wanted: Vec::new() }.push(&mut data);
    ask(stream, option::GO, &data)?.ok_or_else(|| "the server says no size".into())
}

/// Sends an option. Gives the size of the disk, if an answer has it.
fn ask(stream: &mut UnixStream, option: u32, data: &[u8]) -> Result<Option<u64>, Failure> {
    let mut out = Vec::new();
    push_option(&mut out, option, data);
    stream.write_all(&out)?;
    let mut size = None;
    loop {
        let mut head = [0; OPTION_REPLY_BYTES];
        stream.read_exact(&mut head)?;
        let head = OptionReplyHead::parse(&head).map_err(|error| error.0)?;
        let mut answer = vec![0; head.len as usize];
        stream.read_exact(&mut answer)?;
        match head.kind {
            option_reply::ACK => return Ok(size),
            kind if is_error(kind) => return Err(format!("option {option} is refused").into()),
            option_reply::INFO => {
                if let Ok(InfoReply::Export(export)) = InfoReply::parse(&answer) {
                    size = Some(export.size);
                }
            }
            _ => {}
        }
    }
}

/// xorshift64 (Marsaglia 2003).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
