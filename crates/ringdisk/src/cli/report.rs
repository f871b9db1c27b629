//! The words of `ringdisk report`.
//!
//! Promises: parses only; nothing is collected or written.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// Write all that a bug report needs into one file: versions, options, counters, log, image headers
///
/// A text file: read it before you send it. It has names of images and mountpoints, and what
/// `ringdisk info` says of the images that are served; nothing of the content of a disk and of the
/// environment of a process. Passwords and users in addresses, values behind words such as password
/// and token, and private keys are left out. As root it covers the processes of all users.
#[derive(Args, Debug)]
pub(crate) struct ReportArgs {
    /// The file to make, which must not be there; - is standard output [default:
    /// ringdisk-report.txt]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath,
          default_value = "ringdisk-report.txt", hide_default_value = true)]
    pub(crate) output: PathBuf,
}
