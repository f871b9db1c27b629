//! How the image that `mount` and `serve` were asked for is opened, or made.
//!
//! Promises: names hold also after the process has left its directory; an image that cannot be used
//! says what to do.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ringdisk_daemon::confine::{self, Reach};
use ringdisk_daemon::failure::{Cause, Exit, Failure};
use ringdisk_daemon::new_file::{NewFiles, check_new_name};
use ringdisk_daemon::size::human_size;
use ringdisk_daemon::terminal::{self, shell_word};
use ringdisk_disk::name::is_export;
use ringdisk_disk::{
    Bytes, Cache, Disk, Error, ErrorKind, Format, ImageOptions, NullOptions, Source,
};
use ringdisk_images::inspect;
use ringdisk_images::new_image::{Described, NewImage, not_created};

use crate::limits;
use crate::request::ImageRequest;

/// Longest wait for the locks of an image that a process had which was killed: the kernel lets go
/// of them when the last write of that process has landed.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(3);

/// What is to be served.
#[derive(Debug)]
pub struct ImagePlan {
    /// The options.
    pub request: ImageRequest,
    /// `None`: a null disk.
    pub image: Option<PathBuf>,
    /// Another process may go on with it.
    pub outlives_process: bool,
    /// The process leaves its directory before it ends.
    pub leaves_directory: bool,
    /// Writes past the end make the disk larger.
    pub growable: bool,
    /// Another process has it and gives it away later.
    pub inactive: bool,
    /// How long to wait for a process that has it and is about to end.
    pub wait_for_locks: Option<Duration>,
    /// The image that a command put on top of the one that was asked for.
    pub top: Option<(PathBuf, Format)>,
    /// Format of the image, if we made it.
    pub made_format: Option<Format>,
    /// The part of the disk that is served already, whatever its partition table has become: first
    /// byte and length, bytes.
    pub window: Option<(u64, Option<u64>)>,
    /// The format of the raw image was guessed by a process before this one.
    pub protect_raw: bool,
    /// A guest writes it, so a raw image must have been called raw.
    pub ask_for_raw: bool,
    /// The process is confined when it serves.
    pub note_names: bool,
}

impl ImagePlan {
    /// For a server that ends with its process, and clients that take the disk as it is.
    ///
    /// * `image`: `None`: a null disk.
    pub fn new(request: impl Into<ImageRequest>, image: Option<PathBuf>) -> ImagePlan {
        ImagePlan {
            request: request.into(),
            image,
            outlives_process: false,
            leaves_directory: false,
            growable: false,
            inactive: false,
            wait_for_locks: None,
            top: None,
            made_format: None,
            window: None,
            protect_raw: false,
            ask_for_raw: false,
            note_names: false,
        }
    }

    /// Where the command line lets images lie.
    pub fn reach(&self) -> Reach {
        reach(&self.request, self.image.as_deref())
    }

    /// What `--create` makes, and how large, bytes.
    ///
    /// Errors: options that the image cannot have.
    pub fn new_image(&self) -> Result<Option<(NewImage, u64)>, Failure> {
        let request = &self.request;
        let (Some(size), Some(image)) = (request.create, self.image.as_deref()) else {
            return Ok(None);
        };
        match NewImage::parse(request.new_format(image), &request.options)? {
            Described::Image(image) if image.backing().is_some() => Err(Failure::new(
                Exit::Usage,
                "an overlay is made with --overlay FILE, or with `ringdisk create`",
            )),
            Described::Image(image) => {
                image.size(Some(size))?;
                Ok(Some((image, size)))
            }
            Described::Help(_) => Err(Failure::new(
                Exit::Usage,
                "the options of an image are listed by `ringdisk create -f qcow2 -o help`",
            )),
        }
    }

    /// How the image is to be opened.
    ///
    /// * `format`: `None`: it is probed.
    pub fn options(&self, format: Option<Format>) -> ImageOptions {
        let request = &self.request;
        let asked = (request.offset.unwrap_or(0), request.size);
        let (window_offset, window_size) = self.window.unwrap_or(asked);
        ImageOptions {
            format,
            protect_raw: self.protect_raw,
            ask_for_raw: self.ask_for_raw,
            note_names: self.note_names,
            read_only: request.read_only,
            auto_read_only: true,
            cache: request.cache,
            window_offset,
            window_size: window_size.map(Bytes),
            partition: request.partition.filter(|_| self.window.is_none()),
            allow_paths: request.allow_path.iter().map(|path| self.lasting(path)).collect(),
            allow_hosts: request.allow_host.clone(),
            reconnect: request.reconnect,
            force_share: request.force_share,
            internal_snapshot: request.load_snapshot.clone(),
            without_backing: request.without_backing,
            metadata_cache_bytes: request.metadata_cache.map(Bytes),
            discard: request.discard,
            discard_no_unref: request.discard_no_unref,
            detect_zeroes: request.detect_zeroes,
            copy_on_read: request.copy_on_read,
            lazy_refcounts: request.lazy_refcounts,
            temporary: request.snapshot,
            overlay: request.overlay.as_deref().map(|path| self.lasting(path)),
            outlives_process: self.outlives_process,
            inactive: self.inactive,
            wait_for_locks: self.wait_for_locks,
            opener: Some(confine::opener()),
            ..ImageOptions::default()
        }
    }

