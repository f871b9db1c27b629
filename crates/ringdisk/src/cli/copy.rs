//! The words of commands that compare, copy and measure images.
//!
//! Promises: parses only; no image is opened. The names and letters of options are those of
//! `qemu-img`.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use ringdisk_daemon::size::parse_size;
use ringdisk_disk::{Cache, Format, SnapshotChoice};

use crate::cli::inspect::{NameArgs, OutputArgs, PoolArgs};
use crate::cli::names::{parse_choice, parse_file};
use crate::cli::{ProgressArgs, cache_parser, format_parser};

/// Requests at once at most; qemu-img's.
#[allow(clippy::cast_possible_wrap)] // A small constant.
const PARALLEL_MAX: i64 = ringdisk_disk::operations::TASKS_MAX as i64;

const CONVERT_EXAMPLES: &str = "\
Examples:
  ringdisk convert disk.img disk.qcow2             raw to qcow2
  ringdisk convert -O raw disk.qcow2 disk.img      and back
  ringdisk convert -c -o compression_type=zstd disk.qcow2 small.qcow2
  ringdisk convert -n disk.qcow2 -O raw /dev/sdX   onto a device that is there already
  ringdisk convert -l monday disk.qcow2 then.img   an internal snapshot
  ringdisk convert part1.img part2.img whole.img   several images, one behind the other";

/// Copy an image, or several one behind the other, into another, of any format
///
/// Without --target-format the copy is a qcow2 when its name ends in .qcow2, and raw otherwise.
#[derive(Args, Debug)]
#[command(args_override_self = true)]
#[command(after_help = CONVERT_EXAMPLES, override_usage = "ringdisk convert [OPTIONS] SOURCE... \
    TARGET")]
pub(crate) struct ConvertArgs {
    /// Format of the source [default: look at its first bytes]
    #[arg(short, long, alias = "source-format", value_name = "FORMAT",
          value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    /// Copy an internal snapshot of the source: an id or a name, or
    /// snapshot.id=ID,snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT", value_parser = parse_choice)]
    pub(crate) snapshot: Option<SnapshotChoice>,

    /// How the page cache is used for the source
    #[arg(short = 'T', long, value_name = "MODE", value_parser = cache_parser(),
          default_value = "writeback")]
    pub(crate) source_cache: Cache,

    /// Copy the bitmaps too
    #[arg(long)]
    pub(crate) bitmaps: bool,

    /// Leave bitmaps out that cannot be trusted, instead of failing
    #[arg(long, requires = "bitmaps")]
    pub(crate) skip_broken_bitmaps: bool,

    /// Go on where the source cannot be read: zeroes are put there, and it is reported
    #[arg(long)]
    pub(crate) salvage: bool,

    /// Format of the target
    #[arg(short = 'O', long, value_name = "FORMAT", value_parser = format_parser())]
    pub(crate) target_format: Option<Format>,

    /// Read the name of the target as options, such as driver=qcow2,file.filename=disk.qcow2; needs
    /// --no-create
    #[arg(long, conflicts_with = "target_format")]
    pub(crate) target_image_opts: bool,

    /// Options of the target's format, as NAME=VALUE,NAME=VALUE; help lists them
    #[arg(short = 'o', long, alias = "target-format-options", value_name = "OPTIONS")]
    pub(crate) options: Vec<String>,

    /// How the page cache is used for the target
    #[arg(short = 't', long, value_name = "MODE", value_parser = cache_parser(),
          default_value = "unsafe")]
    pub(crate) target_cache: Cache,

    /// Make the target an overlay of BACKING, which has to show what lies below the top image of
    /// the source: only what that one holds is copied
    #[arg(short = 'b', short_alias = 'B', long, value_name = "BACKING",
          value_hint = ValueHint::FilePath,
          value_parser = parse_file)]
    pub(crate) backing: Option<String>,

    /// Format of BACKING, which is never guessed
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = format_parser())]
    pub(crate) backing_format: Option<Format>,

    /// How many zero bytes in a row become a gap of the target; 0: none
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) sparse_size: Option<u64>,

    /// Write into the target that is there already
    #[arg(short, long)]
    pub(crate) no_create: bool,

    /// The target reads as zeroes already, so zeroes need not be written
    #[arg(long, requires = "no_create")]
    pub(crate) target_is_zero: bool,

    /// Compress the target
    #[arg(short, long)]
    pub(crate) compress: bool,

    /// Read although another program is writing to the source
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,

    /// Requests that run at once
    #[arg(short = 'm', long, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=PARALLEL_MAX))]
    pub(crate) parallel: Option<u32>,

    /// Write in any order, which is faster and may spread the target
    #[arg(short = 'W', long)]
    pub(crate) oob_writes: bool,

    /// Let the file system copy where it can, by reference where it has that: from images of any
    /// format to raw ones
    #[arg(short = 'C', long, conflicts_with_all = ["sparse_size", "compress"])]
    pub(crate) copy_range_offloading: bool,

    #[command(flatten)]
    pub(crate) progress: ProgressArgs,

    /// The source, or several, which are put together; and last the target
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath, num_args = 0..)]
    pub(crate) files: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) name: NameArgs,

    #[command(flatten)]
    pub(crate) pool: PoolArgs,
}

