//! The words of `ringdisk ctl`.
//!
//! Promises: parses only; no server is asked. A command that a disk may not have is here all the
//! same; the server refuses it.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueHint};
use ringdisk_daemon::size::{SizeChange, parse_size_change};
use ringdisk_disk::Format;

use ringdisk_qcow2::Preallocation;

use crate::cli::names::parse_snapshot;
use crate::cli::words::parse_switch;
use crate::cli::words::{PREALLOCATION, one_of};
use crate::cli::{
    CheckpointArgs, FleeceArgs, JobRunArgs, ProgressArgs, format_parser, parse_limit,
};

const CTL_EXAMPLES: &str = "\
Examples:
  ringdisk ctl /srv/disk stats
  ringdisk ctl /srv/disk stats --every 2s          with rates of the last two seconds
  ringdisk ctl /srv/disk events                    I/O errors, clients that come and go, and so on
  ringdisk ctl /srv/disk resize +10G
  ringdisk ctl /srv/disk snapshot today.qcow2      further writes go to today.qcow2
  ringdisk ctl /srv/disk commit                    and back into the image below it
  ringdisk ctl /srv/disk commit --background --speed 50M    as a job: `ringdisk job list`
  ringdisk ctl /srv/disk stream                    the image on top needs no backing file any more
  ringdisk ctl /srv/disk backing -F qcow2 copy.qcow2    a copy of the image below takes its place
  ringdisk ctl /srv/disk mirror --complete /mnt/new.qcow2    it moves there while it is in use
  ringdisk ctl /srv/a checkpoint c1 --with /srv/b --bitmap new --since old
                                                   both as they are now, for backup programs
  ringdisk ctl /srv/a checkpoint --end c1
  ringdisk ctl /srv/disk limit iops=5000,bps-write=50M
  ringdisk ctl /srv/disk stop                      when nobody uses it any more; --force: now
  ringdisk ctl /run/vm1.sock resize +10G           a disk of `ringdisk serve`: its guest sees the \
  new size";

/// Control a mount, or a disk of virtual machines or NBD clients, while it is served
///
/// Talks to the process that serves TARGET, through a socket that only its owner and root can use.
/// The disk may be in use meanwhile.
#[derive(Args, Debug)]
#[command(after_help = CTL_EXAMPLES)]
pub(crate) struct CtlArgs {
    /// The file that the image is served as, the socket of `ringdisk serve`, or the HOST:PORT of
    /// `serve --nbd`
    ///
    /// Of several disks that are served over NBD: SOCKET/NAME or HOST:PORT/NAME, with the name of
    /// the export. HOST as it was given to `serve`. `ringdisk ps` lists all targets.
    #[arg(value_name = "TARGET", value_hint = ValueHint::FilePath)]
    pub(crate) target: PathBuf,

    /// How long the server may take to answer; exit code 14 after that. With `stop`: how long it
    /// may take to end (60s)
    ///
    /// What takes long by itself, such as a commit, has no limit once the server has answered,
    /// unless the server is stopped for so long; Ctrl-C gives it up.
    #[arg(long, value_name = "TIME", value_parser = parse_limit)]
    pub(crate) timeout: Option<Duration>,

