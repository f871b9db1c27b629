//! The image file in the hands of the kernel (FUSE passthrough).
//!
//! Promises: only a file that is the disk, byte for byte, is lent; while it is, nothing is put above it. What the kernel writes is
//! not seen here, so a lent disk follows the length of its file.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringdisk_ring::Ring;
use ringdisk_storage::Kind;

use crate::layer::Node;
use crate::options::DetectZeroes;
use crate::{Cache, Disk, Error, ErrorKind};

impl Disk {
    /// A descriptor through which the kernel may read and write the disk without us. From now on no overlay is put above the image.
    ///
    /// Errors: `Unsupported` with the reason when the file is not the disk as it is, or an option asks for more than the kernel does;
    /// those of opening the file once more.
    pub fn lend(&self) -> Result<OwnedFd, Error> {
        let refuse = |why: &str| Err(Error::new(ErrorKind::Unsupported, why.to_owned()));
        let graph = self.graph();
        let Node::Raw(raw) = &graph.top().node else {
            return refuse("the image is not raw");
        };
        let policy = self.policy();
        if graph.window.is_part() || raw.offset != 0 || raw.fixed_size {
            return refuse("the disk is a window in the image");
        }
        if raw.storage.kind() != Kind::Regular {
            return refuse("the image is not a regular file");
        }
        if graph.guard.is_some() {
            return refuse("the first sector is protected, since the format was not given");
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
        self.is_lent.store(true, Ordering::Release);
        match lent {
            Some(fd) => Ok(fd),
            None => refuse("the image is not a regular file"),
        }
    }

    /// Whether the kernel may be reading and writing the image itself.
    pub fn is_lent(&self) -> bool {
        self.is_lent.load(Ordering::Acquire)
    }

    /// Makes the disk as long as its file has become, if it is lent. Does nothing else.
    ///
    /// Errors: as [`Disk::grow`].
    pub async fn follow_length(&self, ring: &Ring) -> Result<(), rustix::io::Errno> {
        if !self.is_lent() {
            return Ok(());
        }
        let graph = self.graph();
        let Node::Raw(raw) = &graph.top().node else { return Ok(()) };
        let storage = Arc::clone(&raw.storage);
        // Asking a file system that does not answer must not stop the queue.
        let len = ring.offload(move || storage.refresh_len()).await?;
        if len > self.size() { self.grow(ring, len).await } else { Ok(()) }
    }
}
