//! The words of this crate's interface: what storage is, what suits it, how it is locked.
//!
//! Promises: plain values without behaviour of their own; every other module may use them.

/// What other programs may do with the image meanwhile (QEMU's byte locks; advisory). See the
/// module `lock`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lock {
    /// [`Lock::Exclusive`] when open for writing, otherwise [`Lock::Shared`].
    #[default]
    Auto,
    /// One writer: others may neither write nor resize. Readers that insist (QEMU: force-share)
    /// may read.
    Exclusive,
    /// Any number of readers; no program may write or resize.
    Shared,
    /// Read although another program may be writing: the content can change under the reader.
    /// Refused only where the other program does not even share reading. Needs `read_only`.
    ForceShare,
    /// Open for later use: other programs may do anything with the image until
    /// [`crate::Storage::set_lock`] takes another lock. QEMU holds this lock on the images of a
    /// guest that is to be migrated to it.
    Inactive,
    /// No lock is taken, and those of other programs are ignored.
    None,
}

/// The kind of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    Regular,
    /// A block device.
    BlockDevice,
    /// A [`crate::CustomStorage`].
    Custom,
}

/// What requests suit the storage best. Any request works; one that does not suit is copied
/// through another buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Buffers start at a multiple of this many bytes (power of two; 1 when buffered).
    pub memory_align: u32,
    /// Offsets and lengths are multiples of this many bytes (power of two; 1 when buffered).
    pub offset_align: u32,
    /// Whether O_DIRECT is in effect.
    pub direct: bool,
    /// Bytes a transfer should have, and be a multiple of, to be efficient.
    pub optimal_transfer: u32,
    /// Offsets and lengths of a discard count in units of this many bytes; parts of a unit at
    /// either end may be left alone.
    pub discard_align: u32,
}

impl Limits {
    /// Limits of storage that takes any request as it is.
    pub const fn byte_granular() -> Limits {
        Limits {
            memory_align: 1,
            offset_align: 1,
            direct: false,
            optimal_transfer: 4096,
            discard_align: 1,
        }
    }

    /// Whether a transfer needs no copy.
    pub fn suits(&self, offset: u64, len: usize, address: usize) -> bool {
        // Both are powers of two, so one mask covers offset and length.
        (offset | len as u64) & (u64::from(self.offset_align) - 1) == 0
            && address & (self.memory_align as usize - 1) == 0
    }
}

/// What [`crate::Storage::preallocate`] does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Only the length grows.
    #[default]
    Off,
    /// The file system reserves space (fallocate).
    Falloc,
    /// Zeroes are written, so that later writes find everything in place.
    Full,
}

/// Whether bytes are backed by storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Possibly anything but zeroes.
    Data,
    /// A hole: reads as zeroes.
    Hole,
}

/// How bytes are made zeroes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Zeroing {
    /// The space may be given back.
    pub(crate) may_unmap: bool,
    /// Write zeroes when there is no quick way; otherwise the error is `EOPNOTSUPP` and nothing has
    /// changed. (Parts of blocks at either end are always written, once the middle is zeroed.)
    pub(crate) fallback: bool,
}