    #[command(subcommand)]
    pub(crate) command: CtlCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CtlCommand {
    /// Say what the disk does, on one screen
    Stats {
        /// As JSON, with all counters
        #[arg(long, conflicts_with = "every")]
        json: bool,
        /// All counters, also those of queue threads and rings
        #[arg(long, conflicts_with_all = ["json", "every"])]
        internals: bool,
        /// Again after each TIME, with what was done in between; Ctrl-C ends it
        #[arg(long, value_name = "TIME", value_parser = parse_limit)]
        every: Option<Duration>,
    },
    /// Print what happens as it happens, as lines of JSON; Ctrl-C ends it
    ///
    /// Each line has `event` (io-error, disk-full, fault, needs-reset, client-came, client-gone,
    /// limited, rate-limited, job, stopping, handed-over, lost), `time`, `number` and `text`; of a
    /// job also `id`, `kind`, `state` and, where it has failed, `why`. A reader that is too slow
    /// gets `lost` with the number of events that it has missed.
    Events,
    /// Change the size of the disk
    Resize {
        /// The new size, such as 20G, +5G or -1G
        #[arg(value_name = "SIZE", value_parser = parse_size_change, allow_hyphen_values = true)]
        size: SizeChange,
        /// Let the disk become smaller; what lies past its new end is lost
        #[arg(long)]
        shrink: bool,
        /// What is prepared in the new part
        #[arg(long, value_name = "MODE", value_parser = one_of(PREALLOCATION),
              default_value = "off")]
        preallocation: Preallocation,
    },
    /// Put a new overlay on top, or make a snapshot inside the image
    ///
    /// With FILE: what was written so far stays in the image as it is, further writes go to FILE, a
    /// new qcow2. With --internal: the state is kept inside the image under a name.
    Snapshot(SnapshotTarget),
    /// Write the top image, or some images of the chain, into the one below
    ///
    /// Clients go on meanwhile, and may write past the end of a growable disk. The images that were
    /// written down are empty afterwards, so a program that opens the disk by an old name sees what
    /// it holds now. A base that is larger than the disk is cut to its size. When an image cannot
    /// be emptied, or its internal snapshots show what is below it, the command fails and the chain
    /// stays as it was. `ringdisk job` shows, pauses, limits and cancels it meanwhile.
    Commit {
        /// The topmost image to be written down [default: the top one]
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        top: Option<PathBuf>,
        /// The image to write into [default: the one below the topmost]
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        base: Option<PathBuf>,
        #[command(flatten)]
        job: JobRunArgs,
        #[command(flatten)]
        progress: ProgressArgs,
    },
    /// Fill the top image from the images below it, which it then no longer needs
    ///
    /// The other way round than `commit`: no other image is written. What the top image shows of
    /// the images below is copied into it, then its header names the base, or no backing file.
    /// Clients go on meanwhile. When an internal snapshot of the top image would show other bytes
    /// then, the command fails and the chain stays as it was. `ringdisk job` shows, pauses, limits
    /// and cancels it meanwhile; given up, it leaves what was copied in the top image.
    Stream {
        /// The image of the chain that becomes the backing file [default: there is none then]
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        base: Option<PathBuf>,
        #[command(flatten)]
        job: JobRunArgs,
        #[command(flatten)]
        progress: ProgressArgs,
    },
    /// Copy the disk to TARGET while clients work, and then switch over to it
    ///
    /// TARGET is a file, a block device, or an NBD export of another server (nbd://HOST/NAME,
    /// nbd+unix:///NAME?socket=PATH). A file that is not there is made, as large as the disk and in
    /// the format of its image on top (--format); one that is there is overwritten with --existing
    /// only. When all is copied the target stays in step with the disk: the job is ready. Then
    /// `ringdisk job complete` has the disk switch over to the target, and `ringdisk job cancel`
    /// leaves the target as a copy of that moment. The command waits until the job is ready, with
    /// --complete until the disk has switched over. Errors of the target are none of the disk's.
    /// With --bitmap only what the bitmap has marked is copied before, into a target that has the
    /// rest already, such as the last copy or an overlay over it; the bitmap goes on as it is.
    Mirror(MirrorArgs),
    /// Copy the disk as it is at this instant to TARGET, while clients write on
    ///
    /// The instant is when the command begins; what clients overwrite afterwards is copied away
    /// first (--fleece-dir). Nothing switches over, and the disk is not changed. TARGET is what
    /// `mirror` takes. With --bitmap only what the bitmap has marked is copied, into a target that
    /// has the rest already, such as an overlay over the last backup; the bitmap goes on as it is.
    /// `ringdisk job` shows, pauses, limits and cancels it meanwhile. A backup that is given up, or
    /// whose server ends, leaves an incomplete target. `ringdisk backup` makes the whole round of
    /// incremental backups, of several disks at one instant.
    Backup(BackupJobArgs),
    /// Make the top image name another backing file of the same content
    ///
    /// The new file, which may be a chain, is compared with the old one wherever the top image, or
    /// an internal snapshot of it, has nothing itself; where they differ the command fails, and
    /// nothing has changed. A server in a sandbox opens what is in its chain, or what its
    /// --allow-path names. Clients work meanwhile. `ringdisk rebase` takes a backing file of other
    /// content, while nobody uses the disk.
    Backing {
        /// The new backing file, "" for none
        // A path of clap's own must not be empty.
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath,
              value_parser = OsStringValueParser::new().map(PathBuf::from))]
        file: PathBuf,
        /// Format of FILE, which is never guessed
        #[arg(short = 'F', long, value_name = "FORMAT", value_parser = format_parser())]
        format: Option<Format>,
        #[command(flatten)]
        progress: ProgressArgs,
    },
    /// Let the host kernel move the data of a virtual machine's disk, or take that back (`ringdisk
    /// serve --accel`)
    ///
    /// Either way only requests in flight are waited for, and the guest notices nothing. `off`
    /// lasts until `on`.
    Accel {
        /// on or off
        #[arg(value_name = "on|off", value_parser = parse_switch, action = clap::ArgAction::Set)]
        on: bool,
    },
    /// Keep what clients read of backing files in the image on top, or do so no longer (as
    /// `--copy-on-read` of mount and serve)
    CopyOnRead {
        /// on or off
        #[arg(value_name = "on|off", value_parser = parse_switch, action = clap::ArgAction::Set)]
        on: bool,
    },
    /// Keep the state of one or several disks at one instant, for readers over NBD (backups)
    ///
    /// All disks stand still for a moment, then their clients go on; what they overwrite is copied
    /// away first. Readers see that instant, read-only, until the checkpoint ends: with --end, or
    /// with the server of the disk. `ringdisk backup` does the whole round.
    Checkpoint(Box<CheckpointArgs>),
    /// Show the limits of the disk, or change some
    ///
    /// Those that LIMITS does not name stay as they are; a rate of 0 is no limit, `none` removes
    /// all. Disks of one group (`--limit group=NAME`) have them together. A disk that the host
    /// kernel serves (--accel) is served by the queue threads then.
    Limit {
        /// As with `--limit`: iops=5000,bps=0
        #[arg(value_name = "LIMITS")]
        change: Option<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// End the mount, as Ctrl-C does; of several disks of one process this one only
    ///
    /// A mount in use loses its name, and is served until its last user has closed it; the command
    /// says who that is, and waits. It can still be named by the path that it had.
    Stop {
        /// End it now: its users get errors, and what they have not written yet is lost
        #[arg(short, long)]
        force: bool,
    },
}

