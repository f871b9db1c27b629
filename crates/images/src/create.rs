//! A new image.
//!
//! Promises: a file of that name is overwritten only if no other program uses it. What was made is
//! removed when the rest fails or a signal ends the command.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_console::operation;
use ringdisk_daemon::failure::{Cause, Exit, Failure};
use ringdisk_daemon::new_file::{NewFiles, check_new_name};
use ringdisk_daemon::signals::{Phase, Watcher};
use ringdisk_daemon::terminal::{self, shell_word};
use ringdisk_disk::name::FileName;
use ringdisk_disk::{AllowedHost, Disk, Format, ImageOptions, Source};
use ringdisk_qcow2::limits::SECTOR;
use ringdisk_ring::Runtime;
use ringdisk_storage::Storage;

use crate::inspect;
use crate::named::{Named, Pool};
use crate::new_image::{Described, NewImage, is_named_qcow2};

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The file to make.
    pub file: Option<PathBuf>,
    /// Of the disk, bytes; `None`: that of the backing file.
    pub size: Option<u64>,
    /// `None`: by the name and the backing file.
    pub format: Option<Format>,
    /// Options of the image, as `NAME=VALUE,…`.
    pub options: Vec<String>,
    /// The backing file.
    pub backing: Option<String>,
    /// Its format.
    pub backing_format: Option<Format>,
    /// It is not looked at.
    pub backing_unsafe: bool,
    /// Print nothing but errors.
    pub quiet: bool,
    /// Where the names inside images may lead.
    pub pool: Pool,
}

/// Makes an image.
///
/// Errors: options that make no sense, a backing file that cannot be opened, those of the file
/// system. Nothing is left of a new file then.
pub fn run(request: &Request) -> Result<(), Failure> {
    let format = request.format.unwrap_or(match &request.file {
        _ if request.backing.is_some() => Format::Qcow2,
        Some(file) if is_named_qcow2(file) => Format::Qcow2,
        _ => Format::Raw,
    });
    let mut image = match NewImage::parse(format, &request.options)? {
        Described::Help(text) => {
            terminal::say(text);
            return Ok(());
        }
        Described::Image(image) => image,
    };
    let usage = |text: &str| Failure::new(Exit::Usage, text);
    let file =
        request.file.as_deref().ok_or_else(|| usage("the name of the new image is missing"))?;
    let (given, named) = (file, Named::of_new(file)?);
    let file = named.path();
    check_new_name(file)?;
    take_backing(&mut image, request.backing.as_deref(), request.backing_format)?;
    let mut runtime = inspect::runtime()?;
    let backing = match image.backing() {
        Some(_) if request.backing_unsafe => None,
        Some(name) => Some(Backing::open(&mut runtime, file, name, &image, request)?),
        None => None,
    };
    let size = match (image.size(request.size)?, &backing) {
        (Some(size), _) => size,
        // QEMU counts the disk of a backing file in sectors; what the user says it repeats as it
        // is.
        (None, Some(backing)) => backing.disk.size().next_multiple_of(SECTOR).0,
        (None, None) => {
            return Err(usage("the size of the new image is missing")
                .because(Cause::SizeMissing)
                .hint(format!("ringdisk create {} 10G", shell_word(&file.to_string_lossy()))));
        }
    };
    if !request.quiet {
        terminal::say(image.line(given, size));
    }
    let fresh = NewFiles::default();
    let watcher = undo_on_signal(&fresh)?;
    let ring = runtime.ring().clone();
    let made = runtime.block_on(image.make(&ring, file, size, &fresh));
    made.inspect_err(|_| fresh.undo())?;
    watcher.enter(Phase::Ending);
    fresh.keep();
    if let Some(backing) = backing {
        backing.explain(file);
    }
    Ok(())
}

/// A signal removes what was made so far, and then ends the process.
fn undo_on_signal(fresh: &NewFiles) -> Result<Watcher, Failure> {
    let fresh = fresh.clone();
    let quit = move |signal: &'static str| {
        fresh.undo();
        operation::die_by(signal);
    };
    Watcher::start(Phase::Starting(Box::new(quit)))
        .map_err(|error| Failure::system("cannot watch for signals", &error, Exit::General))
}

