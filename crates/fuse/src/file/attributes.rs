//! GETATTR and SETATTR.
//!
//! Promises: a SETATTR that is refused changes nothing; mode and owner live as long as the export
//! and never reach the image.

use ringdisk_disk::Bytes;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ringdisk_ring::{Errno, Ring};

use super::{ClientResize, FILE_BYTES_MAX, FileServer};
use crate::abi::flags::{
    FATTR_ATIME, FATTR_ATIME_NOW, FATTR_FH, FATTR_GID, FATTR_KILL_SUIDGID, FATTR_MODE, FATTR_MTIME,
    FATTR_MTIME_NOW, FATTR_SIZE, FATTR_UID,
};
use crate::abi::{Attr, AttrOut, ROOT_ID, SetattrIn};

/// Seconds for which the kernel may keep attributes. A resize does not wait for it: it sends a
/// notification.
const ATTRIBUTES_VALID_S: u64 = 1;
/// Smallest block size that `stat` shows, bytes. The disk takes any alignment, but C libraries size
/// their buffers by this number.
const BLOCK_BYTES_MIN: u32 = 4096;
/// Unit of `st_blocks`, bytes.
const STAT_BLOCK_BYTES: u64 = 512;
/// Bits of a mode that chmod can change.
const PERMISSIONS: u32 = 0o7777;
/// Permissions of others than the owner.
const GROUP_AND_OTHERS: u32 = 0o077;
const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o0010;

impl FileServer {
    /// Attributes of the file as they are now.
    ///
    /// The size on the host comes from a helper thread: asking a file system that does not answer
    /// must not stop the queue.
    pub(super) async fn attributes(&self, ring: &Ring) -> AttrOut {
        // The kernel may have made a file that it writes itself longer; it would believe a smaller
        // number from us.
        let size = match self.disk.follow_length(ring).await {
            Ok(size) => size,
            Err(errno) => {
                tracing::warn!("cannot ask for the length of the image: {errno}");
                self.disk.size()
            }
        };
        let disk = Arc::clone(&self.disk);
        let allocated = ring.offload(move || disk.allocated_bytes()).await;
        let time = if self.read_only { self.started } else { SystemTime::now() };
        let time = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let (seconds, nanoseconds) = (time.as_secs(), time.subsec_nanos());
        let attr = Attr {
            ino: ROOT_ID,
            size: size.min(Bytes(FILE_BYTES_MAX)).0,
            blocks: (allocated / STAT_BLOCK_BYTES).0,
            atime: seconds,
            mtime: seconds,
            ctime: seconds,
            atimensec: nanoseconds,
            mtimensec: nanoseconds,
            ctimensec: nanoseconds,
            mode: libc::S_IFREG | self.mode.load(Ordering::Relaxed),
            nlink: 1,
            uid: self.uid.load(Ordering::Relaxed),
            gid: self.gid.load(Ordering::Relaxed),
            rdev: 0,
            blksize: self.disk.request_align().max(BLOCK_BYTES_MIN),
            flags: 0,
        };
        AttrOut { attr_valid: ATTRIBUTES_VALID_S, attr_valid_nsec: 0, dummy: 0, attr }
    }

    /// Changes size, mode or owner.
    ///
    /// Errors: EACCES on a read-only export; EPERM for permissions of others without `allow_other`,
    /// for a larger size unless the disk is growable, and for a smaller one unless it is resizable;
    /// EOPNOTSUPP for an owner without `allow_other`, for time stamps, and for the size of a disk
    /// that cannot be resized; EFBIG; those of the disk.
    pub(super) async fn set_attributes(
        &self,
        ring: &Ring,
        argument: &SetattrIn,
    ) -> Result<(), Errno> {
        let has = |bits: u32| argument.valid & bits != 0;
        if self.read_only {
            return Err(Errno::ACCESS);
        }
        // A change of size may come with "now" for mtime, which is what the file shows anyway.
        if has(FATTR_ATIME | FATTR_MTIME | FATTR_ATIME_NOW | FATTR_MTIME_NOW) && !has(FATTR_SIZE) {
            return Err(Errno::OPNOTSUPP);
        }
        if has(FATTR_MODE) && !self.allow_other && argument.mode & GROUP_AND_OTHERS != 0 {
            return Err(Errno::PERM);
        }
        if has(FATTR_UID | FATTR_GID) && !self.allow_other {
            return Err(Errno::OPNOTSUPP);
        }

        if has(FATTR_SIZE) && !self.is_open_truncation(argument) {
            if argument.size > FILE_BYTES_MAX {
                return Err(Errno::FBIG);
            }
            self.change_size(ring, argument.size).await?;
        }
        if has(FATTR_UID) {
            self.uid.store(argument.uid, Ordering::Relaxed);
        }
        if has(FATTR_GID) {
            self.gid.store(argument.gid, Ordering::Relaxed);
        }
        // HANDLE_KILLPRIV_V2: the server clears these bits on chown and where it is told to.
        if has(FATTR_UID | FATTR_GID | FATTR_KILL_SUIDGID) {
            self.kill_suid_sgid();
        }
        if has(FATTR_MODE) {
            self.mode.store(argument.mode & PERMISSIONS, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether this is `open` with O_TRUNC on an export that is not resizable: tools that
    /// "overwrite" the file mean its content, and a disk keeps its size.
    ///
    /// It comes as a change of the size to 0 without an open file, while ftruncate names one.
    /// (ATOMIC_O_TRUNC would tell the two apart from truncate(path, 0) too, but it makes the kernel
    /// believe that the file is empty until the next GETATTR, and asynchronous reads and mappings
    /// of other clients would see that.)
    fn is_open_truncation(&self, argument: &SetattrIn) -> bool {
        !self.resizable && argument.size == 0 && argument.valid & FATTR_FH == 0
    }

    /// Makes the disk `size` bytes long, for a client, as far as clients may.
    ///
    /// Errors: EPERM; those of the disk.
    async fn change_size(&self, ring: &Ring, size: u64) -> Result<(), Errno> {
        let now = self.disk.follow_length(ring).await?;
        if size == now.0 {
            return Ok(());
        }
        let _by_client = ClientResize::begin(self);
        if self.resizable {
            return self.disk.resize(ring, Bytes(size)).await;
        }
        if size < now.0 || !self.growable {
            return Err(Errno::PERM);
        }
        // It does not shrink the disk either if that has grown since.
        self.disk.lengthen(ring, Bytes(size)).await
    }

    /// Clears the set-user-id bit, and the set-group-id bit where it means one.
    pub(super) fn kill_suid_sgid(&self) {
        let clear = |mode: u32| {
            let group = if mode & GROUP_EXECUTE != 0 { SET_GROUP_ID } else { 0 };
            let cleared = mode & !(SET_USER_ID | group);
            (cleared != mode).then_some(cleared)
        };
        // Nothing to clear is the usual case, and no failure.
        if self.mode.fetch_update(Ordering::Relaxed, Ordering::Relaxed, clear).is_ok() {
            self.record_attributes();
        }
    }
}
