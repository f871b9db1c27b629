//! The control socket of a mount, or of a disk for virtual machines: how another process of the
//! same user talks to the one that serves.
//!
//! Promises: a client that is slow, silent or sends rubbish costs nobody else anything; nothing
//! that a client sends ends the server; only the owner of the server and root are answered.
//!
//! [`protocol`] is what both sides say, [`registry`] where they meet, [`server`] runs any set of
//! [`server::Commands`] (those of a disk are in [`disk`]), [`client`] is the other end, [`ask_all`]
//! one that asks all servers of the machine; [`jobs`] is what takes long; [`checkpoint`] is what
//! several of them do together.

pub mod address;
pub mod ask_all;
pub mod checkpoint;
pub mod client;
pub mod disk;
pub mod follow;
pub mod jobs;
mod lines;
pub mod protocol;
pub mod refusal;
pub mod registry;
pub mod server;
pub mod serving;
