//! Builds the reply of a request in the memory of its slot.
//!
//! Promises: a reply is in one or a few parts of the slot's memory, heads and data side by side, so
//! nothing is copied and, except for errors and block status, nothing is allocated.

use ringdisk_nbd_protocol::numbers::{NAME_BYTES_MAX, chunk, chunk_flags, command};
use ringdisk_nbd_protocol::reply::{
    Chunk, DATA_OFFSET_BYTES, ERROR_BYTES, EXTENDED_CHUNK_BYTES, ErrorPayload, HOLE_BYTES, Hole,
    SIMPLE_BYTES, SimpleReply,
};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_ring::IoBuf;

use super::slot::{Run, Slot};
use super::validate::Refusal;
use super::{HEAD_BYTES, Session};

/// Bytes of a hole that a chunk for it and the head of the next data fit into.
pub(super) const HOLE_ROOM_BYTES: usize = 2 * EXTENDED_CHUNK_BYTES + HOLE_BYTES + DATA_OFFSET_BYTES;

impl Session {
    /// The request is done; there is no data.
    pub(super) fn answer(&self, slot: &Slot, request: &Request) {
        let memory = slot.memory();
        let cookie = request.cookie;
        let len = match self.style {
            // A read is answered by chunks, also one of no bytes.
            Style::Simple => put_simple(&memory, 0, cookie, 0),
            Style::Structured if request.command != command::READ => {
                put_simple(&memory, 0, cookie, 0)
            }
            Style::Structured | Style::Extended => {
                let flags = chunk_flags::DONE;
                self.put_chunk(&memory, 0, request, Chunk { flags, ..Chunk::default() })
            }
        };
        slot.reply.borrow_mut().push((0, len));
        self.answered(slot);
    }

    /// The request was a read; its first `len` bytes of data are the reply.
    pub(super) fn answer_data(&self, slot: &Slot, request: &Request, len: usize) {
        if len == 0 {
            return self.answer(slot, request);
        }
        let memory = slot.memory();
        let start = match self.style {
            Style::Simple => {
                let start = HEAD_BYTES - SIMPLE_BYTES;
                put_simple(&memory, start, request.cookie, 0);
                start
            }
            Style::Structured | Style::Extended => {
                let run = Run { at: 0, len, is_hole: false };
                self.put_data_head(&memory, request, run, true)
            }
        };
        slot.reply.borrow_mut().push((start, HEAD_BYTES + len));
        self.answered(slot);
    }

    /// The request was a read; the slot's runs are the reply. Holes between data have
    /// [`HOLE_ROOM_BYTES`] at least. Not for [`Style::Simple`].
    pub(super) fn answer_runs(&self, slot: &Slot, request: &Request) {
        let memory = slot.memory();
        {
            let (runs, mut reply) = (slot.runs.borrow(), slot.reply.borrow_mut());
            let mut before: Option<Run> = None;
            for (index, run) in runs.iter().enumerate() {
                let is_last = index + 1 == runs.len();
                if run.is_hole {
                    // Right behind the data before it, in its own room.
                    let start = HEAD_BYTES + run.at;
                    let end = start + self.put_hole(&memory, start, request, *run, is_last);
                    match reply.last_mut().filter(|_| before.is_some()) {
                        Some(part) => part.1 = end,
                        None => reply.push((start, end)),
                    }
                } else {
                    // Right before its data, in the room of the hole before it.
                    let start = self.put_data_head(&memory, request, *run, is_last);
                    reply.push((start, HEAD_BYTES + run.at + run.len));
                }
                before = Some(*run);
            }
        }
        self.answered(slot);
    }

    /// The slot's bytes, whole chunks, are the reply.
    pub(super) fn answer_bytes(&self, slot: &Slot) {
        let bytes = slot.bytes.borrow();
        slot.memory().copy_from_slice(0, &bytes);
        slot.reply.borrow_mut().push((0, bytes.len()));
        self.answered(slot);
    }

