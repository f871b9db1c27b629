//! The command line.
//!
//! Promises: everything that can be refused by looking at the words alone is refused here, with
//! exit code 2, before anything is opened. Help texts are the source of the man pages.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::builder::TypedValueParser;
use clap::{ArgAction, Args, CommandFactory, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use ringdisk_disk::{Cache, Format};
use ringdisk_fuse::export::{QUEUE_DEPTH_MAX, THREADS_MAX};

use crate::size::{parse_size, parse_time};

const ROOT_ABOUT: &str = "Serves a disk image, in place, as an ordinary file";

const ROOT_LONG: &str = "\
Serves a disk image, in place, as an ordinary file.

`ringdisk mount disk.qcow2 disk.raw` makes disk.raw: a file that holds the disk inside the image. \
Every program that reads or writes files now works on that disk, without a copy, without root and \
without a virtual machine.";

const ROOT_EXAMPLES: &str = "\
Examples:
  ringdisk mount disk.qcow2 disk.raw           look into a qcow2 image (Ctrl-C ends it)
  ringdisk mount -f raw --daemonize disk.img /srv/disk
                                               serve a raw image in the background
  ringdisk umount /srv/disk                    and end that
  ringdisk info disk.qcow2                     what an image is
  ringdisk map --json disk.qcow2               where its bytes are";

const MOUNT_LONG: &str = "\
Serves the disk inside IMAGE as the file MOUNTPOINT until it is unmounted or stopped by Ctrl-C \
(SIGINT), SIGTERM or SIGHUP.

MOUNTPOINT is a regular file. It is made when it is not there, and then removed again at the end. \
While the mount lasts, it is the disk: its size is the size of the disk, and reads and writes go to \
the image.

SIGUSR1 prints the counters of each queue on standard error. A service manager that sets \
NOTIFY_SOCKET (Type=notify) is told when the mount answers and when it ends.

Sizes are numbers of bytes, or numbers with K, M, G, T, P or E (powers of 1024): 512, 10G, 1.5T. \
Times need a unit: 250us, 1ms, 5s.";

const MOUNT_EXAMPLES: &str = "\
Examples:
  ringdisk mount disk.qcow2 disk.raw
      look into an image; in another terminal: fdisk -l disk.raw
  ringdisk mount --create 10G -f raw disk.img disk
      make a raw image and use it at once: mkfs.ext4 disk
  ringdisk mount --direct --threads 4 -f raw /dev/sdb1 disk
      serve a block device without the page cache, with four queues
  ringdisk mount --daemonize --pidfile /run/disk.pid disk.img /srv/disk
      in the background; the command returns when the mount answers
  ringdisk mount --null 1T --latency 100us /tmp/null
      a disk that keeps nothing, to measure everything but storage";

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
    Info(InfoArgs),
    Map(MapArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// Serve an image as a file
#[derive(Args, Debug)]
#[command(
    long_about = MOUNT_LONG,
    after_help = MOUNT_EXAMPLES,
    override_usage = "ringdisk mount [OPTIONS] IMAGE MOUNTPOINT\n       \
                      ringdisk mount [OPTIONS] --null SIZE MOUNTPOINT"
)]
pub(crate) struct MountArgs {
    /// The image: a regular file or a block device (with --null: the MOUNTPOINT)
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,

    /// The file to serve it as; made when it is not there
    #[arg(value_name = "MOUNTPOINT", value_hint = ValueHint::FilePath)]
    mountpoint: Option<PathBuf>,

