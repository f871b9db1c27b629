//! Buffers for what is copied around a write, used again and again.
//!
//! Promises: fresh memory (page faults, zeroing) is taken only while the number of copies in flight
//! grows; a buffer that an operation may still use is never handed out; each thread keeps at most
//! [`KEPT_BYTES`].

use std::cell::RefCell;

use ringdisk_ring::IoBuf;

use super::space::ALIGN;

/// Kept for each thread: 64 copies of 64 KiB.
const KEPT_BYTES: usize = 4 << 20;
/// Sizes are rounded up to this, so that one buffer serves many.
const SIZE_MIN: usize = 64 << 10;

thread_local! {
    static KEPT: RefCell<Vec<IoBuf>> = const { RefCell::new(Vec::new()) };
}

/// A buffer with any content; goes back when it is dropped.
pub(super) struct Scratch {
    whole: IoBuf,
    len: usize,
}

impl Scratch {
    /// A buffer of `len` bytes. Its content is anything.
    pub(super) fn take(len: usize) -> Scratch {
        let size = len.next_power_of_two().max(SIZE_MIN);
        let kept = KEPT.with_borrow_mut(|kept| {
            let fits = |buf: &IoBuf| buf.len() == size && !buf.is_shared();
            kept.iter().rposition(fits).map(|at| kept.swap_remove(at))
        });
        Scratch { whole: kept.unwrap_or_else(|| IoBuf::new(size, ALIGN)), len }
    }

    /// The buffer.
    pub(super) fn buf(&self) -> IoBuf {
        self.whole.slice(0..self.len)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        KEPT.with_borrow_mut(|kept| {
            let held: usize = kept.iter().map(IoBuf::len).sum();
            if held + self.whole.len() <= KEPT_BYTES {
                kept.push(self.whole.clone());
            }
        });
    }
}
