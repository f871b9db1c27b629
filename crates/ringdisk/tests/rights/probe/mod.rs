//! From inside of a running sandbox: what a process that was taken over could do, tried on real
//! servers of each kind.
//!
//! [`filter`] reads the filter that the kernel has for each thread of a server and asks it about
//! every system call; [`inject`] makes calls as the server; [`manager`] listens to what is said of
//! it.

mod filter;
pub(crate) mod inject;
mod manager;
mod modes;
mod neighbours;
pub(crate) mod traced;
mod watchdog;
