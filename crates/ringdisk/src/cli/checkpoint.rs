//! The words of `ringdisk ctl … checkpoint`, `ringdisk backup` and `ringdisk restore`.
//!
//! Promises: parses only; no server is asked and no file is opened.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use ringdisk_backup::checkpoint::Fleece;
use ringdisk_daemon::control::protocol::checkpoint::check_name;
use ringdisk_daemon::size::parse_size;
use ringdisk_disk::Format;

use crate::cli::address::parse_new_address;
use crate::cli::names::parse_bitmap;
use crate::cli::{Address, PoolArgs, ProgressArgs, format_parser};

/// Where fleecing files are made unless the user says so.
pub(crate) const FLEECE_DIR: &str = "/var/tmp";

/// Where old data of disks goes while their kept state is read.
#[derive(Args, Clone, Debug)]
pub(crate) struct FleeceArgs {
    /// Where the old data goes that clients overwrite meanwhile: files without a name
    #[arg(long, value_name = "DIR", default_value = FLEECE_DIR, value_hint = ValueHint::DirPath)]
    pub(crate) fleece_dir: PathBuf,

    /// How much old data of each disk there may be; when a client overwrites more, the checkpoint
    /// fails, and never the client [default: half of what is free there, shared by the disks]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) fleece_max: Option<u64>,
}

impl From<&FleeceArgs> for Fleece {
    fn from(args: &FleeceArgs) -> Fleece {
        Fleece { dir: args.fleece_dir.clone(), max: args.fleece_max }
    }
}

fn parse_name(text: &str) -> Result<String, String> {
    check_name(text).map(|()| text.to_owned())
}

/// What is done with the checkpoint NAME.
#[derive(Args, Clone, Debug)]
pub(crate) struct CheckpointArgs {
    /// Name of the checkpoint: letters, digits, '-', '_', '.', ':'
    #[arg(value_name = "NAME", required_unless_present = "list", value_parser = parse_name)]
    pub(crate) name: Option<String>,

    /// Another disk, of this process or another one, of which the state at the same instant is
    /// kept; may be repeated
    #[arg(long, value_name = "TARGET", value_hint = ValueHint::FilePath,
          conflicts_with_all = ["end", "list"])]
    pub(crate) with: Vec<PathBuf>,

    /// Start a bitmap that records what changes from that instant on
    #[arg(long, value_name = "NEW", value_parser = parse_bitmap,
          conflicts_with_all = ["end", "list"])]
    pub(crate) bitmap: Option<String>,

    /// Offer readers what the bitmap OLD has recorded up to that instant
    /// (qemu:dirty-bitmap:OLD)
    #[arg(long, value_name = "OLD", value_parser = parse_bitmap,
          conflicts_with_all = ["end", "list"])]
    pub(crate) since: Option<String>,

    /// Where readers find the disks: unix:PATH or a path, HOST:PORT, or PORT [default: a Unix
    /// socket beside the control sockets of the caller]
    ///
    /// Each disk is an export with the last part of its target as name. Disks of one process are
    /// exports of one address; each further process gets ADDRESS with .2, .3 behind the path, or
    /// the next ports.
    #[arg(long, value_name = "ADDRESS", value_parser = parse_new_address,
          conflicts_with_all = ["end", "list"])]
    pub(crate) nbd: Option<Address>,

    #[command(flatten)]
    pub(crate) fleece: FleeceArgs,

    /// End the checkpoint, for all its disks: the bitmap that it has started goes on in place of
    /// OLD, which is removed
    #[arg(long, conflicts_with = "list")]
    pub(crate) end: bool,

    /// With --end: OLD stays and goes on, too
    #[arg(long, requires = "end", conflicts_with = "merge")]
    pub(crate) keep_bitmap: bool,

    /// With --end, when the backup failed: the bitmap that the checkpoint has started is removed,
    /// and OLD goes on with all that was recorded
    #[arg(long, requires = "end")]
    pub(crate) merge: bool,

    /// Show the checkpoints of the disk, and the bitmaps of its image
    #[arg(long, conflicts_with = "name")]
    pub(crate) list: bool,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const BACKUP_EXAMPLES: &str = "\
Examples:
  ringdisk backup /srv/disk full.qcow2                   the disk as it is now
  ringdisk backup --compress /run/vm1.sock /backup/vm1/  into a directory: the first one is full,
                                                         later ones hold what has changed since
  ringdisk backup /srv/a --with /srv/b /backup/          two disks at the same instant
  ringdisk backup /srv/disk full.qcow2 --bitmap monday
  ringdisk backup /srv/disk inc.qcow2 --since monday --bitmap tuesday --backing full.qcow2
  ringdisk restore /backup/vm1 disk.qcow2                the newest one, with all below it";

