//! The decoder of ring entries, for the fuzzer: what the kernel writes into a header, taken from
//! bytes.
//!
//! Promises: a panic means that something was out of bounds; only the fuzzer calls this. There is
//! no kernel and no ring behind it.

use std::sync::Arc;

use super::memory::{EntryMemory, Frame};
use super::plan::{Plan, QueuePlan};
use super::pool::{Pool, PoolUses};
use crate::abi::uring::HEADER_BYTES;
use crate::reply::ReplyBuf;

/// Bytes of a payload or buffer.
const PAYLOAD_BYTES: usize = 65536;
/// Entries and buffers of each queue.
const ENTRIES: usize = 2;

/// An entry of each kind: with a payload of its own, of a pool, with pages of the client.
pub struct RingEntries(Vec<Frame>);

impl std::fmt::Debug for RingEntries {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RingEntries")
    }
}

impl Default for RingEntries {
    fn default() -> Self {
        let queue = QueuePlan { thread: 0, entries: ENTRIES, node: None };
        let plan = Plan(vec![queue, queue]);
        let memory = EntryMemory::of_queue(1, ENTRIES, PAYLOAD_BYTES);
        let pool = |zero_copy| {
            let uses = PoolUses { zero_copy, pinned: false };
            Pool::new(&plan, true, PAYLOAD_BYTES, uses).map(Arc::new)
        };
        let pools = [None, pool(false), pool(true)];
        RingEntries(pools.iter().map(|pool| memory[1].here(ENTRIES + 1, pool.as_ref())).collect())
    }
}

impl RingEntries {
    /// Takes the request of a header, and answers it. Panics when something is out of bounds.
    ///
    /// * `header`: its beginning; the rest is zeroes.
    pub fn decode(&self, header: &[u8]) {
        let mut bytes = [0; HEADER_BYTES];
        let len = header.len().min(HEADER_BYTES);
        bytes[..len].copy_from_slice(&header[..len]);
        for frame in &self.0 {
            frame.put_all(&bytes);
            let Some(incoming) = frame.incoming() else {
                frame.fail(ringdisk_ring::Errno::IO);
                continue;
            };
            assert!(incoming.body.is_ours() && incoming.body.len() == PAYLOAD_BYTES);
            assert_eq!(incoming.data.len(), PAYLOAD_BYTES);
            assert_eq!(incoming.data.is_ours(), !frame.is_zero_copy());
            let mut reply = ReplyBuf::new();
            reply.set_written(incoming.number, len);
            frame.put(&reply, &incoming.body);
            frame.put_data(incoming.number, PAYLOAD_BYTES);
        }
    }
}
