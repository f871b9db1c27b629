//! The words of commands that only look at an image.
//!
//! Promises: parses only; no image is opened. Nothing of these commands can change one.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use ringdisk_daemon::size::{parse_size, parse_time};
use ringdisk_disk::{AllowedHost, Format};
use ringdisk_images::inspect::Look;
use ringdisk_images::named::Pool;

use crate::cli::format_parser;
use crate::cli::words::parse_host;

/// How a result is printed.
#[derive(Args, Clone, Debug)]
pub(crate) struct OutputArgs {
    /// JSON with the keys of qemu-img
    #[arg(long, conflicts_with = "output")]
    pub(crate) json: bool,

    /// The same in the words of qemu-img: human or json
    #[arg(long, value_name = "KIND", value_parser = ["human", "json"])]
    pub(crate) output: Option<String>,
}

impl OutputArgs {
    /// Whether the result is JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.json || self.output.as_deref() == Some("json")
    }
}

/// How images are named.
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct NameArgs {
    /// Read the name of the image as options, such as driver=qcow2,file.filename=disk.qcow2
    ///
    /// A comma inside a value is written twice. The same can be written as JSON in place of any
    /// name: 'json:{"driver":"qcow2","file":{"filename":"disk.qcow2"}}'.
    #[arg(long, conflicts_with = "format")]
    pub(crate) image_opts: bool,
}

/// Where the files that images name may be.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct PoolArgs {
    /// A directory or file that names inside an image may lead to (repeatable)
    ///
    /// The directory of the image and everything below are always allowed, for names that it had
    /// when a sandbox served it last.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::AnyPath)]
    pub(crate) allow_path: Vec<PathBuf>,

    /// A server that names of NBD exports inside an image may lead to: HOST, HOST:PORT or
    /// unix:PATH (repeatable)
    #[arg(long, value_name = "HOST", value_parser = parse_host)]
    pub(crate) allow_host: Vec<AllowedHost>,

    /// How long requests to an NBD export wait when the connection is lost, such as 5m; then they
    /// fail [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) reconnect: Option<Duration>,
}

impl From<&PoolArgs> for Pool {
    fn from(args: &PoolArgs) -> Pool {
        let PoolArgs { allow_path, allow_host, reconnect } = args.clone();
        Pool { allow_path, allow_host, reconnect }
    }
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

    #[command(flatten)]
    pub(crate) name: NameArgs,

    #[command(flatten)]
    pub(crate) pool: PoolArgs,

    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

impl From<&LookArgs> for Look {
    fn from(args: &LookArgs) -> Look {
        Look {
            image: args.image.clone(),
            image_opts: args.name.image_opts,
            format: args.format,
            force_share: args.force_share,
            pool: (&args.pool).into(),
        }
    }
}

/// Show what an image is
///
/// Opens the image with its backing files, for reading only, and shows its format, its sizes and
/// what it depends on; with --backing-chain the same for every backing file. An image whose backing
/// file cannot be opened is shown alone, with a warning.
#[derive(Args, Debug)]
#[command(args_override_self = true)]
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
#[command(args_override_self = true)]
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
