//! A disk for virtual machines: vhost-user-blk.

#![forbid(unsafe_code)]

mod error;
pub mod export;

pub use error::{Error, ErrorKind};
pub use export::{Export, ExportOptions, Listen, StopHandle};
