//! What a command in the foreground shows, and how a signal ends it.
//!
//! Promises: results go to standard output, everything else to standard error; a stream that cannot
//! be written never ends an operation in the middle. The first signal asks the operation to end
//! between two steps, the second one ends the process.
//!
//! ```
//! use ringdisk_console::operation::{Operation, Showing};
//! use ringdisk_console::output::json_text;
//!
//! let operation = Operation::start("count", Showing { progress: false, quiet: true })?;
//! operation.progress().set_total(ringdisk_disk::Bytes(3));
//! operation.progress().set_done(ringdisk_disk::Bytes(3));
//! let counted = operation.end(Ok(serde_json::json!({ "count": 3 })), "nothing was changed")?;
//! assert_eq!(json_text(&counted), "{\n    \"count\": 3\n}");
//! # Ok::<(), ringdisk_daemon::failure::Failure>(())
//! ```

#![forbid(unsafe_code)]

pub mod log;
pub mod operation;
pub mod output;
