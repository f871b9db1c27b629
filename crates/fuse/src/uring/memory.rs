//! What an entry shares with the kernel.
//!
//! The headers of a queue are one array. The payload is the entry's own (part of a mapping, of
//! which only the pages that requests use are ever taken), a buffer of the queue's pool that the
//! kernel names for each request, or pages of the client that we cannot touch.
//!
//! Promises: the memory outlives every ring that knows its addresses: threads close their rings
//! before they let go of it.

use std::ops::Range;
use std::sync::Arc;

use ringdisk_ring::{Errno, IoBuf, SharedMemory};
use zerocopy::FromBytes;

use crate::abi::uring::{
    COMMIT_ID, ENTRY_FLAGS, ENTRY_ZERO_COPY, HEADER_BYTES, OP_IN, OP_IN_BYTES, PAYLOAD_SIZE,
    POOL_OFFSET,
};
use crate::abi::{IN_HEADER_BYTES, InHeader, OUT_HEADER_BYTES, opcode};
use crate::reply::{ReplyBuf, data_header, error_frame};
use crate::request::{Operation, ParseError, Request};

use super::plan::{HEADER_STRIDE, PAGE_BYTES};
use super::pool::{MEMORY_SLOT, Pool};

/// Where the vector lies: two addresses with their lengths.
const VECTOR_AT: usize = HEADER_BYTES;
const VECTOR_BYTES: usize = 32;

/// The memory of one entry, for any thread.
#[derive(Clone, Debug)]
pub(super) struct EntryMemory {
    headers: Arc<SharedMemory>,
    /// Number inside the queue.
    number: usize,
    /// Queue of the kernel.
    queue: u16,
    /// Those of the whole queue: pairs of them may share a huge page.
    payloads: Arc<SharedMemory>,
    payload_bytes: usize,
}

impl EntryMemory {
    /// Memory for the entries of one queue. Payloads are address space until they are used, which
    /// with a pool is never.
    pub(super) fn of_queue(queue: u16, entries: usize, payload_bytes: usize) -> Vec<EntryMemory> {
        // Pages of their own, which no thread touches before the one that registers them: so they
        // come from its node.
        let headers = SharedMemory::mapped(entries * HEADER_STRIDE);
        let payloads = SharedMemory::new(entries * payload_bytes, PAGE_BYTES);
        payloads.advise_small_pages();
        let entry = |number| EntryMemory {
            headers: Arc::clone(&headers),
            number,
            queue,
            payloads: Arc::clone(&payloads),
            payload_bytes,
        };
        (0..entries).map(entry).collect()
    }

    /// The memory of its whole queue: headers and payloads.
    pub(super) fn of_whole_queue(&self) -> [&SharedMemory; 2] {
        [&self.headers, &self.payloads]
    }

    /// Its payload, inside those of the queue.
    pub(super) fn payload(&self) -> Range<usize> {
        let start = self.number * self.payload_bytes;
        start..start + self.payload_bytes
    }

    /// As buffers of the calling thread.
    ///
    /// * `index`: number of the entry among all.
    pub(super) fn here(&self, index: usize, pool: Option<&Arc<Pool>>) -> Frame {
        let start = self.number * HEADER_STRIDE;
        let payload = match pool {
            None => Payload::Own(self.payloads.buffer().slice(self.payload())),
            Some(pool) => Payload::Pool {
                memory: match pool.is_pinned() {
                    true => pool.memory.fixed_buffer(MEMORY_SLOT),
                    false => pool.memory.buffer(),
                },
                pages: pool
                    .zero_copy
                    .then(|| IoBuf::client_pages(Pool::slot(index), pool.buffer_bytes)),
                pool: Arc::clone(pool),
                queue: self.queue,
            },
        };
        Frame { header: self.headers.buffer().slice(start..start + HEADER_STRIDE), payload }
    }
}

/// Where the payloads of an entry are.
enum Payload {
    Own(IoBuf),
    Pool { memory: IoBuf, pages: Option<IoBuf>, pool: Arc<Pool>, queue: u16 },
}

/// The memory of one entry, on one thread.
pub(super) struct Frame {
    header: IoBuf,
    payload: Payload,
}

/// A request that the kernel put into an entry.
pub(super) struct Incoming {
    /// By which it is committed.
    pub(super) number: u64,
    /// Errors: arguments that do not fit their operation; the request can be answered.
    pub(super) request: Result<Request, ParseError>,
    /// Where the data of a READ go and those of a WRITE are: our memory, or pages of the client.
    pub(super) data: IoBuf,
    /// Where anything else that the reply carries goes; always our memory.
    pub(super) body: IoBuf,
}

