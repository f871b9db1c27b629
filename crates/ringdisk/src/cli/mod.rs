//! The command line.
//!
//! Promises: everything that can be refused by looking at the words alone is refused here, with
//! exit code 2 (`check`: 1, since its 2 says something else), before anything is opened. Help texts
//! are the source of the man pages. Options have the names and letters of qemu-img wherever that
//! has them.

mod address;
mod bitmap;
mod change;
mod checkpoint;
pub(crate) mod config;
mod copy;
mod ctl;
mod disk_args;
mod disk_spec;
mod image;
mod inspect;
mod job;
mod log;
mod mount;
mod names;
mod placement;
mod ps;
mod report;
mod serve;
mod top;
mod topology;
mod user;
mod words;

use std::ffi::OsString;
use std::path::PathBuf;

pub(crate) use address::Address;
pub(crate) use bitmap::BitmapArgs;
pub(crate) use change::CreateArgs;
pub(crate) use change::{CheckArgs, CommitArgs, RebaseArgs, ResizeArgs, SnapshotArgs};
pub(crate) use checkpoint::{BackupArgs, CheckpointArgs, FleeceArgs, RestoreArgs};
use clap::builder::PossibleValuesParser;
use clap::builder::TypedValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, Args, CommandFactory, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
pub(crate) use config::ConfigArgs;
pub(crate) use copy::{CompareArgs, ConvertArgs, MeasureArgs};
pub(crate) use ctl::{BackupJobArgs, CtlArgs, CtlCommand, MirrorArgs};
pub(crate) use disk_args::ServedDisk;
pub(crate) use disk_spec::DiskWords;
pub(crate) use image::ImageArgs;
pub(crate) use inspect::{InfoArgs, MapArgs, PoolArgs};
pub(crate) use job::{JobArgs, JobRunArgs, JobWork};
pub(crate) use log::LogArgs;
pub(crate) use mount::{MountArgs, UmountArgs, parse_limit};
pub(crate) use placement::{PlacementArgs, ThreadArgs};
pub(crate) use ps::{MetricsCommandArgs, PsArgs};
pub(crate) use report::ReportArgs;
use ringdisk_console::operation::Showing;
use ringdisk_disk::{Cache, Format};
pub(crate) use serve::NbdAccessArgs;
pub(crate) use serve::ServeArgs;
pub(crate) use top::TopArgs;
pub(crate) use topology::TopologyArgs;
pub(crate) use user::UserArgs;
pub(crate) use words::{DETECT_ZEROES, DISCARD, PREALLOCATION, SandboxArgs, word_of};

const ROOT_ABOUT: &str =
    "Serves a disk image, in place, as an ordinary file, to virtual machines or to NBD clients";

const ROOT_LONG: &str = "\
Serves a disk image, in place, as an ordinary file, to virtual machines or to NBD clients.

`ringdisk mount disk.qcow2 disk.raw` makes disk.raw: a file that holds the disk inside the image. \
Every program that reads or writes files now works on that disk, without a copy, without root and \
without a virtual machine. `ringdisk serve disk.qcow2 --vhost-user-blk /run/vm1.sock` is a disk \
for QEMU and others. \
The other commands make, change, check and copy images, with the options \
and the output of qemu-img.";

