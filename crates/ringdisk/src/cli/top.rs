//! The words of `ringdisk top`.
//!
//! Promises: parses only; no server is asked.

use std::time::Duration;

use clap::Args;
use ringdisk_daemon::rates::Order;

use crate::cli::parse_limit;
use crate::cli::words::{Words, one_of};

/// The words of `--sort`.
const ORDER: &Words<Order> = &[
    ("requests", "Requests in a second", Order::Requests),
    ("bytes", "Bytes in a second", Order::Bytes),
    ("p99", "The time that 99 of 100 requests do not exceed", Order::Latency),
    ("name", "Where the disk is served", Order::Target),
];

/// Show what all disks of the machine do, live: requests, bytes, latency, depth, CPU
///
/// Of the processes of this user, as root of all users. On a terminal it is one screen: `s` sorts
/// by the next column, `/` filters by name, the arrows select a disk whose numbers are shown in
/// words, the space bar holds the screen, `+` and `-` change the interval; `q` or Ctrl-C ends it.
/// Elsewhere it is a table for each interval. A `!` is in front of a disk that has a fault. LIMIT
/// are requests that wait for a limit now, HITS the percentage of requests for which no table was
/// read from the image.
#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    /// How long an interval is
    #[arg(long, value_name = "TIME", value_parser = parse_limit, default_value = "1s")]
    pub(crate) every: Duration,

    /// What is sorted by
    #[arg(long, value_name = "COLUMN", value_parser = one_of(ORDER), default_value = "requests")]
    pub(crate) sort: Order,

    /// Only disks whose name holds TEXT
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) filter: String,

    /// Print tables one below the other, on a terminal, too
    #[arg(long)]
    pub(crate) plain: bool,

    /// End after so many times
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) count: Option<u32>,
}