/// Takes the options beside `-o` in.
///
/// Errors: given twice; a format that has no backing files; a backing file without its format.
pub fn take_backing(
    image: &mut NewImage,
    name: Option<&str>,
    format: Option<Format>,
) -> Result<(), Failure> {
    let usage = |text: String| Failure::new(Exit::Usage, text);
    if (name.is_some() || format.is_some()) && image.format == Format::Raw {
        return Err(usage(String::from("a raw image cannot have a backing file"))
            .hint("make a qcow2: --format qcow2"));
    }
    if let Some(name) = name {
        if image.get("backing_file").is_some() {
            return Err(usage(String::from("the backing file is given twice; give it once")));
        }
        image.set("backing_file", name)?;
    }
    if let Some(format) = format {
        image.set("backing_fmt", format.name())?;
    }
    // Refuses a format that we do not know, or one without a file.
    let stated = image.backing_format()?;
    match image.backing() {
        Some(name) if stated.is_none() && FileName::parse(name.as_bytes())?.format.is_none() => {
            Err(usage(String::from(
                "the format of the backing file is missing; it is never guessed",
            ))
            .hint("give --backing-format raw or --backing-format qcow2"))
        }
        _ => Ok(()),
    }
}

/// The backing file of a new image.
struct Backing {
    disk: Arc<Disk>,
    path: PathBuf,
}

impl Backing {
    /// Opens it as the new image will.
    fn open(
        runtime: &mut Runtime,
        file: &Path,
        name: &str,
        image: &NewImage,
        request: &Request,
    ) -> Result<Backing, Failure> {
        let parsed = FileName::parse(name.as_bytes())?;
        let path = backing_path(file, &parsed);
        // What the user names here is allowed.
        let named = parsed.nbd.as_ref().map(|it| AllowedHost::Server(it.server.clone()));
        let allow_hosts = [request.pool.allow_host.clone(), named.into_iter().collect()].concat();
        let options = ImageOptions {
            format: image.backing_format()?.or(parsed.format),
            read_only: true,
            window_offset: parsed.raw_offset,
            window_size: parsed.raw_size,
            allow_paths: request.pool.allow_path.clone(),
            allow_hosts,
            reconnect: request.pool.reconnect,
            ..ImageOptions::default()
        };
        let has_window = parsed.raw_offset != 0 || parsed.raw_size.is_some();
        if has_window && options.format == Some(Format::Qcow2) {
            return Err(Failure::new(
                Exit::Usage,
                "the name of a backing file can have an offset or a size for raw images only",
            ));
        }
        if is_same(&path, file) {
            return Err(Failure::new(
                Exit::Usage,
                format!("'{}' cannot be its own backing file", file.display()),
            ));
        }
        let ring = runtime.ring().clone();
        let opened = runtime.block_on(Disk::open(&ring, Source::Path(path.clone()), &options));
        let disk = opened.map_err(|error| {
            let cause = ringdisk_disk::Cause::of_backing_file(
                path.display().to_string(),
                error.message(),
                error.cause(),
            );
            let failure = Failure::from(error)
                .context(format!("backing file '{}'", path.display()))
                .because(Cause::Image(cause));
            match failure.hint_text() {
                None => failure.hint("--backing-unsafe makes the image without looking at it"),
                Some(_) => failure,
            }
        })?;
        Ok(Backing { disk, path })
    }

    /// Says what opening the new image will need, if that is more than usual.
    fn explain(&self, file: &Path) {
        let layers = self.disk.layers();
        if let Some(address) = layers.first().and_then(|top| top.export()) {
            let server = &address.server;
            terminal::note(format_args!(
                "the backing file is an NBD export, so opening the image needs --allow-host {}",
                shell_word(server.host().unwrap_or(&server.to_string()))
            ));
            return;
        }
        let directory = match file.parent() {
            Some(directory) if !directory.as_os_str().is_empty() => directory,
            _ => Path::new("."),
        };
        let real = |path: &Path| path.canonicalize().ok();
        let (Some(own), Some(backing)) = (real(directory), real(&self.path)) else { return };
        if !backing.starts_with(&own)
            && let Some(parent) = backing.parent()
        {
            terminal::note(format_args!(
                "the backing file is not below the directory of the image, so opening it needs \
                 --allow-path {}",
                shell_word(&parent.to_string_lossy())
            ));
        }
    }
}

/// Where a backing file that an image names is: a relative name starts at the image.
pub fn backing_path(file: &Path, name: &FileName) -> PathBuf {
    name.seen_from(file.parent().unwrap_or(Path::new("")))
}

/// Whether two names lead to one file.
pub fn is_same(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| path.metadata().map(|meta| Storage::identity_of(&meta)).ok();
    id(one).is_some_and(|one| Some(one) == id(other))
}
