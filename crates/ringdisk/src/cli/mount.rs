//! The words of `ringdisk mount` and `umount`.
//!
//! Promises: parses only; neither mountpoint nor image is looked at.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use ringdisk_daemon::size::parse_time;
use ringdisk_fuse::{Stay, ZeroCopy};
use ringdisk_server::mount::request::{Paths, Request, StopTimeout};

use crate::cli::words::{STAY, SandboxArgs, ZERO_COPY, one_of};
use crate::cli::{ConfigArgs, ImageArgs, LogArgs, PlacementArgs, UserArgs, refuse};

const MOUNT_LONG: &str = "\
Serves the disk inside IMAGE as the file MOUNTPOINT until it is unmounted or stopped by Ctrl-C \
(SIGINT), SIGTERM or SIGHUP. A stop waits until nobody uses the file any more (--stop-timeout); a \
second signal does not.

MOUNTPOINT is a regular file. It is made when it is not there, and then removed again at the end. \
While the mount lasts, it is the disk: its size is the size of the disk, and reads and writes go \
to \
the image.

SIGUSR1 prints the counters of each queue on standard error. A service manager that sets \
NOTIFY_SOCKET (Type=notify) is told when the mount answers and when it ends.

Sizes are numbers of bytes, or numbers with K, M, G, T, P or E (powers of 1024): 512, 10G, 1.5T. \
Times need a unit: 250us, 1ms, 5s.";

const MOUNT_EXAMPLES: &str = "\
Examples:

A disk to work with:
  ringdisk mount --create 10G disk.qcow2 disk
      make a qcow2 image and use it at once: mkfs.ext4 disk
  ringdisk mount --daemonize disk.qcow2 /srv/disk
      in the background; the command returns when the file is there
  ringdisk umount /srv/disk
      and end that; `ringdisk ps` shows what is served

Look inside, or try something:
  ringdisk mount --read-only disk.qcow2 disk.raw
      look into an image; in another terminal: fdisk -l disk.raw
  ringdisk mount --partition 2 disk.qcow2 part2
      one partition of its disk; then mount -o loop part2 /mnt
  ringdisk mount --snapshot disk.qcow2 disk
      what is written is gone at the end
  ringdisk mount --overlay work.qcow2 disk.qcow2 disk
      what is written goes to work.qcow2

As a service, for years:
  ringdisk mount --daemonize --keep-mount --pidfile /run/disk.pid disk.qcow2 /srv/disk
      the mount outlives a crash of the serving process
  ringdisk mount --upgrade disk.qcow2 /srv/disk
      go on with it in a new process of this version, while it is in use

Speed:
  ringdisk mount --direct --threads 4 -f raw /dev/sdb1 disk
      serve a block device without the page cache, with four queues
  ringdisk mount --cpus 0-3 --numa off disk.qcow2 disk
      with queue threads on four CPUs; `ringdisk topology disk` shows them";

/// Serve an image as a file
#[derive(Args, Debug)]
#[command(
    long_about = MOUNT_LONG,
    after_help = MOUNT_EXAMPLES,
    override_usage = "ringdisk mount [OPTIONS] IMAGE MOUNTPOINT\n       \
                      ringdisk mount [OPTIONS] --null SIZE MOUNTPOINT"
)]
pub(crate) struct MountArgs {
    /// The image: a regular file, a block device or the address of an NBD export (with --null: the
    /// MOUNTPOINT)
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,

    /// The file to serve it as; made when it is not there
    #[arg(value_name = "MOUNTPOINT", value_hint = ValueHint::FilePath)]
    mountpoint: Option<PathBuf>,

    /// Serve in the background; return when the mount answers
    ///
    /// An error during the start is reported as usual, with its exit code. Later messages go where
    /// --log says. Standard output and error stay open only where they are regular files.
    #[arg(long)]
    pub(crate) daemonize: bool,

    /// Let clients make the disk larger: by a write past the end, truncate or fallocate
    ///
    /// Otherwise its size is fixed: a truncation to another size fails (EPERM), and opening the
    /// file with O_TRUNC, as `cp` and `>` do, keeps the size and the content. `ringdisk ctl
    /// MOUNTPOINT resize` changes the size at any time.
    #[arg(long, conflicts_with = "read_only")]
    pub(crate) growable: bool,

