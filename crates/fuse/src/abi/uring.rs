//! Layouts of FUSE over io_uring.
//!
//! Promises: layouts and numbers only; nothing is checked here. Source: `include/uapi/linux/fuse.h`
//! (BSD-2-Clause), `struct fuse_uring_req_header`, `struct fuse_uring_ent_in_out`, `struct
//! fuse_uring_cmd_req`.

/// Bytes of the header that an entry shares with the kernel.
pub const HEADER_BYTES: usize = 288;
/// Where the first argument of an operation lies in it.
pub const OP_IN: usize = 128;
/// Bytes of that argument at most.
pub const OP_IN_BYTES: usize = 128;
/// Where the flags of the request lie (u64).
pub const ENTRY_FLAGS: usize = 256;
/// Where the number lies that names the request when it is committed (u64).
pub const COMMIT_ID: usize = 264;
/// Where the length of the payload lies (u32): of the request, then of the reply.
pub const PAYLOAD_SIZE: usize = 272;
/// Where the place of the buffer in the queue's pool lies (u32); without a pool it means nothing.
pub const POOL_OFFSET: usize = 276;

/// In [`ENTRY_FLAGS`]: the data are in the slot of the entry, not in a buffer.
pub const ENTRY_ZERO_COPY: u64 = 1 << 0;

/// Gives the kernel an entry. Completes when a request is in it.
pub const CMD_REGISTER: u32 = 1;
/// Takes the reply of an entry and completes when the next request is in it.
pub const CMD_COMMIT_AND_FETCH: u32 = 2;
/// Makes a queue (Linux 7.3). Completes at once.
pub const CMD_ADD_QUEUE: u32 = 3;
/// Gives a queue its buffers (Linux 7.3). Completes at once.
pub const CMD_ADD_BUFPOOL: u32 = 4;

/// ADD_QUEUE: entries of the queue have slots for pages of clients.
const QUEUE_ZERO_COPY: u64 = 1 << 0;

/// The command area of a submission entry: flags, number of the request, queue, and what depends on
/// the command.
#[must_use]
pub fn command(commit_id: u64, queue: u16) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[8..16].copy_from_slice(&commit_id.to_ne_bytes());
    bytes[16..18].copy_from_slice(&queue.to_ne_bytes());
    bytes
}

/// The area of REGISTER for an entry whose client pages go to `slot` of the ring.
#[must_use]
pub fn register_with_slot(queue: u16, slot: u16) -> [u8; 80] {
    let mut bytes = command(0, queue);
    bytes[24..26].copy_from_slice(&slot.to_ne_bytes());
    bytes
}

/// The area of ADD_QUEUE.
#[must_use]
pub fn add_queue(queue: u16, zero_copy: bool) -> [u8; 80] {
    let mut bytes = command(0, queue);
    let flags = if zero_copy { QUEUE_ZERO_COPY } else { 0 };
    bytes[0..8].copy_from_slice(&flags.to_ne_bytes());
    bytes
}

/// The area of ADD_BUFPOOL.
///
/// * `address`, `len`: of the queue's region, bytes.
#[must_use]
pub fn add_pool(queue: u16, address: u64, len: u32) -> [u8; 80] {
    let mut bytes = command(0, queue);
    bytes[24..32].copy_from_slice(&address.to_ne_bytes());
    bytes[32..36].copy_from_slice(&len.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::{add_pool, add_queue, command, register_with_slot};

    #[test]
    fn command_areas_have_their_fields_where_the_kernel_looks() {
        let plain = command(0x1122, 7);
        assert_eq!((plain[0], plain[8], plain[9], plain[16]), (0, 0x22, 0x11, 7));
        let register = register_with_slot(7, 0x0102);
        assert_eq!((register[16], register[24], register[25]), (7, 2, 1));
        assert_eq!(
            (add_queue(3, true)[0], add_queue(3, false)[0], add_queue(3, true)[16]),
            (1, 0, 3)
        );
        let pool = add_pool(3, 0x0a00, 0x0b00);
        assert_eq!((pool[16], pool[25], pool[33]), (3, 0x0a, 0x0b));
        assert!(pool[36..].iter().all(|byte| *byte == 0));
    }
}
