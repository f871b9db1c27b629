//! What is known about a range of a disk, in the terms of `qemu-img map`.

/// A run of bytes with one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatus {
    /// Length of the run, bytes; 0 only at and past the end of the disk.
    pub len: u64,
    /// Bytes are stored; otherwise nothing has to be read to know them.
    pub data: bool,
    /// The run is known to read as zeroes.
    pub zero: bool,
    /// Some layer of the chain has the run, be it as zeroes.
    pub present: bool,
    /// The layer that answered: 0 is the top image.
    pub depth: u32,
    /// Where the run begins in `file`, bytes, when it is there as it is.
    pub offset: Option<u64>,
    /// The run is stored compressed.
    pub compressed: bool,
    /// The layer whose file (the data file, where there is one) `offset` belongs to.
    pub file: Option<u32>,
}
