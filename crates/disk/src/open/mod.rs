//! Opens an image with its backing chain.
//!
//! Promises: layers are opened in a loop, one after the other, so a deep chain costs no stack;
//! every file that an image names goes through the [`Resolver`]; the format of a backing file is
//! what the image states, or the chain is refused; a chain that returns to one of its files, or is
//! longer than [`LAYERS_MAX`], is refused. On an error everything that was opened is closed again.
//!
//! Control path; runs on the thread that owns `ring`.

mod export;
mod guess;
mod layer;
pub(crate) mod locks;
mod named;
mod note_names;
mod overlay;
#[cfg(test)]
pub(crate) mod simulated;
mod storages;
mod top;
mod window;

use ringdisk_qcow2::Bytes;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use crate::disk::Parts;
use crate::layer::Layer;
use crate::name::{printable, printable_path};
use crate::names_note::Names;
use crate::resolve::{Access, Held, Opened, Resolver};
use crate::{Cause, Disk, Error, ErrorKind, Format, ImageOptions, LAYERS_MAX, Source};

use locks::LockWait;
use named::Role;

pub use guess::guess;
pub(crate) use layer::{
    lock_of, of_qcow2, of_storage, open_qcow2, open_snapshot, qcow2_layer, raw_layer,
    storage_options,
};
pub use note_names::note_file;
pub(crate) use overlay::{create_file, over, remove, sync_directory};
pub use storages::StoredImage;

/// An image that was found.
enum Found {
    /// A file, open.
    File(Opened),
    /// An NBD export, connected.
    Export(Arc<Storage>),
}

impl Found {
    fn identity(&self) -> Option<(u64, u64)> {
        match self {
            Found::File(opened) => Some(opened.identity),
            Found::Export(storage) => identity_of(storage),
        }
    }
}

/// An image that was found, and what is known about it.
struct Candidate {
    found: Found,
    /// As the user sees it.
    name: PathBuf,
    /// Where relative names inside the image start; `None` for an inherited descriptor.
    directory: Option<PathBuf>,
    format: Format,
    read_only: bool,
    raw_offset: u64,
    raw_size: Option<Bytes>,
    without_backing: bool,
    /// The user has not stated that it is raw.
    is_guarded: bool,
    /// A name that is in no note leads to it. A process that an attacker controlled may have
    /// written that name, so what lies below must be where `--allow-path` allows, or be named by
    /// the user.
    is_unconfirmed: bool,
}

/// How a file was reached.
#[derive(Clone, Copy)]
struct Reached<'a> {
    name: &'a Path,
    /// Where names in it start.
    directory: Option<&'a Path>,
    /// As [`Candidate::is_unconfirmed`].
    is_unconfirmed: bool,
}

/// Name and format of a backing file, as a header states them.
type Named = (Vec<u8>, Option<String>);

/// State of one open.
struct Opening<'a> {
    ring: &'a Ring,
    options: &'a ImageOptions,
    resolver: Resolver,
    /// The paths that the user allowed: a new name in a header may lead there.
    allowed: Resolver,
    /// Those of them that are files.
    allowed_files: Resolver,
    /// The image on top names a file that is in no note and that only a directory of
    /// [`ImageOptions::allow_paths`] allows: it is asked for again at the next start.
    is_top_unconfirmed: bool,
    /// Files of [`ImageOptions::known_paths`]: the images that the user named.
    known_files: Resolver,
    layers: Vec<Layer>,
    /// Files of the chain, one for each layer.
    seen: Vec<(u64, u64)>,
    /// The wait for locks; `None`: locks are tried once.
    lock_wait: Option<LockWait>,
}

impl Disk {
    /// Opens an image with its whole backing chain.
    ///
    /// Errors: see [`ErrorKind`]; the message names the file, the reason and what to do.
    pub async fn open(
        ring: &Ring,
        source: Source,
        options: &ImageOptions,
    ) -> Result<Arc<Disk>, Error> {
        check_options(options)?;
        if options.overlay.is_some() || options.temporary {
            return overlay::open(ring, source, options).await;
        }
        let mut opening = Opening::new(ring, options)?;
        let mut parts = Parts::new(options);
        opening.all(source, &mut parts).await?;
        let disk = Disk::build(opening.layers, parts);
        disk.narrow(ring, options).await?;
        Ok(disk)
    }
}

