//! The words of commands that make, change and check an image.
//!
//! Promises: parses only; no image is opened.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use ringdisk_daemon::size::{SizeChange, parse_size, parse_size_change};
use ringdisk_disk::{Cache, Format};
use ringdisk_images::snapshot::Work;
use ringdisk_qcow2::Preallocation;
use ringdisk_qcow2::Repair;

use crate::cli::inspect::{NameArgs, OutputArgs, PoolArgs};
use crate::cli::names::{parse_existing, parse_file, parse_snapshot};
use crate::cli::words::{PREALLOCATION, Words, one_of};
use crate::cli::{ProgressArgs, cache_parser, format_parser};

const CREATE_EXAMPLES: &str = "\
Examples:
  ringdisk create disk.qcow2 10G
  ringdisk create -f qcow2 -o cluster_size=2M,preallocation=metadata disk 10G
  ringdisk create -b base.qcow2 -F qcow2 overlay.qcow2
  ringdisk create -f qcow2 -o help                 every option of the format";

/// Make an image
///
/// Without --format the image is a qcow2 when its name ends in .qcow2 or it gets a backing file,
/// and raw otherwise. A file of that name is overwritten, unless another program uses it.
#[derive(Args, Debug)]
#[command(args_override_self = true)]
#[command(
    after_help = CREATE_EXAMPLES,
    override_usage = "ringdisk create [OPTIONS] FILE SIZE\n       \
                      ringdisk create [OPTIONS] -b BACKING -F FORMAT FILE [SIZE]\n       \
                      ringdisk create -f FORMAT -o help"
)]
pub(crate) struct CreateArgs {
    /// Format of the new image, raw or qcow2
    #[arg(short, long, value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    /// Options of the format, as NAME=VALUE,NAME=VALUE (a comma in a value is written twice); help
    /// lists them
    #[arg(short = 'o', long, value_name = "OPTIONS")]
    pub(crate) options: Vec<String>,

    /// The image that the new one shows until it is written to
    #[arg(short, long, value_name = "BACKING", value_hint = ValueHint::FilePath,
          value_parser = parse_file)]
    pub(crate) backing: Option<String>,

    /// Format of BACKING, which is never guessed
    #[arg(short = 'F', short_alias = 'B', long, value_name = "FORMAT",
          value_parser = format_parser())]
    pub(crate) backing_format: Option<Format>,

    /// Do not look at BACKING; SIZE is needed then
    #[arg(short = 'u', long)]
    pub(crate) backing_unsafe: bool,

    /// Print nothing but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// The file to make
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) file: Option<PathBuf>,

    /// Size of the disk [default: that of BACKING]
    #[arg(value_name = "SIZE", value_parser = parse_size, allow_hyphen_values = true)]
    pub(crate) size: Option<u64>,

    #[command(flatten)]
    pub(crate) pool: PoolArgs,
}

/// Change the size of an image
///
/// SIZE is the new size, or with + or - in front how much it grows or shrinks.
#[derive(Args, Debug)]
#[command(args_override_self = true)]
pub(crate) struct ResizeArgs {
    /// Format of FILE, raw or qcow2 [default: look at its first bytes]
    #[arg(short, long, value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    /// Let the disk become smaller; what lies past its new end is lost
    #[arg(long)]
    pub(crate) shrink: bool,

    /// What is prepared in the new part
    #[arg(long, value_name = "MODE", value_parser = one_of(PREALLOCATION), default_value = "off")]
    pub(crate) preallocation: Preallocation,

    /// Print nothing but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// The image
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) file: PathBuf,

    /// The new size, such as 20G, +5G or -1G
    #[arg(value_name = "SIZE", value_parser = parse_size_change, allow_hyphen_values = true)]
    pub(crate) size: SizeChange,

    #[command(flatten)]
    pub(crate) name: NameArgs,

    #[command(flatten)]
    pub(crate) pool: PoolArgs,
}

/// The image that a command works on.
#[derive(Args, Debug)]
pub(crate) struct FileArgs {
    /// The image
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) file: PathBuf,

    #[command(flatten)]
    pub(crate) name: NameArgs,

    #[command(flatten)]
    pub(crate) pool: PoolArgs,
}

/// What `check` repairs.
const REPAIR: &Words<Repair> = &[
    ("leaks", "Space that nobody uses, in an image without errors", Repair::Leaks),
    ("all", "Everything that can be repaired", Repair::All),
];

/// Check the metadata of an image, and repair it
///
/// Exit code: 0 nothing is wrong; 1 the check did not end; 2 the image is damaged; 3 space is
/// leaked, otherwise nothing is wrong; 63 the format has nothing to check.
#[derive(Args, Debug)]
#[command(args_override_self = true)]
pub(crate) struct CheckArgs {
    /// Format of FILE, raw or qcow2 [default: look at its first bytes]
    #[arg(short, long, value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    /// How the page cache is used
    #[arg(short = 'T', long, value_name = "MODE", value_parser = cache_parser(),
          default_value = "writeback")]
    pub(crate) cache: Cache,

    /// Repair what is wrong
    #[arg(short, long, value_name = "WHAT", value_parser = one_of(REPAIR))]
    pub(crate) repair: Option<Repair>,

    /// Check although another program is writing to the image; then anything may look wrong
    #[arg(short = 'U', long, conflicts_with = "repair")]
    pub(crate) force_share: bool,

    #[command(flatten)]
    pub(crate) output: OutputArgs,

    #[command(flatten)]
    pub(crate) progress: ProgressArgs,

    #[command(flatten)]
    pub(crate) image: FileArgs,
}

