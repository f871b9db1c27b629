//! Block status: each context, with and without limits, filters and 64 bits.

use std::time::Duration;

use ringdisk_disk::Format;
use ringdisk_nbd::{DirtyBitmap, NamedDisk};
use ringdisk_nbd_protocol::numbers::{command, command_flags as flags, errno};
use ringdisk_nbd_protocol::request::Style;
use ringdisk_nbd_protocol::status::{StatusFilter, StatusPayload};
use ringdisk_testkit::process::ok_words;

use crate::client::{Client, Reply, Server, flagged, null, open, options, request};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
const CHUNKS: [Style; 2] = [Style::Structured, Style::Extended];

fn client(server: &Server, style: Style, contexts: &[&str]) -> Client {
    let mut client = server.connect();
    client.greet();
    client.agree(style);
    assert_eq!(client.set_contexts(contexts).len(), contexts.len());
    client.go("");
    client
}

/// The extents of each context.
fn extents(reply: &Reply) -> Vec<(u32, Vec<(u64, u64)>)> {
    assert_eq!((reply.error, reply.text.as_str()), (0, ""));
    let parse = |(kind, payload): &(u16, Vec<u8>)| {
        let status = StatusPayload::parse(*kind, payload).unwrap();
        (status.id, status.extents().map(|extent| (extent.len, extent.flags)).collect())
    };
    reply.chunks.iter().map(parse).collect()
}

/// A qcow2 of 64 MiB over a backing file of 8 MiB: data of its own at 1 MiB, data of the backing
/// file at 4 MiB, 64 KiB each.
fn chain(directory: &tempfile::TempDir) -> Server {
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (base, top) = (path("base.qcow2"), path("top.qcow2"));
    ok_words(&["qemu-img", "create", "-q", "-f", "qcow2", &base, "8M"]);
    ok_words(&["qemu-io", "-f", "qcow2", "-c", "write -P 1 4M 64k", &base]);
    let create = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2"];
    ok_words(&[&create[..], &[&top, "64M"]].concat());
    ok_words(&["qemu-io", "-f", "qcow2", "-c", "write -P 2 1M 64k", &top]);
    Server::of(open(top.as_ref(), Format::Qcow2))
}

#[test]
fn allocation_and_depth_follow_the_chain() {
    let directory = tempfile::tempdir().unwrap();
    let server = chain(&directory);
    let unit = 64 << 10;
    for style in CHUNKS {
        let both = ["base:allocation", "qemu:allocation-depth"];
        let mut client = client(&server, style, &both);
        let reply = client.call(style, request(command::BLOCK_STATUS, 0, SIZE), &[]);
        let (between, rest) = (3 * MIB - unit, SIZE - 4 * MIB - unit);
        let expected = |own: u64, none: u64, below: u64| {
            vec![(MIB, none), (unit, own), (between, none), (unit, below), (rest, none)]
        };
        assert_eq!(extents(&reply), [(0, expected(0, 3, 0)), (1, expected(1, 0, 2))]);
        // One extent, not longer than asked for.
        let one = flagged(command::BLOCK_STATUS, flags::REQ_ONE, MIB, 4096);
        let reply = client.call(style, one, &[]);
        assert_eq!(extents(&reply), [(0, vec![(4096, 0)]), (1, vec![(4096, 1)])]);
        let one = flagged(command::BLOCK_STATUS, flags::REQ_ONE, 0, SIZE);
        let reply = client.call(style, one, &[]);
        assert_eq!(extents(&reply), [(0, vec![(MIB, 3)]), (1, vec![(MIB, 0)])]);
    }
}

#[test]
fn a_null_disk_and_the_last_byte_have_a_status() {
    let server = Server::of(null(Duration::ZERO));
    for style in CHUNKS {
        let mut client = client(&server, style, &["base:allocation"]);
        for (offset, len) in [(0, SIZE), (SIZE - 1, 1), (5, 1000)] {
            let reply = client.call(style, request(command::BLOCK_STATUS, offset, len), &[]);
            let [(0, list)] = &extents(&reply)[..] else { panic!("{reply:?}") };
            assert_eq!(list.iter().map(|(len, _)| len).sum::<u64>(), len);
        }
        let past = client.call(style, request(command::BLOCK_STATUS, SIZE - 1, 2), &[]);
        assert_eq!(past.error, errno::EINVAL);
    }
}

#[test]
fn bitmaps_say_what_is_dirty_and_filters_choose_among_contexts() {
    let bitmap = |name: &str, ranges: Vec<std::ops::Range<u64>>| DirtyBitmap {
        name: name.to_owned(),
        ranges: ranges.into(),
    };
    let bitmaps = vec![bitmap("b0", std::iter::once(MIB..2 * MIB).collect()), bitmap("b1", vec![])];
    let disk = NamedDisk { bitmaps, ..NamedDisk::new("", null(Duration::ZERO)) };
    let server = Server::start(vec![disk], options(1));
    let style = Style::Extended;
    let contexts = ["base:allocation", "qemu:dirty-bitmap:b0", "qemu:dirty-bitmap:b1"];
    let mut client = client(&server, style, &contexts);
    let b0 = vec![(MIB, 0), (MIB, 1), (SIZE - 2 * MIB, 0)];
    let reply = client.call(style, request(command::BLOCK_STATUS, 0, SIZE), &[]);
    assert_eq!(extents(&reply)[1..], [(1, b0.clone()), (2, vec![(SIZE, 0)])]);
    let filter = |len: u64, ids: &[u32]| {
        let mut payload = Vec::new();
        StatusFilter::push(&mut payload, len, ids);
        (flagged(command::BLOCK_STATUS, flags::PAYLOAD_LEN, 0, payload.len() as u64), payload)
    };
    let (wanted, payload) = filter(SIZE, &[2, 1]);
    let reply = client.call(style, wanted, &payload);
    assert_eq!(extents(&reply), [(2, vec![(SIZE, 0)]), (1, b0)]);
    for (len, ids) in [(SIZE, &[3][..]), (SIZE, &[]), (SIZE, &[1, 1]), (SIZE, &[u32::MAX])] {
        let (wanted, payload) = filter(len, ids);
        let reply = client.call(style, wanted, &payload);
        let text = "CMD_BLOCK_STATUS payload not valid";
        assert_eq!((reply.error, reply.text.as_str()), (errno::EINVAL, text), "{ids:?}");
    }
    for (len, text) in [(0, "non-zero"), (SIZE + 1, "past EOF"), (u64::MAX, "past EOF")] {
        let (wanted, payload) = filter(len, &[0]);
        let reply = client.call(style, wanted, &payload);
        assert!(reply.error == errno::EINVAL && reply.text.contains(text), "{}", reply.text);
    }
    // Cut off, and far too long.
    for len in [3, 9, 70_000] {
        let wanted = flagged(command::BLOCK_STATUS, flags::PAYLOAD_LEN, 0, len);
        let reply = client.call(style, wanted, &vec![0; len as usize]);
        assert_eq!(reply.error, errno::EINVAL, "{len}");
    }
    assert_eq!(client.call(style, request(command::FLUSH, 0, 0), &[]).error, 0);
}
