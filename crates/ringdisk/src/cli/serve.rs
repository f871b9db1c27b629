//! The words of `ringdisk serve`.
//!
//! Promises: parses only; no image is opened and no socket is made. What several `--disk` say
//! together is refused here where words alone show it.

mod nbd;
mod nbd_access;
mod nbd_request;
mod vm_request;

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, ValueHint};

use super::disk_args::{Accel, DeviceArgs, DiskArgs, ServedDisk, SocketArgs};
use super::disk_spec::{DiskSpec, DiskWords};
use crate::cli::{ConfigArgs, LogArgs, SandboxArgs, UserArgs, refuse};
pub(crate) use nbd::NbdArgs;
pub(crate) use nbd_access::NbdAccessArgs;

const SERVE_LONG: &str = "\
Serves the disk inside IMAGE to a virtual machine, through the socket SOCKET (vhost-user-blk), \
until it is \
stopped by Ctrl-C (SIGINT), SIGTERM, SIGHUP or `ringdisk ctl SOCKET stop`. With --nbd ADDRESS it \
is served to NBD clients, without a socket for a virtual machine or beside it (docs/nbd.md).

QEMU, Cloud Hypervisor, Firecracker, crosvm and libblkio connect to it, one at a time; the virtual \
machine may \
go, come back and migrate. Its memory must be shared (memfd), as this lives in another process.

SIGUSR1 prints the counters of each queue on standard error. A service manager that sets \
NOTIFY_SOCKET \
(Type=notify) is told when the socket answers and when it ends; one that passes listening sockets \
(LISTEN_FDS) \
needs no SOCKET here.

Several disks are served by one process with --disk, once for each. SPEC is a list of KEY=VALUE, \
or KEY alone for \
a switch, between commas; a comma inside a value is written twice. Keys are `image`, `socket` (for \
--vhost-user-blk), and the long names of the options below without their dashes; the options \
themselves are what \
every disk has whose SPEC does not say otherwise. `ringdisk ctl` works with each disk on its own.

Sizes are numbers of bytes, or numbers with K, M, G, T, P or E (powers of 1024): 512, 10G, 1.5T. \
Times need a unit: 250us, 1ms, 5s.";

const SERVE_EXAMPLES: &str = "\
Examples:
  ringdisk serve disk.qcow2 --vhost-user-blk /run/vm1.sock
      serve an image; on a terminal the options for QEMU are shown
  ringdisk serve --create 20G disk.qcow2 --vhost-user-blk /run/vm1.sock --queues 4 --serial root
      make it when it is not there; four virtqueues; /dev/disk/by-id/virtio-root in the guest
  ringdisk serve --cache none -f raw /dev/sdb1 --vhost-user-blk /run/vm1.sock --socket-group kvm
      a block device past the page cache; the members of a group may connect
  ringdisk serve --cache none --disk image=root.qcow2,socket=/run/vm1-root.sock,serial=root \\
                 --disk image=data.qcow2,socket=/run/vm1-data.sock,serial=data,read-only
      two disks in one process
  ringdisk serve --daemonize --pidfile /run/vm1.pid disk.img --vhost-user-blk /run/vm1.sock
      in the background; the command returns when the socket answers
  ringdisk serve --keep disk.qcow2 --vhost-user-blk /run/vm1.sock
      the virtual machine goes on, with a pause, when the serving process dies
  ringdisk ctl /run/vm1.sock resize +10G
      the running guest sees the new size
  ringdisk serve disk.qcow2 --nbd /run/nbd.sock
      for NBD clients of this machine: nbdcopy 'nbd+unix:///?socket=/run/nbd.sock' copy.img
  ringdisk serve --null 1T --vhost-user-blk /tmp/null.sock
      a disk that keeps nothing, to measure everything but storage";

