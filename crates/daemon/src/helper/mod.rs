//! The helper process: it does for a confined process what that one may not do any more.
//!
//! Inside landlock nothing can be unmounted, and files can be removed only where all files of a
//! directory can; and a process that may connect one socket may connect all. So before a process is
//! confined it gives its helper a list of what it will need ([`Tasks`]), and asks for one of these
//! when the time has come. An attacker who controls the confined process can ask for nothing else.
//!
//! Promises: the helper serves nothing and reads and writes no image; it does nothing unasked, and
//! what it holds for a confined process it closes when that process ends, however that ends.
//!
//! The helper process is a child of the server ([`process`]); with `--keep-mount` or `--keep` it is
//! the parent of the server, keeps the mount or the disks, and starts the next server
//! ([`crate::keep::supervisor`], [`inherited`]). A server has one process beside it. A server whose
//! helper was killed goes on, and says so.
//!
//! [`start`] starts this program anew as each of these; [`client`] is the confined process's side;
//! [`tasks`], [`overlays`] and [`chain`] are the helper's.

pub(crate) mod answer;
pub mod approval;
pub mod chain;
pub mod client;
pub mod current;
pub(crate) mod inherited;
pub mod manager;
pub mod mark;
#[cfg(any(test, feature = "fuzzing"))]
pub mod model;
pub mod named;
pub mod overlays;
pub mod process;
pub mod session;
pub mod start;
pub mod tasks;
mod wire;

pub use client::Helper;
pub use current::{connect, is_for_helper, is_gone, leave, may_be, remove_file, say, users};
pub use named::{Named, named, pin};
pub use process::run;
pub use tasks::Tasks;
