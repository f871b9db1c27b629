//! The words that say what is served, for `mount` and `serve`: an image with its options, or a null
//! disk.
//!
//! Promises: parses only; neither the image nor its directory is looked at.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use ringdisk_daemon::size::{parse_size, parse_time};
use ringdisk_disk::name::FileName;
use ringdisk_disk::{AllowedHost, Bytes, Cache, DetectZeroes, Discard, Format};
use ringdisk_disk::{ImageOptions, SnapshotChoice};
use ringdisk_server::limits::{LimitWords, parse_limits};
use ringdisk_server::request::ImageRequest;

use crate::cli::names::parse_choice;
use crate::cli::words::{
    CacheSize, DETECT_ZEROES, DISCARD, one_of, parse_cache_size, parse_host,
    parse_new_image_options, parse_switch,
};
use crate::cli::{cache_parser, format_parser};

/// What is served; the IMAGE itself is with the command.
#[derive(Args, Clone, Debug)]
pub(crate) struct ImageArgs {
    /// Never write to IMAGE
    #[arg(short, long)]
    pub(crate) read_only: bool,

    /// Make an image of SIZE bytes when there is no IMAGE: a qcow2 if its name ends so, or with -f
    /// qcow2; else a raw one
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          conflicts_with = "read_only")]
    pub(crate) create: Option<u64>,

    /// Leave IMAGE as it is: what is written goes to a temporary overlay, which is gone at the end
    #[arg(long, conflicts_with_all = ["read_only", "create"])]
    pub(crate) snapshot: bool,

    /// Leave IMAGE as it is: what is written goes to FILE, a qcow2 overlay, made when it is not
    /// there
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath,
          conflicts_with_all = ["read_only", "create", "snapshot"])]
    pub(crate) overlay: Option<PathBuf>,

    /// Format of IMAGE, raw or qcow2 [default: look at its first bytes]
    ///
    /// An image that is taken for raw only because of its first bytes refuses writes that would
    /// make it look like another format the next time; `--format raw` allows them. A file that is
    /// opened with `raw` and written keeps a note of that (the extended attribute
    /// user.ringdisk.format), and where it can keep none the writes stay refused. `serve
    /// --vhost-user-blk` asks for the format of what is not qcow2 and has no such note. An image
    /// with the note that begins like another format, and a block device that does, are not
    /// guessed: say what they are.
    #[arg(short, long, value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    /// Serve partition N of the disk of IMAGE, as the kernel numbers it (1 is /dev/sda1; logical
    /// ones from 5 on)
    ///
    /// The table (MBR, or GPT with sectors of 512 or 4096 bytes; an MBR counts in those of a block
    /// device, else in 512) is read when the image is opened. No request reaches a byte outside the
    /// partition. Refused: a partition that overlaps another one or goes past the end of the disk,
    /// and an extended one.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..),
          conflicts_with_all = ["offset", "size", "create"])]
    pub(crate) partition: Option<u32>,

    /// Options of the image that --create makes, as NAME=VALUE,NAME=VALUE (see `create -o help`)
    #[arg(
        short = 'o',
        long,
        value_name = "OPTIONS",
        value_parser = parse_new_image_options,
        requires = "create",
        help_heading = "Image options"
    )]
    pub(crate) options: Vec<String>,

    /// How the host's page cache and flushes are used
    ///
    /// writeback: through the page cache, a flush makes writes durable. none: past the page cache
    /// (O_DIRECT), a flush makes writes durable. writethrough: each write is durable when it is
    /// answered. directsync: the same, past the page cache. unsafe: flushes are ignored; a crash of
    /// the host loses data.
    #[arg(long, value_name = "MODE", value_parser = cache_parser(), default_value = "writeback",
          help_heading = "Image options")]
    pub(crate) cache: Cache,

    /// Past the host's page cache; the same as --cache none
    #[arg(long, conflicts_with = "cache", help_heading = "Image options")]
    pub(crate) direct: bool,

    /// Serve an internal snapshot of IMAGE, a qcow2: an id or a name, or
    /// snapshot.id=ID,snapshot.name=NAME; needs --read-only
    ///
    /// The disk has the size of that time. It cannot be handed over (--upgrade).
    #[arg(long, value_name = "SNAPSHOT", value_parser = parse_choice, requires = "read_only",
          help_heading = "Image options")]
    pub(crate) load_snapshot: Option<SnapshotChoice>,

    /// Read the name of IMAGE as options, such as driver=qcow2,file.filename=disk.qcow2
    ///
    /// A comma inside a value is written twice. The same can be written as JSON in place of any
    /// name: 'json:{"driver":"qcow2","file":{"filename":"disk.qcow2"}}'.
    #[arg(long, conflicts_with_all = ["format", "create"], help_heading = "Image options")]
    pub(crate) image_opts: bool,

    /// The name of IMAGE says that its backing file does not count.
    #[arg(skip)]
    pub(crate) without_backing: bool,

    /// Serve the disk of IMAGE from this byte on (of any format: a place on its disk, not in its
    /// file)
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Image options")]
    pub(crate) offset: Option<u64>,

    /// Serve so many bytes of the disk of IMAGE, from --offset on [default: to the end]
    ///
    /// A disk with a size of its own cannot be resized.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Image options")]
    pub(crate) size: Option<u64>,

    /// A directory (with all below) or file that backing and data file names of IMAGE may lead to
    ///
    /// The directory of IMAGE and everything below are always allowed when it is opened. In a
    /// sandbox (--sandbox) what is opened later has to be named: a directory for `ringdisk ctl
    /// snapshot` other than that of IMAGE, a file, or its directory, for `ringdisk ctl backing`;
    /// it is read, and written by such commands only. A name that another program (`qemu-img
    /// rebase`) has put into IMAGE since it was served in a sandbox is followed once it is given
    /// here; for a data file it has to be the path of that file. May be given several times.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::AnyPath, help_heading = "Image \
        options")]
    pub(crate) allow_path: Vec<PathBuf>,

    /// A server that backing file names of IMAGE may lead to, if they are NBD exports: HOST,
    /// HOST:PORT or unix:PATH
    ///
    /// The server of an IMAGE that is an export itself needs no leave. May be given several times.
    #[arg(long, value_name = "HOST", value_parser = parse_host, help_heading = "Image options")]
    pub(crate) allow_host: Vec<AllowedHost>,

    /// How long requests to an NBD export wait when the connection is lost, such as 5m; then they
    /// fail, until the server is back [default: 30s]
    ///
    /// 0s: not at all. Reads are repeated over the new connection, and so are writes if the server
    /// ended the old one. Counts for the exports of the backing chain, too.
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = "Image options")]
    pub(crate) reconnect: Option<Duration>,

    /// Read IMAGE although another program is writing to it; needs --read-only
    #[arg(short = 'U', long, requires = "read_only", help_heading = "Image options")]
    pub(crate) force_share: bool,

    /// What a discard does: ignore, or give the space back
    #[arg(long, value_name = "MODE", value_parser = one_of(DISCARD), default_value = "unmap",
          help_heading = "Image options")]
    pub(crate) discard: Discard,

    /// Keep the place of what is discarded in a qcow2, so that it does not become fragmented
    #[arg(long, help_heading = "Image options")]
    pub(crate) discard_no_unref: bool,

    /// What is done with zeroes that are written: off, store them without bytes (on), or that and
    /// give their space back (unmap)
    #[arg(long, value_name = "MODE", value_parser = one_of(DETECT_ZEROES), default_value = "off",
          help_heading = "Image options")]
    pub(crate) detect_zeroes: DetectZeroes,

    /// Keep what is read of backing files in IMAGE, too, so that it is read there the next time
    ///
    /// For a qcow2 over images that are far away or slow: whole clusters are read and kept.
    /// `ringdisk ctl TARGET copy-on-read` switches it.
    #[arg(long, conflicts_with = "read_only", help_heading = "Image options")]
    pub(crate) copy_on_read: bool,

    /// Limit requests and bytes per second: iops=1000,bps-write=50M,iops-max=5000
    ///
    /// {iops,bps}, for all requests, or {iops,bps}-{read,write}; each with -max, the rate of a
    /// burst, and -max-length, how many seconds one may last [default: a burst is as much at once];
    /// iops-size: a longer request counts as several. They mean what they mean in QEMU.
    /// group=NAME: the disks of this process with that NAME share the limits, and take turns. May
    /// be given several times. `ringdisk ctl TARGET limit` changes them.
    #[arg(long, value_name = "LIMITS", value_parser = parse_limits, help_heading = "Image options")]
    pub(crate) limit: Vec<LimitWords>,

    /// Write reference counts of a qcow2 late, or not [default: as the image says]
    ///
    /// Allocating becomes faster; after a crash the next one who writes has to rebuild the counts.
    #[arg(long, value_name = "on|off", num_args = 0..=1, require_equals = true,
          default_missing_value = "on",
          value_parser = parse_switch, help_heading = "Image options")]
    pub(crate) lazy_refcounts: Option<bool>,

    /// Most memory for the tables of each qcow2 layer: a size, or auto
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = parse_cache_size,
          help_heading = "Image options")]
    pub(crate) metadata_cache: CacheSize,

    /// Serve a disk of SIZE bytes that keeps nothing, instead of an image
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Test options",
          conflicts_with_all = ["create", "image_opts", "load_snapshot", "format", "cache",
                                "direct", "allow_path", "allow_host", "reconnect", "force_share",
                                "offset", "size",
                                "partition", "snapshot", "overlay", "discard", "discard_no_unref",
                                "detect_zeroes", "copy_on_read", "lazy_refcounts",
                                "metadata_cache"])]
    pub(crate) null: Option<u64>,

    /// How long each request to a null disk takes, such as 100us
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "null",
          help_heading = "Test options")]
    pub(crate) latency: Option<Duration>,

    /// Reads of a null disk give zeroes (that costs time; without it they return undefined data)
    #[arg(long, requires = "null", help_heading = "Test options")]
    pub(crate) read_zeroes: bool,
}

