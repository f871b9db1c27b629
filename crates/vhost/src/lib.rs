//! A disk for virtual machines: vhost-user-blk.
//!
//! Rooms, from the wire inwards:
//! - [`protocol`]: bytes to messages and replies to bytes, without a socket;
//! - [`session`]: what one front end has said and what follows from it, without a thread;
//! - [`Connection`], [`BackChannel`]: the sockets;
//! - [`keep`]: who keeps an export while its process is killed and another one goes on;
//! - `export`: a disk that is served, from its start to its end, and the device that a session
//!   talks to;
//! - `worker`: queue threads, their virtqueues, and the tasks that serve requests;
//! - `blk`: what a request does;
//! - `device`: what all of these threads share.

#![forbid(unsafe_code)]

mod back_channel;
mod blk;
mod closing;
mod connection;
mod device;
pub mod export;
mod hand_over_state;
pub mod keep;
pub mod protocol;
pub mod session;
mod signals;
mod vet;
mod wire;
mod worker;

pub use back_channel::BackChannel;
pub use connection::{Connection, Received};
pub use export::{Export, ExportOptions, Listen, StopHandle};
pub use ringdisk_export::{
    CommonOptions, Error, ErrorKind, HaltReason, Numa, ThreadOptions, Threads,
};
