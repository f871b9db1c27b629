//! What `ringdisk mount` offers beside bytes: how a mount ends, survives and changes while it is in
//! use, parts of disks, passthrough, zero-copy and io_uring.

mod busy;
mod client_memory;
mod commit;
#[path = "../common/mod.rs"]
mod common;
mod given_up;
mod keep;
mod nbd_silent;
mod passthrough;
mod refused;
mod rounds;
mod stopped_server;
mod upgrade;
mod uring;
mod windows;