/// Serve an image to virtual machines and NBD clients
#[derive(Args, Debug)]
#[command(
    long_about = SERVE_LONG,
    after_help = SERVE_EXAMPLES,
    override_usage = "ringdisk serve [OPTIONS] IMAGE --vhost-user-blk SOCKET\n\
                      \x20      ringdisk serve [OPTIONS] IMAGE [--vhost-user-blk SOCKET] \
                      --nbd ADDRESS\n\
                      \x20      ringdisk serve [OPTIONS] --null SIZE --vhost-user-blk SOCKET\n\
                      \x20      ringdisk serve [OPTIONS] --disk SPEC [--disk SPEC]..."
)]
pub(crate) struct ServeArgs {
    // Before everything else: the others take their words away.
    #[command(flatten)]
    words: DiskWords,

    /// The image: a regular file, a block device or the address of an NBD export
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath, conflicts_with = "null")]
    image: Option<PathBuf>,

    /// Serve in the background; return when the sockets answer
    ///
    /// An error during the start is reported as usual, with its exit code. Later messages go where
    /// --log says. Standard output and error stay open only where they are regular files.
    #[arg(long)]
    pub(crate) daemonize: bool,

    /// A disk of several, as KEY=VALUE,KEY=VALUE: image=root.qcow2,socket=/run/vm1.sock,serial=root
    #[arg(long, value_name = "SPEC", help_heading = "Socket options",
          conflicts_with_all = ["image", "null", "create", "overlay", "vhost_user_blk", "connect",
          "socket_fd",
                               "socket_name", "serial", "export_name"])]
    disk: Vec<String>,

    #[command(flatten)]
    pub(crate) nbd: NbdArgs,

    #[command(flatten)]
    pub(crate) config: ConfigArgs,

    /// Take over, with everything that is connected, from the process that serves the same disks
    /// now
    ///
    /// The words are those of that process. NBD clients go along between two of their requests,
    /// also where a virtual machine has the same disk; those with TLS are disconnected, and connect
    /// again.
    #[arg(long, conflicts_with = "incoming", help_heading = "Serving options")]
    pub(crate) upgrade: bool,

    /// Let the virtual machine go on when the serving process dies: a second process holds its
    /// connection and its memory, and starts another one
    ///
    /// The virtual machine sees a pause and nothing else, and every request is answered exactly
    /// once. NBD clients (--nbd) lose their connections and connect again; the second process holds
    /// the listening sockets, but not those beside --vhost-user-blk. After 5 deaths within 10 s the
    /// disk is given up. Needs the path of a socket, or --nbd; not with --incoming, --snapshot and
    /// --accel require.
    #[arg(long, conflicts_with_all = ["incoming", "snapshot", "socket_fd", "socket_name"],
          help_heading = "Serving options")]
    pub(crate) keep: bool,

    #[command(flatten)]
    pub(crate) log: LogArgs,

    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,

    #[command(flatten)]
    pub(crate) user: UserArgs,

    /// Write the pid to FILE when the sockets answer; locked, and removed at the end
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Serving \
        options")]
    pub(crate) pidfile: Option<PathBuf>,

    /// Print IOPS, bytes, latencies, depth and CPU time per request on standard error at the end
    #[arg(long, help_heading = "Serving options")]
    pub(crate) stats: bool,

    // Last, as its test options are what people need least.
    #[command(flatten)]
    one: DiskArgs,
}

