//! Requests of clients: read, write, flush, discard, zeroes, map and block status.
//!
//! Promises: a request enters the graph once, works on layers that do not change while it runs, and
//! stays inside the window of the disk. A request whose mapping is cached takes no lock that it
//! could wait for, and allocates nothing. Called by queue threads.

mod copy_on_read;
mod map;
mod read;
mod status;
mod throttled;
mod write;
mod write_back;

pub use map::{Mapped, Mapping, View};
pub use status::MapEntry;