impl ImageArgs {
    /// Takes in what the name of an image says beside its path ([`FileName`]).
    ///
    /// * `image`: becomes the path, or the URI of an NBD export.
    ///
    /// Errors: a description that is wrong, of what we do not have, or that contradicts options.
    pub(crate) fn take_name(&mut self, image: &mut PathBuf) -> Result<(), String> {
        let name = match self.image_opts {
            true => FileName::of_options(&image.to_string_lossy()),
            false => FileName::of_user(image),
        };
        let name = name.map_err(|error| error.to_string())?;
        if name.nbd.is_none() && name.path == *image {
            return Ok(());
        }
        self.read_only |= name.node.read_only == Some(true);
        let mut options = ImageOptions {
            format: self.format,
            read_only: self.read_only,
            cache: self.cache_mode(),
            window_offset: self.offset.unwrap_or(0),
            window_size: self.size.map(Bytes),
            partition: self.partition,
            force_share: self.force_share,
            discard: self.discard,
            discard_no_unref: self.discard_no_unref,
            detect_zeroes: self.detect_zeroes,
            lazy_refcounts: self.lazy_refcounts,
            ..ImageOptions::default()
        };
        name.add_to(&mut options).map_err(|error| error.to_string())?;
        self.format = options.format;
        (self.cache, self.direct) = (options.cache, false);
        self.offset = Some(options.window_offset).filter(|offset| *offset != 0).or(self.offset);
        self.size = options.window_size.map(|len| len.0);
        self.force_share = options.force_share;
        self.discard = options.discard;
        self.discard_no_unref = options.discard_no_unref;
        self.detect_zeroes = options.detect_zeroes;
        self.lazy_refcounts = options.lazy_refcounts;
        self.without_backing = options.without_backing;
        self.image_opts = false;
        *image = name.plain_path();
        Ok(())
    }

    /// The cache mode with `--direct` taken in.
    pub(crate) fn cache_mode(&self) -> Cache {
        if self.direct { Cache::None } else { self.cache }
    }
}

impl From<&ImageArgs> for ImageRequest {
    fn from(args: &ImageArgs) -> ImageRequest {
        ImageRequest {
            read_only: args.read_only,
            create: args.create,
            options: args.options.clone(),
            snapshot: args.snapshot,
            overlay: args.overlay.clone(),
            format: args.format,
            partition: args.partition,
            cache: args.cache_mode(),
            load_snapshot: args.load_snapshot.clone(),
            without_backing: args.without_backing,
            offset: args.offset,
            size: args.size,
            allow_path: args.allow_path.clone(),
            allow_host: args.allow_host.clone(),
            reconnect: args.reconnect,
            force_share: args.force_share,
            discard: args.discard,
            discard_no_unref: args.discard_no_unref,
            detect_zeroes: args.detect_zeroes,
            copy_on_read: args.copy_on_read,
            limit: args.limit.clone(),
            lazy_refcounts: args.lazy_refcounts,
            metadata_cache: args.metadata_cache.bytes(),
            null: args.null,
            latency: args.latency,
            read_zeroes: args.read_zeroes,
        }
    }
}
