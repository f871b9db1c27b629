//! Which memory a ring uses all the time, for who moves it to another node. Control path.

use super::Ring;

/// Address and bytes of what a slice lies in.
pub(crate) fn range<T>(slice: &[T]) -> (usize, usize) {
    (slice.as_ptr().addr(), size_of_val(slice))
}

impl Ring {
    /// Start address and bytes of what this ring has allocated for operations and tasks: what the
    /// kernel has made for it (the entries of both queues) is not there, and cannot be moved.
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