const ROOT_EXAMPLES: &str = "\
Examples:
  ringdisk mount --create 10G disk.qcow2 disk  make a qcow2 and serve it (Ctrl-C ends it)
  ringdisk mount --daemonize disk.qcow2 /srv/disk
                                               serve an image in the background
  ringdisk ps                                  what is served here, and who uses it
  ringdisk ctl /srv/disk stats                 what it is doing
  ringdisk job list                            what it copies meanwhile
  ringdisk umount /srv/disk                    and end that
  ringdisk serve disk.qcow2 --vhost-user-blk /run/vm1.sock
                                               serve an image to a virtual machine
  ringdisk serve disk.qcow2 --nbd /run/nbd.sock
                                               serve an image to NBD clients
  ringdisk info disk.qcow2                     what an image is
  ringdisk snapshot -c before disk.qcow2       keep its state under a name
  ringdisk convert -c disk.qcow2 small.qcow2   a compressed copy
  ringdisk check disk.qcow2                    whether its metadata is sound";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "ringdisk",
    version,
    about = ROOT_ABOUT,
    long_about = ROOT_LONG,
    after_help = ROOT_EXAMPLES,
    subcommand_required = true,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub(crate) struct Cli {
    /// Say more: -v what is done, -vv details, -vvv everything
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Mount(Box<MountArgs>),
    Umount(UmountArgs),
    Serve(Box<ServeArgs>),
    Ps(PsArgs),
    Top(TopArgs),
    Ctl(CtlArgs),
    Job(JobArgs),
    Metrics(MetricsCommandArgs),
    Report(ReportArgs),
    Topology(Box<TopologyArgs>),
    Create(CreateArgs),
    Info(InfoArgs),
    Map(MapArgs),
    Check(CheckArgs),
    Resize(ResizeArgs),
    Snapshot(SnapshotArgs),
    Commit(CommitArgs),
    Rebase(RebaseArgs),
    Convert(Box<ConvertArgs>),
    Compare(CompareArgs),
    Measure(MeasureArgs),
    Bitmap(BitmapArgs),
    Backup(Box<BackupArgs>),
    Restore(RestoreArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
    Nbd(NbdWords),
}

/// Serve an image over NBD, with the command line of qemu-nbd
///
/// Everything after `nbd` is read as `qemu-nbd` reads it: `ringdisk nbd --help` lists it. A link
/// to ringdisk with the name qemu-nbd does the same.
#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
pub(crate) struct NbdWords {
    /// Options and the image, as for qemu-nbd
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTION|FILE")]
    pub(crate) words: Vec<OsString>,
}

/// Print the completions of a shell
///
/// bash: ringdisk completions bash > ~/.local/share/bash-completion/completions/ringdisk;
/// zsh: ringdisk completions zsh > "${fpath[1]}/_ringdisk";
/// fish: ringdisk completions fish > ~/.config/fish/completions/ringdisk.fish
#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub(crate) shell: Shell,
}

/// Print the man page, or write all man pages into a directory
#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Where to write ringdisk.1, ringdisk-mount.1 and so on; without it ringdisk.1 is printed
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) directory: Option<PathBuf>,
}

/// What commands that may take long show of their way.
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct ProgressArgs {
    /// Show the progress, also where standard output is no terminal
    #[arg(short, long)]
    pub(crate) progress: bool,

    /// Print nothing but errors, and no progress
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

impl From<ProgressArgs> for Showing {
    fn from(args: ProgressArgs) -> Showing {
        Showing { progress: args.progress, quiet: args.quiet }
    }
}

fn format_parser() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(["raw", "qcow2"]).try_map(|text| text.parse::<Format>())
}

fn cache_parser() -> impl TypedValueParser<Value = Cache> {
    PossibleValuesParser::new(["writeback", "none", "writethrough", "directsync", "unsafe"])
        .try_map(|text| text.parse::<Cache>())
}

/// What other tools call `ps`.
const LIKE_PS: [&str; 5] = ["ls", "list", "status", "show", "mounts"];

/// Adds the command that is meant, where a word is another tool's name of it.
pub(crate) fn with_suggestion(mut error: clap::Error) -> clap::Error {
    let word = error.get(ContextKind::InvalidSubcommand);
    let is_like_ps =
        matches!(word, Some(ContextValue::String(word)) if LIKE_PS.contains(&word.as_str()));
    if is_like_ps {
        let ps = ContextValue::Strings(vec![String::from("ps")]);
        error.insert(ContextKind::SuggestedSubcommand, ps);
    }
    error
}

/// The definition of one command, so that an error shows that command's usage.
fn command_of(name: &str) -> clap::Command {
    let mut root = Cli::command();
    root.build();
    root.find_subcommand(name).cloned().unwrap_or(root)
}

/// What is wrong with the words of one command, with its usage.
pub(crate) fn refuse(command: &str, kind: ErrorKind, text: impl std::fmt::Display) -> clap::Error {
    command_of(command).error(kind, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_says_what_it_does() {
        let mut root = Cli::command();
        root.build();
        for command in root.get_subcommands() {
            assert!(command.get_about().is_some(), "{}", command.get_name());
        }
    }
}