    /// Let other users open the file, as far as its mode allows
    #[arg(long)]
    pub(crate) allow_other: bool,

    /// Let clients make the disk larger and smaller, as any file; what they cut off is lost
    ///
    /// Includes --growable. Opening the file with O_TRUNC empties the disk then.
    #[arg(long, conflicts_with = "read_only", help_heading = "File options")]
    pub(crate) resizable: bool,

    /// Keep the file's contents in the kernel's page cache (for buffered reads that repeat)
    #[arg(long, help_heading = "File options")]
    pub(crate) kernel_cache: bool,

    #[command(flatten)]
    pub(crate) config: ConfigArgs,

    #[command(flatten)]
    pub(crate) placement: PlacementArgs,

    /// Whether requests over io_uring use the client's own pages: on, off, or when the sizes of
    /// requests promise something
    ///
    /// Needs Linux 7.3 and root. auto decides when the file is opened, by what was read and written
    /// before, and leaves opens by root out; on is for every open. With on, no loop device with
    /// direct I/O may use the file: it would damage the memory of the kernel.
    #[arg(
        long,
        value_name = "WHEN",
        value_parser = one_of(ZERO_COPY),
        default_value = "auto",
        help_heading = "Serving options"
    )]
    pub(crate) zero_copy: ZeroCopy,

    /// Let the kernel read and write a raw image itself, past ringdisk
    ///
    /// For a raw image that is a regular file, with `-f raw` and without options that look at data.
    /// Needs Linux 6.9 and root. A write past the end makes the image longer, with or without
    /// --growable, and reads and writes are not in the statistics. Other growth needs fallocate of
    /// the image's file system, which never cuts what the kernel has appended meanwhile.
    #[arg(long, help_heading = "Serving options", conflicts_with_all = ["null", "kernel_cache",
          "snapshot", "overlay", "zero_copy", "limit"])]
    pub(crate) passthrough: bool,

    /// Each entry of a ring has a payload of its own, as before Linux 7.3: to compare
    #[arg(long, hide = true, conflicts_with = "zero_copy")]
    pub(crate) no_pools: bool,

    /// Threads and entries of rings stay in one spot: to compare
    #[arg(long, hide = true, value_name = "PLACE", value_parser = one_of(STAY))]
    pub(crate) stay: Option<Stay>,

    /// Give the mount up, with errors to its users, when storage takes longer for one request
    ///
    /// The time for which requests wait while `ringdisk ctl` changes the disk does not count, up to
    /// ten times as long.
    #[arg(long, value_name = "TIME", value_parser = parse_io_timeout, help_heading = "Serving \
        options")]
    pub(crate) io_timeout: Option<Duration>,

    /// How long a stop waits for those who still use the mount, before it ends all the same, with
    /// errors to them and exit code 13
    ///
    /// A mount in use that is stopped (Ctrl-C, SIGTERM, `ringdisk ctl stop`) loses its name at
    /// once, and is served until its last user has closed it; what they write meanwhile is kept.
    /// `none` waits as long as they take, which is the default; under a service manager
    /// (NOTIFY_SOCKET) that is 60s. A second signal ends it at once.
    #[arg(long, value_name = "TIME", value_parser = parse_stop_timeout, help_heading = "Serving \
        options")]
    pub(crate) stop_timeout: Option<StopTimeout>,

    #[command(flatten)]
    pub(crate) log: LogArgs,

    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,

    #[command(flatten)]
    pub(crate) user: UserArgs,

    /// Keep the mount when the process that serves it dies, and go on with it: clients wait, and no
    /// request is lost
    ///
    /// A service manager that has a place for descriptors (systemd: FileDescriptorStoreMax=) keeps
    /// the mount and starts the next process; otherwise a small parent does both, and is the
    /// process that --pidfile and MAINPID name. It gives up, with errors to the users of the mount,
    /// after 5 deaths in 10 s of serving. Over /dev/fuse only, so not with --transport uring and
    /// --zero-copy on; not with --passthrough, and not with --snapshot, whose overlay is gone with
    /// its process. Requests that the dead process has read are carried out again, once it has let
    /// go of the image. In a qcow2 image a write that needs new space is made durable before it is
    /// answered.
    #[arg(long, conflicts_with = "snapshot", help_heading = "Serving options")]
    pub(crate) keep_mount: bool,

    /// Take the mount over from the process that serves it now, while it is in use: its users see a
    /// pause
    ///
    /// For a new version of ringdisk. The words are those that the mount was started with: what its
    /// users see must stay as it is, threads, CPUs, the depth and the sandbox may change. The
    /// process before serves until everything is prepared here, and goes on if it cannot be taken
    /// over. Over /dev/fuse only, and not with --passthrough; by the same user or root. A mount
    /// that a service manager keeps (--keep-mount) goes on with its `restart` instead.
    #[arg(long, help_heading = "Serving options")]
    pub(crate) upgrade: bool,

    /// Write the pid to FILE when the mount answers; locked, and removed at the end
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Serving \
        options")]
    pub(crate) pidfile: Option<PathBuf>,

    /// Print IOPS, bytes, latencies, depth and CPU time per request on standard error at the end
    #[arg(long, help_heading = "Serving options")]
    pub(crate) stats: bool,

    #[command(flatten)]
    pub(crate) disk: ImageArgs,
}

