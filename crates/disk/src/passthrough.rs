//! FUSE passthrough: the kernel reads and writes the image file itself.
//!
//! Promises: the kernel gets (is *lent*) only a file whose bytes are the disk; while it is lent, no
//! overlay is put above it. This process does not see the kernel's writes, so each operation that
//! depends on the length of the file asks for it first ([`Disk::follow_length`]) and takes it as
//! the size of the disk. The file is never lengthened by setting its length: that could cut off
//! data that the kernel has appended meanwhile.

use ringdisk_qcow2::{Bytes, GuestOffset};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::{Kind, Preallocation};

use crate::layer::{Node, Raw};
use crate::options::DetectZeroes;
use crate::{Cache, Disk, Error, ErrorKind, Progress};

impl Disk {
    /// A descriptor through which the kernel may read and write the disk. From now on no overlay is
    /// put above the image. The descriptor keeps the image locked until [`Disk::end_loan`], or
    /// until the kernel has closed the last file of a client: clients keep using it after this
    /// process has ended.
    ///
    /// Errors: `Unsupported` with the reason when the file is not the disk as it is, or an option
    /// asks for more than the kernel does; those of opening the file once more.
    pub fn lend(&self) -> Result<OwnedFd, Error> {
        let refuse = |why: &str| Err(Error::new(ErrorKind::Unsupported, why.to_owned()));
        let graph = self.graph();
        let Node::Raw(raw) = &graph.top().node else {
            return refuse("the image is not raw");
        };
        let policy = self.policy();
        if graph.window.is_part() || raw.offset.0 != 0 || raw.fixed_size {
            return refuse("the disk is a window in the image");
        }
        if raw.storage.kind() != Kind::Regular {
            return refuse("the image is not a regular file");
        }
        if graph.running_fleece().is_some() {
            return refuse("a checkpoint is running, which has to see each write");
        }
        if graph.guard.is_some() {
            return refuse(
                "the first sector is protected, since nobody said that the image is raw",
            );
        }
        if self.cache() != Cache::Writeback {
            return refuse("the kernel can only use the page cache as --cache writeback does");
        }
        if policy.detect_zeroes != DetectZeroes::Off {
            return refuse("the kernel does not look for zeroes");
        }
        let lent = raw
            .storage
            .plain_descriptor()
            .map_err(|errno| Error::os("cannot open the image once more", errno))?;
        let Some(lent) = lent else { return refuse("the image is not a regular file") };
        let kept = lent.try_clone().map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::MFILE);
            Error::os("cannot duplicate the descriptor of the image", errno)
        })?;
        *self.loan() = Some(kept);
        self.is_lent.store(true, Ordering::Release);
        Ok(lent)
    }

    /// Ends the passthrough, when no client has an open file any more: only this process keeps the
    /// image locked.
    pub fn end_loan(&self) {
        let Some(lent) = self.loan().take() else { return };
        if let Node::Raw(raw) = &self.graph().top().node {
            raw.storage.unlock_plain(lent.as_fd());
        }
    }

    fn loan(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the kernel may be reading and writing the image itself.
    pub fn is_lent(&self) -> bool {
        self.is_lent.load(Ordering::Acquire)
    }

    /// The size of the disk, bytes. If it is lent, that is the length that its file has now, which
    /// becomes the size of the disk.
    ///
    /// Callers that decide something by the size call this first.
    ///
    /// Errors: those of fstat(2).
    pub async fn follow_length(&self, ring: &Ring) -> Result<Bytes, Errno> {
        if !self.is_lent() {
            return Ok(self.size());
        }
        let graph = self.graph();
        let Node::Raw(raw) = &graph.top().node else { return Ok(self.size()) };
        let storage = Arc::clone(&raw.storage);
        // Asked and stored under one lock, else an older answer could be stored after a newer one.
        let _alone = self.length_check.lock().await;
        // On a helper thread: a file system that does not answer must not stop the queue.
        let len = Bytes(ring.offload(move || storage.refresh_len()).await?);
        graph.top().size.store(len.0, Ordering::Release);
        self.set_size(len);
        Ok(len)
    }

    /// Moves the end of the file while the kernel writes to it, and takes the length that results.
    /// The caller holds the lock of changes and, to shorten it, has drained the disk.
    ///
    /// * `before`, `size`: the present and the wanted length, bytes.
    /// * `from`: start of the space that is reserved, bytes.
    ///
    /// Errors: EOPNOTSUPP where the file system has no way to lengthen a file beside other writers;
    /// those of the storage. The file may have become longer: cutting it again could meet what the
    /// kernel has appended.
    pub(crate) async fn move_lent_end(
        &self,
        ring: &Ring,
        raw: &Raw,
        (before, size): (Bytes, Bytes),
        (from, mode): (GuestOffset, Preallocation),
        progress: &Progress,
    ) -> Result<(), Errno> {
        let moved = if size < before {
            raw.storage.set_len(ring, size.0).await
        } else {
            raw.storage.extend(ring, from.0, size.0, mode, &|| progress.check()).await
        };
        let len = self.follow_length(ring).await;
        if let Ok(len) = len
            && len != before
        {
            self.watchers().notify(len);
        }
        moved.and(len.map(drop))
    }
}
