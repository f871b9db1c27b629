//! Addresses of the memory that a ring uses, to move it to another NUMA node.
//!
//! Promises: memory of the kernel is left out, since it cannot be moved. Control path.

use super::Ring;

/// Address and length of the memory of a slice, bytes.
pub(crate) fn range<T>(slice: &[T]) -> (usize, usize) {
    (slice.as_ptr().addr(), size_of_val(slice))
}

impl Ring {
    /// Start address and length of each allocation of this ring for operations and tasks. The
    /// kernel's memory (the entries of both queues) is left out, since it cannot be moved.
    #[must_use]
    pub fn own_memory(&self) -> Vec<(usize, usize)> {
        let inner = &*self.0;
        let mut ranges = vec![(std::ptr::from_ref(inner).addr(), size_of_val(inner))];
        ranges.extend([range(&inner.vectors), range(&inner.times)]);
        inner.slots.borrow().own_memory(&mut ranges);
        inner.executor.own_memory(&mut ranges);
        ranges
    }
}
