//! The words of `ringdisk serve` about the device: what the guest sees, and what serves it.
//!
//! Promises: parses only; a serial, a block size or a number that no device can have is refused
//! here.

use clap::Args;
use clap::builder::Resettable;
use clap::error::ErrorKind;
use ringdisk_daemon::size::parse_size;
use ringdisk_vhost::export::{
    Engine, OnError, Packed, QUEUE_SIZE_MAX, QUEUES_MAX, check_block_size, check_serial,
    queues_default,
};

use crate::cli::ThreadArgs;
use crate::cli::words::{ENGINE, ON_ERROR, PACKED, Words, cpus_long_help, one_of};

/// The help of `--threads`.
const THREADS: &str = "Queue threads: a number, or auto (one for each virtqueue that is offered, \
                       at most as many as there are CPUs)";

/// The long help of `--cpus`.
const CPUS_LONG: &str = cpus_long_help!(
    " Each of several threads is bound to one of them; without this option the scheduler chooses."
);

/// The help of `--numa`.
const NUMA_HELP: &str =
    "Serve virtqueues on the NUMA node of their memory (auto), or do not look at nodes (off)";

/// What the guest sees, and what serves it.
#[derive(Args, Clone, Debug)]
#[command(
    mut_arg("threads", |arg| arg.help(THREADS).long_help(Resettable::Reset)),
    mut_arg("cpus", |arg| arg.long_help(CPUS_LONG)),
    mut_arg("numa", |arg| arg.help(NUMA_HELP).long_help(Resettable::Reset))
)]
pub(crate) struct DeviceArgs {
    /// Virtqueues that are offered; the virtual machine may use fewer [default: one for each CPU
    /// here, at most 64]
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)),
          help_heading = "Device options")]
    pub(crate) queues: Option<u16>,

    /// Largest virtqueue that the virtual machine may ask for, descriptors
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u16).range(2..=i64::from(QUEUE_SIZE_MAX)),
          default_value_t = QUEUE_SIZE_MAX, help_heading = "Device options")]
    pub(crate) queue_size: u16,

    /// Serial number of the disk, at most 20 characters: its name in /dev/disk/by-id of a Linux
    /// guest
    #[arg(long, value_name = "TEXT", value_parser = parse_serial, default_value = "",
          hide_default_value = true,
          help_heading = "Device options")]
    pub(crate) serial: String,

    /// Smallest piece that the guest reads and writes, bytes: 512, 4096, ...
    #[arg(long, value_name = "SIZE", value_parser = parse_block_size, default_value = "512",
          help_heading = "Device options")]
    pub(crate) logical_block_size: u32,

    /// Piece that the guest should read and write, bytes [default: what the storage has]
    #[arg(long, value_name = "SIZE", value_parser = parse_block_size, help_heading = "Device \
        options")]
    pub(crate) physical_block_size: Option<u32>,

    /// Offer packed virtqueues: on, off, or auto, which does unless the kernel could serve split
    /// ones (--accel)
    ///
    /// A virtual machine that does not ask for them (packed=on) has split ones.
    #[arg(long, value_name = "WHEN", value_parser = one_of(PACKED),
          default_value = "auto", help_heading = "Device options")]
    pub(crate) packed: Packed,

    /// What an error of the image does besides being told to the guest: report it here, or stop
    /// serving the disk too
    #[arg(long, value_name = "WHAT", value_parser = one_of(ON_ERROR),
          default_value = "report", help_heading = "Device options")]
    pub(crate) on_error: OnError,

    /// The disk comes with a virtual machine that migrates here: wait until the source has let go
    /// of the image
    #[arg(long, conflicts_with_all = ["read_only", "create", "snapshot", "overlay"],
          help_heading = "Device options")]
    pub(crate) incoming: bool,

    #[command(flatten)]
    pub(crate) threads: ThreadArgs,

    /// Let the host kernel move the data of a plain disk: auto (where it can), off, require (or
    /// serve nothing)
    ///
    /// Needs the module vhost_blk of ringdisk (docs/vhost-blk.md), a raw image or block device
    /// without anything between (--format raw, --cache none), and a guest with split virtqueues.
    /// The log and `ringdisk ctl TARGET stats` say why it is not done; `ringdisk ctl TARGET accel
    /// off` ends it at any moment. Snapshots, migrations and resizes take the virtqueues back for
    /// as long as they take.
    #[arg(
        long,
        value_name = "WHEN",
        value_parser = one_of(ACCEL),
        default_value = "auto",
        help_heading = "Serving options"
    )]
    pub(crate) accel: Accel,

    /// How the kernel moves data: auto (what takes fewer instructions), kiocb (files and block
    /// devices), bio (block devices)
    #[arg(
        long,
        value_name = "ENGINE",
        value_parser = one_of(ENGINE),
        default_value = "auto",
        help_heading = "Serving options"
    )]
    pub(crate) accel_engine: Engine,

    /// Threads of the kernel for it, at most one for each virtqueue [default: one for each]
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)),
          help_heading = "Serving options")]
    pub(crate) accel_workers: Option<u16>,

    /// Register all memory of the guest with io_uring: less CPU time for each request
    ///
    /// Pins all of it, so all of it is taken at once, and cannot be given back by ballooning nor be
    /// swapped. It counts as locked memory (RLIMIT_MEMLOCK) once for each queue thread; what is
    /// above the limit is used unpinned, with a warning. Requests whose data are one segment gain.
    #[arg(long, help_heading = "Serving options")]
    pub(crate) pin_guest_memory: bool,
}

/// Whether the host kernel moves the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accel {
    /// Where it can.
    Auto,
    /// Never.
    Off,
    /// Or nothing is served.
    Require,
}

/// The words of `--accel`.
const ACCEL: &Words<Accel> = &[
    ("auto", "Where it can", Accel::Auto),
    ("off", "Never", Accel::Off),
    ("require", "Or nothing is served", Accel::Require),
];

impl DeviceArgs {
    /// Errors: words about the host kernel that contradict each other.
    pub(crate) fn check_accel(&self) -> Result<(), (ErrorKind, String)> {
        let conflict = |text: &str| Err((ErrorKind::ArgumentConflict, String::from(text)));
        match self.accel {
            Accel::Require if self.packed == Packed::On => {
                return conflict(
                    "--accel require and --packed on contradict each other: the kernel knows no \
                     packed virtqueues",
                );
            }
            Accel::Off if self.accel_workers.is_some() => {
                return conflict("--accel off and --accel-workers contradict each other");
            }
            Accel::Off if self.accel_engine != Engine::Default => {
                return conflict("--accel off and --accel-engine contradict each other");
            }
            _ => {}
        }
        let queues = self.queues.unwrap_or_else(queues_default);
        match self.accel_workers {
            Some(workers) if workers > queues => {
                let text = format!(
                    "--accel-workers {workers} is more than --queues {queues}: there is at most \
                     one for each virtqueue"
                );
                Err((ErrorKind::ValueValidation, text))
            }
            _ => Ok(()),
        }
    }
}

fn parse_serial(text: &str) -> Result<String, String> {
    check_serial(text).map(|()| text.to_owned())
}

fn parse_block_size(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text)?;
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    check_block_size(bytes).map(|()| bytes)
}