/// Opens the chain of a backing file that an image of an open disk will name.
///
/// * `layer`: that image.
/// * `file`, `format`: as they will be written to the header.
///
/// Returns the full name of the file, and its layers, all for reading.
///
/// Errors: as [`Disk::open`].
pub(crate) async fn open_below(
    ring: &Ring,
    options: &ImageOptions,
    layer: &Layer,
    named: Named,
) -> Result<(String, Vec<Layer>), Error> {
    let options = ImageOptions { read_only: true, internal_snapshot: None, ..options.clone() };
    let mut opening = Opening::new(ring, &options)?;
    let directory = layer.directory.as_deref();
    if let Some(directory) = directory {
        let _ = opening.resolver.allow(directory);
    }
    opening.seen.extend(layer.file().and_then(|file| identity_of(file)));
    let (file, format) = named;
    let (full, candidate) = opening.below(&file, format.as_deref(), layer.name(), directory)?;
    opening.chain(candidate, None).await?;
    Ok((full, opening.layers))
}

/// The identity of the file of an open storage, as [`crate::resolve::identify`] gives it.
pub(crate) fn identity_of(storage: &Storage) -> Option<(u64, u64)> {
    let (device, inode) = storage.identity()?;
    match storage.kind() {
        ringdisk_storage::Kind::BlockDevice => Some((u64::MAX, device)),
        _ => Some((device, inode)),
    }
}

fn check_options(options: &ImageOptions) -> Result<(), Error> {
    let invalid = |message: &str| Err(Error::new(ErrorKind::Invalid, message));
    if options.force_share && !options.read_only {
        return invalid("force-share needs read-only: two writers would damage the image");
    }
    if options.internal_snapshot.is_some() && (!options.read_only || options.inactive) {
        return invalid("an internal snapshot can only be read: open the image read-only");
    }
    let has_range = options.window_offset != 0 || options.window_size.is_some();
    if options.partition.is_some() && has_range {
        return invalid("a partition has its own offset and size, so none can be given beside it");
    }
    if options.partition.is_some() && options.inactive {
        return invalid(
            "the partition table can be read only when the image is ours; give the offset and the \
             size of the partition",
        );
    }
    let has_overlay = options.overlay.is_some() || options.temporary;
    if options.overlay.is_some() && options.temporary {
        return invalid("an overlay is either temporary or kept");
    }
    if options.inactive && options.temporary {
        return invalid("a temporary overlay belongs to one process, so nobody can hand it over");
    }
    if options.inactive && options.overlay.as_ref().is_some_and(|path| !path.exists()) {
        return invalid("an overlay that is waited for must be there: its guest runs elsewhere");
    }
    if has_overlay && options.read_only {
        return invalid("an overlay takes writes, so it makes no sense on a read-only disk");
    }
    if has_overlay && options.without_backing {
        return invalid("an overlay needs the whole image below it");
    }
    Ok(())
}

