use std::sync::Arc;

use ringdisk_ring::Errno;

use super::{EntryMemory, Frame, POOL_OFFSET};
use crate::abi::uring::{COMMIT_ID, ENTRY_FLAGS, ENTRY_ZERO_COPY, OP_IN, PAYLOAD_SIZE};
use crate::abi::{InHeader, ReadIn, opcode};
use crate::reply::ReplyBuf;
use crate::uring::Plan;
use crate::uring::pool::{Pool, PoolUses};
use zerocopy::IntoBytes;

const MIB: usize = 1 << 20;

fn pool(zero_copy: bool) -> Arc<Pool> {
    let plan = Plan::of_cpus(2, 2, Some(2), MIB);
    let uses = PoolUses { zero_copy, pinned: false };
    Arc::new(Pool::new(&plan, true, MIB, uses).expect("few entries"))
}

/// The second entry of the second queue.
fn frame(pool: Option<&Arc<Pool>>) -> Frame {
    EntryMemory::of_queue(1, 2, MIB)[1].here(3, pool)
}

/// A READ of 8 KiB as the kernel writes it.
fn fill(frame: &Frame, offset: u32, flags: u64) {
    let header = InHeader { opcode: opcode::READ, unique: 77, ..InHeader::default() };
    let read = ReadIn { size: 8192, offset: 4096, ..ReadIn::default() };
    frame.header.copy_from_slice(0, header.as_bytes());
    frame.header.copy_from_slice(OP_IN, read.as_bytes());
    frame.header.copy_from_slice(ENTRY_FLAGS, &flags.to_ne_bytes());
    frame.header.copy_from_slice(COMMIT_ID, &77u64.to_ne_bytes());
    frame.header.copy_from_slice(POOL_OFFSET, &offset.to_ne_bytes());
}

fn payload_size(frame: &Frame) -> u32 {
    frame.half(PAYLOAD_SIZE)
}

#[test]
fn an_entry_of_its_own_ignores_what_older_kernels_leave_in_the_header() {
    let frame = frame(None);
    fill(&frame, u32::MAX, ENTRY_ZERO_COPY);
    let incoming = frame.incoming().expect("its own payload");
    assert_eq!((incoming.number, incoming.data.len()), (77, MIB));
    assert!(incoming.data.is_ours() && !frame.is_zero_copy());
    assert_eq!(frame.slot(3), None);
}

#[test]
fn the_kernel_names_a_buffer_of_the_pool() {
    let pool = pool(false);
    let frame = frame(Some(&pool));
    fill(&frame, 1 << 20, ENTRY_ZERO_COPY);
    let incoming = frame.incoming().expect("a buffer");
    let (start, _) = pool.region(1);
    assert_eq!(incoming.data.address() as u64, start + MIB as u64);
    assert_eq!(incoming.body.address(), incoming.data.address());
    // Nobody has asked for client pages, so the flag means nothing.
    assert!(incoming.data.is_ours());
}

#[test]
fn a_buffer_that_is_not_there_is_refused_and_the_request_answered() {
    let frame = frame(Some(&pool(false)));
    for offset in [2 << 20, (1 << 20) + 1, u32::MAX] {
        fill(&frame, offset, 0);
        assert!(frame.incoming().is_none(), "{offset}");
    }
    assert_eq!(frame.fail(Errno::IO), 77);
    assert_eq!(payload_size(&frame), 0);
    assert_eq!(frame.half(4).cast_signed(), -Errno::IO.raw_os_error());
}

#[test]
fn client_pages_come_with_the_flag_and_the_reply_body_goes_to_the_buffer() {
    let frame = frame(Some(&pool(true)));
    assert_eq!(frame.slot(3), Some(4));
    fill(&frame, 0, 0);
    assert!(frame.incoming().expect("a buffer").data.is_ours());
    fill(&frame, 1 << 20, ENTRY_ZERO_COPY);
    let incoming = frame.incoming().expect("pages");
    assert!(frame.is_zero_copy() && !incoming.data.is_ours());
    let mut reply = ReplyBuf::new();
    reply.set_written(77, 8192);
    frame.put(&reply, &incoming.body);
    assert_eq!(payload_size(&frame), 8);
    let mut body = [0; 4];
    incoming.body.copy_to_slice(0, &mut body);
    assert_eq!(u32::from_ne_bytes(body), 8192);
    frame.put_data(77, 100);
    assert_eq!(payload_size(&frame), 100);
}