    /// Serve a disk of SIZE bytes that keeps nothing, instead of an image
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Image options",
          conflicts_with_all = ["create", "format", "cache", "direct", "allow_path", "force_share", "offset", "size"])]
    pub(crate) null: Option<u64>,

    /// How long each request to a null disk takes, such as 100us
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "null", help_heading = "Image options")]
    pub(crate) latency: Option<Duration>,

    /// Reads of a null disk give zeroes (they cost time; without it they give anything)
    #[arg(long, requires = "null", help_heading = "Image options")]
    pub(crate) read_zeroes: bool,

    /// Make a raw image of SIZE bytes when there is no IMAGE
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Image options",
          conflicts_with = "read_only")]
    pub(crate) create: Option<u64>,

    /// Format of IMAGE, raw or qcow2 [default: look at its first bytes]
    ///
    /// An image that is taken for raw only because of its first bytes refuses writes that would
    /// make it look like another format the next time; `--format raw` allows them.
    #[arg(short, long, value_parser = format_parser(), help_heading = "Image options")]
    pub(crate) format: Option<Format>,

    /// Never write to IMAGE
    #[arg(short, long, help_heading = "Image options")]
    pub(crate) read_only: bool,

    /// How the host's page cache and flushes are used
    ///
    /// writeback: through the page cache, a flush makes writes durable. none: past the page cache
    /// (O_DIRECT), a flush makes writes durable. writethrough: each write is durable when it is
    /// answered. unsafe: flushes are ignored; a crash of the host loses data.
    #[arg(long, value_name = "MODE", value_parser = cache_parser(), default_value = "writeback",
          help_heading = "Image options")]
    pub(crate) cache: Cache,

    /// Past the host's page cache; the same as --cache none
    #[arg(long, conflicts_with = "cache", help_heading = "Image options")]
    pub(crate) direct: bool,

    /// Where the disk begins inside a raw IMAGE, bytes
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Image options")]
    pub(crate) offset: Option<u64>,

    /// Size of the disk inside a raw IMAGE, bytes [default: to the end]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Image options")]
    pub(crate) size: Option<u64>,

    /// A directory (with all below) or file that backing and data file names of IMAGE may lead to
    ///
    /// The directory of IMAGE and everything below are always allowed. May be given several times.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::AnyPath, help_heading = "Image options")]
    pub(crate) allow_path: Vec<PathBuf>,

    /// Read IMAGE although another program is writing to it; needs --read-only
    #[arg(short = 'U', long, requires = "read_only", help_heading = "Image options")]
    pub(crate) force_share: bool,

    /// Let a write past the end make the disk larger
    #[arg(long, conflicts_with = "read_only", help_heading = "File options")]
    pub(crate) growable: bool,

    /// Let other users open the file, as far as its mode allows
    #[arg(long, help_heading = "File options")]
    pub(crate) allow_other: bool,

    /// Keep the file's contents in the kernel's page cache (for buffered reads that repeat)
    #[arg(long, help_heading = "File options")]
    pub(crate) kernel_cache: bool,

    /// Queue threads: a number, or auto
    #[arg(long, value_name = "N", default_value = "auto", value_parser = parse_threads,
          help_heading = "Serving options")]
    pub(crate) threads: Threads,

    /// Requests of each queue thread that run at once [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(QUEUE_DEPTH_MAX)),
          help_heading = "Serving options")]
    pub(crate) queue_depth: Option<u32>,

    /// Give the mount up, with errors to its users, when storage takes longer for one request
    #[arg(long, value_name = "TIME", value_parser = parse_io_timeout, help_heading = "Serving options")]
    pub(crate) io_timeout: Option<Duration>,

    /// Serve in the background; return when the mount answers
    ///
    /// An error during the start is reported as usual, with its exit code. Standard output and
    /// error stay open only where they are regular files.
    #[arg(long, help_heading = "Serving options")]
    pub(crate) daemonize: bool,

    /// Write the pid to FILE when the mount answers; locked, and removed at the end
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Serving options")]
    pub(crate) pidfile: Option<PathBuf>,

    /// Print IOPS, bytes, latencies, depth and CPU time per request on standard error at the end
    #[arg(long, help_heading = "Serving options")]
    pub(crate) stats: bool,
}

/// End a mount
///
/// The server of the mount flushes the image and ends; its pid file, and the mountpoint if the
/// server made it, are removed by it.
#[derive(Args, Debug)]
pub(crate) struct UmountArgs {
    /// The file that the image is served as
    #[arg(value_name = "MOUNTPOINT", value_hint = ValueHint::FilePath)]
    pub(crate) mountpoint: PathBuf,

    /// Take the mount away although it is in use; it ends when its last user closes it
    #[arg(short, long, conflicts_with = "force")]
    pub(crate) lazy: bool,

    /// Take the mount away now; requests in flight fail
    #[arg(short, long)]
    pub(crate) force: bool,
}

