//! What each file operation does on a disk.
//!
//! Promises: a client sees the results that it knows from qemu-storage-daemon, whatever the
//! transport; reads are never short inside the disk; the size is what it is unless the disk is
//! `growable` (clients may make it larger) or `resizable` (and smaller). Called by the tasks of all
//! queue threads at once: the state is atomics, there is no lock, and no READ or WRITE allocates.
//!
//! Different from qemu-storage-daemon, on purpose:
//! - `st_blksize` is at least 4096 (there 1, from which C libraries make one-byte buffers);
//! - a read-only file shows one unchanging time (there always "now", which tools take for a change
//!   while they read);
//! - without `growable` no client changes the size (there `ftruncate` and `fallocate` do), and with
//!   it none makes the disk smaller: that takes `resizable`. EPERM says so; the size that the disk
//!   has may always be "set";
//! - O_TRUNC without `resizable` keeps the size in the kernel too (there the kernel takes the file
//!   for empty until the next `stat`); the price is that `truncate(path, 0)` without an open file
//!   succeeds as well, and changes nothing;
//! - a write at or past the end of a disk that is not growable fails with ENOSPC, and never
//!   succeeds with 0 bytes;
//! - closing a descriptor that cannot write does not flush.
//!
//! READ and WRITE are calls of their own ([`FileServer::read`], [`FileServer::write`]), so that the
//! transport decides where the data lies; everything else is one call that writes the reply
//! ([`FileServer::serve_control`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::SystemTime;

use ringdisk_disk::{Bytes, Cache, ClientErrors, Disk};
use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::abi::flags::{WRITE_CACHE, WRITE_KILL_SUIDGID};
use crate::abi::{OpenIn, OpenOut, StatfsOut, WriteIn};
use crate::negotiate::Profile;
use crate::reply::ReplyBuf;
use crate::request::{Operation, Request};
use record::{FileRecord, FileState, representable_since};

mod allocate;
mod attributes;
pub(crate) mod record;
mod seek;

/// Handle in every OPEN reply. The same for all, so that a request stays valid when another process
/// takes the connection over.
const FILE_HANDLE: u64 = 1;
/// Longest name that STATFS reports, bytes.
const NAME_BYTES_MAX: u32 = 255;
/// Smallest block size that STATFS reports, bytes.
const STATFS_BLOCK_MIN: u32 = 512;
/// Permissions of a writable export at start.
const MODE_WRITABLE: u32 = 0o600;
/// Permissions of a read-only export at start.
const MODE_READ_ONLY: u32 = 0o400;
/// Largest size of a file, bytes: what `off_t` holds.
const FILE_BYTES_MAX: u64 = i64::MAX as u64;

/// How a disk is shown as a file.
#[derive(Clone, Copy, Debug)]
pub struct FileOptions {
    /// Clients may make the disk larger: by writes past the end, ftruncate and fallocate.
    pub growable: bool,
    /// Clients may make the disk larger and smaller; includes `growable`.
    pub resizable: bool,
    /// Nothing may be changed; also the case if the disk itself is read-only.
    pub read_only: bool,
    /// The mount lets other users in, so that modes and owners mean something.
    pub allow_other: bool,
    /// What the mount was negotiated with.
    pub profile: Profile,
    /// Number of the file that the kernel reads and writes itself; 0: none.
    pub backing_id: u32,
    /// Owner of the file at start.
    pub uid: u32,
    /// Group of the file at start.
    pub gid: u32,
}

impl FileServer {
    /// Goes on with the state that is recorded, if one is, and records from now on. Before any
    /// request is served.
    #[must_use]
    pub fn recording(mut self, record: Arc<FileRecord>) -> FileServer {
        if let Some(state) = record.state() {
            self = self.continuing(&state);
        }
        self.record = Some(record);
        self.record_attributes();
        self
    }

