//! Freezes the disk's layout while the kernel reads and writes the image directly (`--accel`, the
//! vhost-blk module).
//!
//! Promises: only a disk whose bytes are those of one file is held. While it is held
//! ([`Disk::hold_plain`]) its graph does not change: the holder counts as a request in flight. A
//! change reports before it waits that it is coming, and afterwards that it is over
//! ([`Disk::watch_changes`]).

use ringdisk_qcow2::Bytes;
use std::os::fd::OwnedFd;

use ringdisk_storage::{Kind, Limits};

use crate::graph::Graph;
use crate::layer::{Node, Raw};
use crate::options::{DetectZeroes, Discard};
use crate::watch::Change;
use crate::{Cache, Disk, Error, ErrorKind};

/// A disk that is the bytes of one file, for direct access.
#[derive(Debug)]
pub struct Plain {
    /// A duplicate of this process's descriptor, with its locks.
    pub fd: OwnedFd,
    /// Bytes.
    pub size: Bytes,
    /// It is a block device, not a regular file.
    pub is_block_device: bool,
    /// Writes are to be refused.
    pub read_only: bool,
    /// Each write is to be durable before it is answered.
    pub write_through: bool,
    /// Alignment that direct I/O wants of memory, bytes, a power of two.
    pub memory_align: u32,
}

impl Disk {
    /// Keeps changes of the graph waiting until the future of `with` is done, which should
    /// therefore end soon after a change was reported. For any ring thread.
    ///
    /// * `with`: gets the file of the disk.
    ///
    /// Errors: `Unsupported` with the reason when the disk is more than the bytes of a file, or
    /// something looks at them on the way; `Busy` while a change is under way (try again when it is
    /// over) and when the disk is not active; `Io` when it is broken; those of dup(2).
    pub async fn hold_plain<T>(&self, with: impl AsyncFnOnce(Plain) -> T) -> Result<T, Error> {
        let Some(pass) = self.gateway().try_enter() else {
            return Err(Error::new(ErrorKind::Busy, "a change of the disk is under way"));
        };
        pass.check().map_err(|errno| Error::os("the disk cannot be used", errno))?;
        let plain = self.plain(&pass)?;
        let result = with(plain).await;
        drop(pass);
        Ok(result)
    }

    /// Whether [`Disk::hold_plain`] would be refused at this moment. Gives the limits of the file
    /// and its kind.
    ///
    /// Errors: as there.
    pub fn check_plain(&self) -> Result<(Limits, Kind), Error> {
        let graph = self.graph();
        let storage = &self.plain_raw(&graph)?.storage;
        Ok((storage.limits(), storage.kind()))
    }

    /// Calls `callback` when a change of the graph is about to wait for all requests and holders,
    /// and when it is over. On the thread of the change; it must not block. Only the first call
    /// counts.
    pub fn watch_changes(&self, callback: impl Fn(Change) + Send + Sync + 'static) {
        self.gateway().watch(Box::new(callback));
    }

    /// The file whose bytes the disk is.
    fn plain_raw<'a>(&self, graph: &'a Graph) -> Result<&'a Raw, Error> {
        let refuse = |why: &str| Err(Error::new(ErrorKind::Unsupported, why.to_owned()));
        let policy = self.policy();
        let Node::Raw(raw) = &graph.top().node else {
            let is_above_raw =
                graph.layers.len() == 2 && matches!(graph.layers[1].node, Node::Raw(_));
            return refuse(if is_above_raw {
                "an overlay is above the raw image (`ringdisk ctl TARGET commit` brings it back)"
            } else {
                "the image is not raw"
            });
        };
        if graph.layers.len() > 1 {
            return refuse("the image has a backing file");
        }
        if graph.window.is_part() || raw.offset.0 != 0 || raw.fixed_size {
            return refuse("the disk is a window in the image (--offset, --size, --partition)");
        }
        if self.cache() == Cache::Unsafe {
            return refuse("flushes are ignored (--cache unsafe)");
        }
        if !self.cache().direct() {
            return refuse(
                "the image is used through the page cache (not with --cache none, on a file system \
                 with direct I/O)",
            );
        }
        if graph.guard.is_some() {
            return refuse(
                "nobody said that the image is raw, or its file system keeps no note of that, so \
                 its first sector is protected (serve it with --format raw)",
            );
        }
        if policy.detect_zeroes != DetectZeroes::Off {
            return refuse("zeroes are looked for in what is written (--detect-zeroes)");
        }
        if policy.discard == Discard::Ignore && !self.is_read_only() {
            return refuse("discards are ignored (--discard ignore)");
        }
        if graph.tracker.is_some() {
            return refuse("a commit, a stream or a mirror is under way");
        }
        if graph.running_fleece().is_some() {
            return refuse("a checkpoint is running");
        }
        if !raw.storage.limits().direct {
            return refuse("the file system has no direct I/O");
        }
        Ok(raw)
    }

    fn plain(&self, graph: &Graph) -> Result<Plain, Error> {
        let raw = self.plain_raw(graph)?;
        let limits = raw.storage.limits();
        let fd = raw
            .storage
            .duplicate()
            .map_err(|errno| Error::os("cannot duplicate the image's descriptor", errno))?;
        let Some(fd) = fd else {
            return Err(Error::new(ErrorKind::Unsupported, "the image is no file"));
        };
        Ok(Plain {
            fd,
            size: graph.size(),
            is_block_device: raw.storage.kind() == Kind::BlockDevice,
            read_only: self.is_read_only(),
            write_through: self.cache().sync(),
            memory_align: limits.memory_align,
        })
    }
}
