//! Requests: each command in each style, and each trap.

use std::time::Duration;

use ringdisk_disk::{Disk, Format, ImageOptions};
use ringdisk_nbd::NamedDisk;
use ringdisk_nbd_protocol::numbers::{chunk, command, command_flags as flags, errno};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_ring::Errno;
use ringdisk_testkit::process::ok_words;
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use crate::client::{
    Client, Reply, STYLES, Server, data, flagged, null, open, options, raw, request,
};

const SIZE: u64 = 64 << 20;
const MIB: u64 = 1 << 20;

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed) | 1).collect()
}

#[test]
fn what_is_written_is_read_in_every_style_and_size() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::of(raw(&directory).0);
    for (style, seed) in STYLES.into_iter().zip([1, 2, 3]) {
        let mut client = server.client(style);
        for (offset, len) in [
            (0, 0),
            (0, 1),
            (511, 1027),
            (4096, 4096),
            (MIB - 5, 70_000),
            (2 * MIB, 256 << 10),
            (3 * MIB + 1, (256 << 10) + 1),
            (8 * MIB, 32 << 20),
            (SIZE - 3, 3),
        ] {
            let bytes = pattern(len, seed);
            let write = request(command::WRITE, offset, len as u64);
            assert_eq!(client.call(style, write, &bytes).error, 0, "{style:?} {len}");
            let read = request(command::READ, offset, len as u64);
            let reply = client.call(style, read, &[]);
            assert!(data(&reply, offset, len) == bytes, "{style:?} {offset} {len}");
        }
    }
}

#[test]
fn many_requests_in_flight_are_answered_each_once_in_any_order() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::of(raw(&directory).0);
    for style in STYLES {
        let mut client = server.client(style);
        // More than a connection has slots for.
        for number in 0..300 {
            let bytes = pattern(4096, number as u8);
            let write = Request { cookie: number, ..request(command::WRITE, number * 4096, 4096) };
            client.start(style, write, &bytes);
        }
        let mut seen: Vec<u64> = (0..300)
            .map(|_| {
                let reply = client.reply_of(style, |_| 0);
                assert_eq!(reply.error, 0);
                reply.cookie
            })
            .collect();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..300));
        for number in 0..100 {
            let read = Request { cookie: number, ..request(command::READ, number * 4096, 4096) };
            client.start(style, read, &[]);
        }
        for _ in 0..100 {
            let reply = client.reply_of(style, |_| 4096);
            let expected = pattern(4096, reply.cookie as u8);
            assert!(data(&reply, reply.cookie * 4096, 4096) == expected);
        }
    }
}

#[test]
fn a_request_that_comes_in_pieces_is_one() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::of(raw(&directory).0);
    let mut client = server.client(Style::Structured);
    let bytes = pattern(100, 9);
    let mut all = request(command::WRITE, 5, 100).to_compact().to_vec();
    all.extend(&bytes);
    send_in_pieces(&mut client, &all);
    assert_eq!(client.reply_of(Style::Structured, |_| 0).error, 0);
    send_in_pieces(&mut client, &request(command::READ, 5, 100).to_compact());
    let reply = client.reply_of(Style::Structured, |_| 0);
    assert_eq!(data(&reply, 5, 100), bytes);
}

fn send_in_pieces(client: &mut Client, bytes: &[u8]) {
    for piece in bytes.chunks(17) {
        client.send(piece);
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn other_commands_do_what_they_say() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, path) = raw(&directory);
    let mut server = Server::of(disk);
    for style in STYLES {
        let mut client = server.client(style);
        let bytes = pattern(3 << 20, 7);
        let fua = flags::FUA;
        let write = flagged(command::WRITE, fua, 0, bytes.len() as u64);
        assert_eq!(client.call(style, write, &bytes).error, 0);
        for wanted in [
            flagged(command::WRITE_ZEROES, 0, 0, 4096),
            flagged(command::WRITE_ZEROES, flags::NO_HOLE | fua, 4096, 4096),
            flagged(command::WRITE_ZEROES, flags::FAST_ZERO, 8192, 4096),
            flagged(command::TRIM, fua, 16 << 10, 64 << 10),
            flagged(command::CACHE, 0, 0, MIB),
            flagged(command::CACHE, fua, 0, 0),
            request(command::FLUSH, 0, 0),
            flagged(command::FLUSH, fua, u64::MAX, 77),
            request(command::TRIM, SIZE, 0),
            request(command::WRITE, SIZE, 0),
        ] {
            let reply = client.call(style, wanted, &[]);
            assert_eq!((reply.error, reply.text.as_str()), (0, ""), "{style:?} {wanted:?}");
        }
        let reply = client.call(style, request(command::READ, 0, 12288), &[]);
        assert!(data(&reply, 0, 12288).iter().all(|byte| *byte == 0));
        let reply = client.call(style, request(command::READ, MIB, 2 * MIB), &[]);
        assert!(data(&reply, MIB, 2 << 20) == bytes[1 << 20..]);
        client.start(style, request(command::DISCONNECT, 0, 0), &[]);
        assert!(client.is_closed());
    }
    server.stop().unwrap();
    assert!(std::fs::read(path).unwrap()[MIB as usize..3 << 20] == pattern(3 << 20, 7)[1 << 20..]);
}

