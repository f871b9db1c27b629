//! Opens a disk that a predecessor process on this host handed over, the successor's side.
//!
//! Promises: no name is looked up; each descriptor is checked against the file in the description;
//! the locks of the predecessor are kept, and a failure leaves them with it.

use ringdisk_qcow2::Bytes;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_ring::Ring;
use ringdisk_storage::{Lock, Storage};

use super::HandOver;
use super::state::{DiskState, Kind, LayerState};
use crate::disk::Parts;
use crate::graph::State;
use crate::layer::Layer;
use crate::name::printable_path;
use crate::names_note::Names;
use crate::open::{
    lock_of, of_qcow2, of_storage, open_qcow2, qcow2_layer, raw_layer, storage_options,
};
use crate::resolve::Resolver;
use crate::{Cache, Disk, Error, ErrorKind, Format, ImageOptions, NullOptions, format_note};

impl Disk {
    /// Opens a disk from the state that [`Disk::hand_over`] of the predecessor gave: the same
    /// chain, also where names were changed since. Changes no image. The predecessor owns the locks
    /// until [`Disk::take_charge`].
    ///
    /// * `options`: those of the predecessor. Options that describe the image itself (format,
    ///   window, overlay, read-only) are taken from the state; `O_DIRECT` is as the descriptors
    ///   have it.
    ///
    /// Errors: `Invalid` when description and descriptors do not fit; those of [`Disk::open`].
    pub async fn open_handed(
        ring: &Ring,
        handed: HandOver,
        options: &ImageOptions,
    ) -> Result<Arc<Disk>, Error> {
        let state = DiskState::parse(&handed.description)?;
        let wanted: usize = state.layers.iter().map(|layer| layer.files.len()).sum();
        if wanted != handed.fds.len() {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("the disk has {wanted} files, and {} came with it", handed.fds.len()),
            ));
        }
        let options = ImageOptions {
            inactive: !state.active,
            read_only: state.read_only,
            force_share: options.force_share && state.read_only,
            ..options.clone()
        };
        // Nothing is looked for there now, but commands may be later; as with any other open, a
        // path that leads nowhere is a mistake of the user.
        Resolver::new(&options.allow_paths)?;
        let mut fds = handed.fds.into_iter();
        let mut layers = Vec::with_capacity(state.layers.len());
        for layer in &state.layers {
            layers.push(open_layer(ring, layer, &mut fds, &options).await?);
        }
        // Nothing is noted before all descriptors are what they are called: the predecessor may
        // have handed over files that it could only read. It may be a version that kept no notes.
        for (layer, of) in layers.iter_mut().zip(&state.layers) {
            let is_raw = matches!(of.kind, Kind::Raw { .. }) && !state.guarded;
            let own = layer.file().filter(|_| is_raw);
            let raw = own.into_iter().chain(layer.external_data());
            let mut unnoted =
                raw.filter(|file| !file.is_read_only() && format_note::set_raw_of(file).is_err());
            if unnoted.next().is_some() {
                layer.protect();
            }
        }
        let mut parts = Parts::new(&options);
        parts.state = if state.active { State::Active } else { State::Inactive };
        parts.read_only_reason = state.read_only_reason;
        parts.window = state.window;
        if options.temporary {
            parts.policy.cache = Cache::Unsafe;
        }
        if state.guarded
            && let Some(bottom) = layers.last_mut()
        {
            bottom.protect();
        }
        let disk = Disk::build(layers, parts);
        if let Some(limits) = state.limits {
            let _ = disk.handed_limits.set(limits);
        }
        if let Some(is_on) = state.copy_on_read {
            disk.copy_on_read.switch(is_on);
        }
        Ok(disk)
    }

    /// Opens the target of a mirror of this disk that another process hands over
    /// ([`Disk::hand_over`] of the target), and takes charge of it.
    ///
    /// * `format`, `protect_raw`: as for [`Disk::open_mirror`].
    ///
    /// Errors: as [`Disk::open_handed`].
    pub async fn take_mirror(
        &self,
        ring: &Ring,
        handed: HandOver,
        format: Option<Format>,
        protect_raw: bool,
    ) -> Result<Arc<Disk>, Error> {
        let options = self.mirror_options(format, protect_raw);
        let target = Disk::open_handed(ring, handed, &options).await?;
        target.take_charge();
        Ok(target)
    }

    /// Notes the names in the header of the top image of a disk that was handed over, and of its
    /// data file, where there is no note; an existing note stays, even if the header has other
    /// names by now. For the caller of [`Disk::open_handed`], once it has judged what it got.
    pub fn note_handed(&self) {
        let graph = self.graph();
        let top = graph.top();
        if self.options().note_names && top.is_writable {
            note_if_absent(top.file(), &Names::of_layer(top));
            note_if_absent(top.external_data(), &Names::default());
        }
    }
}

