//! The time of this process.
//!
//! Promises: it never goes back. Any thread, also on the path of a request: it costs one look at
//! the clock.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The time since some moment of this process, the same for all threads. Any thread.
pub(crate) fn now() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}