#[test]
fn requests_that_cannot_be_are_refused_and_the_next_one_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::of(raw(&directory).0);
    let past = "operation past EOF; From: 67108608, Len: 512, Size: 67108864";
    for style in [Style::Structured, Style::Extended] {
        let mut client = server.client(style);
        for (wanted, payload, error, text) in [
            (request(command::READ, SIZE - 256, 512), 0, errno::EINVAL, past),
            (request(command::WRITE, SIZE - 256, 512), 512, errno::ENOSPC, past),
            (request(command::WRITE_ZEROES, SIZE - 256, 512), 0, errno::ENOSPC, past),
            (request(command::TRIM, SIZE - 256, 512), 0, errno::EINVAL, past),
            (request(command::READ, 1 << 63, 512), 0, errno::EINVAL, "past EOF"),
            (request(command::READ, u64::MAX, 512), 0, errno::EINVAL, "past EOF"),
            (request(command::WRITE, u64::MAX, 70_000), 70_000, errno::ENOSPC, "past EOF"),
            (
                request(command::READ, 0, 33 * MIB),
                0,
                errno::EINVAL,
                "larger than max len (33554432)",
            ),
            (request(command::CACHE, 0, 33 * MIB), 0, errno::EINVAL, "larger than max len"),
            (request(99, 0, 0), 0, errno::EINVAL, "invalid request type (99) received"),
            (request(command::RESIZE, 0, 0), 0, errno::EINVAL, "invalid request type (8)"),
            (
                flagged(command::READ, flags::REQ_ONE, 0, 512),
                0,
                errno::EINVAL,
                "unsupported flags for command read (got 0x8)",
            ),
            (
                flagged(command::WRITE, flags::DF, 0, 512),
                512,
                errno::EINVAL,
                "unsupported flags for command write (got 0x4)",
            ),
            (request(command::BLOCK_STATUS, 0, 0), 0, errno::EINVAL, "need non-zero length"),
            (request(command::BLOCK_STATUS, 0, 512), 0, errno::EINVAL, "not negotiated"),
        ] {
            let reply = client.call(style, wanted, &vec![0; payload]);
            assert_eq!(reply.error, error, "{wanted:?}: {}", reply.text);
            assert!(reply.text.contains(text), "{wanted:?}: {}", reply.text);
        }
        assert_eq!(client.call(style, request(command::FLUSH, 0, 0), &[]).error, 0);
    }
    let mut client = server.client(Style::Simple);
    let reply = client.call(Style::Simple, flagged(command::READ, flags::DF, 0, 512), &[]);
    assert_eq!(reply.error, errno::EINVAL);
    assert_eq!(client.call(Style::Simple, request(command::READ, 0, 512), &[]).error, 0);
}

#[test]
fn a_payload_of_more_than_32_mib_ends_the_connection_and_no_other() {
    let server = Server::of(null(Duration::ZERO));
    let mut other = server.client(Style::Structured);
    for style in STYLES {
        let mut client = server.client(style);
        client.start(style, request(command::WRITE, 0, 33 * MIB), &[]);
        let reply = client.reply_of(style, |_| 0);
        assert_eq!(reply.error, errno::EINVAL);
        assert!(client.is_closed());
    }
    let mut client = server.client(Style::Extended);
    client.start(Style::Extended, request(command::WRITE, 0, u64::MAX), &[]);
    assert_eq!(client.reply_of(Style::Extended, |_| 0).error, errno::EINVAL);
    assert!(client.is_closed());
    assert_eq!(other.call(Style::Structured, request(command::FLUSH, 0, 0), &[]).error, 0);
}

#[test]
fn payloads_of_extended_heads_are_taken_also_where_they_make_no_sense() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::of(raw(&directory).0);
    let style = Style::Extended;
    let mut client = server.client(style);
    let bytes = pattern(512, 3);
    // Without the flag, as with it.
    for flags in [0, flags::PAYLOAD_LEN] {
        assert_eq!(client.call(style, flagged(command::WRITE, flags, 0, 512), &bytes).error, 0);
    }
    let wrong = flagged(command::READ, flags::PAYLOAD_LEN, 0, 512);
    assert_eq!(client.call(style, wrong, &bytes).error, errno::EINVAL);
    let reply = client.call(style, request(command::READ, 0, 512), &[]);
    assert_eq!(data(&reply, 0, 512), bytes);
}

