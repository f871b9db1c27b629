//! Exports of this process as files: the protocol, its transports, mounts, depth and failures.

#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod depth;
mod fair;
mod faults;
mod handover;
mod kernel_orders;
mod late_writes;
mod mounts;
mod refused;
mod semantics;
mod uring;
