//! The primitives that queue threads share, in one place: the model test (`model/`) builds the same
//! source files on simulated ones.
//!
//! Promises: nothing but the names; what they are is decided by the module that includes the files.

pub(super) use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
