//! For tests only: real mounts, image makers, limits on time and on what may stay behind; simulated
//! storage.
//!
//! Promises: every external command ends within a time limit, every mount, loop device and process
//! is removed when its guard is dropped, also when the test panics. Nothing here is used by the
//! program itself; a broken environment panics with the command and what it printed.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod allocations;
pub mod certificates;
pub mod connection;
pub mod cpuset;
pub mod fio;
pub mod images;
pub mod layout;
pub mod limits;
pub mod machine;
pub mod model;
pub mod mount;
pub mod oracle;
pub mod process;
pub mod sim;
pub mod skips;