/// End a mount
///
/// The server of the mount flushes the image and ends; its pid file, and the mountpoint if the
/// server made it, are removed by it.
#[derive(Args, Debug)]
pub(crate) struct UmountArgs {
    /// The file that the image is served as; several are ended one after the other
    #[arg(value_name = "MOUNTPOINT", value_hint = ValueHint::FilePath,
          required_unless_present = "all")]
    pub(crate) mountpoints: Vec<PathBuf>,

    /// End all mounts of this user (as root: of all users)
    #[arg(short, long, conflicts_with = "mountpoints")]
    pub(crate) all: bool,

    /// Take the mount away although it is in use; it ends when its last user closes it
    #[arg(short, long, conflicts_with = "force")]
    pub(crate) lazy: bool,

    /// Take the mount away now; requests in flight fail, and so do those of all who still use
    /// it
    #[arg(short, long)]
    pub(crate) force: bool,

    /// How long the mount may take to go, and its server to flush the image and end; exit code 14
    /// after that
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_limit)]
    pub(crate) timeout: Duration,
}

fn parse_stop_timeout(text: &str) -> Result<StopTimeout, String> {
    if text == "none" { Ok(StopTimeout(None)) } else { parse_time(text).map(Some).map(StopTimeout) }
}

/// A time that something may take.
pub(crate) fn parse_limit(text: &str) -> Result<Duration, String> {
    match parse_time(text)? {
        Duration::ZERO => Err(String::from("nothing is done in no time")),
        time => Ok(time),
    }
}

fn parse_io_timeout(text: &str) -> Result<Duration, String> {
    match parse_time(text)? {
        Duration::ZERO => Err(String::from("a timeout of nothing would end every request")),
        time => Ok(time),
    }
}

impl MountArgs {
    /// Takes in what the name of the image says beside its path.
    ///
    /// Errors: as [`ImageArgs::take_name`].
    pub(crate) fn take_name(&mut self) -> Result<(), clap::Error> {
        if self.disk.null.is_some() {
            return Ok(());
        }
        let taken = self.disk.take_name(&mut self.image);
        taken.map_err(|text| refuse("mount", clap::error::ErrorKind::ValueValidation, text))
    }

