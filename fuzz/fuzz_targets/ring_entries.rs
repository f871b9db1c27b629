//! What a kernel may leave in the header of a ring entry, and the answer to it: nothing out of
//! bounds, nothing panics.
#![no_main]

use std::cell::LazyCell;

use libfuzzer_sys::fuzz_target;
use ringdisk_fuse::RingEntries;

thread_local! {
    static ENTRIES: LazyCell<RingEntries> = LazyCell::new(RingEntries::default);
}

fuzz_target!(|bytes: &[u8]| {
    ENTRIES.with(|entries| entries.decode(bytes));
});