    /// Goes on with the state that another process had. Before any request is served.
    #[must_use]
    pub fn continuing(mut self, state: &FileState) -> FileServer {
        self.mode = AtomicU32::new(state.mode);
        self.uid = AtomicU32::new(state.uid);
        self.gid = AtomicU32::new(state.gid);
        self.open_files = AtomicU64::new(state.open_files);
        self.started = SystemTime::UNIX_EPOCH + representable_since(state.since);
        self
    }

    /// What another process needs to go on with the file. No request is in flight.
    pub(crate) fn state(&self) -> FileState {
        if let Some(state) = self.record.as_ref().and_then(|record| record.state()) {
            return state;
        }
        let load = |value: &AtomicU32| value.load(Ordering::Relaxed);
        FileState {
            mode: load(&self.mode),
            uid: load(&self.uid),
            gid: load(&self.gid),
            open_files: self.open_files.load(Ordering::SeqCst),
            writable_files: 0,
            since: self.started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
        }
    }

    /// Whether another process may go on with the mount.
    pub(crate) fn is_kept(&self) -> bool {
        self.record.is_some()
    }

    /// Mode and owner are what the next process shall find.
    fn record_attributes(&self) {
        if let Some(record) = &self.record {
            let load = |value: &AtomicU32| value.load(Ordering::Relaxed);
            record.set(load(&self.mode), load(&self.uid), load(&self.gid), self.started);
        }
    }

    /// An OPEN or a RELEASE.
    ///
    /// * `flags`: of open(2).
    fn count(&self, unique: u64, is_open: bool, flags: u32) {
        if let Some(record) = &self.record {
            record.count(unique, is_open, can_write(flags));
            return;
        }
        let change = if is_open { u64::checked_add } else { u64::checked_sub };
        // A RELEASE without an OPEN would be a bug of the kernel; the count must not wrap over it.
        let _ = self
            .open_files
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| change(count, 1));
    }
}

/// A disk as a file: the meaning of every operation.
#[derive(Debug)]
pub struct FileServer {
    disk: Arc<Disk>,
    growable: bool,
    resizable: bool,
    read_only: bool,
    allow_other: bool,
    profile: Profile,
    backing_id: u32,
    /// Permission bits, changed by chmod.
    mode: AtomicU32,
    uid: AtomicU32,
    gid: AtomicU32,
    /// Open files of all clients.
    open_files: AtomicU64,
    /// Nothing can be opened any more.
    refuses_opens: AtomicBool,
    /// Changes of the size that clients of this file are making: the kernel knows of those.
    client_resizes: AtomicU32,
    /// Time that a read-only file shows: it does not change, so tools that watch for changes must
    /// not see any.
    started: SystemTime,
    /// Where the state is kept for another process.
    record: Option<Arc<FileRecord>>,
    /// Where errors of clients are written down.
    errors: Option<ClientErrors>,
}

impl FileServer {
    /// Shows `disk` as a file.
    #[must_use]
    pub fn new(disk: Arc<Disk>, options: &FileOptions) -> FileServer {
        let read_only = options.read_only || disk.is_read_only();
        FileServer {
            disk,
            growable: (options.growable || options.resizable) && !read_only,
            resizable: options.resizable && !read_only,
            read_only,
            allow_other: options.allow_other,
            profile: options.profile,
            backing_id: options.backing_id,
            mode: AtomicU32::new(if read_only { MODE_READ_ONLY } else { MODE_WRITABLE }),
            uid: AtomicU32::new(options.uid),
            gid: AtomicU32::new(options.gid),
            open_files: AtomicU64::new(0),
            refuses_opens: AtomicBool::new(false),
            client_resizes: AtomicU32::new(0),
            started: SystemTime::now(),
            record: None,
            errors: None,
        }
    }

    /// Writes errors of clients down there. Before any request is served.
    #[must_use]
    pub fn logging(mut self, errors: ClientErrors) -> FileServer {
        self.errors = Some(errors);
        self
    }

