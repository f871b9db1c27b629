//! Reads and writes of scattered buffers.
//!
//! Promises: no allocation unless both ends of the bytes lie inside pieces and there are many; the
//! array and the pieces, which the kernel reads, live until the completion.

use io_uring::{opcode, squeue, types};

use super::op::{Cut, Fd, Op, Way, What};
use super::{Inner, Ring};
use crate::IoBuf;
use crate::buffer::Vectors;
use crate::slots::VECTOR_MAX;

/// Pieces of one operation at most (`UIO_MAXIOV`): with more the operation is short.
const PIECES_MAX: usize = 1024;

fn entry(cut: Cut, vector: *const libc::iovec, count: usize) -> squeue::Entry {
    let Cut { fd, offset, way } = cut;
    // Not above PIECES_MAX.
    let count = u32::try_from(count.min(PIECES_MAX)).unwrap_or(0);
    match way {
        Way::Read => {
            on_fd!(fd, |fd| opcode::Readv::new(fd, vector, count).offset(offset).build())
        }
        Way::Write => {
            on_fd!(fd, |fd| opcode::Writev::new(fd, vector, count).offset(offset).build())
        }
    }
}

impl Ring {
    /// As [`Ring::read`] and [`Ring::write`].
    #[cold]
    #[inline(never)]
    pub(super) fn move_pieces(&self, fd: Fd, offset: u64, buf: &IoBuf, way: Way) -> Op {
        let cut = Cut { fd, offset, way };
        let (what, keep) = match buf.vectors() {
            Some(Vectors::Cut(count)) if count <= VECTOR_MAX => (What::Cut(cut), buf.clone()),
            Some(Vectors::Cut(_)) => {
                let own = buf.with_own_vectors();
                let Some(Vectors::Array(vector, count)) = own.vectors() else {
                    unreachable!("the whole of a scattered buffer has an array")
                };
                (What::Entry(entry(cut, vector, count)), own)
            }
            Some(Vectors::Array(vector, count)) => {
                (What::Entry(entry(cut, vector, count)), buf.clone())
            }
            None => unreachable!("asked for scattered buffers only"),
        };
        Op::new(self, what, Some(keep))
    }
}

impl Inner {
    /// Fills the array of a slot with the pieces of the buffer that it keeps.
    #[cold]
    pub(super) fn cut_entry(&self, slot: u32, cut: Cut) -> squeue::Entry {
        let vector = self.vectors[slot as usize].get();
        let mut count = 0;
        if let Some(buf) = self.slots.borrow().buffer(slot) {
            for piece in buf.pieces().take(VECTOR_MAX) {
                let (iov_base, iov_len) = (piece.as_mut_ptr().cast(), piece.len());
                // SAFETY: the slot belongs to this operation alone, `count < VECTOR_MAX`, and the
                // table lives as long as the ring.
                unsafe { (*vector)[count] = libc::iovec { iov_base, iov_len } };
                count += 1;
            }
        }
        entry(cut, vector.cast(), count)
    }
}
