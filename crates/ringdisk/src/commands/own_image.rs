//! An image that a command has for itself: opened with its lock, without its backing files.
//!
//! Promises: nobody else uses the image meanwhile (or we were told to look all the same); its
//! external data file is followed only where the user allows it.

use std::path::Path;
use std::sync::Arc;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::terminal::shell_word;
use ringdisk_disk::name::FileName;
use ringdisk_disk::names_note::Names;
use ringdisk_disk::resolve::{Access, Resolver};
use ringdisk_disk::{Format, ImageOptions};
use ringdisk_qcow2::{Info, Qcow2};
use ringdisk_ring::Runtime;
use ringdisk_storage::{Lock, OpenOptions, Storage};

use crate::cli::PoolArgs;
use crate::commands::look;
use crate::commands::named::Named;

/// How to open.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OwnImage {
    pub(crate) format: Option<Format>,
    pub(crate) writable: bool,
    pub(crate) force_share: bool,
}

impl OwnImage {
    /// Opens a qcow2 image. The caller closes it.
    ///
    /// * `what`: what raw images do not have, for the message.
    ///
    /// Errors: it cannot be opened, or is no qcow2.
    pub(crate) fn open(
        self,
        runtime: &mut Runtime,
        named: &Named,
        pool: &PoolArgs,
        what: &str,
    ) -> Result<Qcow2, Failure> {
        let asked = named.options(ImageOptions {
            format: self.format,
            read_only: !self.writable,
            force_share: self.force_share,
            ..ImageOptions::default()
        })?;
        let path = named.path();
        let storage = named.storage(&OpenOptions {
            read_only: !self.writable,
            direct: asked.cache.direct(),
            lock: if asked.force_share { Lock::ForceShare } else { Lock::Auto },
            ..OpenOptions::default()
        })?;
        let ring = runtime.ring().clone();
        let format = match asked.format {
            Some(format) => format,
            None => runtime.block_on(look::format_of(&ring, &storage))?,
        };
        if format != Format::Qcow2 {
            return Err(Failure::new(
                Exit::Unsupported,
                format!("'{}' is a {format} image, which has no {what}", path.display()),
            ));
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
    pub(crate) fn data_file(
        self,
        info: &Info,
        path: &Path,
        pool: &PoolArgs,
    ) -> Result<Arc<Storage>, Failure> {
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
