//! Opens an image under a qcow2 overlay: a temporary one, or one that is kept.
//!
//! Promises: the image itself and its chain are opened for reading only. A temporary overlay has no
//! name (or loses it before the first write), so no file is ever left behind. A kept overlay is
//! created if it does not exist, with name and format of its backing file; an existing file must be
//! an overlay of this image.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_qcow2::{Bytes, CreateOptions};
use ringdisk_ring::Ring;
use ringdisk_storage::{Lock, Storage};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

use super::{Opening, identity_of, of_qcow2, of_storage, open_qcow2, qcow2_layer, storage_options};
use crate::disk::Parts;
use crate::layer::Layer;
use crate::name::{FileName, printable_path};
use crate::{AllowedHost, Cache, Disk, Error, ErrorKind, Format, ImageOptions, Source};

/// Names that are tried where the file system has no unnamed files.
const NAMES_MAX: u32 = 100;

/// Opens an image under an overlay.
pub(super) async fn open(
    ring: &Ring,
    source: Source,
    options: &ImageOptions,
) -> Result<Arc<Disk>, Error> {
    match &options.overlay {
        Some(path) => kept(ring, source, options, path).await,
        None => temporary(ring, source, options).await,
    }
}

/// Options of the image under the overlay.
fn for_reading(options: &ImageOptions) -> ImageOptions {
    ImageOptions { read_only: true, temporary: false, overlay: None, ..options.clone() }
}

/// Opens an image with its chain for reading.
async fn base(ring: &Ring, source: Source, options: &ImageOptions) -> Result<Vec<Layer>, Error> {
    let mut opening = Opening::new(ring, options)?;
    opening.all(source, &mut Parts::new(options)).await?;
    Ok(opening.layers)
}

async fn temporary(
    ring: &Ring,
    source: Source,
    options: &ImageOptions,
) -> Result<Arc<Disk>, Error> {
    let below = base(ring, source, &for_reading(options)).await?;
    let directory = std::env::temp_dir();
    let name = format!("temporary overlay in {}", directory.display());
    let fd = unnamed(&directory)?;
    // No other process can open it, so no lock is needed.
    let for_file = ringdisk_storage::OpenOptions {
        lock: Lock::None,
        ..ringdisk_storage::OpenOptions::default()
    };
    let storage =
        Storage::from_fd(fd, &name, &for_file).map(Arc::new).map_err(|error| of_storage(&error))?;
    let size = below.first().map_or(Bytes::ZERO, Layer::size);
    let create = CreateOptions { size, ..CreateOptions::default() };
    ringdisk_qcow2::create(ring, &storage, None, &create)
        .await
        .map_err(|error| of_qcow2(&error))?;
    let image = open_qcow2(ring, storage, options, true).await?;
    let mut layer = qcow2_layer(image, true);
    layer.name = PathBuf::from(name);
    let mut parts = Parts::new(options);
    // It vanishes with the process, so no flush is needed.
    parts.policy.cache = Cache::Unsafe;
    let mut layers = vec![layer];
    layers.extend(below);
    let disk = Disk::build(layers, parts);
    disk.narrow(ring, options).await?;
    Ok(disk)
}

/// A file without a name.
fn unnamed(directory: &Path) -> Result<OwnedFd, Error> {
    let shown = printable_path(directory);
    let failed = |errno| {
        let doing = format!("cannot make a temporary file in '{shown}' (TMPDIR chooses another)");
        Error::os(doing, errno)
    };
    let mode = Mode::from_raw_mode(0o600);
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::openat(CWD, directory, flags | OFlags::TMPFILE, mode) {
        Ok(fd) => return Ok(fd),
        // A file system without such files, or a kernel that takes the flag for O_DIRECTORY.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT) => {}
        Err(errno) => return Err(failed(errno)),
    }
    for number in 0..NAMES_MAX {
        let path = directory.join(format!(".ringdisk-{}-{number}", std::process::id()));
        match rustix::fs::openat(CWD, &path, flags | OFlags::CREATE | OFlags::EXCL, mode) {
            Ok(fd) => {
                rustix::fs::unlink(&path).map_err(failed)?;
                return Ok(fd);
            }
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed(errno)),
        }
    }
    Err(failed(Errno::EXIST))
}