impl<'a> Opening<'a> {
    fn new(ring: &'a Ring, options: &'a ImageOptions) -> Result<Opening<'a>, Error> {
        let mut resolver = Resolver::new(&options.allow_paths)?.asking(options.opener.as_ref());
        let mut known_files = Resolver::default().asking(options.opener.as_ref());
        for path in &options.known_paths {
            resolver.allow(path)?;
            if !path.is_dir() {
                known_files.allow(path)?;
            }
        }
        let allowed = Resolver::new(&options.allow_paths)?.asking(options.opener.as_ref());
        let files = options.allow_paths.iter().filter(|path| !path.is_dir()).cloned();
        let allowed_files =
            Resolver::new(&files.collect::<Vec<_>>())?.asking(options.opener.as_ref());
        let lock_wait = options.wait_for_locks.map(LockWait::new);
        Ok(Opening {
            ring,
            options,
            resolver,
            allowed,
            allowed_files,
            known_files,
            is_top_unconfirmed: false,
            layers: Vec::new(),
            seen: Vec::new(),
            lock_wait,
        })
    }

    /// Opens the image that the user named with all below it.
    async fn all(&mut self, source: Source, parts: &mut Parts) -> Result<(), Error> {
        let (candidate, held) = self.top(source, parts).await?;
        self.chain(candidate, held.as_ref().map(|held| (held, parts))).await?;
        self.note_names().await;
        Ok(())
    }

    /// Opens a chain from its top on.
    ///
    /// * `fallback`: how the top can be opened again for reading.
    async fn chain(
        &mut self,
        candidate: Candidate,
        mut fallback: Option<(&Held, &mut Parts)>,
    ) -> Result<(), Error> {
        let mut next = Some(candidate);
        while let Some(candidate) = next {
            next = self.add(candidate, fallback.take()).await?;
        }
        Ok(())
    }

    fn access(&self, read_only: bool) -> Access {
        Access { write: !read_only, direct: self.options.cache.direct() }
    }

    /// Adds the layer of an open file, and opens its backing file.
    ///
    /// * `fallback`: for the top image, so that it can be opened for reading where it cannot be
    ///   written.
    async fn add(
        &mut self,
        candidate: Candidate,
        fallback: Option<(&Held, &mut Parts)>,
    ) -> Result<Option<Candidate>, Error> {
        let identity = candidate.found.identity();
        if let Some(at) = self.seen.iter().position(|id| Some(*id) == identity) {
            return Err(self.looped(&candidate.name, at));
        }
        self.seen.extend(identity);
        let writable = !candidate.read_only;
        let storage = match candidate.found {
            Found::File(opened) => {
                self.storage(opened, &candidate.name, candidate.read_only).await?
            }
            Found::Export(storage) => storage,
        };
        let name = candidate.name;
        let named = Reached {
            name: &name,
            directory: candidate.directory.as_deref(),
            is_unconfirmed: candidate.is_unconfirmed,
        };
        let mut layer = match candidate.format {
            Format::Raw if self.options.internal_snapshot.is_some() && self.layers.is_empty() => {
                let text =
                    format!("'{}' is a raw image, which has no snapshots", printable_path(&name));
                let error = Error::new(ErrorKind::Unsupported, text);
                return Err(error.because(Cause::RawWithoutSnapshots));
            }
            Format::Raw => {
                let mut layer =
                    raw_layer(storage, &name, candidate.raw_offset, candidate.raw_size)?;
                layer.is_writable = writable;
                layer
            }
            Format::Qcow2 => match self.qcow2(storage, &named, writable).await {
                Err(error) if writable && is_about_writing(&error) => {
                    self.qcow2_for_reading(error, &named, fallback).await?
                }
                result => result?,
            },
        };
        layer.name.clone_from(&name);
        if candidate.is_guarded {
            layer.protect();
        }
        layer.directory = candidate.directory.clone();
        let below = layer.qcow2().and_then(|image| {
            let info = image.info();
            info.backing_file.as_deref().map(|file| (file.to_vec(), info.backing_format.clone()))
        });
        layer.without_backing = candidate.without_backing && below.is_some();
        let below = below.filter(|_| !candidate.without_backing);
        let mut next = None;
        if let Some((file, format)) = below {
            next = Some(self.next_below(&mut layer, &named, &file, format.as_deref()).map_err(
                |error| {
                    let (file, name) = (printable(&file), printable_path(&name));
                    error.of_backing_file(&file, &format!(" of '{name}'"))
                },
            )?);
        }
        self.layers.push(layer);
        if next.is_some() && self.layers.len() == LAYERS_MAX {
            return Err(Error::new(
                ErrorKind::TooDeep,
                format!(
                    "the backing chain of '{}' has more than {LAYERS_MAX} layers; shorten it with \
                     `ringdisk commit` or `ringdisk rebase`",
                    printable_path(self.top_name())
                ),
            ));
        }
        Ok(next)
    }

    /// The backing file that a layer names, if it may.
    ///
    /// * `of`: how the layer was reached.
    fn next_below(
        &mut self,
        layer: &mut Layer,
        of: &Reached<'_>,
        file: &[u8],
        format: Option<&str>,
    ) -> Result<Candidate, Error> {
        let Reached { name, directory, is_unconfirmed } = *of;
        let asked = layer.file().map(|open| Names::of_layer(layer).ask(open));
        let is_other = asked.is_some_and(|note| note.other_below);
        if is_other {
            self.check_allowed(file, name, directory, Role::Backing(format))?;
            let is_first = self.layers.is_empty();
            self.is_top_unconfirmed |= is_first && !self.is_allowed_itself(file, directory)?;
        }
        if is_unconfirmed {
            self.check_reached(file, name, directory)?;
        }
        let (full, mut below) = self.below(file, format, name, directory)?;
        below.is_unconfirmed = is_unconfirmed || is_other;
        layer.full_backing_name = Some(full);
        Ok(below)
    }

    /// A qcow2 layer with its external data file.
    async fn qcow2(
        &self,
        storage: Arc<Storage>,
        reached: &Reached<'_>,
        writable: bool,
    ) -> Result<Layer, Error> {
        let Reached { name, directory, is_unconfirmed } = *reached;
        let choice = self.options.internal_snapshot.as_ref().filter(|_| self.layers.is_empty());
        let mut image = match choice {
            Some(choice) => open_snapshot(self.ring, storage, self.options, choice).await?,
            None => open_qcow2(self.ring, storage, self.options, writable).await?,
        };
        let mut data_name = None;
        if image.info().external_data_file {
            let file = image.info().data_file.clone().ok_or_else(|| {
                Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "'{}' has an external data file and does not name it; name it with \
                         `qemu-img amend -o data_file=FILE`",
                        printable_path(name)
                    ),
                )
            })?;
            let is_other = Names::of(image.info()).ask(image.file()).other_data;
            let checked = if is_other {
                self.check_allowed(&file, name, directory, Role::Data)
            } else if is_unconfirmed {
                self.check_reached(&file, name, directory)
            } else {
                Ok(())
            };
            checked.map_err(|error| {
                let (file, name) = (printable(&file), printable_path(name));
                error.context(format!("data file '{file}' of '{name}'"))
            })?;
            let (full, data) =
                self.data_file(&file, name, directory, writable).await.map_err(|error| {
                    let (file, name) = (printable(&file), printable_path(name));
                    error.context(format!("data file '{file}' of '{name}'"))
                })?;
            image.set_data_file(data).map_err(|error| of_qcow2(&error))?;
            data_name = Some(full);
        }
        let mut layer = qcow2_layer(image, writable);
        layer.data_name = data_name;
        Ok(layer)
    }

    /// An image that cannot be written: opened for reading if the user allows it.
    ///
    /// * `error`: why it cannot be written.
    async fn qcow2_for_reading(
        &self,
        error: Error,
        reached: &Reached<'_>,
        fallback: Option<(&Held, &mut Parts)>,
    ) -> Result<Layer, Error> {
        let Some((held, parts)) = fallback.filter(|_| self.options.auto_read_only) else {
            return Err(error);
        };
        let opened = held.open(self.access(true), self.options.opener.as_deref())?;
        let storage = self.storage(opened, reached.name, true).await?;
        let layer = self.qcow2(storage, reached, false).await?;
        parts.policy.read_only = true;
        parts.read_only_reason = Some(error.to_string());
        Ok(layer)
    }

    async fn storage(
        &self,
        opened: Opened,
        name: &Path,
        read_only: bool,
    ) -> Result<Arc<Storage>, Error> {
        #[cfg(test)]
        if let Some(storage) = simulated::find(name) {
            return Ok(storage);
        }
        let options = storage_options(self.options, read_only);
        let shown = printable_path(name);
        match &self.lock_wait {
            None => Storage::from_fd(opened.fd, &shown, &options).map(Arc::new),
            Some(wait) => {
                return locks::open_waiting(self.ring, opened.fd, &shown, &options, wait).await;
            }
        }
        .map_err(|error| of_storage(&error))
    }

    fn top_name(&self) -> &Path {
        self.layers.first().map_or(Path::new(""), Layer::name)
    }

    fn looped(&self, name: &Path, at: usize) -> Error {
        let first = self.layers.get(at).map_or(name, Layer::name);
        let Some(from) = self.layers.last().map(Layer::name) else {
            let text = format!(
                "'{}' is one of the images of this disk already; name a file that is not, such as \
                 a copy of the image below the one on top",
                printable_path(name)
            );
            return Error::new(ErrorKind::Loop, text);
        };
        Error::new(
            ErrorKind::Loop,
            format!(
                "the backing chain of '{}' is a loop: '{}' names '{}', which is already in the \
                 chain as '{}'; give '{}' another backing file with `ringdisk rebase -u`",
                printable_path(self.top_name()),
                printable_path(from),
                printable_path(name),
                printable_path(first),
                printable_path(from),
            ),
        )
        .because(Cause::BackingLoop { file: printable_path(name) })
    }
}

/// Whether an image that cannot be opened for writing may be readable all the same.
fn is_about_writing(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Unsupported | ErrorKind::Corrupt | ErrorKind::PermissionDenied
    )
}
