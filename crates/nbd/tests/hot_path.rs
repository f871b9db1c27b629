//! What a request costs once everything is warm: no allocation on queue threads, and few system
//! calls.

#![allow(clippy::unwrap_used)]
#![allow(clippy::cast_possible_truncation)]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::{Bytes, Disk, Format, ImageOptions, NullOptions, Source};
use ringdisk_nbd::{CommonOptions, Export, NamedDisk, NbdOptions};
use ringdisk_nbd_protocol::numbers::{command, option};
use ringdisk_nbd_protocol::options::{InfoRequest, push_option};
use ringdisk_nbd_protocol::request::Request;
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::allocations::{Counting, of_all_threads};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROUNDS: usize = 200;
const DEPTH: usize = 32;
const BLOCK: usize = 4096;

/// Enters transmission, with structured replies or with simple ones.
fn enter(stream: &mut UnixStream, is_structured: bool) {
    stream.read_exact(&mut [0; 18]).unwrap();
    let mut out = 3u32.to_be_bytes().to_vec();
    let mut replies = 20 + 2 + 12 + 20 + 2 + 10 + 20;
    if is_structured {
        push_option(&mut out, option::STRUCTURED_REPLY, &[]);
        replies += 20;
    }
    let mut data = Vec::new();
    InfoRequest::default().push(&mut data);
    push_option(&mut out, option::GO, &data);
    stream.write_all(&out).unwrap();
    stream.read_exact(&mut vec![0; replies]).unwrap();
}

/// Rounds of 32 requests at once; gives the allocations of the second half.
fn allocations(stream: &mut UnixStream, is_structured: bool, command: u16) -> u64 {
    let is_write = command == command::WRITE;
    let mut out = Vec::new();
    for number in 0..DEPTH as u64 {
        let (offset, len) = (number * BLOCK as u64, BLOCK as u64);
        out.extend(Request { command, cookie: number, offset, len, flags: 0 }.to_compact());
        out.resize(out.len() + if is_write { BLOCK } else { 0 }, 3);
    }
    let head = if is_structured && !is_write { 28 } else { 16 };
    let mut replies = vec![0; DEPTH * (head + if is_write { 0 } else { BLOCK })];
    let mut before = 0;
    for round in 0..2 * ROUNDS {
        if round == ROUNDS {
            before = of_all_threads();
        }
        stream.write_all(&out).unwrap();
        stream.read_exact(&mut replies).unwrap();
    }
    of_all_threads() - before
}

/// The same with one read of 512 KiB at a time, whose memory a slot does not have by itself.
fn large_allocations(stream: &mut UnixStream) -> u64 {
    const LEN: u64 = 512 << 10;
    let read = Request { command: command::READ, len: LEN, ..Request::default() }.to_compact();
    let mut reply = vec![0; 16 + LEN as usize];
    let mut before = 0;
    for round in 0..2 * ROUNDS {
        if round == ROUNDS {
            before = of_all_threads();
        }
        stream.write_all(&read).unwrap();
        stream.read_exact(&mut reply).unwrap();
    }
    of_all_threads() - before
}

/// One test, so that nothing else of this program allocates meanwhile.
#[test]
fn warm_requests_allocate_nothing_and_share_system_calls() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    std::fs::write(&image, vec![3u8; 1 << 20]).unwrap();
    let mut runtime = Runtime::new(Config::default()).unwrap();
    let ring = runtime.ring().clone();
    let raw = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
    let raw = runtime.block_on(Disk::open(&ring, Source::Path(image), &raw)).unwrap();
    drop((ring, runtime));
    let null = NullOptions { size: Bytes(1 << 30), read_zeroes: false, latency: Duration::ZERO };
    let disks = [("null", Disk::null(&null)), ("raw", raw)];
    for (name, disk) in disks {
        let socket = directory.path().join(name);
        let listeners = vec![UnixListener::bind(&socket).unwrap().into()];
        let options =
            NbdOptions { common: CommonOptions::with_threads(1), ..NbdOptions::default() };
        let disks = vec![NamedDisk::new("", Arc::clone(&disk))];
        let export = Export::start(disks, listeners, options).unwrap();
        for is_structured in [false, true] {
            for command in [command::READ, command::WRITE] {
                let mut stream = UnixStream::connect(&socket).unwrap();
                enter(&mut stream, is_structured);
                let before = export.stats().total();
                let count = allocations(&mut stream, is_structured, command);
                assert_eq!(count, 0, "{name}, structured {is_structured}, command {command}");
                let after = export.stats().total();
                let requests = after.requests - before.requests;
                assert_eq!(requests, (2 * ROUNDS * DEPTH) as u64);
                let enters = after.enters - before.enters;
                // How many requests storage ends at once is its own affair.
                let most = if name == "null" { requests / 2 } else { requests * 2 };
                assert!(enters < most, "{name}: {enters} enters for {requests} requests");
            }
        }
        let mut stream = UnixStream::connect(&socket).unwrap();
        enter(&mut stream, false);
        assert_eq!(large_allocations(&mut stream), 0, "{name}, larger requests");
        drop(export);
    }
}
