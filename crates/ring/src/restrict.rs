//! Restrictions of a ring, which the kernel checks for each entry.
//!
//! Promises: an operation that this crate does not submit completes with `EACCES`, for as long as
//! the ring lives, whatever code writes into the ring.
//!
//! A filter of system calls cannot see inside a ring: a process that may enter one may open files
//! and connect sockets through it. So a ring is made disabled, restricted to the operations of this
//! crate, and enabled.
//!
//! An operation that is added to this crate must be added here; the tests of the ring run
//! restricted, so a missing one fails there.

use std::io;

use io_uring::register::Restriction;
use io_uring::{Submitter, opcode};

/// Operations of every ring.
const OPERATIONS: [u8; 13] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::ReadFixed::CODE,
    opcode::WriteFixed::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::Ftruncate::CODE,
    opcode::PollAdd::CODE,
    opcode::Timeout::CODE,
    opcode::AsyncCancel::CODE,
    opcode::MsgRingData::CODE,
];

/// Calls of io_uring_register(2) that are made while a ring works. Numbers:
/// include/uapi/linux/io_uring.h, `IORING_REGISTER_*`; the table of files is made before the ring
/// is enabled.
const REGISTRATIONS: [u8; 6] = [
    /* UNREGISTER_BUFFERS */ 1, /* FILES_UPDATE */ 6, /* BUFFERS2 */ 15,
    /* BUFFERS_UPDATE */ 16, /* RING_FDS */ 20, /* UNREGISTER_RING_FDS */ 21,
];

/// Flags of entries: a registered file, a link to the next entry, no completion after success.
/// `IOSQE_*` of the same header.
const FLAGS: u8 = (1 << 0) | (1 << 2) | (1 << 6);

/// Restricts a ring that is not enabled yet.
///
/// * `wide`: 128-byte entries, which carry commands of drivers.
///
/// Errors: those of io_uring_register(2).
pub(crate) fn restrict(submitter: &Submitter<'_>, wide: bool) -> io::Result<()> {
    let operations = OPERATIONS.into_iter().chain(wide.then_some(opcode::UringCmd80::CODE));
    let mut all: Vec<Restriction> = operations.map(Restriction::sqe_op).collect();
    all.extend(REGISTRATIONS.map(Restriction::register_op));
    all.push(Restriction::sqe_flags_allowed(FLAGS));
    submitter.register_restrictions(&mut all)
}

#[cfg(test)]
mod tests;
