//! Images for programs that want neither async functions nor rings: open, read, write, flush, map.
//!
//! Promises:
//! 1. Every call returns when its work is done, and may be made from any thread. An [`Image`] has a
//!    thread and a ring of its own; calls of several threads run side by side on it.
//! 2. [`Image::write_at`] writes all of its bytes or gives an error.
//! 3. Dropping an [`Image`] flushes nothing: writes since the last [`Image::flush`] may be lost, as
//!    after a power cut, and the image stays sound. [`Image::close`] loses nothing.
//!
//! ```
//! use ringdisk_disk::Bytes;
//! use ringdisk_disk::blocking::{CreateOptions, Image, create};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let directory = tempfile::tempdir()?;
//! let path = directory.path().join("disk.qcow2");
//! create(&path, &CreateOptions { size: Bytes(1 << 30), ..CreateOptions::default() })?;
//!
//! let image = Image::open(&path)?;
//! image.write_at(b"hello", 1 << 20)?;
//! image.flush()?;
//!
//! let mut bytes = [0; 5];
//! assert_eq!(image.read_at(&mut bytes, 1 << 20)?, 5);
//! assert_eq!(&bytes, b"hello");
//! image.close()?;
//! # Ok(())
//! # }
//! ```

#[cfg(test)]
mod tests;
mod thread;

use ringdisk_qcow2::Bytes;
use std::path::Path;
use std::sync::Arc;

use ringdisk_ring::{Errno, IoBuf};

use crate::name::printable_path;
use crate::open::{create_file, of_qcow2, remove, sync_directory};
use crate::{Disk, Error, ErrorKind, ImageOptions, MapEntry, Source};

pub use ringdisk_qcow2::CreateOptions;

use thread::RingThread;

/// Bytes of one request to the disk: a longer call makes several, so that its buffer stays small.
const REQUEST_BYTES_MAX: usize = 1 << 20;
/// Alignment of the buffers: a page suits every storage.
const BUFFER_ALIGN: usize = 4096;

/// Creates a qcow2 image in a new file; the image and its name are durable when this returns.
///
/// * `options`: the size, and the format's choices. A backing file is recorded, not opened.
///
/// Errors: `Io` when the file exists already or cannot be created; `Invalid` for options that the
/// format does not allow, and for an external data file, which this function does not create. No
/// file is left then.
pub fn create(path: impl AsRef<Path>, options: &CreateOptions) -> Result<(), Error> {
    if options.data_file.is_some() {
        return Err(Error::new(
            ErrorKind::Invalid,
            "an image with an external data file cannot be created here",
        ));
    }
    let (path, options) = (path.as_ref().to_owned(), options.clone());
    RingThread::start()?.call(move |ring| async move {
        let opening = ImageOptions::default();
        let storage = create_file(&path, &opening)?;
        let created = async {
            ringdisk_qcow2::create(&ring, &storage, None, &options)
                .await
                .map_err(|error| of_qcow2(&error))?;
            sync_directory(&ring, &path, &opening).await
        };
        created.await.inspect_err(|_| remove(&storage, &path, &opening))
    })
}

/// An open image with its backing chain.
#[derive(Debug)]
pub struct Image {
    // Dropped before the thread, on which its last task may run.
    disk: Arc<Disk>,
    /// For messages.
    name: String,
    thread: RingThread,
}

impl Image {
    /// Opens an image for reading and writing; its format is probed.
    ///
    /// Errors: as [`Image::open_with`].
    pub fn open(path: impl AsRef<Path>) -> Result<Image, Error> {
        Image::open_with(path, &ImageOptions::default())
    }

    /// Opens an image with its backing chain, as the options say.
    ///
    /// Errors: those of [`Disk::open`]; `Unsupported` where the system has no io_uring, or forbids
    /// it.
    pub fn open_with(path: impl AsRef<Path>, options: &ImageOptions) -> Result<Image, Error> {
        let thread = RingThread::start()?;
        let name = printable_path(path.as_ref());
        let (source, options) = (Source::Path(path.as_ref().to_owned()), options.clone());
        let disk = thread.call(|ring| async move { Disk::open(&ring, source, &options).await })?;
        Ok(Image { disk, name, thread })
    }

    /// Size of the disk, bytes.
    pub fn size(&self) -> Bytes {
        self.disk.size()
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.disk.is_read_only()
    }

