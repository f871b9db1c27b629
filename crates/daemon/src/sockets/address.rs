//! Addresses that clients connect to.
//!
//! Promises: plain values; nothing is resolved or opened here.

use std::fmt;
use std::path::PathBuf;

/// Where clients connect: those of NBD, readers of checkpoints, and those of metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A socket that is made.
    Unix(PathBuf),
    /// A port.
    Tcp {
        /// A name, or an address without brackets.
        host: String,
        /// 0: one that is free.
        port: u16,
    },
    /// A listening socket that the process is started with: its number, or its name at the service
    /// manager.
    Given(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "{}", path.display()),
            Address::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "{host}:{port}"),
            Address::Given(name) => write!(f, "fd:{name}"),
        }
    }
}