    /// A client gets an error.
    ///
    /// * `offset`, `len`: bytes; 0 where they mean nothing.
    #[cold]
    pub(crate) fn failed(&self, operation: &'static str, offset: u64, len: u64, errno: Errno) {
        if let Some(errors) = &self.errors {
            errors.record(operation, offset, Bytes(len), errno);
        }
    }

    /// As [`failed`](FileServer::failed), for a write. That the disk ends where it ends is no
    /// failure.
    #[cold]
    pub(crate) fn failed_write(&self, argument: &WriteIn, errno: Errno) {
        let is_end = !self.growable && argument.offset >= self.disk.size().0;
        if errno != Errno::NOSPC || !is_end {
            self.failed("a write", argument.offset, argument.size.into(), errno);
        }
    }

    /// The disk behind the file.
    #[must_use]
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// What the mount was negotiated with.
    #[must_use]
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Whether the file refuses every change.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Open files of all clients at this moment.
    #[must_use]
    pub fn open_files(&self) -> u64 {
        let recorded = self.record.as_ref().and_then(|record| record.state());
        recorded.map_or_else(|| self.open_files.load(Ordering::SeqCst), |state| state.open_files)
    }

    /// Whether OPEN is refused from now on, with ESTALE: for a mount that has left the tree. The
    /// kernel looks the name up again then (`do_filp_open` of fs/namei.c), and finds what is there
    /// now. A caller that sets this and then counts no open file can be sure that there will be
    /// none: an OPEN counts first and looks here after that. Any thread.
    pub(crate) fn refuse_opens(&self, refuses: bool) {
        self.refuses_opens.store(refuses, Ordering::SeqCst);
    }

    /// Reads into the first `size` bytes of `buf`.
    ///
    /// * `offset`: bytes; `size`: bytes, cut to the length of `buf`.
    ///
    /// Returns the bytes to send: less than `size` only where the disk ends, since the kernel takes
    /// a short read for the end of the file and shrinks its idea of the size; 0 at and past the
    /// end.
    ///
    /// Errors: those of the disk.
    pub async fn read(
        &self,
        ring: &Ring,
        offset: u64,
        size: u32,
        buf: &IoBuf,
    ) -> Result<usize, Errno> {
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let done = if size < buf.len() {
            self.disk.read(ring, offset, &buf.slice(0..size)).await?
        } else {
            self.disk.read(ring, offset, buf).await?
        };
        if done >= size.min(buf.len()) {
            return Ok(done);
        }
        // The end of the disk, as a rule. A disk that promises more (it grew meanwhile) gets
        // zeroes, which is what new space holds.
        let inside = self.inside(offset, size.min(buf.len()));
        if done < inside {
            ring.zero(&buf.slice(done..inside)).await?;
        }
        Ok(done.max(inside))
    }

    /// Writes the whole of `buf`, which holds the data of the WRITE request `argument`.
    ///
    /// Returns the bytes that the client has written: cut at the end of the disk unless it is
    /// growable, and ENOSPC at and past the end, as on a block device: of 0 bytes written some
    /// programs make another attempt, for ever. Less is also returned if an error came after some
    /// progress. With O_DSYNC or O_SYNC the data is durable on return.
    ///
    /// Errors: ENOSPC; EACCES on a read-only export; EFBIG past the largest file size; EOPNOTSUPP
    /// past the end of a disk that is growable but cannot be resized; those of the disk.
    pub async fn write(
        &self,
        ring: &Ring,
        argument: &WriteIn,
        buf: &IoBuf,
    ) -> Result<usize, Errno> {
        if self.read_only {
            return Err(Errno::ACCESS);
        }
        if argument.write_flags & WRITE_KILL_SUIDGID != 0 {
            self.kill_suid_sgid();
        }
        if buf.is_empty() {
            return Ok(0);
        }
        // Pages of a shared mapping end at the end of the file. If they do not, the file has shrunk
        // since: that must not undo it.
        let from_page_cache = argument.write_flags & WRITE_CACHE != 0;
        let end = argument
            .offset
            .checked_add(buf.len() as u64)
            .filter(|end| *end <= FILE_BYTES_MAX)
            .ok_or(Errno::FBIG)?;
        if self.growable && !from_page_cache && end > self.disk.size().0 {
            self.grow(ring, end).await?;
        }

        // Nobody sees a short count of page-cache writes: all or an error.
        let is_strict = from_page_cache || self.profile.kernel_cache;
        let done = self.write_all(ring, argument.offset, buf, is_strict).await?;
        if done > 0 && wants_sync(argument.flags) && self.disk.cache() != Cache::Writethrough {
            self.disk.flush(ring).await?;
        }
        if from_page_cache {
            return Ok(buf.len());
        }
        if done == 0 { Err(Errno::NOSPC) } else { Ok(done) }
    }

