//! The words about one disk that is served.
//!
//! Promises: words that make no sense for any disk are refused here; what depends on other disks,
//! or on the whole command, is not.

mod device;

use std::path::PathBuf;

use clap::{Args, ValueHint};
use ringdisk_daemon::sockets::SocketOptions;
use ringdisk_nbd::options::check_text;
use ringdisk_vhost::export::Second;

use super::ImageArgs;
use super::words::{SECOND, one_of};
pub(crate) use device::{Accel, DeviceArgs};

/// Largest number of a descriptor that is taken for one.
const FD_MAX: i32 = 1 << 20;

/// What each disk of a process has for itself.
#[derive(Args, Clone, Debug)]
pub(crate) struct DiskArgs {
    #[command(flatten)]
    pub(crate) place: SocketArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) nbd: NbdDiskArgs,
    #[command(flatten)]
    pub(crate) source: ImageArgs,
}

/// Where front ends come from.
#[derive(Args, Clone, Debug)]
pub(crate) struct SocketArgs {
    /// The socket to make and to listen on; one that a killed process left is replaced
    #[arg(long, value_name = "SOCKET", value_hint = ValueHint::FilePath, help_heading = "Socket \
        options")]
    pub(crate) vhost_user_blk: Option<PathBuf>,

    /// Connect to a front end that listens on SOCKET, and again when it has gone
    ///
    /// While nobody listens there it is tried every 100 ms at first, then less and less often, down
    /// to every 2 s.
    #[arg(long, value_name = "SOCKET", value_hint = ValueHint::FilePath, help_heading = "Socket \
        options",
          conflicts_with_all = ["vhost_user_blk", "second_front_end", "socket_mode",
          "socket_group"])]
    pub(crate) connect: Option<PathBuf>,

    /// Use descriptor N, a Unix socket that listens or that is connected, from the process that
    /// starts this one
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(i32).range(3..=i64::from(FD_MAX)),
          help_heading = "Socket options", conflicts_with_all = ["vhost_user_blk", "connect",
          "socket_mode", "socket_group"])]
    pub(crate) socket_fd: Option<i32>,

    /// Use the socket of this name from the service manager (FileDescriptorName=) [default: the
    /// next one]
    #[arg(long, value_name = "NAME", help_heading = "Socket options",
          conflicts_with_all = ["vhost_user_blk", "connect", "socket_fd", "socket_mode",
          "socket_group"])]
    pub(crate) socket_name: Option<String>,

    /// Who may connect, as chmod writes it [default: 600, with --socket-group 660]
    #[arg(long, value_name = "MODE", value_parser = parse_mode, help_heading = "Socket options")]
    pub(crate) socket_mode: Option<u32>,

    /// Group of the socket: a name or a number
    #[arg(long, value_name = "GROUP", help_heading = "Socket options")]
    pub(crate) socket_group: Option<String>,

    /// What happens to a front end that comes while another one is connected
    #[arg(long, value_name = "WHAT", value_parser = one_of(SECOND),
          default_value = "wait", help_heading = "Socket options")]
    pub(crate) second_front_end: Second,
}

/// How NBD clients see one disk.
#[derive(Args, Clone, Debug)]
pub(crate) struct NbdDiskArgs {
    /// The name that NBD clients ask for [default: the empty one]
    #[arg(long, value_name = "NAME", value_parser = parse_text, help_heading = "NBD options")]
    pub(crate) export_name: Option<String>,

    /// A text about the disk for NBD clients
    #[arg(long, value_name = "TEXT", value_parser = parse_text, help_heading = "NBD options")]
    pub(crate) description: Option<String>,

    /// Offer the bitmap NAME of the image to NBD clients (qemu:dirty-bitmap:NAME); may be repeated
    ///
    /// Clients see it as it is at the start. Where the disk can be written, one that records is
    /// refused: what clients read would no longer be what it says.
    #[arg(long, value_name = "NAME", help_heading = "NBD options")]
    pub(crate) bitmap: Vec<String>,

    /// Offer `qemu:allocation-depth`: `qemu-nbd` does with a word only.
    #[arg(skip = true)]
    pub(crate) allocation_depth: bool,

    /// Offer a bitmap that records, as it is at the start: callers of `qemu-nbd` name all of them.
    #[arg(skip)]
    pub(crate) shows_recording: bool,
}

/// One disk, after the words were checked against each other.
#[derive(Clone, Debug)]
pub(crate) struct ServedDisk {
    /// `None` with `--null`.
    pub(crate) image: Option<PathBuf>,
    pub(crate) args: DiskArgs,
}

impl SocketArgs {
    /// Whether the words say where front ends come from.
    pub(crate) fn is_given(&self) -> bool {
        self.vhost_user_blk.is_some()
            || self.connect.is_some()
            || self.socket_fd.is_some()
            || self.socket_name.is_some()
    }

    /// As the library takes them.
    pub(crate) fn options(&self) -> SocketOptions {
        SocketOptions {
            make: self.vhost_user_blk.clone(),
            connect: self.connect.clone(),
            descriptor: self.socket_fd,
            name: self.socket_name.clone(),
            mode: self.socket_mode,
            group: self.socket_group.clone(),
        }
    }
}

fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        // A process that may not write to a socket cannot connect (unix(7)).
        Ok(mode) if mode <= 0o777 && mode & 0o600 == 0o600 => Ok(mode),
        _ => Err(String::from(
            "write an octal mode from 600 to 777 that lets its owner read and write, such as 660",
        )),
    }
}

fn parse_text(text: &str) -> Result<String, String> {
    check_text("it", text).map(|()| text.to_owned())
}
