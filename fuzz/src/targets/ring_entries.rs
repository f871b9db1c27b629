//! What a kernel may leave in the header of a ring entry, and the answer to it: nothing out of
//! bounds, nothing panics.

use std::cell::LazyCell;

use ringdisk_fuse::RingEntries;

thread_local! {
    static ENTRIES: LazyCell<RingEntries> = LazyCell::new(RingEntries::default);
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    ENTRIES.with(|entries| entries.decode(bytes));
}