/// List, make, apply and delete the snapshots inside an image
///
/// SNAPSHOT is a name, or an ID of the list. Where it is the ID of one snapshot and the name of
/// another, --apply takes the ID and --delete the name, as qemu-img does.
#[derive(Args, Debug)]
#[command(args_override_self = true)]
pub(crate) struct SnapshotArgs {
    /// Format of FILE [default: look at its first bytes]
    #[arg(short, long, value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    /// List the snapshots (also when nothing else is asked for)
    #[arg(short, long, group = "what")]
    pub(crate) list: bool,

    /// Make a snapshot of the disk as it is
    #[arg(short, long, value_name = "SNAPSHOT", group = "what", value_parser = parse_snapshot)]
    pub(crate) create: Option<String>,

    /// Go back to a snapshot; what was written since is lost
    #[arg(short, long, value_name = "SNAPSHOT", group = "what", value_parser = parse_existing)]
    pub(crate) apply: Option<String>,

    /// Delete a snapshot
    #[arg(short, long, value_name = "SNAPSHOT", group = "what", value_parser = parse_existing)]
    pub(crate) delete: Option<String>,

    /// List although another program is writing to the image
    #[arg(short = 'U', long, conflicts_with_all = ["create", "apply", "delete"])]
    pub(crate) force_share: bool,

    /// Print nothing but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,

    #[command(flatten)]
    pub(crate) image: FileArgs,
}

impl SnapshotArgs {
    /// What is asked for.
    pub(crate) fn work(&self) -> Work {
        match (&self.create, &self.apply, &self.delete) {
            (Some(name), _, _) => Work::Create(name.clone()),
            (_, Some(name), _) => Work::Apply(name.clone()),
            (_, _, Some(name)) => Work::Delete(name.clone()),
            _ => Work::List,
        }
    }
}

/// Write what an image holds into its backing file
///
/// Afterwards the image, and with --base those between, hold nothing of their own and show their
/// backing file, unless --drop says to leave them as they are. The base gets the size of the image.
/// An image whose internal snapshots show what is below it is refused.
#[derive(Args, Debug)]
#[command(args_override_self = true)]
pub(crate) struct CommitArgs {
    /// Format of FILE [default: look at its first bytes]
    #[arg(short, long, value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    /// How the page cache is used
    #[arg(short = 't', long, value_name = "MODE", value_parser = cache_parser(),
          default_value = "writeback")]
    pub(crate) cache: Cache,

    /// The image of the chain to write into [default: the backing file of FILE]
    #[arg(short, long, value_name = "BASE", value_hint = ValueHint::FilePath)]
    pub(crate) base: Option<PathBuf>,

    /// Format of that image: an error when it has another
    ///
    /// A raw image that does not begin like one of another format stays so, since the next program
    /// that opens it without --format would take it for that: a commit that would change it is
    /// refused.
    /// `raw` allows it, for a base that is always opened with --format raw.
    #[arg(long, value_name = "FORMAT", value_parser = format_parser())]
    pub(crate) base_format: Option<Format>,

    /// Do not empty FILE, and the images between, afterwards: delete them before anything writes to
    /// the base
    #[arg(short, long)]
    pub(crate) drop: bool,

    #[command(flatten)]
    pub(crate) progress: ProgressArgs,

    #[command(flatten)]
    pub(crate) image: FileArgs,
}

/// Change the backing file of an image
///
/// The disk stays what it is: where the old and the new backing file differ, the image gets the old
/// bytes. With --backing-unsafe only the name is changed, for a backing file that was moved.
#[derive(Args, Debug)]
#[command(args_override_self = true)]
pub(crate) struct RebaseArgs {
    /// Format of FILE [default: look at its first bytes]
    #[arg(short, long, value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    /// How the page cache is used for FILE
    #[arg(short = 't', long, value_name = "MODE", value_parser = cache_parser(),
          default_value = "writeback")]
    pub(crate) cache: Cache,

    /// The new backing file, "" for none
    #[arg(short, long, value_name = "BACKING", value_hint = ValueHint::FilePath,
          value_parser = parse_file)]
    pub(crate) backing: Option<String>,

    /// Format of BACKING, which is never guessed
    #[arg(short = 'F', short_alias = 'B', long, value_name = "FORMAT",
          value_parser = format_parser())]
    pub(crate) backing_format: Option<Format>,

    /// How the page cache is used for the backing files
    #[arg(short = 'T', long, value_name = "MODE", value_parser = cache_parser(),
          default_value = "writeback")]
    pub(crate) backing_cache: Cache,

    /// Change the name only; look at no backing file
    #[arg(short = 'u', long)]
    pub(crate) backing_unsafe: bool,

    /// Compress what is copied into the image
    #[arg(short, long)]
    pub(crate) compress: bool,

    /// Read the backing files although another program is writing to them
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,

    #[command(flatten)]
    pub(crate) progress: ProgressArgs,

    #[command(flatten)]
    pub(crate) image: FileArgs,
}
