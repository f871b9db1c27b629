//! The words of `ringdisk serve --nbd`.
//!
//! Promises: parses only; no port is taken; addresses are checked for their form.

use std::time::Duration;

use clap::Args;
use ringdisk_daemon::size::parse_time;
use ringdisk_nbd::options::{CONNECTIONS_DEFAULT, CONNECTIONS_MAX};

use super::NbdAccessArgs;
use crate::cli::DiskWords;
use crate::cli::address::{Address, parse_address};
use crate::cli::disk_args::{Accel, NbdDiskArgs, ServedDisk};

/// Where NBD clients connect, for all disks of the process.
#[derive(Args, Clone, Debug)]
pub(crate) struct NbdArgs {
    /// Serve over NBD at ADDRESS: unix:PATH or a path, HOST:PORT, or PORT (for this machine only);
    /// once for each address
    ///
    /// Port 0 is one that is free, which the line that says what is served has. Each disk is an
    /// export of every address. fd:N is a listening socket that the process is started with, by its
    /// number (fd:3), or by the name that a service manager gives it (FileDescriptorName). Beside
    /// --vhost-user-blk NBD clients have the same disk, read-only without --share-rw. Over TCP
    /// without --tls-creds every process that reaches the port reads and writes the disk.
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address, help_heading = "NBD options",
          conflicts_with = "incoming")]
    pub(crate) nbd: Vec<Address>,

    /// NBD clients at once; further ones wait
    #[arg(long, value_name = "N", value_parser = parse_connections, requires = "nbd",
          default_value_t = CONNECTIONS_DEFAULT, help_heading = "NBD options")]
    pub(crate) max_connections: usize,

    /// How long an NBD client may take for its handshake, or none
    #[arg(long, value_name = "TIME", value_parser = parse_handshake, requires = "nbd",
          default_value = "10s", help_heading = "NBD options")]
    pub(crate) handshake_limit: HandshakeLimit,

    /// End when no NBD client has used the disk for so long; 0s: when the last one has gone
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "nbd",
          help_heading = "NBD options")]
    pub(crate) idle_exit: Option<Duration>,

    /// Let NBD clients write to the disk of a virtual machine while that uses it
    ///
    /// Most file systems are damaged by a second writer: only for guests that expect it (cluster
    /// file systems, tools of the guest that are coordinated with it). Limits, flushes and
    /// checkpoints hold for both.
    #[arg(long, requires = "nbd", help_heading = "NBD options")]
    pub(crate) share_rw: bool,

    #[command(flatten)]
    pub(crate) access: NbdAccessArgs,

    /// Nothing is printed when the disk is served: `qemu-nbd` says nothing.
    #[arg(skip)]
    pub(crate) is_quiet: bool,

    /// A client is a block device of this machine.
    #[arg(skip)]
    pub(crate) is_for_a_device: bool,

    /// In the background the standard streams stay.
    #[arg(skip)]
    pub(crate) keeps_output: bool,
}

/// What only virtual machines see of a disk, or have to do with.
const OF_GUESTS: [&str; 11] = [
    "second_front_end",
    "queues",
    "queue_size",
    "serial",
    "logical_block_size",
    "physical_block_size",
    "packed",
    "on_error",
    "accel_engine",
    "accel_workers",
    "pin_guest_memory",
];