/// What a command that only looks at an image needs.
#[derive(Args, Debug)]
pub(crate) struct LookArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    pub(crate) image: PathBuf,

    /// Format of IMAGE, raw or qcow2 [default: look at its first bytes]
    #[arg(short, long, value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    /// Look although another program is writing to the image; what is shown may be outdated
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,

    /// A directory or file that names inside IMAGE may lead to (repeatable)
    #[arg(long, value_name = "DIR", value_hint = ValueHint::AnyPath)]
    pub(crate) allow_path: Vec<PathBuf>,

    /// JSON with the keys of qemu-img
    #[arg(long, conflicts_with = "output")]
    pub(crate) json: bool,

    /// The same in the words of qemu-img
    #[arg(long, value_name = "KIND", value_parser = ["human", "json"], hide = true)]
    pub(crate) output: Option<String>,
}

impl LookArgs {
    /// Whether the result is JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.json || self.output.as_deref() == Some("json")
    }
}

/// Show what an image is
///
/// Opens the image with its backing files, for reading only, and shows its format, its sizes and
/// what it depends on; with --backing-chain the same for every backing file.
#[derive(Args, Debug)]
pub(crate) struct InfoArgs {
    #[command(flatten)]
    pub(crate) look: LookArgs,

    /// Show every image of the backing chain
    #[arg(long)]
    pub(crate) backing_chain: bool,
}

/// Show where the bytes of an image are
///
/// Without --json: the ranges that are stored as they are, with the file and the place in it. With
/// --json: every range of the disk with the keys start, length, depth, present, zero, data,
/// compressed and offset, as qemu-img shows them.
#[derive(Args, Debug)]
pub(crate) struct MapArgs {
    #[command(flatten)]
    pub(crate) look: LookArgs,

    /// First byte of the disk to show
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    pub(crate) start_offset: u64,

    /// Bytes to show [default: to the end]
    #[arg(short = 'l', long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) max_length: Option<u64>,
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

/// How many queue threads serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Threads {
    /// As many as suit this machine.
    Auto,
    /// This many.
    Count(u16),
}

fn parse_threads(text: &str) -> Result<Threads, String> {
    if text == "auto" {
        return Ok(Threads::Auto);
    }
    match text.parse() {
        Ok(count) if (1..=THREADS_MAX).contains(&usize::from(count)) => Ok(Threads::Count(count)),
        _ => Err(format!("write auto, or a number from 1 to {THREADS_MAX}")),
    }
}

fn parse_io_timeout(text: &str) -> Result<Duration, String> {
    match parse_time(text)? {
        Duration::ZERO => Err(String::from("a timeout of nothing would end every request")),
        time => Ok(time),
    }
}

fn format_parser() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(["raw", "qcow2"]).try_map(|text| text.parse::<Format>())
}

fn cache_parser() -> impl TypedValueParser<Value = Cache> {
    PossibleValuesParser::new(["writeback", "none", "writethrough", "unsafe"])
        .try_map(|text| text.parse::<Cache>())
}

/// What `mount` serves, and where, after the words were checked against each other.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MountPaths {
    /// `None` with `--null`.
    pub(crate) image: Option<PathBuf>,
    pub(crate) mountpoint: PathBuf,
}

impl MountArgs {
    /// Sorts the paths out.
    ///
    /// Errors: one path too few or too many, an image of a format that cannot be made.
    pub(crate) fn paths(&self) -> Result<MountPaths, clap::Error> {
        let refuse = |kind, text: &str| Err(command_of("mount").error(kind, text));
        let paths = match (self.null, &self.mountpoint) {
            (Some(_), None) => MountPaths { image: None, mountpoint: self.image.clone() },
            (Some(_), Some(_)) => {
                return refuse(
                    clap::error::ErrorKind::TooManyValues,
                    "with --null there is no IMAGE; give the MOUNTPOINT only",
                );
            }
            (None, Some(mountpoint)) => {
                MountPaths { image: Some(self.image.clone()), mountpoint: mountpoint.clone() }
            }
            (None, None) => {
                return refuse(
                    clap::error::ErrorKind::MissingRequiredArgument,
                    "the MOUNTPOINT is missing: name the file that the image is to appear as, \
                     such as\n\n  ringdisk mount disk.img disk.raw",
                );
            }
        };
        Ok(paths)
    }

    /// The cache mode with `--direct` taken in.
    pub(crate) fn cache_mode(&self) -> Cache {
        if self.direct { Cache::None } else { self.cache }
    }

    /// Whether the image is to be made as qcow2, which this version cannot.
    pub(crate) fn wants_new_qcow2(&self) -> bool {
        let named = || self.image.extension().is_some_and(|e| e.eq_ignore_ascii_case("qcow2"));
        self.create.is_some()
            && match self.format {
                Some(format) => format == Format::Qcow2,
                None => named(),
            }
    }
}

