//! The server against a client that speaks the protocol by hand: what the protocol has, and what it
//! does not.

#![allow(clippy::unwrap_used)]
#![allow(clippy::cast_possible_truncation)]

mod beside;
mod changes;
mod client;
mod hand_over;
mod handshake;
mod limits;
mod model;
mod requests;
mod status;
mod tls;
mod users;