fn note_if_absent(file: Option<&Arc<Storage>>, names: &Names) {
    let Some(file) = file else { return };
    if names.ask(file).is_absent
        && let Err(errno) = names.note(file)
    {
        tracing::debug!("'{}' gets no note of its names ({errno})", file.name());
    }
}

async fn open_layer(
    ring: &Ring,
    state: &LayerState,
    fds: &mut impl Iterator<Item = OwnedFd>,
    options: &ImageOptions,
) -> Result<Layer, Error> {
    let misfit = || {
        let name = printable_path(&state.name);
        Error::new(ErrorKind::Invalid, format!("the files of '{name}' are not what was announced"))
    };
    let mut storages = Vec::with_capacity(state.files.len());
    for ((identity, read_only), fd) in state.files.iter().zip(fds) {
        let name = if storages.is_empty() { Some(&state.name) } else { state.data_name.as_ref() };
        let name = name.unwrap_or(&state.name);
        let storage = adopt(fd, name, *read_only, options)?;
        if storage.identity() != Some(*identity) || !read_only && !storage.is_open_for_writing() {
            return Err(misfit());
        }
        storages.push(storage);
    }
    let mut storages = storages.into_iter();
    let (file, data) = (storages.next(), storages.next());
    let mut layer = match (&state.kind, file) {
        (Kind::Null { size, read_zeroes, latency_ns }, None) => {
            let latency = Duration::from_nanos(*latency_ns);
            Layer::null(&NullOptions { size: Bytes(*size), read_zeroes: *read_zeroes, latency })
        }
        (Kind::Raw { offset, fixed_size }, Some(file)) if data.is_none() => {
            raw_layer(file, &state.name, *offset, fixed_size.map(Bytes))?
        }
        (Kind::Qcow2, Some(file)) => {
            let mut image = open_qcow2(ring, file, options, state.writable).await?;
            if image.info().external_data_file != data.is_some() {
                return Err(misfit());
            }
            if let Some(data) = data {
                image.set_data_file(data).map_err(|error| of_qcow2(&error))?;
            }
            qcow2_layer(image, state.writable)
        }
        _ => return Err(misfit()),
    };
    layer.is_writable = state.writable;
    layer.name.clone_from(&state.name);
    layer.directory.clone_from(&state.directory);
    layer.data_name.clone_from(&state.data_name);
    layer.full_backing_name.clone_from(&state.full_backing_name);
    layer.without_backing = state.without_backing;
    Ok(layer)
}

fn adopt(
    fd: OwnedFd,
    name: &Path,
    read_only: bool,
    options: &ImageOptions,
) -> Result<Arc<Storage>, Error> {
    let lock = if options.inactive { Lock::Inactive } else { lock_of(options) };
    let options = ringdisk_storage::OpenOptions { lock, ..storage_options(options, read_only) };
    Storage::adopt(fd, &printable_path(name), &options)
        .map(Arc::new)
        .map_err(|error| of_storage(&error))
}