/// Where a disk is mirrored to, and how.
#[derive(Args, Debug)]
pub(crate) struct MirrorArgs {
    /// A file, a block device, or the address of an NBD export
    #[arg(value_name = "TARGET", value_hint = ValueHint::FilePath)]
    pub(crate) to: PathBuf,
    /// Format of TARGET [default: of a new file that of the image on top; else qcow2 where it is
    /// one, and a raw one has to be named]
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = format_parser())]
    pub(crate) format: Option<Format>,
    /// Overwrite a file or device that is there
    #[arg(long)]
    pub(crate) existing: bool,
    /// What is copied at the beginning: full (all), top (what the image on top has: the target has
    /// the images below that one as its backing file), none (the target has it all already)
    /// [default: full]
    #[arg(long, value_name = "WHAT",
          value_parser = PossibleValuesParser::new(["full", "top", "none"]))]
    pub(crate) sync: Option<String>,
    /// Copy at the beginning what this bitmap of the image on top has marked by then
    #[arg(long, value_name = "NAME", conflicts_with = "sync")]
    pub(crate) bitmap: Option<String>,
    /// Answer a client's write when the target has it, too; so the rest never grows
    #[arg(long)]
    pub(crate) write_blocking: bool,
    /// Switch over as soon as the target is in step
    #[arg(long)]
    pub(crate) complete: bool,
    /// Waits, as it does without --background
    #[arg(long = "wait", hide = true, conflicts_with = "background")]
    pub(crate) _wait: bool,
    #[command(flatten)]
    pub(crate) job: JobRunArgs,
    #[command(flatten)]
    pub(crate) progress: ProgressArgs,
}

/// Where a disk is backed up to, and how.
#[derive(Args, Debug)]
pub(crate) struct BackupJobArgs {
    /// A file, a block device, or the address of an NBD export
    #[arg(value_name = "TARGET", value_hint = ValueHint::FilePath)]
    pub(crate) to: PathBuf,
    /// Format of TARGET [default: of a new file that of the image on top; else qcow2 where it is
    /// one, and a raw one has to be named]
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = format_parser())]
    pub(crate) format: Option<Format>,
    /// Overwrite a file or device that is there
    #[arg(long)]
    pub(crate) existing: bool,
    /// What is copied: full (all), top (what the image on top has: the target has the images below
    /// that one as its backing file) [default: full]
    #[arg(long, value_name = "WHAT", value_parser = PossibleValuesParser::new(["full", "top"]))]
    pub(crate) sync: Option<String>,
    /// Copy what this bitmap of the image on top has marked
    #[arg(long, value_name = "NAME", conflicts_with = "sync")]
    pub(crate) bitmap: Option<String>,
    #[command(flatten)]
    pub(crate) fleece: FleeceArgs,
    #[command(flatten)]
    pub(crate) job: JobRunArgs,
    #[command(flatten)]
    pub(crate) progress: ProgressArgs,
}

/// Where the state of the disk is kept.
#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
pub(crate) struct SnapshotTarget {
    /// The new overlay
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) file: Option<PathBuf>,
    /// Name of a snapshot inside the image
    #[arg(long, value_name = "NAME", value_parser = parse_snapshot)]
    pub(crate) internal: Option<String>,
}
