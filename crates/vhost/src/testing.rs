//! What only tests of an export do; no part of the interface for users of the library.
//!
//! Promises: nothing outside of tests calls it. It breaks an export on purpose, so that what
//! follows can be tested.

use crate::export::Export;

/// Makes a queue thread of an export panic.
pub fn panic(export: &Export) {
    export.panic_on_a_queue();
}