/// Back a disk up, also while it is in use
///
/// TARGET is a mount, the socket of `ringdisk serve`, or an image that nobody serves. Its clients
/// go on meanwhile: what they overwrite is copied away first (--fleece-dir).
///
/// FILE is a new image. Where it is a directory, ringdisk chooses the names: FULL-TIME.qcow2 is
/// complete, INC-TIME.qcow2 holds what has changed since the one that it names as its backing file.
/// A bitmap of the image, ringdisk-TIME, records what changes after each. When a backup fails or is
/// stopped, its file is removed, and the bitmaps are as if it had not been begun.
#[derive(Args, Debug)]
#[command(after_help = BACKUP_EXAMPLES)]
pub(crate) struct BackupArgs {
    /// A mount, a socket of `ringdisk serve` (of several NBD disks: SOCKET/NAME), or an image
    #[arg(value_name = "TARGET", value_hint = ValueHint::FilePath)]
    pub(crate) target: PathBuf,

    /// The backup, or a directory for backups
    #[arg(value_name = "FILE|DIRECTORY", value_hint = ValueHint::FilePath)]
    pub(crate) file: PathBuf,

    /// Another disk that is backed up at the same instant, into DIRECTORY/NAME; may be repeated
    #[arg(long, value_name = "TARGET", value_hint = ValueHint::FilePath)]
    pub(crate) with: Vec<PathBuf>,

    /// Copy only what the bitmap OLD says has changed: into an overlay of --backing, or without it
    /// into an overlay that has no backing file yet
    #[arg(long, value_name = "OLD", value_parser = parse_bitmap)]
    pub(crate) since: Option<String>,

    /// The backup that was made when OLD was started
    #[arg(long, value_name = "BACKUP", requires = "since", value_hint = ValueHint::FilePath)]
    pub(crate) backing: Option<PathBuf>,

    /// Start a bitmap for the next backup; it takes the place of OLD
    #[arg(long, value_name = "NEW", value_parser = parse_bitmap)]
    pub(crate) bitmap: Option<String>,

    /// In a directory: a full backup, whatever is there
    #[arg(long)]
    pub(crate) full: bool,

    /// Compress the backup
    #[arg(short, long)]
    pub(crate) compress: bool,

    /// Format of the backup [default: qcow2]
    #[arg(long, value_name = "FORMAT", value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    #[command(flatten)]
    pub(crate) fleece: FleeceArgs,

    #[command(flatten)]
    pub(crate) pool: PoolArgs,

    #[command(flatten)]
    pub(crate) progress: ProgressArgs,
}

const RESTORE_EXAMPLES: &str = "\
Examples:
  ringdisk restore full.qcow2 disk.qcow2
  ringdisk restore /backup/vm1 disk.qcow2                 the newest backup of a directory
  ringdisk restore /backup/vm1 disk.img --at 20261127T183000Z";

/// Make an image from a backup
///
/// All images below the backup are looked at first: each must be there and sound. The new image
/// needs none of them.
#[derive(Args, Debug)]
#[command(after_help = RESTORE_EXAMPLES)]
pub(crate) struct RestoreArgs {
    /// A backup, or a directory of `ringdisk backup`
    #[arg(value_name = "BACKUP|DIRECTORY", value_hint = ValueHint::AnyPath)]
    pub(crate) backup: PathBuf,

    /// The new image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    pub(crate) image: PathBuf,

    /// Of a directory: the newest backup that is not newer than TIME, as in the names of its files
    #[arg(long, value_name = "TIME")]
    pub(crate) at: Option<String>,

    /// Format of the new image [default: qcow2 when its name ends in .qcow2, else raw]
    #[arg(short = 'O', long, value_name = "FORMAT", value_parser = format_parser())]
    pub(crate) target_format: Option<Format>,

    /// Replace IMAGE if it is there
    #[arg(long)]
    pub(crate) force: bool,

    #[command(flatten)]
    pub(crate) pool: PoolArgs,

    #[command(flatten)]
    pub(crate) progress: ProgressArgs,
}
