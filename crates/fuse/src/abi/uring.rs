//! Layouts of FUSE over io_uring.
//!
//! Source: `include/uapi/linux/fuse.h` (BSD-2-Clause), `struct fuse_uring_req_header`, `struct fuse_uring_ent_in_out`,
//! `struct fuse_uring_cmd_req`.

/// Bytes of the header that an entry shares with the kernel.
pub const HEADER_BYTES: usize = 288;
/// Where the first argument of an operation lies in it.
pub const OP_IN: usize = 128;
/// Bytes of that argument at most.
pub const OP_IN_BYTES: usize = 128;
/// Where the number lies that names the request when it is committed (u64).
pub const COMMIT_ID: usize = 264;
/// Where the length of the payload lies (u32): of the request, then of the reply.
pub const PAYLOAD_SIZE: usize = 272;

/// Gives the kernel an entry. Completes when a request is in it.
pub const CMD_REGISTER: u32 = 1;
/// Takes the reply of an entry and completes when the next request is in it.
pub const CMD_COMMIT_AND_FETCH: u32 = 2;

/// The command area of a submission entry: flags (none), number of the request, queue.
#[must_use]
pub fn command(commit_id: u64, queue: u16) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[8..16].copy_from_slice(&commit_id.to_ne_bytes());
    bytes[16..18].copy_from_slice(&queue.to_ne_bytes());
    bytes
}
