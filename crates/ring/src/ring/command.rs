//! Commands for drivers (`IORING_OP_URING_CMD`).
//!
//! Promises: the command is handed to the kernel as it is; memory that it names is the caller's to
//! keep until the result is there. Never allocates or blocks; on the thread of the ring.

use io_uring::{opcode, squeue};

use super::Ring;
use super::op::{Fd, Op, State};
use crate::Errno;
use crate::slots::Keep;

/// A driver command (`IORING_OP_URING_CMD`), on a ring of 128-byte entries.
/// Source: include/uapi/linux/io_uring.h, struct io_uring_sqe.
#[derive(Clone, Debug)]
pub struct RawCommand {
    /// The file that takes the command.
    pub fd: Fd,
    /// `sqe.cmd_op`.
    pub operation: u32,
    /// `sqe.addr` and `sqe.len`; memory that they name is the caller's to keep.
    pub address: u64,
    /// See `address`.
    pub len: u32,
    /// `sqe.buf_index`, with `IORING_URING_CMD_FIXED`.
    pub fixed_buffer: Option<u16>,
    /// The command area, `sqe.cmd`.
    pub command: [u8; 80],
}

impl Ring {
    /// Sends a driver command. Errors: `EOPNOTSUPP` on a ring without 128-byte entries.
    ///
    /// # Safety
    ///
    /// Memory that the command names must stay valid, and untouched as the driver requires, until
    /// the command has completed, also when the future is dropped.
    pub async unsafe fn command(&self, command: &RawCommand) -> Result<u32, Errno> {
        let inner = &self.0;
        let slot = self.slot(|| Keep::Nothing).await;
        let user_data = inner.slots.borrow().user_data(slot);
        let entry = command_entry(command, user_data);
        inner.make_room(1);
        if let Err(error) = inner.uring.push_wide(&entry) {
            inner.slots.borrow_mut().complete(user_data, 0, false);
            inner.slots.borrow_mut().abandon(slot);
            inner.wake_slot_waiters();
            return Err(error);
        }
        Op { ring: self.clone(), state: State::InFlight(slot), inline: false }.await
    }
}

/// The 128-byte entry of a command. `io-uring` 0.7 cannot set `len` beside a command, so the
/// entry is written as bytes. Offsets: include/uapi/linux/io_uring.h, struct io_uring_sqe.
fn command_entry(command: &RawCommand, user_data: u64) -> squeue::Entry128 {
    const { assert!(size_of::<squeue::Entry128>() == 128) };
    let mut bytes = [0u8; 128];
    let (fd, fixed_file) = match command.fd {
        Fd::Raw(fd) => (fd, 0),
        Fd::Fixed(index) => (index.cast_signed(), 1u8),
    };
    bytes[0] = opcode::UringCmd80::CODE;
    bytes[1] = fixed_file;
    bytes[4..8].copy_from_slice(&fd.to_ne_bytes());
    bytes[8..12].copy_from_slice(&command.operation.to_ne_bytes());
    bytes[16..24].copy_from_slice(&command.address.to_ne_bytes());
    bytes[24..28].copy_from_slice(&command.len.to_ne_bytes());
    if let Some(index) = command.fixed_buffer {
        bytes[28..32].copy_from_slice(&1u32.to_ne_bytes());
        bytes[40..42].copy_from_slice(&index.to_ne_bytes());
    }
    bytes[32..40].copy_from_slice(&user_data.to_ne_bytes());
    bytes[48..128].copy_from_slice(&command.command);
    // SAFETY: `Entry128` is `repr(C)` over plain integers and byte arrays, 128 bytes as asserted
    // above: every bit pattern is valid.
    unsafe { std::mem::transmute::<[u8; 128], squeue::Entry128>(bytes) }
}
