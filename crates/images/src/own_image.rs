//! An image that a command has for itself: opened with its lock, without its backing files.
//!
//! Promises: nobody else uses the image meanwhile (or we were told to look all the same); its
//! external data file is followed only where the user allows it.

use std::path::Path;
use std::sync::Arc;

use ringdisk_daemon::failure::{Cause, Exit, Failure};
use ringdisk_daemon::terminal::shell_word;
use ringdisk_disk::name::FileName;
use ringdisk_disk::names_note::Names;
use ringdisk_disk::resolve::{Access, Resolver};
use ringdisk_disk::{Format, ImageOptions};
use ringdisk_qcow2::{Info, Qcow2};
use ringdisk_ring::Runtime;
use ringdisk_storage::{Lock, OpenOptions, Storage};

use crate::inspect;
use crate::named::{Named, Pool};

/// What raw images do not have inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inside {
    /// Bitmaps.
    Bitmaps,
    /// Snapshots.
    Snapshots,
}

/// How to open.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnImage {
    /// `None`: it is probed.
    pub format: Option<Format>,
    /// It is written, too.
    pub writable: bool,
    /// Other programs may write it meanwhile.
    pub force_share: bool,
}

/// Opens the file of an image, and finds its format where none was asked for.
///
/// * `asked`: what the name and the command say.
///
/// Errors: it cannot be opened or read; it is locked.
pub(crate) fn file_and_format(
    runtime: &mut Runtime,
    named: &Named,
    asked: &ImageOptions,
    writable: bool,
) -> Result<(Arc<Storage>, Format), Failure> {
    let options = OpenOptions {
        read_only: !writable,
        direct: asked.cache.direct(),
        lock: if asked.force_share { Lock::ForceShare } else { Lock::Auto },
        ..OpenOptions::default()
    };
    let storage = named.storage(&options, asked.reconnect)?;
    let format = match asked.format {
        Some(format) => format,
        None => {
            let ring = runtime.ring().clone();
            runtime.block_on(inspect::format_of(&ring, &storage))?
        }
    };
    Ok((storage, format))
}

impl OwnImage {
    /// Opens a qcow2 image. The caller closes it.
    ///
    /// * `what`: what it is opened for.
    ///
    /// Errors: it cannot be opened, or is no qcow2.
    pub fn open(
        self,
        runtime: &mut Runtime,
        named: &Named,
        pool: impl Into<Pool>,
        what: Inside,
    ) -> Result<Qcow2, Failure> {
        let asked = named.options(ImageOptions {
            format: self.format,
            read_only: !self.writable,
            force_share: self.force_share,
            ..ImageOptions::default()
        })?;
        let path = named.path();
        let (storage, format) = file_and_format(runtime, named, &asked, self.writable)?;
        let ring = runtime.ring().clone();
        if format != Format::Qcow2 {
            let refuse = |what: &str| {
                let text = format!("'{}' is a {format} image, which has no {what}", path.display());
                Failure::new(Exit::Unsupported, text)
            };
            return Err(match what {
                Inside::Bitmaps => refuse("bitmaps"),
                Inside::Snapshots => {
                    let cause = ringdisk_disk::Cause::RawWithoutSnapshots;
                    refuse("snapshots").because(Cause::Image(cause))
                }
            });
        }
        let for_image =
            ringdisk_qcow2::OpenOptions { writable: self.writable, ..Default::default() };
        let mut image = runtime.block_on(Qcow2::open(&ring, storage, &for_image))?;
        if image.info().external_data_file {
            let data = self.data_file(image.info(), path, pool)?;
            image.set_data_file(data)?;
        }
        Ok(image)
    }

    /// Opens the external data file that an image names.
    ///
    /// Errors: it cannot be opened, or the user has not allowed its place.
    pub fn data_file(
        self,
        info: &Info,
        path: &Path,
        pool: impl Into<Pool>,
    ) -> Result<Arc<Storage>, Failure> {
        let pool = pool.into();
        let unsupported = |text: String| Failure::new(Exit::Unsupported, text);
        let shown = path.display();
        let Some(name) = &info.data_file else {
            return Err(unsupported(format!("'{shown}' does not name its external data file")));
        };
        let parsed = FileName::parse(name)?;
        if parsed.nbd.is_some()
            || parsed.format == Some(Format::Qcow2)
            || parsed.raw_offset != 0
            || parsed.raw_size.is_some()
        {
            return Err(unsupported(format!(
                "the data file of '{shown}' is no plain file, used from its first byte"
            )));
        }
        let whole = std::path::absolute(path)
            .map_err(|error| Failure::system(shown.to_string(), &error, Exit::Image))?;
        let directory = whole.parent().unwrap_or(Path::new("/"));
        let mut resolver = Resolver::new(&pool.allow_path)?;
        resolver.allow(directory)?;
        let data = directory.join(&parsed.path);
        let is_said = || {
            let said = Resolver::new(&pool.allow_path)?;
            said.open(&data, Access { write: false, direct: false })
        };
        if Names::of(info).ask_at(path).other_data && is_said().is_err() {
            let text = format!(
                "'{shown}' did not name the data file '{}' when it was served last, and it was not \
                 changed by ringdisk since",
                data.display()
            );
            return Err(Failure::new(Exit::Permission, text).hint(format!(
                "if you have changed it: --allow-path {}",
                shell_word(&data.display().to_string())
            )));
        }
        let opened = resolver.open(&data, Access { write: self.writable, direct: false })?;
        let options = OpenOptions {
            read_only: !self.writable,
            lock: if self.force_share { Lock::ForceShare } else { Lock::Auto },
            ..OpenOptions::default()
        };
        let name = parsed.path.to_string_lossy();
        Ok(Arc::new(Storage::from_fd(opened.fd, &name, &options)?))
    }
}

/// Closes an image that was open for writing.
///
/// * `file`: its name, for the message.
///
/// Errors: it could not be written to the end.
pub(crate) fn close(runtime: &mut Runtime, image: &Qcow2, file: &Path) -> Result<(), Failure> {
    let ring = runtime.ring().clone();
    runtime.block_on(image.close(&ring)).map_err(|errno| {
        let doing = format!("cannot write '{}' to the end", file.display());
        Failure::system(doing, &errno.into(), Exit::Storage)
    })
}