    /// The request is answered with an error. Allocates nothing itself.
    pub(super) fn refuse(&self, slot: &Slot, request: &Request, refusal: &Refusal) {
        self.queue.cells.errors.add(1);
        let memory = slot.memory();
        let len = match self.style {
            Style::Simple => put_simple(&memory, 0, request.cookie, refusal.error),
            Style::Structured | Style::Extended => {
                let text = refusal.text.as_bytes();
                let text = &text[..text.len().min(NAME_BYTES_MAX - EXTENDED_CHUNK_BYTES)];
                let (flags, kind) = (chunk_flags::DONE, chunk::ERROR);
                let len = (ERROR_BYTES + text.len()) as u64;
                let head = Chunk { flags, kind, len, ..Chunk::default() };
                let at = self.put_chunk(&memory, 0, request, head);
                memory.copy_from_slice(at, &ErrorPayload::head(refusal.error, text.len()));
                memory.copy_from_slice(at + ERROR_BYTES, text);
                at + ERROR_BYTES + text.len()
            }
        };
        slot.reply.borrow_mut().push((0, len));
        self.answered(slot);
    }

    /// The reply is complete.
    fn answered(&self, slot: &Slot) {
        if let Some(begun) = slot.begun.take() {
            self.queue.cells.end_since(begun);
            // Unsent before it is no longer in flight: the end of the export waits for both.
            self.finish(slot);
            self.queue.admission.end(self.ring());
        } else {
            self.finish(slot);
        }
    }

    /// Writes the head of a chunk. Gives the byte after it.
    fn put_chunk(&self, memory: &IoBuf, at: usize, request: &Request, chunk: Chunk) -> usize {
        let mut head = [0; EXTENDED_CHUNK_BYTES];
        let chunk = Chunk { cookie: request.cookie, offset: request.offset, ..chunk };
        let len = chunk.put(self.style, &mut head);
        memory.copy_from_slice(at, &head[..len]);
        at + len
    }

    /// Writes the head of a chunk of data so that it ends where the data begins. Gives its first
    /// byte.
    fn put_data_head(&self, memory: &IoBuf, request: &Request, run: Run, is_last: bool) -> usize {
        let flags = if is_last { chunk_flags::DONE } else { 0 };
        let len = (DATA_OFFSET_BYTES + run.len) as u64;
        let mut head = [0; EXTENDED_CHUNK_BYTES + DATA_OFFSET_BYTES];
        let (cookie, offset, kind) = (request.cookie, request.offset, chunk::OFFSET_DATA);
        let chunk = Chunk { flags, kind, cookie, offset, len };
        let mut first = [0; EXTENDED_CHUNK_BYTES];
        let end = chunk.put(self.style, &mut first);
        head[..end].copy_from_slice(&first[..end]);
        let at = (request.offset + run.at as u64).to_be_bytes();
        head[end..end + DATA_OFFSET_BYTES].copy_from_slice(&at);
        let start = HEAD_BYTES + run.at - end - DATA_OFFSET_BYTES;
        memory.copy_from_slice(start, &head[..end + DATA_OFFSET_BYTES]);
        start
    }

    /// Writes a chunk for a hole. Gives its length.
    fn put_hole(
        &self,
        memory: &IoBuf,
        at: usize,
        request: &Request,
        run: Run,
        is_last: bool,
    ) -> usize {
        let flags = if is_last { chunk_flags::DONE } else { 0 };
        let (kind, len) = (chunk::OFFSET_HOLE, HOLE_BYTES as u64);
        let end =
            self.put_chunk(memory, at, request, Chunk { flags, kind, len, ..Chunk::default() });
        // Not above 32 MiB.
        let len = u32::try_from(run.len).unwrap_or(u32::MAX);
        let hole = Hole { offset: request.offset + run.at as u64, len };
        memory.copy_from_slice(end, &hole.to_bytes());
        end + HOLE_BYTES - at
    }
}

/// Writes a simple reply. Gives the byte after it.
fn put_simple(memory: &IoBuf, at: usize, cookie: u64, error: u32) -> usize {
    memory.copy_from_slice(at, &SimpleReply { error, cookie }.to_bytes());
    at + SIMPLE_BYTES
}