impl NbdArgs {
    /// Errors: words about NBD without an address; words about virtual machines without a socket
    /// for them; disks of which some have such a socket and some do not; what cannot be served to
    /// both.
    ///
    /// * `keep`, `upgrade`: by these another process goes on with the disks.
    pub(super) fn check(
        &self,
        disks: &[ServedDisk],
        words: &DiskWords,
        (keep, upgrade): (bool, bool),
    ) -> Result<(), String> {
        let refuse = |text: &str| Err(String::from(text));
        let has_words = |disk: &ServedDisk| {
            let NbdDiskArgs { export_name, description, bitmap, .. } = &disk.args.nbd;
            export_name.is_some() || description.is_some() || !bitmap.is_empty()
        };
        if self.nbd.is_empty() {
            return match disks.iter().any(has_words) {
                true => refuse(
                    "--export-name, --description and --bitmap are for NBD: add --nbd ADDRESS",
                ),
                false => Ok(()),
            };
        }
        if let Some(twice) = twice(&self.nbd) {
            return Err(format!("--nbd {twice} is given twice"));
        }
        let given = |address: &Address| matches!(address, Address::Given(_));
        let moves = if keep { Some("--keep") } else { upgrade.then_some("--upgrade") };
        if let Some(option) = moves.filter(|_| self.nbd.iter().any(given)) {
            return Err(format!("{option} does not go with --nbd fd:N: name a path or a port"));
        }
        if keep && self.access.has_key_of_descriptor() {
            return refuse(
                "--keep does not go with keys and certificates of descriptors, which the next \
                 server could not read again: name files in --tls-creds",
            );
        }
        let guests = disks.iter().filter(|disk| disk.args.place.is_given()).count();
        if guests == 0 {
            let of_guests = OF_GUESTS.into_iter().chain(["accel"]);
            return match of_guests.into_iter().find(|id| words.has(id)) {
                Some(id) => Err(format!(
                    "--{} is for virtual machines: add --vhost-user-blk SOCKET",
                    id.replace('_', "-")
                )),
                None if self.share_rw => {
                    refuse("--share-rw is for disks of virtual machines: NBD clients write anyway")
                }
                None => Ok(()),
            };
        }
        if guests < disks.len() {
            return refuse(
                "beside --nbd each disk has a socket for a virtual machine, or none has one",
            );
        }
        let is_passed = |disk: &ServedDisk| {
            disk.args.place.socket_fd.is_some() || disk.args.place.socket_name.is_some()
        };
        if self.nbd.iter().any(given) && disks.iter().any(is_passed) {
            return refuse(
                "--nbd fd:N does not go with --socket-fd and --socket-name: name one by its path",
            );
        }
        if disks.iter().any(|disk| disk.args.device.accel == Accel::Require) {
            return refuse(
                "--accel require and --nbd contradict each other: NBD clients would not see what \
                 the kernel has in flight",
            );
        }
        Ok(())
    }
}

/// A limit, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HandshakeLimit(pub(crate) Option<Duration>);

/// The first address that is the same as one before it.
fn twice(addresses: &[Address]) -> Option<&Address> {
    let place = |address: &Address| match address {
        // Without `.` and doubled slashes.
        Address::Unix(path) => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            Address::Unix(path.components().collect())
        }
        other => other.clone(),
    };
    let is_free = |address: &Address| matches!(address, Address::Tcp { port: 0, .. });
    let places: Vec<Address> = addresses.iter().map(place).collect();
    let mut numbers = 0..places.len();
    let again = numbers.find(|at| !is_free(&places[*at]) && places[..*at].contains(&places[*at]));
    again.map(|at| &addresses[at])
}

fn parse_connections(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if (1..=CONNECTIONS_MAX).contains(&count) => Ok(count),
        _ => Err(format!("write a number from 1 to {CONNECTIONS_MAX}")),
    }
}

fn parse_handshake(text: &str) -> Result<HandshakeLimit, String> {
    if text == "none" {
        return Ok(HandshakeLimit(None));
    }
    let limit = parse_time(text)?;
    let limit = (!limit.is_zero()).then_some(limit);
    limit.map(|limit| HandshakeLimit(Some(limit))).ok_or_else(|| String::from("write none"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_given_twice_is_found() {
        let all = |texts: &[&str]| -> Vec<Address> {
            texts.iter().map(|text| parse_address(text).unwrap()).collect()
        };
        for (texts, found) in [
            (&["/a", "/b", "unix:/a"][..], Some("/a")),
            (&["unix:a", "./a"], Some("./a")),
            (&["1", "127.0.0.1:1"], Some("127.0.0.1:1")),
            (&["fd:3", "fd:3"], Some("fd:3")),
            (&["0", "0", "/a", "/b", "1", "2", "fd:3", "fd:4"], None),
        ] {
            let all = all(texts);
            assert_eq!(twice(&all).map(Address::to_string).as_deref(), found, "{texts:?}");
        }
    }

    #[test]
    fn a_handshake_has_a_limit_or_none() {
        assert_eq!(parse_handshake("none"), Ok(HandshakeLimit(None)));
        let limit = Duration::from_secs(3);
        assert_eq!(parse_handshake("3s"), Ok(HandshakeLimit(Some(limit))));
        assert!(parse_handshake("0s").is_err() && parse_handshake("3").is_err());
    }
}