impl ServeArgs {
    /// The disks, in the order of the words.
    ///
    /// Errors: words that make no sense together.
    pub(crate) fn disks(&self) -> Result<Vec<ServedDisk>, clap::Error> {
        let mut disks = match self.disk.as_slice() {
            [] => vec![ServedDisk { image: self.image.clone(), args: self.one.clone() }],
            specs => {
                let mut disks = Vec::new();
                for spec in specs {
                    let DiskSpec { image, one } = self
                        .words
                        .parse(spec)
                        .map_err(|(kind, text)| refuse("serve", kind, text))?;
                    disks.push(ServedDisk { image, args: one });
                }
                disks
            }
        };
        for disk in &mut disks {
            if let Some(image) = &mut disk.image {
                let taken = disk.args.source.take_name(image);
                taken.map_err(|text| refuse("serve", ErrorKind::ValueValidation, text))?;
            }
        }
        let is_missing =
            |disk: &ServedDisk| disk.image.is_none() && disk.args.source.null.is_none();
        if let Some(number) = disks.iter().position(is_missing) {
            let text = match self.disk.get(number) {
                None => String::from(
                    "the IMAGE is missing: name what is to be served, such as\n\n  \
                     ringdisk serve disk.qcow2 --vhost-user-blk /run/vm1.sock",
                ),
                Some(spec) => format!(
                    "the image of --disk '{spec}' is missing: name what is to be served, such \
                     as\n\n  \
                     ringdisk serve --disk image=disk.qcow2,socket=/run/vm1.sock"
                ),
            };
            return Err(refuse("serve", ErrorKind::MissingRequiredArgument, text));
        }
        for disk in &disks {
            let device = &disk.args.device;
            if device.physical_block_size.is_some_and(|size| size < device.logical_block_size) {
                let text = "--physical-block-size is smaller than --logical-block-size";
                return Err(refuse("serve", ErrorKind::ValueValidation, text));
            }
            device.check_accel().map_err(|(kind, text)| refuse("serve", kind, text))?;
            if device.accel == Accel::Require && !disk.args.source.limit.is_empty() {
                let text = "--accel require and --limit contradict each other: the kernel knows no \
                            limits";
                return Err(refuse("serve", ErrorKind::ArgumentConflict, text));
            }
        }
        disks.iter().try_for_each(|disk| self.check_kept(&disk.args))?;
        let wrong = |text| refuse("serve", ErrorKind::ArgumentConflict, text);
        self.nbd.check(&disks, &self.words, (self.keep, self.upgrade)).map_err(wrong)?;
        self.check_alike(&disks)?;
        Ok(disks)
    }

    /// The words about queue threads, for all disks of a process.
    pub(crate) fn device(&self) -> &DeviceArgs {
        &self.one.device
    }

    /// The words about sockets, for all disks of a process.
    pub(crate) fn socket(&self) -> &SocketArgs {
        &self.one.place
    }

    /// Errors: a disk that cannot be kept.
    fn check_kept(&self, disk: &DiskArgs) -> Result<(), clap::Error> {
        let why = match disk {
            _ if !self.keep => return Ok(()),
            _ if disk.device.accel == Accel::Require => {
                "--accel require: the host kernel loses virtqueues with the process"
            }
            _ if disk.source.snapshot => "--snapshot: its overlay goes with the process",
            _ if disk.device.incoming => "--incoming: begin with the disk, or keep it later",
            DiskArgs { place, .. }
                if self.nbd.nbd.is_empty()
                    && place.vhost_user_blk.is_none()
                    && place.connect.is_none() =>
            {
                "a socket that is passed: name one with --vhost-user-blk"
            }
            _ => return Ok(()),
        };
        let text = format!("--keep does not go with {why}");
        Err(refuse("serve", ErrorKind::ArgumentConflict, text))
    }

    /// Errors: two disks that want the same socket.
    fn check_alike(&self, disks: &[ServedDisk]) -> Result<(), clap::Error> {
        for (number, disk) in disks.iter().enumerate() {
            let place = &disk.args.place;
            let same = |other: &&ServedDisk| {
                let theirs = &other.args.place;
                let path = |place: &SocketArgs| {
                    let path = place.vhost_user_blk.as_ref().or(place.connect.as_ref());
                    path.and_then(|path| std::path::absolute(path).ok())
                };
                path(place).is_some_and(|mine| path(theirs) == Some(mine))
                    || place.socket_fd.is_some_and(|mine| theirs.socket_fd == Some(mine))
                    || place
                        .socket_name
                        .as_ref()
                        .is_some_and(|mine| theirs.socket_name.as_ref() == Some(mine))
            };
            if disks.iter().skip(number + 1).find(same).is_some() {
                let text = format!(
                    "two disks cannot have one socket; give --disk '{}' one of its own",
                    self.disk.get(number).map_or("", String::as_str)
                );
                return Err(refuse("serve", ErrorKind::ArgumentConflict, text));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