#[test]
fn a_bad_magic_number_is_answered_and_ends_the_connection() {
    let server = Server::of(null(Duration::ZERO));
    let mut client = server.client(Style::Structured);
    let mut bytes = request(command::FLUSH, 0, 0).to_compact();
    bytes[..4].copy_from_slice(&0x1234_5678u32.to_be_bytes());
    client.send(&bytes);
    let reply = client.reply_of(Style::Structured, |_| 0);
    assert_eq!(reply.text, "invalid magic (got 0x12345678, expected 0x25609513)");
    assert!(client.is_closed());
}

#[test]
fn a_read_only_disk_takes_no_change_and_flushes() {
    let disk = NamedDisk { read_only: true, ..NamedDisk::new("", null(Duration::ZERO)) };
    let server = Server::start(vec![disk], options(1));
    let mut client = server.connect();
    client.greet();
    client.agree(Style::Structured);
    assert_eq!(client.go("").flags, 0x058f);
    for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
        let payload = if command == command::WRITE { 512 } else { 0 };
        let reply = client.call(Style::Structured, request(command, 0, 512), &vec![0; payload]);
        assert_eq!((reply.error, reply.text.as_str()), (errno::EPERM, "Export is read-only"));
    }
    assert_eq!(client.call(Style::Structured, request(command::FLUSH, 0, 0), &[]).error, 0);
}

#[test]
fn holes_are_chunks_unless_one_chunk_is_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    let file = path.to_str().unwrap();
    ok_words(&["qemu-img", "create", "-f", "qcow2", file, "64M"]);
    let server = Server::of(open(&path, Format::Qcow2));
    for style in [Style::Structured, Style::Extended] {
        let mut client = server.client(style);
        let bytes = pattern(64 << 10, 5);
        for at in [MIB, 3 * MIB] {
            let write = request(command::WRITE, at, 64 << 10);
            assert_eq!(client.call(style, write, &bytes).error, 0);
        }
        let mut expected = vec![0; 4 << 20];
        for at in [1 << 20, 3 << 20] {
            expected[at..at + (64 << 10)].copy_from_slice(&bytes);
        }
        let kinds = |reply: &Reply| reply.chunks.iter().map(|(kind, _)| *kind).collect::<Vec<_>>();
        let (hole, full) = (chunk::OFFSET_HOLE, chunk::OFFSET_DATA);
        let reply = client.call(style, request(command::READ, 0, 4 * MIB), &[]);
        assert_eq!(kinds(&reply), [hole, full, hole, full, hole]);
        assert!(data(&reply, 0, 4 << 20) == expected);
        // From the middle of data to the middle of data.
        let (from, len) = (MIB + 100, (2 << 20) + 1000);
        let reply = client.call(style, request(command::READ, from, len), &[]);
        assert_eq!(kinds(&reply), [full, hole, full]);
        let slice = &expected[from as usize..(from + len) as usize];
        assert!(data(&reply, from, len as usize) == slice);
        let reply = client.call(style, flagged(command::READ, flags::DF, 0, 4 * MIB), &[]);
        assert_eq!(kinds(&reply), [full]);
        assert!(data(&reply, 0, 4 << 20) == expected);
    }
    // A simple reply has no holes.
    let mut client = server.client(Style::Simple);
    let reply = client.call(Style::Simple, request(command::READ, 0, 4 * MIB), &[]);
    assert!(data(&reply, 0, 4 << 20)[..1 << 20].iter().all(|byte| *byte == 0));
}

#[test]
fn an_error_of_the_disk_reaches_the_client_with_its_number() {
    let sim = SimStorage::new(SIZE, 1);
    let fail = |kind, errno| sim.on(When::kind(kind).once(), Fault::Fail(errno));
    let server = Server::of(Disk::from_storage(sim.storage(), &ImageOptions::default()));
    for style in STYLES {
        let mut client = server.client(style);
        for (kind, errno, command, len, expected) in [
            (OpKind::Read, Errno::IO, command::READ, 4096, errno::EIO),
            (OpKind::Write, Errno::NOSPC, command::WRITE, 4096, errno::ENOSPC),
            (OpKind::Write, Errno::DQUOT, command::WRITE, 4096, errno::ENOSPC),
            (OpKind::Flush, Errno::IO, command::FLUSH, 0, errno::EIO),
        ] {
            fail(kind, errno);
            let payload = vec![1; if command == command::WRITE { len } else { 0 }];
            let reply = client.call(style, request(command, 0, len as u64), &payload);
            assert_eq!(reply.error, expected, "{style:?} {kind:?}");
            sim.clear_rules();
        }
        assert_eq!(client.call(style, request(command::FLUSH, 0, 0), &[]).error, 0);
    }
}