impl Incoming {
    /// The user id of the client that opens the file; `None`: the request is no open.
    pub(super) fn opener(&self) -> Option<u32> {
        let request = self.request.as_ref().ok()?;
        matches!(request.operation, Operation::Open(_)).then_some(request.header.uid)
    }
}

impl Frame {
    /// Writes the vector for REGISTER and returns its address.
    pub(super) fn vector(&self) -> u64 {
        let payload = match &self.payload {
            Payload::Own(payload) => [payload.address() as u64, payload.len() as u64],
            Payload::Pool { .. } => [0, 0],
        };
        let words = [self.header.address() as u64, HEADER_BYTES as u64, payload[0], payload[1]];
        let mut bytes = [0; VECTOR_BYTES];
        for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *place = word.to_ne_bytes();
        }
        self.header.copy_from_slice(VECTOR_AT, &bytes);
        self.header.address() as u64 + VECTOR_AT as u64
    }

    /// Overwrites the header, as the kernel does.
    pub(super) fn put_all(&self, header: &[u8; HEADER_BYTES]) {
        self.header.copy_from_slice(0, header);
    }

    /// The payload, where it is this entry's alone.
    pub(super) fn own_payload(&self) -> Option<IoBuf> {
        match &self.payload {
            Payload::Own(payload) => Some(payload.clone()),
            Payload::Pool { .. } => None,
        }
    }

    /// The slot of the entry's client pages, if it has one.
    pub(super) fn slot(&self, index: usize) -> Option<u16> {
        match &self.payload {
            Payload::Pool { pages: Some(_), .. } => Some(Pool::slot(index)),
            _ => None,
        }
    }

    /// Whether the data of the request are in pages of the client: such a request stays with the
    /// ring that has them.
    pub(super) fn is_zero_copy(&self) -> bool {
        matches!(self.payload, Payload::Pool { pages: Some(_), .. })
            && self.word(ENTRY_FLAGS) & ENTRY_ZERO_COPY != 0
    }

    /// The request that the kernel put in. `None`: it names a buffer that is not there, so there is
    /// no telling what it wants.
    pub(super) fn incoming(&self) -> Option<Incoming> {
        let mut head = [0; IN_HEADER_BYTES];
        let mut arguments = [0; OP_IN_BYTES];
        self.header.copy_to_slice(0, &mut head);
        self.header.copy_to_slice(OP_IN, &mut arguments);
        let header = InHeader::read_from_bytes(&head).unwrap_or_default();
        // Of the arguments only those of a WRITE have a length that must fit: they and the payload
        // are all of it.
        let length = match header.opcode {
            opcode::WRITE => size_of::<crate::abi::WriteIn>() + self.half(PAYLOAD_SIZE) as usize,
            _ => OP_IN_BYTES,
        };
        let (data, body) = match &self.payload {
            Payload::Own(payload) => (payload.clone(), payload.clone()),
            Payload::Pool { memory, pages, pool, queue } => {
                let body = memory.slice(pool.buffer(*queue, self.half(POOL_OFFSET))?);
                match pages.as_ref().filter(|_| self.is_zero_copy()) {
                    Some(pages) => (pages.clone(), body),
                    None => (body.clone(), body),
                }
            }
        };
        Some(Incoming {
            number: self.word(COMMIT_ID),
            request: Request::from_parts(header, &arguments, length),
            data,
            body,
        })
    }

    fn word(&self, at: usize) -> u64 {
        let mut bytes = [0; 8];
        self.header.copy_to_slice(at, &mut bytes);
        u64::from_ne_bytes(bytes)
    }

    fn half(&self, at: usize) -> u32 {
        let mut bytes = [0; 4];
        self.header.copy_to_slice(at, &mut bytes);
        u32::from_ne_bytes(bytes)
    }

    /// A reply whose data are where they belong already.
    pub(super) fn put_data(&self, unique: u64, len: usize) {
        self.put_header(&data_header(unique, len), len);
    }

    /// Any other reply.
    pub(super) fn put(&self, reply: &ReplyBuf, body: &IoBuf) {
        // A request that has no buffer has a reply without body.
        body.copy_from_slice(0, reply.body());
        // An error carries nothing; the kernel does not look at the length then.
        self.put_header(&reply.as_bytes()[..OUT_HEADER_BYTES], reply.body().len());
    }

    /// The reply to a request that could not be understood at all. Returns the number to commit.
    pub(super) fn fail(&self, errno: Errno) -> u64 {
        let number = self.word(COMMIT_ID);
        self.put_header(&error_frame(number, errno), 0);
        number
    }

    fn put_header(&self, header: &[u8], payload_len: usize) {
        self.header.copy_from_slice(0, header);
        // At most the payload, 1 MiB.
        let len = u32::try_from(payload_len).unwrap_or(u32::MAX);
        self.header.copy_from_slice(PAYLOAD_SIZE, &len.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests;
