//! What `ringdisk mount` was asked for: names, options, and how the image is opened.
//!
//! Promises: names hold also after the process has left its directory; an image that cannot be used says what to do; that of a process
//! that was killed is opened only when that one has let go of it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_disk::{
    Cache, DetectZeroes, Discard, Disk, Error, ErrorKind, Format, ImageOptions, NullOptions, Source,
};
use ringdisk_fuse::mount::{Unmount, mountpoint, unmount};

use super::Made;
use crate::cli::{DetectZeroesWord, DiscardWord, MountArgs, MountPaths};
use crate::commands::look;
use crate::keep::State;
use crate::new_image::NewImage;
use crate::report::{Exit, Failure};
use crate::sandbox;
use crate::serve::Options;
use crate::signals::Watcher;
use crate::size::human_size;
use crate::terminal::{self, shell_word};

/// How long the image of a process that was killed may stay locked: its storage has that long to take what is in flight.
const FREE: Duration = Duration::from_secs(60);
/// After so long it is said what is waited for.
const FREE_QUIET: Duration = Duration::from_secs(1);
/// How often one looks.
const FREE_LOOK: Duration = Duration::from_millis(20);

/// What was asked for, with absolute names where they are used after the start.
pub(super) struct Plan<'a> {
    args: &'a MountArgs,
    pub(super) image: Option<PathBuf>,
    /// As the user wrote it, for messages.
    pub(super) mountpoint_shown: String,
    pub(super) mountpoint: PathBuf,
    pub(super) pidfile: Option<PathBuf>,
    /// The image that a command put on top of the one that was asked for.
    top: Option<(PathBuf, Format)>,
    /// Format of the image, if we made it.
    made_format: Option<Format>,
}

impl<'a> Plan<'a> {
    /// Errors: a mountpoint that cannot be used, whether it is there or not.
    pub(super) fn new(args: &'a MountArgs, paths: MountPaths) -> Result<Plan<'a>, Failure> {
        let mountpoint_shown = paths.mountpoint.display().to_string();
        let mut mountpoint = mountpoint::resolve(&paths.mountpoint)
            .map_err(|error| no_directory(&paths.mountpoint).unwrap_or_else(|| error.into()))?;
        match fs::symlink_metadata(&mountpoint) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            _ => mountpoint = free_mountpoint(&mountpoint)?,
        }
        let pidfile = args.pidfile.as_deref().map(std::path::absolute).transpose();
        let pidfile = pidfile
            .map_err(|error| Failure::system("the name of the pid file", &error, Exit::General))?;
        let image = paths.image;
        let (top, made_format) = (None, None);
        Ok(Plan { args, image, mountpoint_shown, mountpoint, pidfile, top, made_format })
    }

