//! `ringdisk topology`: the machine, and where a mount is served on it.
//!
//! Promises: looks, and changes nothing. A mount's server says where its threads and buffers are;
//! without a mount no server is asked.

use std::path::Path;

use ringdisk_daemon::control::client::{ANSWER, Client, Timeout};
use ringdisk_daemon::control::protocol::Command;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::terminal::{Results, ended, visible_lines};
use ringdisk_daemon::topology;
use ringdisk_ring::Topology;
use ringdisk_server::mount::foresee;
use serde_json::Value;

use crate::cli::TopologyArgs;
use ringdisk_console::output::{json, without_text};

/// Prints it.
///
/// Errors: options that this machine cannot meet; there is no such mount, or its server does not
/// answer.
pub(crate) fn run(args: &TopologyArgs) -> Result<(), Failure> {
    let value = match &args.mountpoint {
        Some(mountpoint) => of_mount(mountpoint)?,
        None => {
            let machine = args.root.as_deref().map_or_else(Topology::read, Topology::read_under);
            topology::to_json(&machine, &foresee(&(&args.placement).into(), &machine)?)
        }
    };
    let mut out = Results::lock();
    if args.json {
        ended(json(&mut out, &without_text(value)))?;
    } else {
        use std::io::Write as _;
        let text = value.get("text").and_then(Value::as_str).unwrap_or_default();
        ended(writeln!(out, "{}", visible_lines(text)))?;
    }
    out.finish()
}

/// What the server of a mount says.
fn of_mount(mountpoint: &Path) -> Result<Value, Failure> {
    let progress = ringdisk_disk::Progress::new();
    Client::connect(mountpoint, ANSWER)?.call(
        &Command::Topology,
        &progress,
        Timeout::Answer(ANSWER),
    )
}
