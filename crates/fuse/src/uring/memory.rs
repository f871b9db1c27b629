//! What an entry shares with the kernel.
//!
//! The headers of a queue are one array; each payload is a mapping of its own, of which only the pages that requests use are ever
//! taken. The memory outlives every ring that knows its addresses: threads close their rings before they let go of it.

use std::sync::Arc;

use ringdisk_ring::{IoBuf, SharedMemory};
use zerocopy::FromBytes;

use crate::abi::uring::{COMMIT_ID, HEADER_BYTES, OP_IN, OP_IN_BYTES, PAYLOAD_SIZE};
use crate::abi::{IN_HEADER_BYTES, InHeader, OUT_HEADER_BYTES, opcode};
use crate::reply::{ReplyBuf, data_header};
use crate::request::{ParseError, Request};

/// Bytes from one header to the next: the header, and the vector that REGISTER reads, in whole cache lines.
const STRIDE: usize = 384;
/// Where the vector lies: two addresses with their lengths.
const VECTOR_AT: usize = HEADER_BYTES;
const VECTOR_BYTES: usize = 32;
const PAGE_BYTES: usize = 4096;

/// The memory of one entry, for any thread.
#[derive(Clone, Debug)]
pub(super) struct EntryMemory {
    headers: Arc<SharedMemory>,
    index: usize,
    payload: Arc<SharedMemory>,
}

impl EntryMemory {
    /// Memory for the entries of one queue.
    pub(super) fn of_queue(entries: usize, payload_bytes: usize) -> Vec<EntryMemory> {
        let headers = SharedMemory::new(entries * STRIDE, PAGE_BYTES);
        let entry = |index| EntryMemory {
            headers: Arc::clone(&headers),
            index,
            payload: SharedMemory::new(payload_bytes, PAGE_BYTES),
        };
        (0..entries).map(entry).collect()
    }

    /// As buffers of the calling thread.
    pub(super) fn here(&self) -> Frame {
        let start = self.index * STRIDE;
        Frame {
            header: self.headers.buffer().slice(start..start + STRIDE),
            payload: self.payload.buffer(),
        }
    }
}

/// The memory of one entry, on one thread.
pub(super) struct Frame {
    header: IoBuf,
    pub(super) payload: IoBuf,
}

impl Frame {
    /// Writes the vector for REGISTER and returns its address.
    pub(super) fn vector(&self) -> u64 {
        let words = [
            self.header.address() as u64,
            HEADER_BYTES as u64,
            self.payload.address() as u64,
            self.payload.len() as u64,
        ];
        let mut bytes = [0; VECTOR_BYTES];
        for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *place = word.to_ne_bytes();
        }
        self.header.copy_from_slice(VECTOR_AT, &bytes);
        self.header.address() as u64 + VECTOR_AT as u64
    }

    /// The request that the kernel put in, and the number by which it is committed.
    ///
    /// Errors: arguments that do not fit their operation; the request can be answered.
    pub(super) fn request(&self) -> (u64, Result<Request, ParseError>) {
        let mut head = [0; IN_HEADER_BYTES];
        let mut arguments = [0; OP_IN_BYTES];
        let (mut number, mut payload) = ([0; 8], [0; 4]);
        self.header.copy_to_slice(0, &mut head);
        self.header.copy_to_slice(OP_IN, &mut arguments);
        self.header.copy_to_slice(COMMIT_ID, &mut number);
        self.header.copy_to_slice(PAYLOAD_SIZE, &mut payload);
        let header = InHeader::read_from_bytes(&head).unwrap_or_default();
        // Of the arguments only those of a WRITE have a length that must fit: they and the payload are all of it.
        let length = match header.opcode {
            opcode::WRITE => {
                size_of::<crate::abi::WriteIn>() + u32::from_ne_bytes(payload) as usize
            }
            _ => OP_IN_BYTES,
        };
        (u64::from_ne_bytes(number), Request::from_parts(header, &arguments, length))
    }

    /// A reply whose data are in the payload already.
    pub(super) fn put_data(&self, unique: u64, len: usize) {
        self.put_header(&data_header(unique, len), len);
    }

    /// Any other reply.
    pub(super) fn put(&self, reply: &ReplyBuf) {
        self.payload.copy_from_slice(0, reply.body());
        // An error carries nothing; the kernel does not look at the length then.
        self.put_header(&reply.as_bytes()[..OUT_HEADER_BYTES], reply.body().len());
    }

    fn put_header(&self, header: &[u8], payload_len: usize) {
        self.header.copy_from_slice(0, header);
        // At most the payload, 1 MiB.
        let len = u32::try_from(payload_len).unwrap_or(u32::MAX);
        self.header.copy_from_slice(PAYLOAD_SIZE, &len.to_ne_bytes());
    }
}
