//! The life of a request: fetch, serve, reply.
//!
//! Promises: one task for each entry, for as long as the export lives. Never allocates, locks or
//! blocks; what waits (a disk that is slow) is this entry alone.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::time::Instant;

use ringdisk_ring::{Errno, IoBuf};

use crate::abi::{OUT_HEADER_BYTES, REQUEST_HEAD_BYTES, WRITE_DATA_OFFSET};
use crate::events::EndReason;
use crate::reply::{ReplyBuf, data_header, error_frame};
use crate::request::{ParseError, Request, opcode_expects_reply};
use crate::serve::{Answer, answer};

use super::queue::DevQueue;

/// Where data lies in an entry's memory: a page boundary, so that direct I/O needs no copy. The
/// header of a request ends and the header of a reply ends there too.
const DATA_AT: usize = 4096;

/// Memory of an entry, bytes.
pub(crate) fn entry_bytes(payload_bytes: usize) -> usize {
    DATA_AT + payload_bytes
}

/// What an entry sends back: a part of its memory, or nothing.
enum Reply {
    None,
    Frame { start: usize, len: usize, is_error: bool },
}

/// Serves requests until the export ends.
pub(crate) async fn serve_entry(queue: Rc<DevQueue>, entry: usize) {
    let transfer = queue.server.profile().transfer_bytes() as usize;
    let memory = queue.new_buffer(entry_bytes(transfer));
    let frame = memory.slice(DATA_AT - WRITE_DATA_OFFSET..DATA_AT + transfer);
    let data = memory.slice(DATA_AT..DATA_AT + transfer);
    queue.memory.enter(entry, Some(memory.clone()));
    let is_kept = queue.server.is_kept();
    loop {
        queue.memory.set_idle(entry, true);
        queue.fetch.wait_for_turn(&queue.ring, entry).await;
        queue.memory.set_idle(entry, false);
        if is_kept && queue.memory.take_cold(entry) {
            touch(&memory);
        }
        let fetched = fetch(&queue, entry, &frame).await;
        let Some(received) = fetched else { continue };
        let started = Instant::now();
        queue.begin(entry, started);
        let reply = serve(&queue, entry, received, &memory, &frame, &data).await;
        queue.end(entry, started);
        if let Reply::Frame { start, len, is_error } = reply {
            if is_error {
                queue.cells.errors.add(1);
            }
            send(&queue, &memory.slice(start..start + len)).await;
        }
    }
}

/// Takes the pages of an entry before it fetches.
///
/// A process that is being killed can take no new pages, and the kernel may yet make it read a
/// request: if that cannot be copied, the client gets EIO, and no other process ever sees the
/// request.
fn touch(memory: &IoBuf) {
    let page = rustix::param::page_size();
    for at in (0..memory.len()).step_by(page) {
        memory.copy_from_slice(at, &[0]);
    }
}

/// Waits for a request. `None`: there was none, the entry is idle again.
async fn fetch(queue: &DevQueue, entry: usize, frame: &IoBuf) -> Option<usize> {
    if !queue.fetch.is_enabled() {
        // Stopped between the permit and now: a fetch in the ring would escape the cancellation.
        queue.fetch.ended(&queue.ring, entry);
        queue.fetch_ended();
        return None;
    }
    let mut op = queue.ring.read_when_readable(queue.device, frame);
    let known = Cell::new(false);
    let result = poll_fn(|cx| {
        let polled = Pin::new(&mut op).poll(cx);
        // Without a free slot it is not in the ring at the first poll.
        if !known.get()
            && let Some(id) = op.id()
        {
            queue.fetch.submitted(entry, id);
            known.set(true);
        }
        polled
    })
    .await;
    match result {
        Ok(received) => {
            queue.fetch.fetched(&queue.ring, entry);
            queue.fetch_ended();
            return Some(received as usize);
        }
        // The kernel dropped a request between the wake-up and the read, or another queue took it.
        Err(Errno::AGAIN | Errno::INTR | Errno::NOENT) => queue.cells.eagain.add(1),
        // The queue was told to stop fetching.
        Err(Errno::CANCELED) => {}
        Err(Errno::NODEV) => queue.finish(EndReason::Unmounted),
        Err(Errno::CONNABORTED | Errno::NOTCONN) => queue.finish(EndReason::Aborted),
        Err(errno) => queue.finish(EndReason::Device(errno)),
    }
    queue.fetch.ended(&queue.ring, entry);
    queue.fetch_ended();
    None
}

async fn serve(
    queue: &DevQueue,
    entry: usize,
    received: usize,
    memory: &IoBuf,
    frame: &IoBuf,
    data: &IoBuf,
) -> Reply {
    let mut head = [0u8; REQUEST_HEAD_BYTES];
    let head_len = received.min(REQUEST_HEAD_BYTES).min(frame.len());
    frame.copy_to_slice(0, &mut head[..head_len]);
    let request = match Request::parse(&head[..head_len], received) {
        Ok(request) => request,
        Err(ParseError::Arguments { header }) if opcode_expects_reply(header.opcode) => {
            return put_error(memory, header.unique, Errno::INVAL);
        }
        Err(error) if error.is_fatal() => {
            queue.finish(EndReason::Protocol(error));
            return Reply::None;
        }
        Err(_) => return Reply::None,
    };
    let unique = request.header.unique;
    queue.will_use(entry, &request);
    match answer(&queue.ring, &queue.server, &queue.cells, &request, data).await {
        Answer::None => Reply::None,
        Answer::Data(len) => {
            let start = DATA_AT - OUT_HEADER_BYTES;
            memory.copy_from_slice(start, &data_header(unique, len));
            Reply::Frame { start, len: OUT_HEADER_BYTES + len, is_error: false }
        }
        Answer::Reply(reply) => put(memory, &reply),
    }
}

/// Copies a reply without data to the start of the entry's memory, which no request uses.
fn put(memory: &IoBuf, reply: &ReplyBuf) -> Reply {
    let bytes = reply.as_bytes();
    memory.copy_from_slice(0, bytes);
    Reply::Frame { start: 0, len: bytes.len(), is_error: reply.is_failure() }
}

fn put_error(memory: &IoBuf, unique: u64, errno: Errno) -> Reply {
    let bytes = error_frame(unique, errno);
    memory.copy_from_slice(0, &bytes);
    Reply::Frame { start: 0, len: bytes.len(), is_error: true }
}

async fn send(queue: &DevQueue, reply: &IoBuf) {
    // /dev/fuse takes a reply at once, so its completion is not worth a wait of its own.
    let sent = queue.ring.write(queue.device, 0, reply).completes_inline().await;
    match sent {
        // ENOENT: the caller was killed meanwhile. The others: the mount is gone, as the fetch will
        // see.
        Ok(_)
        | Err(
            Errno::NOENT
            | Errno::NODEV
            | Errno::NOTCONN
            | Errno::CONNABORTED
            | Errno::CANCELED
            | Errno::PERM,
        ) => {}
        Err(errno) => queue.finish(EndReason::Reply(errno)),
    }
}
