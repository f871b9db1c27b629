//! Transport `dev`: FUSE over `/dev/fuse`.
//!
//! Promises: one cloned descriptor, one thread and one io_uring for each queue. Requests are
//! fetched and replies are sent through that ring, together with the disk's own I/O, so one
//! `io_uring_enter` does all three.
//!
//! All clones of a connection share the kernel's input queue. So that a request wakes one thread
//! and not all, a fetch is an *exclusive* poll with the read linked behind it; and which queues
//! fetch at all is decided by [`fetching_queues`].
//!
//! Modules: [`entry`] is the life of a request, [`fetch`] says which entry fetches next,
//! [`fetching_queues`] which queue, [`queue`] acts on that, [`init`] is the first exchange of a
//! mount.

mod entry;
mod fetch;
mod fetching_queues;
mod init;
mod policy;
mod queue;

pub(crate) use entry::{entry_bytes, serve_entry};
pub(crate) use fetch::Fetch;
pub(crate) use fetching_queues::Place;
pub(crate) use init::answer_init;
pub(crate) use queue::{DevQueue, announce};