    /// Sorts the paths out.
    ///
    /// Errors: one path too few or too many.
    pub(crate) fn paths(&self) -> Result<Paths, clap::Error> {
        let refuse = |kind, text: &str| Err(refuse("mount", kind, text));
        let paths = match (self.disk.null, &self.mountpoint) {
            (Some(_), None) => Paths { image: None, mountpoint: self.image.clone() },
            (Some(_), Some(_)) => {
                return refuse(
                    clap::error::ErrorKind::TooManyValues,
                    "with --null there is no IMAGE; give the MOUNTPOINT only",
                );
            }
            (None, Some(mountpoint)) => {
                Paths { image: Some(self.image.clone()), mountpoint: mountpoint.clone() }
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
}

impl From<&MountArgs> for Request {
    fn from(args: &MountArgs) -> Request {
        Request {
            disk: (&args.disk).into(),
            daemonize: args.daemonize,
            growable: args.growable,
            resizable: args.resizable,
            allow_other: args.allow_other,
            kernel_cache: args.kernel_cache,
            placement: (&args.placement).into(),
            zero_copy: args.zero_copy,
            passthrough: args.passthrough,
            no_pools: args.no_pools,
            stay: args.stay,
            io_timeout: args.io_timeout,
            stop_timeout: args.stop_timeout,
            metrics: args.log.metrics.clone(),
            sandbox: args.sandbox.word,
            user: args.user.word.clone(),
            keep_mount: args.keep_mount,
            upgrade: args.upgrade,
            pidfile: args.pidfile.clone(),
            stats: args.stats,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use clap::error::ErrorKind;
    use ringdisk_disk::{Cache, DetectZeroes, Discard, Format};
    use ringdisk_export::{Numa, Threads};
    use ringdisk_server::request::ImageRequest;

    use super::*;

    use crate::cli::words::CacheSize;
    use crate::cli::{Cli, Command};

    fn mount(words: &str) -> Result<MountArgs, clap::Error> {
        let all = ["ringdisk", "mount"].into_iter().chain(words.split_whitespace());
        match Cli::try_parse_from(all)?.command {
            Command::Mount(args) => Ok(*args),
            other => panic!("not mount: {other:?}"),
        }
    }

    #[test]
    fn an_image_needs_a_mountpoint_and_null_has_no_image() {
        let both = mount("disk.img disk").expect("parses").paths().expect("paths");
        assert_eq!(both.image, Some(PathBuf::from("disk.img")));
        assert_eq!(both.mountpoint, PathBuf::from("disk"));
        let null = mount("--null 1T /tmp/null").expect("parses").paths().expect("paths");
        assert_eq!(null, Paths { image: None, mountpoint: PathBuf::from("/tmp/null") });
        let missing = mount("disk.img").expect("parses").paths().expect_err("missing");
        assert_eq!(missing.exit_code(), 2);
        assert!(missing.to_string().contains("MOUNTPOINT is missing"));
        assert!(mount("--null 1T a b").expect("parses").paths().is_err());
    }

    #[test]
    fn all_options_of_an_image_are_understood() {
        let args = mount(
            "-f raw --direct --growable --resizable --allow-other --allow-path /a --allow-path /b \
             --kernel-cache --queue-depth 64 --threads 4 --cpus 0-3,8 --numa off --offset 1M \
             --size 2G --io-timeout 5s \
             --stop-timeout 30s --daemonize --pidfile /run/x --stats disk.img disk",
        )
        .expect("parses");
        assert_eq!(args.disk.cache_mode(), Cache::None);
        assert_eq!(args.placement.threads.threads, Threads::Count(4));
        assert_eq!(
            args.placement.threads.cpus.map(|cpus| cpus.to_string()).as_deref(),
            Some("0-3,8")
        );
        assert_eq!(args.placement.threads.numa, Numa::Off);
        assert_eq!(args.disk.allow_path.len(), 2);
        assert_eq!((args.disk.offset, args.disk.size), (Some(1 << 20), Some(2 << 30)));
        assert_eq!(args.io_timeout, Some(Duration::from_secs(5)));
        assert_eq!(mount("--partition 7 a b").expect("parses").disk.partition, Some(7));
        assert_eq!(args.stop_timeout, Some(StopTimeout(Some(Duration::from_secs(30)))));
    }

    #[test]
    fn defaults_are_those_of_the_help_text() {
        let args = mount("a b").expect("parses");
        assert_eq!(args.disk.cache_mode(), Cache::Writeback);
        assert_eq!(args.placement.threads.threads, Threads::Auto);
        assert_eq!((args.placement.threads.cpus, args.placement.threads.numa), (None, Numa::Auto));
        assert_eq!(args.disk.format, None);
        assert_eq!(args.stop_timeout, None);
        let forever = mount("--stop-timeout none a b").expect("parses").stop_timeout;
        assert_eq!(forever, Some(StopTimeout(None)));
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
            ("--resizable --read-only a b", ErrorKind::ArgumentConflict),
            ("--create 1G --read-only a b", ErrorKind::ArgumentConflict),
            ("--snapshot --read-only a b", ErrorKind::ArgumentConflict),
            ("--snapshot --overlay c a b", ErrorKind::ArgumentConflict),
            ("--null 1G --snapshot b", ErrorKind::ArgumentConflict),
            ("--null 1G --partition 1 b", ErrorKind::ArgumentConflict),
            ("--partition 1 --offset 1M a b", ErrorKind::ArgumentConflict),
            ("--partition 1 --size 1M a b", ErrorKind::ArgumentConflict),
            ("--partition 1 --create 1G a b", ErrorKind::ArgumentConflict),
            ("--partition 0 a b", ErrorKind::ValueValidation),
            ("--partition sda1 a b", ErrorKind::ValueValidation),
            ("-o cluster_size=4k a b", ErrorKind::MissingRequiredArgument),
            ("--detect-zeroes maybe a b", ErrorKind::InvalidValue),
            ("--lazy-refcounts=perhaps a b", ErrorKind::ValueValidation),
            ("--threads 0 a b", ErrorKind::ValueValidation),
            ("--threads many a b", ErrorKind::ValueValidation),
            ("--queue-depth 0 a b", ErrorKind::ValueValidation),
            ("--cpus 3-1 a b", ErrorKind::ValueValidation),
            ("--cpus all a b", ErrorKind::ValueValidation),
            ("--cpus 1,,2 a b", ErrorKind::ValueValidation),
            ("--numa maybe a b", ErrorKind::InvalidValue),
            ("--io-timeout 0 a b", ErrorKind::ValueValidation),
            ("--null 10Q b", ErrorKind::ValueValidation),
            ("-f vmdk a b", ErrorKind::InvalidValue),
            ("--cache sync a b", ErrorKind::InvalidValue),
            ("a b c", ErrorKind::UnknownArgument),
            ("", ErrorKind::MissingRequiredArgument),
        ] {
            let error = mount(words).expect_err(words);
            assert_eq!(error.kind(), kind, "{words}: {error}");
            assert_eq!(error.exit_code(), 2, "{words}");
        }
    }

    #[test]
    fn a_new_image_is_of_the_format_that_its_name_or_an_option_says() {
        for (words, format) in [
            ("--create 1G a.qcow2 b", Format::Qcow2),
            ("--create 1G a.QCOW2 b", Format::Qcow2),
            ("--create 1G -f qcow2 a b", Format::Qcow2),
            ("--create 1G -f raw a.qcow2 b", Format::Raw),
            ("--create 1G a.img b", Format::Raw),
        ] {
            let args = mount(words).expect("parses");
            assert_eq!(ImageRequest::from(&args.disk).new_format(&args.image), format, "{words}");
        }
    }

    #[test]
    fn options_of_qcow2_are_understood() {
        let args = mount(
            "--discard ignore --discard-no-unref --detect-zeroes unmap --lazy-refcounts=off \
             --metadata-cache 8M a b",
        )
        .expect("parses");
        assert_eq!(args.disk.discard, Discard::Ignore);
        assert!(args.disk.discard_no_unref);
        assert_eq!(args.disk.detect_zeroes, DetectZeroes::Unmap);
        assert_eq!(args.disk.lazy_refcounts, Some(false));
        assert_eq!(args.disk.metadata_cache, CacheSize::Bytes(8 << 20));
        let plain = mount("--lazy-refcounts a b").expect("parses");
        assert_eq!(plain.disk.lazy_refcounts, Some(true));
        assert_eq!(plain.disk.metadata_cache, CacheSize::Auto);
        assert_eq!(
            (plain.disk.discard, plain.disk.detect_zeroes),
            (Discard::Unmap, DetectZeroes::Off)
        );
    }
}
