//! [`Qcow2`], an open image.
//!
//! Promises: `Send + Sync`; all queue threads share one.

use crate::units::Bytes;
use ringdisk_storage::Storage;

use super::Engine;
use crate::compressed::Decompressor;
use crate::concurrent::loads_in_flight::Flights;
use crate::concurrent::slices::{SliceCache, SliceIndex};
use crate::entry::{Lengths, Rules};
use crate::error::{Error, ErrorKind};
use crate::geometry::Geometry;
use crate::info::Info;
use crate::refcounts::Named;
use crate::snapshots::SnapshotChoice;
use crate::sync::{Arc, AtomicU64, Mutex};

/// How to open an image.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Open for writing. An image that is marked corrupt is refused (kind `Corrupt`); the reference
    /// counts of one that is marked dirty are built anew first.
    pub writable: bool,
    /// What discards do.
    pub discard: Discard,
    /// Discarded clusters keep their place in the image file, so that it does not fragment; their
    /// space is given back to the file system all the same. Version 3 only.
    pub discard_no_unref: bool,
    /// Reference counts are written at the end only, and the dirty bit is set meanwhile. `None`: as
    /// the image says. Version 3 only.
    pub lazy_refcounts: Option<bool>,
    /// Cap of the metadata cache in bytes; `None`: [`limits::METADATA_CACHE_BYTES`]
    /// (the whole image where that is less).
    ///
    /// [`limits::METADATA_CACHE_BYTES`]: crate::limits::METADATA_CACHE_BYTES
    pub metadata_cache_bytes: Option<Bytes>,
    /// Read the header and nothing else, since another process may be writing to the image:
    /// [`Qcow2::info`] names no snapshots and no bitmaps, and no place of the disk can be looked
    /// up. Not with `writable`.
    pub header_only: bool,
    /// Show the disk as this internal snapshot has it, with the size of that time. Not with
    /// `writable` or `header_only`. [`Qcow2::info`] then names no bitmaps, which are those of the
    /// disk as it is.
    pub snapshot: Option<SnapshotChoice>,
}

/// What a discard of the disk's user does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Discard {
    /// Nothing.
    Ignore,
    /// Space is given back, to the image and to its file system.
    #[default]
    Unmap,
}

/// An open qcow2 image. `Send + Sync`: shared by all queue threads in an `Arc`.
#[derive(Debug)]
pub struct Qcow2 {
    pub(crate) info: Info,
    pub(crate) file: Arc<Storage>,
    /// The external data file, once it is set.
    pub(crate) data_file: Option<Arc<Storage>>,
    pub(crate) geometry: Geometry,
    pub(crate) rules: Rules,
    /// The L1 table as far as the disk needs it, in the byte order of the machine.
    pub(crate) l1: Box<[AtomicU64]>,
    pub(crate) slices: SliceCache,
    /// Slices that are being loaded.
    pub(crate) loads: Flights<SliceIndex, ()>,
    pub(crate) decompressor: Decompressor,
    /// What writing needs; `None`: open for reading only.
    pub(crate) engine: Option<Box<Engine>>,
    /// Of an image that is open for reading only: what was known to be named when it was open for
    /// writing.
    pub(crate) named: Mutex<Named>,
    /// How it was opened.
    pub(crate) options: OpenOptions,
}

/// What the metadata cache did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// L2 slices that were loaded.
    pub loads: u64,
    /// L2 slices that were pushed out, because the cap was reached.
    pub evictions: u64,
    /// L2 slices that differ from the image file now.
    pub dirty: u64,
    /// Bytes that the cache may take.
    pub capacity_bytes: Bytes,
}

impl Qcow2 {
    /// What the header, its extensions and the directories say.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Size of the disk in bytes.
    pub fn virtual_size(&self) -> Bytes {
        self.geometry.virtual_size
    }

    /// Sets the file that holds the data of an image with an external data file. Until then every
    /// mapping that needs it is `EIO`.
    ///
    /// Errors: `InvalidRequest` when the image has no external data file.
    pub fn set_data_file(&mut self, data: Arc<Storage>) -> Result<(), Error> {
        if !self.info.external_data_file {
            return Err(Error::new(
                ErrorKind::InvalidRequest,
                self.file.name(),
                "the image keeps its data itself, so a data file cannot be given",
                "leave the data file out",
            ));
        }
        self.data_file = Some(data);
        Ok(())
    }

    /// The image file: metadata and compressed clusters.
    pub fn file(&self) -> &Arc<Storage> {
        &self.file
    }

    /// The file that the offsets of data extents belong to: the image file or the external data
    /// file.
    pub fn data_storage(&self) -> &Arc<Storage> {
        self.data_file.as_ref().unwrap_or(&self.file)
    }

    /// Counters of the metadata cache. Takes a lock: not for the data path.
    pub fn cache_counters(&self) -> CacheCounters {
        let counters = self.slices.counters();
        CacheCounters {
            loads: counters.loads,
            evictions: counters.evictions,
            dirty: counters.dirty,
            capacity_bytes: self.slices.capacity_bytes(),
        }
    }

    /// Lengths of the files right now.
    pub(crate) fn lengths(&self) -> Lengths {
        let file = Bytes(self.file.len());
        let data = match &self.data_file {
            Some(data) => Bytes(data.len()),
            // Not set yet: nothing in it can be read.
            None if self.info.external_data_file => Bytes::ZERO,
            None => file,
        };
        Lengths { file, data }
    }
}
