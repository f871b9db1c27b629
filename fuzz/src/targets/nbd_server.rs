//! Any bytes of a client, to a server: nothing panics, the connection ends when the client does,
//! and the next one is served.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use ringdisk_disk::{Bytes, Disk, NullOptions};
use ringdisk_nbd::{CommonOptions, Export, NamedDisk, NbdOptions};
use ringdisk_nbd_protocol::numbers::option;
use ringdisk_nbd_protocol::options::{InfoRequest, MetaRequest, push_option};
use ringdisk_nbd_protocol::request::Request;

use crate::Input;

/// Size of the disk, bytes; offsets of requests lie on both sides of its end.
const DISK_BYTES: u64 = 1 << 20;
/// Longest wait for the end of a connection.
const LIMIT: Duration = Duration::from_secs(10);
/// Most parts of one input.
const PARTS_MAX: usize = 64;

/// The socket of an export that lives as long as the process. It has no name that would stay.
fn socket() -> &'static SocketAddr {
    // Reachable until the end, so that the sanitizer takes it for no leak.
    static SERVER: OnceLock<(SocketAddr, Mutex<Export>)> = OnceLock::new();
    let (socket, _) = SERVER.get_or_init(|| {
        let name = format!("ringdisk-fuzz-{}", std::process::id());
        let socket = SocketAddr::from_abstract_name(name).expect("an address");
        let listener = UnixListener::bind_addr(&socket).expect("a socket");
        let size = Bytes(DISK_BYTES);
        let null = NullOptions { size, read_zeroes: true, ..NullOptions::default() };
        let disks = vec![NamedDisk::new("", Disk::null(&null))];
        let common = CommonOptions::with_threads(1);
        let options = NbdOptions { common, ..NbdOptions::default() };
        let export = Export::start(disks, vec![listener.into()], options).expect("an export");
        (socket, Mutex::new(export))
    });
    socket
}

/// Options that are as they should be, requests whose fields are chosen, or any bytes.
fn part(input: &mut Input<'_>, out: &mut Vec<u8>) {
    let mut data = Vec::new();
    match input.byte() % 8 {
        0 => push_option(out, option::STRUCTURED_REPLY, &[]),
        1 => push_option(out, option::EXTENDED_HEADERS, &[]),
        2 => {
            MetaRequest { export: b"", queries: vec![b"base:allocation"] }.push(&mut data);
            push_option(out, option::SET_META_CONTEXT, &data);
        }
        3 => {
            InfoRequest { name: b"", wanted: vec![u16::from(input.byte())] }.push(&mut data);
            push_option(out, option::GO, &data);
        }
        kind @ (4 | 5) => {
            let request = Request {
                flags: u16::from(input.byte() % 64),
                command: u16::from(input.byte() % 10),
                cookie: 7,
                offset: input.number(3),
                len: u64::from(input.byte()) * 64,
            };
            match kind {
                4 => out.extend(request.to_compact()),
                _ => out.extend(request.to_extended()),
            }
            // The payload that a write has.
            if request.command == 1 {
                out.resize(out.len() + request.len as usize, 1);
            }
        }
        6 => {
            let (number, len) = (u32::from(input.byte() % 13), usize::from(input.byte()));
            push_option(out, number, &vec![input.byte(); len]);
        }
        _ => out.extend(input.number(8).to_be_bytes()),
    }
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input(bytes);
    let mut out = u32::from(input.byte() % 4).to_be_bytes().to_vec();
    for _ in 0..PARTS_MAX {
        if input.is_empty() {
            break;
        }
        part(&mut input, &mut out);
    }
    let mut stream = UnixStream::connect_addr(socket()).expect("the server is there");
    stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
    stream.set_write_timeout(Some(LIMIT)).expect("a timeout");
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).expect("a greeting");
    // The server may have ended the connection by then.
    let _ = stream.write_all(&out);
    let _ = stream.shutdown(Shutdown::Write);
    let mut replies = Vec::new();
    if let Err(error) = stream.read_to_end(&mut replies) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "it ends");
    }
}
