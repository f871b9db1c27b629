//! The words that say where the messages and the metrics of a serving process go.
//!
//! Promises: parses only; no file is opened and no port is taken; the address is checked for its
//! form.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::log_target::{self, Wanted};

use crate::cli::address::{Address, parse_new_address};
use crate::cli::words::{Words, one_of};

/// The words of `--log`.
const LOG: &Words<Wanted> = &[
    ("auto", "In the background journal or syslog, else stderr", Wanted::Auto),
    ("stderr", "Standard error", Wanted::StandardError),
    ("journal", "The journal of systemd", Wanted::Journal),
    ("syslog", "syslog", Wanted::Syslog),
];

/// Where messages and metrics go.
#[derive(Args, Clone, Debug)]
pub(crate) struct LogArgs {
    /// Append the messages of the serving process to FILE, once the disk answers
    ///
    /// Errors of the start are said on standard error as well. `logrotate` needs `copytruncate`.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "log",
          help_heading = "Serving options")]
    log_file: Option<PathBuf>,

    /// Where the messages of the serving process go, once the disk answers
    ///
    /// auto: in the background (--daemonize) to the journal, or to syslog where there is no
    /// journal, unless standard error is a regular file; otherwise to standard error.
    #[arg(long, value_name = "WHERE", value_parser = one_of(LOG), default_value = "auto",
          help_heading = "Serving options")]
    log: Wanted,

    /// Serve metrics for Prometheus over HTTP at ADDRESS: PORT (for this machine only), HOST:PORT,
    /// or unix:PATH; once for each address
    ///
    /// /metrics has the counters of all disks of the process; /healthz answers while it runs, and
    /// /readyz while all disks are served without a fault. There is no password: over another
    /// address than a loopback one every host that reaches it can read this.
    #[arg(long, value_name = "ADDRESS", value_parser = parse_new_address,
          help_heading = "Serving options")]
    pub(crate) metrics: Vec<Address>,
}

impl LogArgs {
    /// Opens what is asked for.
    ///
    /// * `daemonize`: the process goes into the background.
    ///
    /// Errors: as [`log_target::prepare`].
    pub(crate) fn prepare(&self, daemonize: bool) -> Result<(), Failure> {
        log_target::prepare(self.log_file.as_deref(), self.log, daemonize)
    }
}
