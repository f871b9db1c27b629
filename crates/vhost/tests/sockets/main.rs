//! Descriptors of front ends whose use or closing blocks. These tests fill the threads of the
//! process that close, so they are apart from other devices.

mod closing;
#[path = "../common/mod.rs"]
mod common;
mod descriptors;