    /// For a mount that is there: of a process that is gone.
    ///
    /// Errors: another mount was asked for than the one that was kept.
    pub(super) fn resumed(
        args: &'a MountArgs,
        paths: MountPaths,
        state: &State,
    ) -> Result<Plan<'a>, Failure> {
        let kept = state.terms().mountpoint;
        if mountpoint::resolve(&paths.mountpoint).is_ok_and(|asked| asked != kept) {
            return Err(Failure::new(
                Exit::Mountpoint,
                format!(
                    "the mount on '{}' was kept, and the command asks for '{}'",
                    kept.display(),
                    paths.mountpoint.display()
                ),
            )
            .hint("stop the service, then start it with the new command"));
        }
        let pidfile = args.pidfile.as_deref().map(std::path::absolute).transpose();
        let pidfile = pidfile
            .map_err(|error| Failure::system("the name of the pid file", &error, Exit::General))?;
        Ok(Plan {
            args,
            image: paths.image,
            mountpoint_shown: paths.mountpoint.display().to_string(),
            mountpoint: kept,
            pidfile,
            top: state.top(),
            made_format: state.format(),
        })
    }

    /// Opens the image of a process that is gone, as soon as that has let go of it: its locks stay until the last write that it began
    /// has landed, and until then nothing may be read or carried out again.
    ///
    /// Errors: as [`Plan::open_disk`]; the image was not free within [`FREE`], or a signal came.
    pub(super) fn open_when_free(&self, watcher: &Watcher) -> Result<Arc<Disk>, Failure> {
        let begun = Instant::now();
        let mut is_said = false;
        loop {
            let failure = match self.open_disk(&Made::default(), None) {
                Err(failure) if failure.exit == Exit::Locked => failure,
                opened => return opened,
            };
            if let Some(signal) = watcher.stopped_by() {
                return Err(failure.hint(format!("{signal} came while it was waited for")));
            }
            if begun.elapsed() > FREE {
                let waited = FREE.as_secs();
                return Err(failure.hint(format!(
                    "after a crash it was waited for {waited} s; look whether its storage answers"
                )));
            }
            if !is_said && begun.elapsed() > FREE_QUIET {
                is_said = true;
                terminal::note(format_args!(
                    "waiting until the writes of the process before this one have landed: {}",
                    failure.message()
                ));
            }
            std::thread::sleep(FREE_LOOK);
        }
    }

    /// Opens what is to be served, on a ring that lives no longer than this.
    pub(super) fn open_disk(
        &self,
        made: &Made,
        new: Option<&(NewImage, u64)>,
    ) -> Result<Arc<Disk>, Failure> {
        let args = self.args;
        let Some(image) = &self.image else {
            // No image is read, but the queues need rings: the reason why there are none is said
            // best here.
            look::runtime()?;
            let options = NullOptions {
                size: args.null.unwrap_or(0),
                read_zeroes: args.read_zeroes,
                latency: args.latency.unwrap_or_default(),
            };
            return Ok(Disk::null(&options));
        };
        let mut format = args.format.or(self.made_format);
        if let Some((new, size)) = new {
            if made.image(image, new, *size)? {
                // We know what it is: nothing is probed, so nothing needs protection.
                format = Some(new.format);
            } else {
                terminal::note(format_args!(
                    "'{}' is there already and is used as it is; --create changes nothing",
                    image.display()
                ));
            }
        }
        let mut options = ImageOptions {
            format,
            read_only: args.read_only,
            auto_read_only: true,
            cache: args.cache_mode(),
            raw_offset: args.offset.unwrap_or(0),
            raw_size: args.size,
            allow_paths: args.allow_path.iter().map(|path| self.lasting(path)).collect(),
            force_share: args.force_share,
            metadata_cache_bytes: args.metadata_cache.bytes(),
            discard: match args.discard {
                DiscardWord::Ignore => Discard::Ignore,
                DiscardWord::Unmap => Discard::Unmap,
            },
            discard_no_unref: args.discard_no_unref,
            detect_zeroes: match args.detect_zeroes {
                DetectZeroesWord::Off => DetectZeroes::Off,
                DetectZeroesWord::On => DetectZeroes::On,
                DetectZeroesWord::Unmap => DetectZeroes::Unmap,
            },
            lazy_refcounts: args.lazy_refcounts,
            temporary: args.snapshot,
            overlay: args.overlay.as_deref().map(|path| self.lasting(path)),
            outlives_process: args.keep_mount,
            ..ImageOptions::default()
        };
        let mut image = &self.lasting(image);
        if let Some((top, format)) = &self.top {
            // The images below may lie where those of the command line do.
            let known = [Some(image), options.overlay.as_ref()].into_iter().flatten();
            let directories = known.filter_map(|path| path.parent().map(Path::to_owned));
            options.allow_paths.extend(directories.collect::<Vec<_>>());
            options.overlay = None;
            options.format = Some(*format);
            image = top;
        }
        let mut result = open(image, &options)?;
        if options.cache.direct() && result.as_ref().is_err_and(is_about_direct) {
            options.cache =
                if options.cache.sync() { Cache::Writethrough } else { Cache::Writeback };
            result = open(image, &options)?;
            if result.is_ok() {
                terminal::warn(format_args!(
                    "'{}' is on a file system without O_DIRECT, so the page cache is used; move it \
                     to one that has it, such as ext4, xfs or btrfs",
                    image.display()
                ));
            }
        }
        let disk = result.map_err(|error| self.explain(error))?;
        self.check_read_only(&disk)?;
        Ok(disk)
    }

    /// What to do about an image that does not open.
    fn explain(&self, error: Error) -> Failure {
        let kind = error.kind();
        let failure = Failure::from(error);
        let image = self.image.as_deref().unwrap_or(Path::new(""));
        let shown = shell_word(&image.display().to_string());
        match kind {
            // A name that an image contains is not one that --create could make.
            ErrorKind::NotFound if !image.exists() => {
                failure.hint(format!("add `--create 10G` to make '{shown}'"))
            }
            _ => failure,
        }
    }

    /// What it means that the image could be opened for reading only although that was not asked
    /// for: fine for a format that is only read, an error where permission lacks.
    fn check_read_only(&self, disk: &Disk) -> Result<(), Failure> {
        let Some(reason) = disk.read_only_reason() else { return Ok(()) };
        if disk.layers().first().and_then(|top| top.format()) == Some(Format::Raw) {
            return Err(Failure::new(Exit::Permission, reason)
                .hint("`--read-only` serves it without writing"));
        }
        if self.args.growable {
            return Err(Failure::new(
                Exit::Unsupported,
                format!("--growable needs an image that can be written: {reason}"),
            ));
        }
        terminal::note(format_args!("served read-only: {reason}"));
        Ok(())
    }

    /// A name that is still true after a background process has left its directory: images of the
    /// chain are named by each other, and opened again, while it serves.
    fn lasting(&self, path: &Path) -> PathBuf {
        match std::path::absolute(path) {
            Ok(whole) if self.args.daemonize || self.args.keep_mount => whole,
            _ => path.to_owned(),
        }
    }

    /// What serving takes of the system, for the sandbox.
    ///
    /// * `control`: name of the control socket.
    pub(super) fn confinement(
        &self,
        disk: &Disk,
        control: Option<&Path>,
    ) -> ringdisk_sandbox::Plan {
        let args = self.args;
        let mut plan = sandbox::images(args.sandbox, disk, &args.allow_path);
        if let Some(directory) = control.and_then(Path::parent) {
            // Locked while the socket goes.
            plan = plan.list(directory);
        }
        plan
    }

    fn name(&self) -> String {
        match &self.image {
            Some(image) => std::path::absolute(image)
                .unwrap_or_else(|_| image.clone())
                .to_string_lossy()
                .into_owned(),
            None => String::from("null"),
        }
    }

    pub(super) fn options(&self, disk: &Disk) -> Options {
        let args = self.args;
        Options {
            mountpoint: self.mountpoint.clone(),
            placement: args.placement.clone(),
            zero_copy: args.zero_copy,
            passthrough: args.passthrough,
            no_pools: args.no_pools,
            stay: args.stay,
            growable: args.growable,
            read_only: args.read_only || disk.is_read_only(),
            allow_other: args.allow_other,
            kernel_cache: args.kernel_cache,
            io_timeout: args.io_timeout,
            restricted: sandbox::is_wanted(args.sandbox),
            keep: None,
            name: self.name(),
        }
    }

    /// What is served where, in one line.
    pub(super) fn ready_line(&self, disk: &Disk) -> String {
        let image = match &self.image {
            Some(image) => image.display().to_string(),
            None => String::from("a null disk"),
        };
        let format = disk.layers().first().and_then(|top| top.format());
        let format = format.map(|format| format!(", {format}")).unwrap_or_default();
        let read_only = self.args.read_only || disk.is_read_only();
        let mode = if read_only { ", read-only" } else { "" };
        let size = human_size(disk.size());
        format!("{image} ({size}{format}{mode}) is served as {}", self.mountpoint_shown)
    }
}

