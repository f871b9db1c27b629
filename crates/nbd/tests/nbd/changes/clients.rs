//! NBD clients at work while the disk is changed: one whose request is in flight when the change
//! begins, one that writes in the middle of it, and others that write and read all the time.

use std::thread::JoinHandle;

use ringdisk_nbd::DirtyBitmap;
use ringdisk_nbd_protocol::numbers::{command, command_flags as flags};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_nbd_protocol::status::StatusPayload;

use super::world::{Cell, Change};
use crate::client::{Client, Reply, Server, data, flagged, request};

pub(super) const STYLE: Style = Style::Structured;

/// A range of the disk, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) len: u64,
}

impl Range {
    pub(super) fn indices(self) -> std::ops::Range<usize> {
        self.start as usize..(self.start + self.len) as usize
    }
}

/// Where the request of a cell is, and the one that comes in the middle of the change.
pub(super) const FIRST: Range = Range { start: 64 << 10, len: 40 << 10 };
pub(super) const LATER: Range = Range { start: 300 << 10, len: 12 << 10 };
/// The byte of the latter.
pub(super) const LATER_BYTE: u8 = 0x22;
/// What the bitmap of the export marks: nothing of the first 64 KiB of [`FIRST`].
const DIRTY: Range = Range { start: 128 << 10, len: 192 << 10 };
/// Connections that are at work all the time, and what each of them does so often.
pub(super) const WORKERS: usize = 2;
const ROUNDS: u8 = 3;

/// The requests, by command and flags; the last one is asked for the bitmap, too.
pub(super) const REQUESTS: [(u16, u16); 10] = [
    (command::READ, 0),
    (command::READ, flags::DF),
    (command::WRITE, 0),
    (command::WRITE, flags::FUA),
    (command::FLUSH, 0),
    (command::TRIM, 0),
    (command::WRITE_ZEROES, flags::NO_HOLE),
    (command::CACHE, 0),
    (command::BLOCK_STATUS, 0),
    (command::BLOCK_STATUS, 0),
];
const WITH_BITMAP: usize = REQUESTS.len() - 1;

pub(super) fn bitmap() -> DirtyBitmap {
    let ranges = std::iter::once(DIRTY.start..DIRTY.start + DIRTY.len).collect();
    DirtyBitmap { name: String::from("b"), ranges }
}

/// A client that has entered, with the contexts that its request needs.
pub(super) fn client(server: &Server, number: usize) -> Client {
    let all = ["base:allocation", "qemu:dirty-bitmap:b"];
    let contexts = if number == WITH_BITMAP { &all[..] } else { &all[..1] };
    let mut client = server.connect();
    client.greet();
    client.agree(STYLE);
    assert_eq!(client.set_contexts(contexts).len(), contexts.len());
    client.go("");
    client
}

/// The request of a cell, and what it sends.
pub(super) fn asked(number: usize) -> (Request, Vec<u8>) {
    let (command, flags) = REQUESTS[number];
    let (offset, len) = if command == command::FLUSH { (0, 0) } else { (FIRST.start, FIRST.len) };
    let bytes = if command == command::WRITE { vec![0x11; len as usize] } else { Vec::new() };
    (Request { cookie: 1, ..flagged(command, flags, offset, len) }, bytes)
}

/// The byte that a request leaves in its range.
pub(super) fn left_by(number: usize) -> Option<u8> {
    match REQUESTS[number].0 {
        command::WRITE => Some(0x11),
        // What was trimmed reads as zeroes on these disks.
        command::TRIM | command::WRITE_ZEROES => Some(0),
        _ => None,
    }
}

/// A reply that succeeded says what the request asks.
///
/// * `old`: what the disk shows in [`FIRST`].
pub(super) fn judge_reply(reply: &Reply, old: &[u8], cell: Cell) {
    match REQUESTS[cell.request].0 {
        command::READ => {
            assert!(data(reply, FIRST.start, FIRST.len as usize) == old, "{cell:?}");
        }
        command::BLOCK_STATUS => {
            let contexts = reply.chunks.len();
            assert_eq!(contexts, 1 + usize::from(cell.request == WITH_BITMAP), "{cell:?}");
            for (kind, payload) in &reply.chunks {
                let status = StatusPayload::parse(*kind, payload).unwrap();
                let extents: Vec<_> =
                    status.extents().map(|extent| (extent.len, extent.flags)).collect();
                if status.id == 1 {
                    // From 64 KiB on 64 KiB are clean: longer than the request.
                    assert_eq!(extents[0].1, 0, "{cell:?}");
                }
                assert!(extents[0].0 > 0, "{extents:?} {cell:?}");
            }
        }
        _ => assert!(reply.chunks.iter().all(|(_, data)| data.is_empty()), "{cell:?}"),
    }
}

/// The range of a worker, which no one else writes.
pub(super) fn work(worker: usize) -> Range {
    Range { start: (448 << 10) + worker as u64 * (24 << 10), len: 20 << 10 }
}

/// What a worker has seen.
pub(super) struct Worked {
    pub(super) client: Client,
    /// Each byte of its range is one of these.
    pub(super) may_be: Vec<u8>,
    /// Errors of requests.
    pub(super) errors: Vec<u32>,
}

/// Starts a worker: it writes its range, reads it back, asks for its status, and flushes.
///
/// * `byte`: what its range shows.
pub(super) fn start(mut client: Client, worker: usize, byte: u8, cell: Cell) -> JoinHandle<Worked> {
    let range = work(worker);
    std::thread::spawn(move || {
        let (mut may_be, mut errors) = (vec![byte], Vec::new());
        let ask = |command| request(command, range.start, range.len);
        for round in 0..ROUNDS {
            let new = 0x40 + 0x10 * worker as u8 + round;
            let written = client.call(STYLE, ask(command::WRITE), &vec![new; range.len as usize]);
            errors.push(written.error);
            // A snapshot that is applied takes it back at any time.
            if written.error == 0 && cell.change != Change::Apply {
                may_be.clear();
            }
            may_be.push(new);
            let read = client.call(STYLE, ask(command::READ), &[]);
            errors.push(read.error);
            if read.error == 0 {
                let bytes = data(&read, range.start, range.len as usize);
                let wrong = bytes.iter().find(|byte| !may_be.contains(byte));
                assert_eq!(wrong, None, "of {may_be:?}, worker {worker}, {cell:?}");
            }
            for command in [command::BLOCK_STATUS, command::FLUSH] {
                let len = if command == command::FLUSH { 0 } else { range.len };
                let asked = request(command, range.start, len);
                errors.push(client.call(STYLE, asked, &[]).error);
            }
        }
        errors.retain(|error| *error != 0);
        Worked { client, may_be, errors }
    })
}
