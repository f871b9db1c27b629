//! Single parts of a start that tests and measurements force ([`crate::testing`]).
//!
//! Promises: plain values; the default forces nothing, and no option of an export sets one.

use crate::uring::{Refuse, RingMode, Stay};

/// What is forced. The default forces nothing.
#[derive(Clone, Copy, Debug)]
pub struct Forced {
    /// Moves the fetching between queues all the time.
    pub restless: bool,
    /// Where entries of the rings stay; `None`: they move with the load.
    pub stay: Option<Stay>,
    /// The most that rings do.
    pub ring_mode_max: RingMode,
    /// Makes the kernel refuse a step of the start over io_uring.
    pub refuse: Option<Refuse>,
}

impl Default for Forced {
    fn default() -> Forced {
        Forced { restless: false, stay: None, ring_mode_max: RingMode::ZeroCopy, refuse: None }
    }
}