async fn kept(
    ring: &Ring,
    source: Source,
    options: &ImageOptions,
    path: &Path,
) -> Result<Arc<Disk>, Error> {
    let Source::Path(image) = source else {
        return Err(Error::new(
            ErrorKind::Invalid,
            "an overlay records the name of its image, so the image must be given by its path",
        ));
    };
    let reading = for_reading(options);
    let below = base(ring, Source::Path(image.clone()), &reading).await?;
    let below = Disk::build(below, Parts::new(&reading));
    let top = Arc::clone(below.graph().top());
    let identity = top.file().and_then(|file| identity_of(file));
    if !path.exists() {
        // Refuses a window that the image does not have, before a file is created.
        below.narrow(ring, &reading).await?;
        make(ring, path, &top, options).await?;
    }
    drop((below, top));
    let mut known_paths = options.known_paths.clone();
    let mut allow_hosts = options.allow_hosts.clone();
    if let Some(FileName { nbd: Some(address), .. }) = FileName::export_of(&image)? {
        // The user has named it.
        allow_hosts.push(AllowedHost::Server(address.server));
    } else if let Some(directory) = image.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        known_paths.push(directory.to_owned());
    } else {
        known_paths.push(PathBuf::from("."));
    }
    let overlay = ImageOptions {
        format: Some(Format::Qcow2),
        // The overlay states the format that was probed here; another program may probe the image
        // again.
        trust_base_format: options.format == Some(Format::Raw) && !options.protect_raw,
        overlay: None,
        temporary: false,
        known_paths,
        allow_hosts,
        ..options.clone()
    };
    let mut opening = Opening::new(ring, &overlay)?;
    let mut parts = Parts::new(&overlay);
    opening.all(Source::Path(path.to_owned()), &mut parts).await?;
    let found = opening.layers.get(1).and_then(Layer::file).and_then(|file| identity_of(file));
    if identity.is_none() || found != identity {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "'{}' is there already and is no overlay of '{}'; name another file, or serve the \
                 overlay itself",
                printable_path(path),
                printable_path(&image)
            ),
        ));
    }
    let disk = Disk::build(opening.layers, parts);
    disk.narrow(ring, options).await?;
    Ok(disk)
}

/// Creates a kept overlay over `top`. On an error no file is left.
async fn make(ring: &Ring, path: &Path, top: &Layer, options: &ImageOptions) -> Result<(), Error> {
    let storage = create_file(path, options)?;
    let create = over(top, path)?;
    let made = async {
        ringdisk_qcow2::create(ring, &storage, None, &create)
            .await
            .map_err(|error| of_qcow2(&error))?;
        sync_directory(ring, path, options).await
    };
    made.await.inspect_err(|_| remove(&storage, path, options))
}

/// A new empty file for an overlay.
pub(crate) fn create_file(path: &Path, options: &ImageOptions) -> Result<Arc<Storage>, Error> {
    #[cfg(test)]
    if let Some(storage) = super::simulated::find(path) {
        return Ok(storage);
    }
    let options =
        ringdisk_storage::OpenOptions { create_new: true, ..storage_options(options, false) };
    Storage::open(path, &options).map(Arc::new).map_err(|error| of_storage(&error))
}

/// Creation options of an empty overlay over `layer`.
///
/// * `path`: of the overlay. The name of the backing file is relative where both are in one
///   directory.
pub(crate) fn over(layer: &Layer, path: &Path) -> Result<CreateOptions, Error> {
    use std::os::unix::ffi::OsStrExt;
    let shown = printable_path(layer.name());
    let format = layer.format().ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "a null disk cannot have an overlay that is kept")
    })?;
    let refuse = |reason: &str| {
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("'{shown}' cannot have an overlay: {reason}"),
        ))
    };
    let create = |name: Vec<u8>| CreateOptions {
        size: layer.size(),
        backing_file: Some(name),
        backing_format: Some(format.name().to_owned()),
        ..CreateOptions::default()
    };
    if layer.export().is_some() && layer.differs_by_its_name().is_none() {
        return Ok(create(layer.name().as_os_str().as_bytes().to_vec()));
    }
    if layer.directory.is_none() {
        return refuse("it has no name that the overlay could record");
    }
    if let Some(why) = layer.differs_by_its_name() {
        return refuse(&format!("{why}, which is all that an overlay records"));
    }
    let absolute = crate::resolve::absolute(layer.name())
        .map_err(|errno| Error::os(format!("cannot find the directory of '{shown}'"), errno))?;
    let overlay = crate::resolve::absolute(path)
        .map_err(|errno| Error::os("cannot find the directory of the overlay", errno))?;
    let mut name = match absolute.file_name() {
        Some(name) if overlay.parent() == absolute.parent() => name.as_bytes().to_vec(),
        _ => absolute.as_os_str().as_bytes().to_vec(),
    };
    // A colon before the first slash would be read as a protocol.
    let colon = name.iter().position(|&byte| byte == b':' || byte == b'/');
    if colon.is_some_and(|at| name[at] == b':') {
        name.splice(0..0, *b"./");
    }
    Ok(create(name))
}

/// Makes the name of a new file durable.
pub(crate) async fn sync_directory(
    ring: &Ring,
    path: &Path,
    options: &ImageOptions,
) -> Result<(), Error> {
    let failed = |errno| {
        let doing = format!("cannot make the name '{}' durable", printable_path(path));
        Error::os(doing, errno)
    };
    let absolute = crate::resolve::absolute(path).map_err(failed)?;
    let directory = absolute.parent().map_or_else(|| PathBuf::from("/"), Path::to_path_buf);
    let options = storage_options(options, false);
    ring.offload(move || options.sync_directory(&directory)).await.map_err(failed)
}

/// Removes an overlay after an error.
pub(crate) fn remove(storage: &Storage, path: &Path, options: &ImageOptions) {
    let _ = match storage.identity() {
        Some(identity) => storage_options(options, false).remove_made(path, identity),
        // A simulated storage of a test.
        None => rustix::fs::unlink(path),
    };
}
