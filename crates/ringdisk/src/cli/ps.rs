//! The words of `ringdisk ps`.
//!
//! Promises: parses only; no server is asked.

use clap::Args;

const PS_EXAMPLES: &str = "\
Examples:
  ringdisk ps
  ringdisk ps --json | jq -r '.[] | select(.state != \"serving\") | .where'";

/// List the disks that are served: what, where, since when, who uses them, and how they are
///
/// Lists the serving processes of this user, as root those of all users, with the processes,
/// virtual machines, NBD clients, loop devices and mounts that use each disk. What a killed process
/// has left (a dead mount, a socket) is listed with the command that clears it away. States:
/// serving; inactive (its images are with another process, before or after a migration); stopping
/// (its users have it open); silent (its process does not answer); fault (the image takes no more
/// changes); needs-reset (the guest has to reset the device); helper-gone (it serves, and can no
/// longer unmount by itself); no-control (a mount without a control socket); dead, stale (left).
#[derive(Args, Debug)]
#[command(after_help = PS_EXAMPLES)]
pub(crate) struct PsArgs {
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Only what `ringdisk ctl` and `umount` take, one in each line, for completions
    #[arg(long, hide = true, conflicts_with = "json")]
    pub(crate) targets: bool,
}

const METRICS_EXAMPLES: &str = "\
Examples:
  ringdisk metrics > /var/lib/node_exporter/ringdisk.prom    for node_exporter's textfile collector
  ringdisk mount --metrics 9436 disk.qcow2 disk              or from the process itself, over HTTP";

/// Print the metrics of all serving processes, as Prometheus reads them
///
/// Of the processes of this user, as root of all users. A process serves its own metrics over HTTP
/// with `mount --metrics` and `serve --metrics`.
#[derive(Args, Debug)]
#[command(after_help = METRICS_EXAMPLES)]
pub(crate) struct MetricsCommandArgs {}
