//! The primitives that queue threads share, in one place: the model test (`model/`) builds the same
//! source files on simulated ones.

pub(super) use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