/// The definition of one command, so that an error shows that command's usage.
fn command_of(name: &str) -> clap::Command {
    let mut root = Cli::command();
    root.build();
    root.find_subcommand(name).cloned().unwrap_or(root)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::error::ErrorKind;

    fn mount(words: &str) -> Result<MountArgs, clap::Error> {
        let all = ["ringdisk", "mount"].into_iter().chain(words.split_whitespace());
        match Cli::try_parse_from(all)?.command {
            Command::Mount(args) => Ok(*args),
            other => panic!("not mount: {other:?}"),
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn an_image_needs_a_mountpoint_and_null_has_no_image() {
        let both = mount("disk.img disk").expect("parses").paths().expect("paths");
        assert_eq!(both.image, Some(PathBuf::from("disk.img")));
        assert_eq!(both.mountpoint, PathBuf::from("disk"));
        let null = mount("--null 1T /tmp/null").expect("parses").paths().expect("paths");
        assert_eq!(null, MountPaths { image: None, mountpoint: PathBuf::from("/tmp/null") });
        let missing = mount("disk.img").expect("parses").paths().expect_err("missing");
        assert_eq!(missing.exit_code(), 2);
        assert!(missing.to_string().contains("MOUNTPOINT is missing"));
        assert!(mount("--null 1T a b").expect("parses").paths().is_err());
    }

    #[test]
    fn all_options_of_an_image_are_understood() {
        let args = mount(
            "-f raw --direct --growable --allow-other --allow-path /a --allow-path /b \
             --kernel-cache --queue-depth 64 --threads 4 --offset 1M --size 2G --io-timeout 5s \
             --daemonize --pidfile /run/x --stats disk.img disk",
        )
        .expect("parses");
        assert_eq!(args.cache_mode(), Cache::None);
        assert_eq!(args.threads, Threads::Count(4));
        assert_eq!(args.allow_path.len(), 2);
        assert_eq!((args.offset, args.size), (Some(1 << 20), Some(2 << 30)));
        assert_eq!(args.io_timeout, Some(Duration::from_secs(5)));
    }

    #[test]
    fn defaults_are_those_of_the_help_text() {
        let args = mount("a b").expect("parses");
        assert_eq!(args.cache_mode(), Cache::Writeback);
        assert_eq!(args.threads, Threads::Auto);
        assert_eq!(args.format, None);
    }

    #[test]
    fn words_that_exclude_each_other_are_refused() {
        for (words, kind) in [
            ("--direct --cache none a b", ErrorKind::ArgumentConflict),
            ("--null 1G --create 1G b", ErrorKind::ArgumentConflict),
            ("--null 1G -f raw b", ErrorKind::ArgumentConflict),
            ("--latency 1ms a b", ErrorKind::MissingRequiredArgument),
            ("--force-share a b", ErrorKind::MissingRequiredArgument),
            ("--growable --read-only a b", ErrorKind::ArgumentConflict),
            ("--create 1G --read-only a b", ErrorKind::ArgumentConflict),
            ("--threads 0 a b", ErrorKind::ValueValidation),
            ("--threads many a b", ErrorKind::ValueValidation),
            ("--queue-depth 0 a b", ErrorKind::ValueValidation),
            ("--io-timeout 0 a b", ErrorKind::ValueValidation),
            ("--null 10Q b", ErrorKind::ValueValidation),
            ("-f vmdk a b", ErrorKind::InvalidValue),
            ("--cache directsync a b", ErrorKind::InvalidValue),
            ("a b c", ErrorKind::UnknownArgument),
            ("", ErrorKind::MissingRequiredArgument),
        ] {
            let error = mount(words).expect_err(words);
            assert_eq!(error.kind(), kind, "{words}: {error}");
            assert_eq!(error.exit_code(), 2, "{words}");
        }
    }

    #[test]
    fn a_new_qcow2_is_recognised_by_its_name_or_format() {
        assert!(mount("--create 1G a.qcow2 b").expect("parses").wants_new_qcow2());
        assert!(mount("--create 1G -f qcow2 a b").expect("parses").wants_new_qcow2());
        assert!(!mount("--create 1G -f raw a.qcow2 b").expect("parses").wants_new_qcow2());
        assert!(!mount("a.qcow2 b").expect("parses").wants_new_qcow2());
    }
}
