//! An image from a backup and all those below it.
//!
//! Promises: no image is overwritten unless that was asked for, and then only when the new one is
//! whole; a backup whose chain is not whole is refused before anything is made.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_console::operation::{Operation, Showing};
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::new_file::{NewFiles, check_new_name};
use ringdisk_daemon::terminal::visible;
use ringdisk_disk::operations::{self, ConvertOptions};
use ringdisk_disk::{Disk, Format, ImageOptions, Progress, Source};
use ringdisk_images::inspect;
use ringdisk_images::named::Pool;
use ringdisk_images::new_image::{Described, NewImage, is_named_qcow2};
use ringdisk_qcow2::{CheckHooks, CheckOptions};
use ringdisk_ring::Runtime;
use ringdisk_storage::{OpenOptions, Storage};

use crate::directory::{self, is_stamp};

/// What the name of an image that is not whole ends with.
const PART: &str = ".part";

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// A backup, or a directory of backups.
    pub backup: PathBuf,
    /// The image that is made.
    pub image: PathBuf,
    /// In a directory: the newest one that is not younger than this, as in the names.
    pub at: Option<String>,
    /// Format of the image; `None`: by its name.
    pub target_format: Option<Format>,
    /// An image that is there is replaced.
    pub force: bool,
    /// Where the names of backups may lead.
    pub pool: Pool,
}

/// Makes an image. Gives the backup that was taken, and the size of the disk, bytes.
///
/// Errors: there is no such backup; its chain is not whole; the image is there; those of reading
/// and writing; stopped by a signal.
pub fn restore(request: &Request, showing: Showing) -> Result<(PathBuf, u64), Failure> {
    let image = &request.image;
    check_new_name(image)?;
    if !request.force && fs::symlink_metadata(image).is_ok() {
        let text = format!("'{}' is there already, and is not overwritten", image.display());
        return Err(Failure::new(Exit::Usage, text).hint("--force replaces it"));
    }
    let backup = find(request)?;
    let mut runtime = inspect::runtime()?;
    let from = open(&mut runtime, request, &backup)?;
    let fresh = NewFiles::default();
    let operation = Operation::start("restore", showing)?;
    let result = check_chain(&mut runtime, &from, operation.progress())
        .and_then(|()| copy(&mut runtime, request, &from, &fresh, operation.progress()));
    operation.end(result, "nothing was made").inspect_err(|_| fresh.undo())?;
    Ok((backup, from.size().0))
}

/// The backup that is meant.
fn find(request: &Request) -> Result<PathBuf, Failure> {
    if !request.backup.is_dir() {
        if request.at.is_some() {
            return Err(Failure::new(Exit::Usage, "--at is for a directory of backups"));
        }
        return Ok(request.backup.clone());
    }
    let shown = request.backup.display();
    let mut all = directory::stored(&request.backup)?;
    if let Some(at) = &request.at {
        if !is_stamp(at) {
            let text = format!("'{}' is no time of a backup", visible(at));
            return Err(Failure::new(Exit::Usage, text)
                .hint("write it as in the names of the files, such as 20261127T183000Z"));
        }
        // Without its milliseconds a time means that whole second.
        let at = if at.contains('.') { at.clone() } else { at.replace('Z', ".999Z") };
        all.retain(|stored| stored.stamp <= at);
    }
    all.pop().map(|stored| stored.file).ok_or_else(|| {
        let which = if request.at.is_some() { "so old a backup" } else { "backup" };
        Failure::new(Exit::Image, format!("there is no {which} in '{shown}'"))
    })
}

fn open(runtime: &mut Runtime, request: &Request, backup: &Path) -> Result<Arc<Disk>, Failure> {
    let format = match backup.extension().is_some_and(|end| end == "qcow2") {
        true => Some(Format::Qcow2),
        false => None,
    };
    let options = ImageOptions {
        format,
        read_only: true,
        allow_paths: request.pool.allow_path.clone(),
        allow_hosts: request.pool.allow_host.clone(),
        reconnect: request.pool.reconnect,
        ..ImageOptions::default()
    };
    let ring = runtime.ring().clone();
    let opened = Disk::open(&ring, Source::Path(backup.to_owned()), &options);
    let context =
        |error| Failure::from(error).context(format!("the backup '{}'", backup.display()));
    runtime.block_on(opened).map_err(context)
}

/// Looks whether the metadata of all images of the chain is sound.
///
/// Errors: it is not.
fn check_chain(runtime: &mut Runtime, from: &Disk, progress: &Progress) -> Result<(), Failure> {
    let ring = runtime.ring().clone();
    for layer in from.layers() {
        if layer.format() != Some(Format::Qcow2) {
            continue;
        }
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let storage = Arc::new(Storage::open(layer.name(), &options)?);
        let cancelled = || progress.is_cancelled();
        let hooks = CheckHooks { progress: &|_, _| {}, cancelled: &cancelled };
        let options = CheckOptions::default();
        let checking = ringdisk_qcow2::check(&ring, &storage, None, &options, hooks);
        let report = runtime.block_on(checking)?;
        if report.corruptions > 0 || report.check_errors > 0 {
            let text = format!("the backup '{}' is damaged", layer.name().display());
            return Err(Failure::new(Exit::Image, text)
                .hint("`ringdisk check` shows how; take another backup (--at)"));
        }
    }
    Ok(())
}

/// Makes the image.
fn copy(
    runtime: &mut Runtime,
    request: &Request,
    from: &Arc<Disk>,
    fresh: &NewFiles,
    progress: &Progress,
) -> Result<(), Failure> {
    let ring = runtime.ring().clone();
    let format = request.target_format.unwrap_or(match is_named_qcow2(&request.image) {
        true => Format::Qcow2,
        false => Format::Raw,
    });
    let Described::Image(image) = NewImage::parse(format, &[])? else {
        return Err(Failure::new(Exit::General, "the options of the image make no sense"));
    };
    let mut part = request.image.clone().into_os_string();
    part.push(PART);
    let part = PathBuf::from(part);
    runtime.block_on(image.make(&ring, &part, from.size().0, fresh))?;
    let options = ImageOptions { format: Some(format), ..ImageOptions::default() };
    let opened = Disk::open(&ring, Source::Path(part.clone()), &options);
    let target = runtime.block_on(opened)?;
    let options = ConvertOptions { target_is_zero: true, ..ConvertOptions::default() };
    let copying =
        operations::convert(&ring, std::slice::from_ref(from), &target, &options, progress);
    let copied = runtime.block_on(copying).map_err(Failure::from);
    inspect::close(runtime, &target, &part, copied)?;
    if request.force {
        replaceable(&request.image)?;
    }
    fs::rename(&part, &request.image).map_err(|error| {
        let doing = format!("cannot give the image its name '{}'", request.image.display());
        Failure::system(doing, &error, Exit::Mountpoint)
    })?;
    fresh.keep();
    Ok(())
}

/// Errors: another process uses the image that is to be replaced.
fn replaceable(image: &Path) -> Result<(), Failure> {
    match fs::metadata(image) {
        Ok(meta) if !meta.is_file() => {
            let text = format!("'{}' is no regular file, and is not replaced", image.display());
            Err(Failure::new(Exit::Usage, text)
                .hint("write onto a device with `ringdisk convert -n BACKUP -O raw DEVICE`"))
        }
        Ok(_) => Storage::open(image, &OpenOptions::default()).map(drop).map_err(Failure::from),
        Err(_) => Ok(()),
    }
}
