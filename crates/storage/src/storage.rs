//! [`Storage`], the type that all users of this crate hold: one of several kinds of storage.
//!
//! Promises: dispatch is a match, so a file costs no indirection.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use ringdisk_ring::{Errno, Fd, IoBuf, Ring};
use rustix::fs::OFlags;

use crate::custom::CustomStorage;
use crate::endpoint::NbdEndpoint;
use crate::error::Error;
use crate::failure;
use crate::file::{File, end_of};
use crate::kinds::{Allocation, Kind, Limits, Preallocation, Zeroing};
use crate::nbd::{self, Nbd, NbdAddress, NbdOptions};
use crate::options::OpenOptions;
use crate::{open, reopen};

/// Something that holds bytes. `Send + Sync`; used as `Arc<Storage>`.
///
/// Data path errors are the kernel's; besides: `EINVAL` for a request that ends past offset
/// 2^63 − 1, `EROFS` for a change of storage that is open for reading only.
#[derive(Debug)]
pub struct Storage(Inner);

#[derive(Debug)]
enum Inner {
    File(File),
    Nbd(Box<Nbd>),
    Custom(Box<dyn CustomStorage>),
}

impl Storage {
    /// Opens a regular file or block device. Blocks. Errors: see [`crate::ErrorKind`]; the message
    /// names the path, the reason and the remedy.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Storage, Error> {
        open::open(path, options).map(|file| Storage(Inner::File(file)))
    }

    /// Takes over an open descriptor (inherited, or from a caller that resolves names itself).
    ///
    /// O_NONBLOCK and O_APPEND are taken off its open file description, O_DIRECT is set if
    /// `options.direct`; a descriptor that has O_DIRECT keeps it. The lock belongs to the
    /// description, so it does not keep out others that use a duplicate of the descriptor. `create`
    /// and `create_new` mean nothing here.
    ///
    /// * `name`: for messages.
    ///
    /// Errors: as [`Storage::open`].
    pub fn from_fd(fd: OwnedFd, name: &str, options: &OpenOptions) -> Result<Storage, Error> {
        open::from_fd(fd, name, options).map(|file| Storage(Inner::File(file)))
    }

    /// Opens the same file again in another mode, through its descriptor, and takes its locks over:
    /// for an image that becomes a backing file, or a backing file that becomes writable. The old
    /// storage has no lock afterwards, so no new request may use it. Blocks. Storage of another
    /// kind is not reopened: `None`.
    ///
    /// * `options`: `create` and `create_new` mean nothing here.
    ///
    /// Errors: as [`Storage::open`]; the old storage is as it was.
    pub fn reopen(&self, options: &OpenOptions) -> Option<Result<Storage, Error>> {
        match &self.0 {
            Inner::File(file) => {
                Some(reopen::reopen(file, options).map(|file| Storage(Inner::File(file))))
            }
            Inner::Nbd(nbd) => {
                Some(nbd.reopen(options).map(|nbd| Storage(Inner::Nbd(Box::new(nbd)))))
            }
            Inner::Custom(_) => None,
        }
    }

    /// Whether its descriptor is open for writing, even where the storage is used for reading only.
    /// Storage of another kind: whether it is not read-only.
    pub fn is_open_for_writing(&self) -> bool {
        match &self.0 {
            Inner::File(file) => rustix::fs::fcntl_getfl(file.borrow())
                .is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDWR),
            Inner::Nbd(_) | Inner::Custom(_) => !self.is_read_only(),
        }
    }

    /// Takes the locks back that [`Storage::reopen`] moved to `from`, which is not used any more.
    ///
    /// Errors: kind `Locked` when another user, which the lock of `from` did not exclude, came
    /// meanwhile.
    pub fn reclaim(&self, from: &Storage) -> Result<(), Error> {
        match (&self.0, &from.0) {
            (Inner::File(file), Inner::File(from)) => reopen::reclaim(file, from),
            _ => Ok(()),
        }
    }

    /// Wraps an open file.
    pub(crate) fn of_file(file: File) -> Storage {
        Storage(Inner::File(file))
    }

    /// The file, unless it is of another kind.
    pub(crate) fn file(&self) -> Option<&File> {
        match &self.0 {
            Inner::File(file) => Some(file),
            Inner::Nbd(_) | Inner::Custom(_) => None,
        }
    }

    /// Opens an export of an NBD server. It has a fixed size and no locks, and its users treat it
    /// as a block device. Blocks, for at most 10 s and the look-up of the host's name.
    ///
    /// Errors: kind `NotFound`: no server, host or export; `ReadOnly`: the server offers it for
    /// reading only; `PermissionDenied`: the server refuses; `Io`.
    pub fn open_nbd(address: &NbdAddress, options: &NbdOptions) -> Result<Storage, Error> {
        nbd::open(address, options).map(|nbd| Storage(Inner::Nbd(Box::new(nbd))))
    }

    fn nbd(&self) -> Option<&Nbd> {
        match &self.0 {
            Inner::Nbd(nbd) => Some(nbd),
            Inner::File(_) | Inner::Custom(_) => None,
        }
    }

    /// The address of an NBD export. `None`: it is none.
    pub fn nbd_address(&self) -> Option<&NbdAddress> {
        self.nbd().map(Nbd::address)
    }

    /// Where the server of an NBD export is, with its host's name looked up; empty: it is none.
    pub fn nbd_endpoints(&self) -> &[NbdEndpoint] {
        self.nbd().map_or(&[], Nbd::endpoints)
    }

    /// Connections to the server of an NBD export; 0: it is none, or the server is gone.
    pub fn nbd_connections(&self) -> usize {
        self.nbd().map_or(0, Nbd::connections)
    }

    /// Whether a discard may be tried.
    pub(crate) fn may_discard(&self) -> bool {
        self.nbd().map_or(!self.is_read_only(), Nbd::can_discard)
    }

    /// Wraps storage of another kind.
    pub fn custom(inner: Box<dyn CustomStorage>) -> Storage {
        Storage(Inner::Custom(inner))
    }

    /// The path as given, or the name of the descriptor.
    pub fn name(&self) -> &str {
        match &self.0 {
            Inner::File(file) => &file.name,
            Inner::Nbd(nbd) => nbd.name(),
            Inner::Custom(custom) => custom.name(),
        }
    }

    /// Length in bytes, as last seen: follows this process's own changes at once, those of others
    /// at [`Storage::refresh_len`] and when a read ends early. No system call.
    #[allow(clippy::len_without_is_empty)] // `is_empty` follows.
    pub fn len(&self) -> u64 {
        match &self.0 {
            Inner::File(file) => file.len(),
            Inner::Nbd(nbd) => nbd.len(),
            Inner::Custom(custom) => custom.len(),
        }
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Asks the system for the length, in bytes. One quick system call.
    pub fn refresh_len(&self) -> Result<u64, Errno> {
        match &self.0 {
            Inner::File(file) => file.refresh_len(),
            Inner::Nbd(nbd) => Ok(nbd.len()),
            Inner::Custom(custom) => Ok(custom.len()),
        }
    }

    /// Whether it was opened for reading only.
    pub fn is_read_only(&self) -> bool {
        match &self.0 {
            Inner::File(file) => file.read_only,
            Inner::Nbd(nbd) => nbd.read_only,
            Inner::Custom(custom) => custom.is_read_only(),
        }
    }

    /// What it is.
    pub fn kind(&self) -> Kind {
        match &self.0 {
            Inner::File(file) => file.kind,
            Inner::Nbd(_) => Kind::BlockDevice,
            Inner::Custom(custom) => custom.kind(),
        }
    }

    /// What requests suit it best; found out when it was opened.
    pub fn limits(&self) -> Limits {
        match &self.0 {
            Inner::File(file) => file.limits,
            Inner::Nbd(nbd) => nbd.limits,
            Inner::Custom(custom) => custom.limits(),
        }
    }

    /// The descriptor, for callers that submit I/O themselves. They keep to [`Storage::limits`],
    /// keep this storage alive meanwhile, and do not write while O_DIRECT needs whole blocks
    /// (`offset_align > 1`), since this crate coordinates such writes. `None`: no file.
    pub fn raw_fd(&self) -> Option<Fd> {
        match &self.0 {
            Inner::File(file) => Some(file.fd),
            Inner::Nbd(_) | Inner::Custom(_) => None,
        }
    }

    /// Opens the same file once more through its descriptor, without O_DIRECT; for reading only
    /// where this storage is. The new descriptor holds the locks that this storage has now, until
    /// [`Storage::unlock_plain`], or until its last owner (such as the kernel, for open files of
    /// clients) has closed it. A search for locks of others finds it as another user, so the lock
    /// of this storage does not change meanwhile. `None`: not a regular file.
    ///
    /// Errors: those of open(2); needs `/proc`, and a sandbox must not forbid it.
    pub fn plain_descriptor(&self) -> Result<Option<OwnedFd>, Errno> {
        match &self.0 {
            Inner::File(file) if file.kind == Kind::Regular => {
                let options = OpenOptions::default();
                let plain = open::open_buffered(file.borrow(), file.read_only, &options)?;
                file.held().copy_to(plain.as_fd());
                Ok(Some(plain))
            }
            _ => Ok(None),
        }
    }

    /// Releases the locks of a [`Storage::plain_descriptor`] that is not used any more, though it
    /// may still be open for a moment.
    pub fn unlock_plain(&self, plain: BorrowedFd<'_>) {
        if let Inner::File(file) = &self.0 {
            file.held().release(plain);
        }
    }

    /// Asks the file system to make space for the file in extents of this size. Only a hint: where
    /// the file system has none, nothing happens.
    ///
    /// * `bytes`: a multiple of the block size of the file system; 0: no hint.
    pub fn hint_extent_size(&self, bytes: u32) {
        if let Inner::File(file) = &self.0
            && file.kind == Kind::Regular
            && bytes > 0
            && let Err(errno) = crate::ffi::set_extent_size(file.borrow(), bytes)
        {
            tracing::debug!("'{}' gets no hint about the size of extents: {errno}", self.name());
        }
    }

    /// Device and inode number of a file, (device number, 0) of a block device, a number made of
    /// the address of an NBD export: equal for two storages on the same bytes. `None`: another
    /// kind.
    pub fn identity(&self) -> Option<(u64, u64)> {
        match &self.0 {
            Inner::File(file) => Some(file.identity),
            Inner::Nbd(nbd) => Some((nbd.identity(), 0)),
            Inner::Custom(_) => None,
        }
    }

    /// What [`Storage::identity`] says of a file that was looked up by its name.
    pub fn identity_of(file: &std::fs::Metadata) -> (u64, u64) {
        use std::os::unix::fs::{FileTypeExt, MetadataExt};
        match file.file_type().is_block_device() {
            true => (file.rdev(), 0),
            false => (file.dev(), file.ino()),
        }
    }

    /// Bytes that it takes where it is stored (`st_blocks` × 512). One quick system call.
    pub fn allocated_bytes(&self) -> u64 {
        match &self.0 {
            Inner::File(file) => file.allocated_bytes(),
            // The server does not say.
            Inner::Nbd(nbd) => nbd.len(),
            Inner::Custom(custom) => custom.allocated_bytes(),
        }
    }

    /// Finds out whether pages of clients ([`IoBuf::client_pages`]), whose alignment is not known,
    /// may be given to the kernel as they are; until then, and where not, they are copied. Blocks
    /// for a few reads. The answer is remembered.
    pub fn probe_client_pages(&self) -> bool {
        match &self.0 {
            Inner::File(file) => file.probe_client_pages(),
            Inner::Nbd(_) | Inner::Custom(_) => false,
        }
    }

    /// Reads into `buf`. Short only at the end of the storage; 0 at or past it.
    ///
    /// After an error the content of `buf` is undefined.
    pub async fn read(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        let result = match &self.0 {
            Inner::File(file) => file.read(ring, offset, buf).await,
            Inner::Nbd(nbd) => nbd.read(ring, offset, buf).await,
            Inner::Custom(custom) => read_custom(&**custom, ring, offset, buf).await,
        };
        self.noted(result, "a read", offset, buf.len() as u64)
    }

    /// Notes a failure, so that a message about the request can name it.
    #[inline]
    fn noted<T>(
        &self,
        result: Result<T, Errno>,
        operation: &'static str,
        offset: u64,
        len: u64,
    ) -> Result<T, Errno> {
        if let Err(errno) = &result {
            failure::note(self.name(), operation, offset, len, *errno);
        }
        result
    }

    /// Writes `buf`; a regular file grows when it must. Returns the bytes written: fewer than there
    /// are when an error came after some progress. Not durable before [`Storage::flush`].
    ///
    /// Errors: `ENOSPC` (also past the end of a block device), `EIO`, `EDQUOT`, `EFBIG`, `EROFS`,
    /// …
    pub async fn write(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        let result = match &self.0 {
            Inner::File(file) => file.write(ring, offset, buf).await,
            Inner::Nbd(nbd) => nbd.write(ring, offset, buf).await,
            Inner::Custom(custom) => write_custom(&**custom, ring, offset, buf).await,
        };
        self.noted(result, "a write", offset, buf.len() as u64)
    }

    /// Writes all of `buf`, as [`Storage::write`] does.
    ///
    /// Errors: as there, also after some progress; `EIO` where it takes nothing.
    pub async fn write_all(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<(), Errno> {
        let mut done = 0;
        while done < buf.len() {
            match self.write(ring, offset + done as u64, &buf.slice(done..buf.len())).await? {
                0 => return Err(Errno::IO),
                written => done += written,
            }
        }
        Ok(())
    }

    /// Makes all writes that completed before durable, down to the device.
    ///
    /// Errors: `EIO`, `ENOSPC`, `EDQUOT`: written data may be lost. Every later flush fails too
    /// until the storage is opened again, since the kernel forgets the pages that it could not
    /// write and tells of an error once; but not after an `ENOSPC` or `EDQUOT` past the page cache,
    /// which loses nothing.
    pub async fn flush(&self, ring: &Ring) -> Result<(), Errno> {
        let result = match &self.0 {
            Inner::File(file) => file.flush(ring).await,
            Inner::Nbd(nbd) => nbd.flush(ring).await,
            Inner::Custom(custom) => custom.flush(ring).await,
        };
        self.noted(result, "a flush", 0, 0)
    }

    /// Frees space. A regular file then reads as zeroes there, a block device returns undefined
    /// data: callers that need zeroes use [`Storage::write_zeroes`] with `may_unmap`. Beyond the
    /// end nothing happens.
    ///
    /// Errors: `EOPNOTSUPP` when file system or device cannot.
    pub async fn discard(&self, ring: &Ring, offset: u64, len: u64) -> Result<(), Errno> {
        let result = match &self.0 {
            Inner::File(file) => file.discard(ring, offset, len).await,
            Inner::Nbd(nbd) => nbd.discard(ring, offset, len).await,
            Inner::Custom(custom) => custom.discard(ring, offset, len).await,
        };
        self.noted(result, "a discard", offset, len)
    }

    /// Makes a range read as zeroes; a regular file grows when it must.
    ///
    /// * `may_unmap`: the space may be freed; otherwise it stays (or becomes) reserved.
    /// * `fallback`: write zeroes where there is no quicker way; without it: `EOPNOTSUPP` then, and
    ///   nothing has changed.
    ///
    /// Errors: as [`Storage::write`]; after any but that `EOPNOTSUPP` a part may have been zeroed.
    pub async fn write_zeroes(
        &self,
        ring: &Ring,
        offset: u64,
        len: u64,
        may_unmap: bool,
        fallback: bool,
    ) -> Result<(), Errno> {
        let how = Zeroing { may_unmap, fallback };
        let result = match &self.0 {
            Inner::File(file) => file.write_zeroes(ring, offset, len, how).await,
            Inner::Nbd(nbd) => nbd.write_zeroes(ring, offset, len, how).await,
            Inner::Custom(custom) => {
                custom.write_zeroes(ring, offset, len, may_unmap, fallback).await
            }
        };
        self.noted(result, "zeroing", offset, len)
    }

    /// Sets the length in bytes. Errors: `EOPNOTSUPP` on a block device (unless it has that
    /// length), `EFBIG`, `ENOSPC`, `EROFS`, …
    pub async fn set_len(&self, ring: &Ring, len: u64) -> Result<(), Errno> {
        match &self.0 {
            Inner::File(file) => file.set_len(ring, len).await,
            Inner::Nbd(nbd) => nbd.set_len(len),
            Inner::Custom(custom) => custom.set_len(ring, len).await,
        }
    }

    /// Makes a regular file at least `end` bytes long without ever shortening it or changing what
    /// is in it, even while others write to it. It may be longer afterwards than was asked for.
    ///
    /// * `from`: where the space that is reserved begins, if it is past the end.
    /// * `mode`: what is prepared. [`Preallocation::Full`] writes zeroes to everything that is
    ///   added.
    /// * `go_on`: asked between two writes of zeroes; an error ends it.
    ///
    /// Errors: `EOPNOTSUPP` where the file system cannot (and for `Full` with O_DIRECT); `ENOSPC`,
    /// also past the end of a block device; `EFBIG`, `EROFS`, … With `Full` a part may have been
    /// added.
    pub async fn extend(
        &self,
        ring: &Ring,
        from: u64,
        end: u64,
        mode: Preallocation,
        go_on: &dyn Fn() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        match &self.0 {
            Inner::File(file) => file.extend(ring, from, end, mode, go_on).await,
            Inner::Nbd(nbd) => nbd.reach(end),
            // Only this process writes to it, and its users do not write past its end.
            Inner::Custom(custom) if custom.len() >= end => Ok(()),
            Inner::Custom(custom) if mode == Preallocation::Off => custom.set_len(ring, end).await,
            Inner::Custom(custom) => {
                let from = from.max(custom.len());
                custom.preallocate(ring, from, end.saturating_sub(from), mode).await
            }
        }
    }

    /// Prepares space for `offset..offset + len` and lets the storage reach at least to its end.
    /// Except with [`Preallocation::Falloc`], no other writer may write past the end meanwhile.
    ///
    /// Errors: `EINVAL` for [`Preallocation::Full`] below the end of the file (it would overwrite),
    /// `EOPNOTSUPP` where nothing can be reserved, `ENOSPC`, …
    pub async fn preallocate(
        &self,
        ring: &Ring,
        offset: u64,
        len: u64,
        mode: Preallocation,
    ) -> Result<(), Errno> {
        match &self.0 {
            Inner::File(file) => file.preallocate(ring, offset, len, mode).await,
            Inner::Nbd(nbd) => nbd.reach(offset.saturating_add(len)),
            Inner::Custom(custom) => custom.preallocate(ring, offset, len, mode).await,
        }
    }

    /// Whether there is data or a hole at `offset`, and for how many bytes (1 to `len`; the run may
    /// go on after that). (Hole, 0) at or past the end. Storage that cannot tell holes counts as
    /// data. Runs on a helper thread.
    pub async fn allocation(
        &self,
        ring: &Ring,
        offset: u64,
        len: u64,
    ) -> Result<(Allocation, u64), Errno> {
        match &self.0 {
            Inner::File(file) => file.allocation(ring, offset, len).await,
            Inner::Nbd(nbd) => nbd.allocation(ring, offset, len).await,
            Inner::Custom(custom) => custom.allocation(ring, offset, len).await,
        }
    }

    /// Whether it is an NBD export that was opened to look at a bitmap
    /// ([`NbdAddress::with_dirty_bitmap`]). Its holes are not known then: all counts as data.
    pub fn shows_bitmap(&self) -> bool {
        matches!(&self.0, Inner::Nbd(nbd) if nbd.shows_bitmap())
    }

    /// Whether the bitmap has marked the byte at `offset`, and for how many bytes that is so (1 to
    /// `len`; the run may go on after that). (false, 0) at or past the end. Without a bitmap
    /// nothing is marked.
    ///
    /// Errors: those of the server.
    pub async fn dirty(&self, ring: &Ring, offset: u64, len: u64) -> Result<(bool, u64), Errno> {
        match &self.0 {
            Inner::Nbd(nbd) => nbd.dirty(ring, offset, len).await,
            Inner::File(_) | Inner::Custom(_) => Ok((false, len)),
        }
    }
}

async fn read_custom(
    custom: &dyn CustomStorage,
    ring: &Ring,
    offset: u64,
    buf: &IoBuf,
) -> Result<usize, Errno> {
    end_of(offset, buf.len() as u64)?;
    if !buf.is_ours() {
        let ours = IoBuf::new(buf.len(), custom.limits().memory_align as usize);
        let done = Box::pin(read_custom(custom, ring, offset, &ours)).await?;
        ring.copy(&ours.slice(0..done), buf).await?;
        return Ok(done);
    }
    let mut done = 0;
    while done < buf.len() {
        match custom.read(ring, offset + done as u64, &buf.slice(done..buf.len())).await? {
            0 => break,
            n => done += n.min(buf.len() - done),
        }
    }
    Ok(done)
}

async fn write_custom(
    custom: &dyn CustomStorage,
    ring: &Ring,
    offset: u64,
    buf: &IoBuf,
) -> Result<usize, Errno> {
    end_of(offset, buf.len() as u64)?;
    let buf = &ring.in_memory(buf).await?;
    let mut done = 0;
    while done < buf.len() {
        match custom.write(ring, offset + done as u64, &buf.slice(done..buf.len())).await {
            Ok(0) if done == 0 => return Err(Errno::IO),
            Ok(0) => break,
            Ok(n) => done += n.min(buf.len() - done),
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
    }
    Ok(done)
}