    /// Opens what is to be served, on a ring that lives no longer than this.
    ///
    /// * `fresh`: gets what is made.
    /// * `new`: what is made when there is no image.
    ///
    /// Errors: why the image cannot be served.
    pub fn open(
        &self,
        fresh: &NewFiles,
        new: Option<&(NewImage, u64)>,
    ) -> Result<Arc<Disk>, Failure> {
        let request = &self.request;
        // Before anything is opened or made.
        limits::check(&request.limit)?;
        let Some(image) = &self.image else {
            // No image is read, but the queues need rings: the reason why there are none is said
            // best here.
            inspect::runtime()?;
            let options = NullOptions {
                size: Bytes(request.null.unwrap_or(0)),
                read_zeroes: request.read_zeroes,
                latency: request.latency.unwrap_or_default(),
            };
            let disk = Disk::null(&options);
            limits::apply(&request.limit, &disk)?;
            return Ok(disk);
        };
        let mut format = request.format.or(self.made_format);
        if let Some((new, size)) = new {
            if make_image(fresh, image, new, *size)? {
                // We know what it is: nothing is probed, so nothing needs protection.
                format = Some(new.format);
            } else {
                terminal::note(format_args!(
                    "'{}' is there already and is used as it is; --create changes nothing",
                    image.display()
                ));
            }
        }
        let mut options = self.options(format);
        let mut image = &self.lasting(image);
        if let Some((top, format)) = &self.top {
            // The images below may lie where those of the command line do.
            let known = [Some(image), options.overlay.as_ref()].into_iter().flatten();
            let known = known.filter(|path| !is_export(path));
            let known: Vec<_> = known
                .flat_map(|path| [path.parent(), path.exists().then_some(path.as_path())])
                .flatten()
                .map(Path::to_owned)
                .collect();
            options.known_paths.extend(known);
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
        limits::apply(&request.limit, &disk)?;
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
            ErrorKind::NotFound
                if !is_export(image) && !image.exists() && self.request.read_only =>
            {
                failure.hint("an image that is only read must be there: look at its name")
            }
            ErrorKind::NotFound if !is_export(image) && !image.exists() => {
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
                .because(Cause::Image(ringdisk_disk::Cause::Other))
                .hint("`--read-only` serves it without writing"));
        }
        if self.growable {
            return Err(Failure::new(
                Exit::Unsupported,
                format!("--growable and --resizable need an image that can be written: {reason}"),
            ));
        }
        terminal::note(format_args!("served read-only: {reason}"));
        Ok(())
    }

    /// A name that is still true after a background process has left its directory: images of the
    /// chain are named by each other, and opened again, while it serves.
    fn lasting(&self, path: &Path) -> PathBuf {
        match std::path::absolute(path) {
            Ok(whole) if self.leaves_directory && !is_export(path) => whole,
            _ => path.to_owned(),
        }
    }

    /// For headings: the absolute name of the image.
    pub fn name(&self) -> String {
        match &self.image {
            Some(image) if is_export(image) => image.to_string_lossy().into_owned(),
            Some(image) => std::path::absolute(image)
                .unwrap_or_else(|_| image.clone())
                .to_string_lossy()
                .into_owned(),
            None => String::from("null"),
        }
    }

    /// What is served, in some words: name, size, format.
    pub fn describe(&self, disk: &Disk) -> String {
        let image = match &self.image {
            Some(image) => match self.request.partition {
                Some(number) => format!("partition {number} of {}", image.display()),
                None => image.display().to_string(),
            },
            None => String::from("a null disk"),
        };
        let format = disk.layers().first().and_then(|top| top.format());
        let format = format.map(|format| format!(", {format}")).unwrap_or_default();
        let read_only = self.request.read_only || disk.is_read_only();
        let mode = match (&self.request.overlay, self.request.snapshot) {
            (Some(overlay), _) => format!(", what is written goes to {}", overlay.display()),
            (None, true) => String::from(", what is written is lost at the end"),
            (None, false) if read_only => String::from(", read-only"),
            (None, false) => String::new(),
        };
        let size = human_size(disk.size().0);
        format!("{image} ({size}{format}{mode})")
    }
}

/// Where a command line lets images lie.
pub fn reach(request: &ImageRequest, image: Option<&Path>) -> Reach {
    let images = image.into_iter().chain(request.overlay.as_deref());
    Reach::of(images.filter(|image| !is_export(image)), &request.allow_path)
}

/// Makes an image when there is none; `false` if there is one.
fn make_image(fresh: &NewFiles, path: &Path, new: &NewImage, size: u64) -> Result<bool, Failure> {
    check_new_name(path)?;
    if !fresh.file(path).map_err(|error| not_created(path, &error))? {
        return Ok(false);
    }
    let mut runtime = inspect::runtime()?;
    let ring = runtime.ring().clone();
    runtime.block_on(new.make(&ring, path, size, fresh))?;
    Ok(true)
}

/// Opens an image on a ring of this thread.
fn open(image: &Path, options: &ImageOptions) -> Result<Result<Arc<Disk>, Error>, Failure> {
    let mut runtime = inspect::runtime()?;
    let ring = runtime.ring().clone();
    let source = Source::Path(image.to_owned());
    Ok(runtime.block_on(Disk::open(&ring, source, options)))
}

/// Whether an image did not open because its file system has no O_DIRECT.
fn is_about_direct(error: &Error) -> bool {
    let cause = error.cause().map(ringdisk_disk::Cause::root);
    matches!(cause, Some(ringdisk_disk::Cause::Storage(ringdisk_storage::Cause::NoDirectIo { .. })))
}