    /// The disk, for its descriptions ([`Disk::layers`], [`crate::describe`]).
    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Reads at byte `offset`. Returns the number of bytes, which is short only at the end of the
    /// disk, and 0 at and past it.
    ///
    /// Errors: `Io` for a damaged image, and those of the storage; the buffer may be filled in
    /// part.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Error> {
        let mut done = 0;
        for piece in buffer.chunks_mut(REQUEST_BYTES_MAX) {
            let Some(at) = offset.checked_add(done as u64) else { break };
            let (disk, len) = (Arc::clone(&self.disk), piece.len());
            let bytes = self.request("read", at, Bytes::of(len), move |ring| async move {
                let buf = IoBuf::new(len, BUFFER_ALIGN);
                let count = disk.read(&ring, at, &buf).await?;
                Ok(buf.slice(0..count).to_vec())
            })?;
            piece[..bytes.len()].copy_from_slice(&bytes);
            done += bytes.len();
            if bytes.len() < len {
                break;
            }
        }
        Ok(done)
    }

    /// Writes all bytes at byte `offset`. They are durable after [`Image::flush`].
    ///
    /// Errors: `Invalid` for a range that goes past the end of the disk, before anything is
    /// written; `PermissionDenied` for a read-only image; those of the storage. A part may be
    /// written then.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), Error> {
        self.check_range(offset, Bytes::of(bytes.len()))?;
        let mut at = offset;
        for piece in bytes.chunks(REQUEST_BYTES_MAX) {
            let (disk, owned) = (Arc::clone(&self.disk), piece.to_vec());
            self.request("write", at, Bytes::of(piece.len()), move |ring| async move {
                let buf = IoBuf::new(owned.len(), BUFFER_ALIGN);
                buf.copy_from_slice(0, &owned);
                disk.write_all(&ring, at, &buf).await
            })?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Makes all completed writes durable.
    ///
    /// Errors: those of the storage.
    pub fn flush(&self) -> Result<(), Error> {
        let disk = Arc::clone(&self.disk);
        let flushed = self.thread.call(move |ring| async move {
            disk.flush(&ring).await.map_err(|errno| Error::os("flush", errno))
        });
        flushed.map_err(|error| error.context(format!("'{}'", self.name)))
    }

    /// The maximal runs of a range with one answer each: allocated or not, zeroes or data, and the
    /// layer and host offset of each (the lines of `qemu-img map`). The part past the end of the
    /// disk is left out.
    ///
    /// Errors: as [`Image::read_at`].
    pub fn map(&self, offset: u64, len: Bytes) -> Result<Vec<MapEntry>, Error> {
        let disk = Arc::clone(&self.disk);
        self.request("map", offset, len, move |ring| async move {
            let mut entries = Vec::new();
            disk.map_entries(&ring, offset, len, |entry| entries.push(*entry)).await?;
            Ok(entries)
        })
    }

    /// Makes all writes durable, writes cached metadata, and closes the image.
    ///
    /// Errors: those of the storage; after one, writes may be lost.
    pub fn close(self) -> Result<(), Error> {
        let disk = Arc::clone(&self.disk);
        let closed = self.thread.call(move |ring| async move {
            disk.close(&ring).await.map_err(|errno| Error::os("close", errno))
        });
        closed.map_err(|error| error.context(format!("'{}'", self.name)))
    }

    /// Runs one request, and names it in its error.
    fn request<T, F>(
        &self,
        doing: &str,
        offset: u64,
        len: Bytes,
        work: impl FnOnce(ringdisk_ring::Ring) -> F + Send + 'static,
    ) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Errno>> + 'static,
    {
        let doing = format!("cannot {doing} {len} bytes at {offset} of '{}'", self.name);
        self.thread.call(move |ring| async move {
            work(ring).await.map_err(|errno| Error::os(doing, errno))
        })
    }

    /// Errors: `Invalid` for a range that goes past the end.
    fn check_range(&self, offset: u64, len: Bytes) -> Result<(), Error> {
        let size = self.size();
        if offset.checked_add(len.0).is_some_and(|end| end <= size.0) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "cannot write {len} bytes at {offset} of '{}': the disk has {size} bytes",
                self.name
            ),
        ))
    }
}