/// Checks a mountpoint; what a ringdisk that was killed left on it goes.
///
/// Errors: those of the check.
fn free_mountpoint(path: &Path) -> Result<PathBuf, Failure> {
    let stale = match mountpoint::check(path) {
        Err(error) if error.kind() == ringdisk_fuse::ErrorKind::Stale => error,
        checked => return Ok(checked?),
    };
    if unmount(path, Unmount::Lazy).is_err() {
        return Err(stale.into());
    }
    terminal::note(format_args!(
        "'{}' still carried the mount of a ringdisk that was killed; it is replaced",
        path.display()
    ));
    Ok(mountpoint::check(path)?)
}

/// What is wrong with a mountpoint whose directory is missing; `None` if that is not the matter.
fn no_directory(mountpoint: &Path) -> Option<Failure> {
    let directory = mountpoint.parent().filter(|directory| !directory.as_os_str().is_empty())?;
    if !fs::metadata(directory).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return None;
    }
    let shown = directory.display().to_string();
    Some(
        Failure::new(Exit::Mountpoint, format!("the directory '{shown}' does not exist"))
            .hint(format!("mkdir -p {}", shell_word(&shown))),
    )
}

/// Opens an image on a ring of this thread.
fn open(image: &Path, options: &ImageOptions) -> Result<Result<Arc<Disk>, Error>, Failure> {
    let mut runtime = look::runtime()?;
    let ring = runtime.ring().clone();
    let source = Source::Path(image.to_owned());
    Ok(runtime.block_on(Disk::open(&ring, source, options)))
}

/// Whether an image did not open because its file system has no O_DIRECT.
fn is_about_direct(error: &Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = next {
        let direct = cause
            .downcast_ref::<ringdisk_storage::Error>()
            .is_some_and(|error| error.kind() == ringdisk_storage::ErrorKind::DirectUnsupported);
        if direct {
            return true;
        }
        next = cause.source();
    }
    // The disk's error may hold the words without the cause.
    error.kind() == ErrorKind::Unsupported && error.message().contains("O_DIRECT")
}
