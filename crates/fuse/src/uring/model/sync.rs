//! Simulated primitives in place of `super::sync`.
//!
//! Promises: the same names as there, so that the source files of the model are built on them
//! unchanged.

pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicI32, Ordering};