    /// Whether a client of this file is changing its size, so that the kernel need not be told. Any
    /// thread.
    #[must_use]
    pub fn is_resized_by_client(&self) -> bool {
        self.client_resizes.load(Ordering::Acquire) > 0
    }

    /// Makes the disk at least `size` bytes long, for a client.
    async fn grow(&self, ring: &Ring, size: u64) -> Result<(), Errno> {
        let _by_client = ClientResize::begin(self);
        self.disk.grow(ring, Bytes(size)).await
    }

    /// Writes until the end of `buf` or of the disk.
    async fn write_all(
        &self,
        ring: &Ring,
        offset: u64,
        buf: &IoBuf,
        is_strict: bool,
    ) -> Result<usize, Errno> {
        let mut done = self.disk.write(ring, offset, buf).await?;
        // Short inside the disk means that an error came after some progress: the rest will name
        // it.
        while done < self.inside(offset, buf.len()) {
            match self.disk.write(ring, offset + done as u64, &buf.slice(done..buf.len())).await {
                Ok(0) if is_strict => return Err(Errno::IO),
                Ok(0) => break,
                Ok(more) => done += more,
                // A page-cached mount would report a short write as EIO; better the true error.
                Err(errno) if is_strict => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Serves any operation but INIT, READ and WRITE, and writes its reply to `out`, which stays
    /// empty if there is none to send.
    pub async fn serve_control(&self, ring: &Ring, request: &Request, out: &mut ReplyBuf) {
        out.clear();
        if !request.expects_reply() {
            return;
        }
        let unique = request.header.unique;
        let result = self.control(ring, request, out).await;
        if let Err(errno) = result {
            match &request.operation {
                Operation::Fsync(_) | Operation::Flush(_) => self.failed("a flush", 0, 0, errno),
                Operation::Setattr(_) => self.failed("a change of the file", 0, 0, errno),
                // What is asked for may make no sense.
                Operation::Fallocate(asked) if errno != Errno::INVAL => {
                    self.failed("an fallocate", asked.offset, asked.length, errno);
                }
                // Nothing is there, or what is asked for makes no sense.
                Operation::Lseek(asked) if ![Errno::NXIO, Errno::INVAL].contains(&errno) => {
                    self.failed("a search for data or a hole", asked.offset, 0, errno);
                }
                _ => {}
            }
            out.set_error(unique, errno);
        }
    }

    async fn control(
        &self,
        ring: &Ring,
        request: &Request,
        out: &mut ReplyBuf,
    ) -> Result<(), Errno> {
        let unique = request.header.unique;
        match &request.operation {
            Operation::Getattr(_) => out.set_body(unique, &self.attributes(ring).await),
            Operation::Setattr(argument) => {
                self.set_attributes(ring, argument).await?;
                self.record_attributes();
                out.set_body(unique, &self.attributes(ring).await);
            }
            Operation::Open(argument) => out.set_body(unique, &self.open(unique, argument)?),
            Operation::Release(argument) => {
                self.count(unique, false, argument.flags);
                out.set_empty(unique);
            }
            Operation::Fsync(_) | Operation::Flush(_) => {
                self.disk.flush(ring).await?;
                out.set_empty(unique);
            }
            Operation::Statfs => out.set_body(unique, &self.statfs()),
            Operation::Fallocate(argument) => {
                self.fallocate(ring, argument).await?;
                out.set_empty(unique);
            }
            Operation::Lseek(argument) => out.set_body(unique, &self.seek(ring, argument).await?),
            Operation::Destroy => out.set_empty(unique),
            // The root is the file, and a file has no children.
            Operation::Lookup => return Err(Errno::NOENT),
            // The kernel remembers ENOSYS and does not ask again, or falls back to what it can do
            // itself.
            Operation::Unsupported(_) => return Err(Errno::NOSYS),
            // The transport keeps these for itself; INIT is never repeated.
            Operation::Init(_) | Operation::Read(_) | Operation::Write(_) => {
                return Err(Errno::INVAL);
            }
            Operation::Forget(_)
            | Operation::BatchForget(_)
            | Operation::Interrupt(_)
            | Operation::NotifyReply => {}
        }
        Ok(())
    }

    /// Errors: EACCES for writing to a read-only export (the kernel has said EROFS before, as a
    /// rule); ESTALE at the end of the mount.
    fn open(&self, unique: u64, argument: &OpenIn) -> Result<OpenOut, Errno> {
        let can_write = can_write(argument.flags);
        if can_write && self.read_only {
            return Err(Errno::ACCESS);
        }
        if argument.open_flags & crate::abi::flags::OPEN_KILL_SUIDGID != 0 {
            self.kill_suid_sgid();
        }
        self.count(unique, true, argument.flags);
        if self.refuses_opens.load(Ordering::SeqCst) {
            self.count(unique, false, argument.flags);
            return Err(Errno::STALE);
        }
        Ok(OpenOut {
            fh: FILE_HANDLE,
            open_flags: self.profile.open_flags(can_write),
            backing_id: self.backing_id,
        })
    }

    fn statfs(&self) -> StatfsOut {
        let block = self.disk.optimal_transfer().max(STATFS_BLOCK_MIN);
        StatfsOut { bsize: block, frsize: block, namelen: NAME_BYTES_MAX, ..StatfsOut::default() }
    }

    /// Bytes of a request that lie inside the disk.
    fn inside(&self, offset: u64, len: usize) -> usize {
        let left = self.disk.size().saturating_sub(Bytes(offset));
        usize::try_from(left).map_or(len, |left| left.min(len))
    }
}

/// Counts one change of the size by a client, until it is dropped.
struct ClientResize<'a>(&'a FileServer);

impl<'a> ClientResize<'a> {
    fn begin(server: &'a FileServer) -> ClientResize<'a> {
        server.client_resizes.fetch_add(1, Ordering::AcqRel);
        ClientResize(server)
    }
}

impl Drop for ClientResize<'_> {
    fn drop(&mut self) {
        self.0.client_resizes.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Bits of open flags that say whether the file is read or written.
#[allow(clippy::cast_sign_loss, reason = "a small positive constant of the C library")]
const ACCESS_MODE: u32 = libc::O_ACCMODE as u32;
/// Value of [`ACCESS_MODE`] for a file that is only read.
#[allow(clippy::cast_sign_loss, reason = "a small positive constant of the C library")]
const READ_ONLY_ACCESS: u32 = libc::O_RDONLY as u32;
/// The bit that O_SYNC and O_DSYNC have in common.
#[allow(clippy::cast_sign_loss, reason = "a small positive constant of the C library")]
const DSYNC: u32 = libc::O_DSYNC as u32;

/// Whether a file opened with these flags can be written.
fn can_write(flags: u32) -> bool {
    flags & ACCESS_MODE != READ_ONLY_ACCESS
}

/// Whether a WRITE with these flags must be durable before it is answered.
fn wants_sync(flags: u32) -> bool {
    flags & DSYNC != 0
}

#[cfg(test)]
mod tests;
