//! Simulated primitives in place of `super::sync`.

pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicI32, Ordering};
