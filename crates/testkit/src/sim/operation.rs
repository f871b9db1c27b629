//! Operations of a simulated storage, and the changes that they make.
//!
//! Promises: plain values, with all that an operation needs to take effect later.

use std::sync::Arc;

use ringdisk_storage::{Allocation, Preallocation};

use super::image::Image;

/// Kinds of operations, after the methods of `Storage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names are those of the methods.
pub enum OpKind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    SetLen,
    Preallocate,
    Allocation,
}

/// An operation that began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its place in the log, from 0.
    pub number: u64,
    /// What it is.
    pub kind: OpKind,
    /// Its offset in bytes; the new length for `SetLen`; 0 for `Flush`.
    pub offset: u64,
    /// Its length in bytes; 0 for `SetLen` and `Flush`.
    pub len: u64,
}

/// An operation that waits for its release.
pub type Held = Record;

/// An operation with all that it needs to take effect later.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    Read {
        offset: u64,
        len: u64,
    },
    Write {
        offset: u64,
        bytes: Arc<[u8]>,
    },
    /// Covers the changes made before it began.
    Flush {
        before: u64,
    },
    Zero {
        offset: u64,
        len: u64,
        unmap: bool,
        grow: bool,
        /// Only space is to be given back; a block device need not zero anything then.
        discards: bool,
    },
    SetLen(u64),
    Preallocate {
        offset: u64,
        len: u64,
        mode: Preallocation,
    },
    Allocation {
        offset: u64,
        len: u64,
    },
}

/// What an operation brings.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Done,
    /// What a read found.
    Bytes(Vec<u8>),
    Count(usize),
    Run(Allocation, u64),
}

/// A change that took effect and may be lost.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Write { offset: u64, bytes: Arc<[u8]> },
    Zero { offset: u64, len: u64, unmap: bool },
    Reserve { offset: u64, len: u64 },
    SetLen(u64),
}

impl Change {
    /// First byte and length of what it touches; a change of the length: (new length, 0).
    pub(crate) fn range(&self) -> (u64, u64) {
        match *self {
            Change::Write { offset, ref bytes } => (offset, bytes.len() as u64),
            Change::Zero { offset, len, .. } | Change::Reserve { offset, len } => (offset, len),
            Change::SetLen(len) => (len, 0),
        }
    }

    pub(crate) fn apply(&self, image: &mut Image) {
        match self {
            Change::Write { offset, bytes } => image.write(*offset, bytes),
            Change::Zero { offset, len, unmap } => image.zero(*offset, *len, *unmap),
            Change::Reserve { offset, len } => image.reserve(*offset, *len),
            Change::SetLen(len) => image.set_len(*len),
        }
    }
}
