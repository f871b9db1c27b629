//! Running servers seen from outside: what they do, live and in a report.
//!
//! Promises: servers are asked over their control sockets only, and nothing is changed; one that
//! does not answer costs the time of its limit. What a server says controls no terminal.
//!
//! ```
//! let report = ringdisk_observe::report::report()?;
//! assert!(report.starts_with("Report of ringdisk, "));
//! assert!(report.contains("== Served =="));
//! # Ok::<(), ringdisk_daemon::failure::Failure>(())
//! ```

#![forbid(unsafe_code)]

pub mod job_texts;
pub mod jobs;
pub mod metrics;
pub mod report;
pub mod top;
pub mod watch;