/// Compare what two images hold
///
/// Exit code: 0 the same; 1 different; 2 one of them cannot be opened, or the command line is
/// wrong; 3 the map of one cannot be read; 4 its bytes cannot be read. A longer image whose rest is
/// zeroes counts as the same, unless --strict.
#[derive(Args, Debug)]
#[command(args_override_self = true)]
pub(crate) struct CompareArgs {
    /// Format of FILE1 [default: look at its first bytes]
    #[arg(short, long, alias = "a-format", value_name = "FORMAT", value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    /// Format of FILE2 [default: look at its first bytes]
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = format_parser())]
    pub(crate) b_format: Option<Format>,

    /// The sizes, and what is allocated, must be the same too
    #[arg(short, long)]
    pub(crate) strict: bool,

    /// How the page cache is used
    #[arg(short = 'T', long, value_name = "MODE", value_parser = cache_parser(),
          default_value = "writeback")]
    pub(crate) cache: Cache,

    /// Read although another program is writing
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,

    #[command(flatten)]
    pub(crate) progress: ProgressArgs,

    /// One image
    #[arg(value_name = "FILE1", value_hint = ValueHint::FilePath)]
    pub(crate) first: PathBuf,

    /// The other
    #[arg(value_name = "FILE2", value_hint = ValueHint::FilePath)]
    pub(crate) second: PathBuf,

    #[command(flatten)]
    pub(crate) name: NameArgs,

    #[command(flatten)]
    pub(crate) pool: PoolArgs,
}

/// Say how much space an image would need
///
/// Either for a new disk of --size bytes, or for a copy of FILE.
#[derive(Args, Debug)]
#[command(args_override_self = true)]
#[command(override_usage = "ringdisk measure [OPTIONS] --size SIZE\n       \
                            ringdisk measure [OPTIONS] FILE")]
pub(crate) struct MeasureArgs {
    /// Format of FILE [default: look at its first bytes]
    #[arg(short, long, value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    /// Format of the new image
    #[arg(short = 'O', long, value_name = "FORMAT", value_parser = format_parser(),
          default_value = "raw")]
    pub(crate) target_format: Format,

    /// Options of the new image, as NAME=VALUE,NAME=VALUE; help lists them
    #[arg(short = 'o', long, value_name = "OPTIONS")]
    pub(crate) options: Vec<String>,

    /// Size of a new disk
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "file",
          allow_hyphen_values = true)]
    pub(crate) size: Option<u64>,

    /// Look although another program is writing to the image
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,

    /// Measure an internal snapshot of FILE: an id or a name, or snapshot.id=ID,snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT", requires = "file",
          value_parser = parse_choice)]
    pub(crate) snapshot: Option<SnapshotChoice>,

    #[command(flatten)]
    pub(crate) output: OutputArgs,

    /// The image to be copied
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) file: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) name: NameArgs,

    #[command(flatten)]
    pub(crate) pool: PoolArgs,
}
