//! Extents, the answer of a look-up, and how neighbouring pieces grow into one.
//!
//! Promises: pure; no allocation.

use crate::compressed::Compressed;
use crate::units::{Bytes, HostOffset};

/// A range of the disk whose bytes are found in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, at least 1 and at most what was asked for.
    pub len: Bytes,
    /// Where the bytes are.
    pub kind: ExtentKind,
}

/// Where the bytes of an extent are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// In [`data_storage`](crate::Qcow2::data_storage), all of them before its end.
    Data {
        /// Where it begins there.
        offset: HostOffset,
    },
    /// Nowhere: they read as zeroes, whatever the backing file says.
    Zero {
        /// Where the space that is reserved for them begins in
        /// [`data_storage`](crate::Qcow2::data_storage).
        offset: Option<HostOffset>,
    },
    /// In one compressed cluster. The extent never crosses that cluster.
    Compressed(Compressed),
    /// In the backing file, or zeroes where there is none or it is shorter.
    Unallocated,
}

/// An extent that grows while pieces follow on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    kind: Option<ExtentKind>,
    len: Bytes,
}

impl Run {
    pub(crate) fn new() -> Run {
        Run { kind: None, len: Bytes::ZERO }
    }

    /// Bytes so far.
    pub(crate) fn len(&self) -> Bytes {
        self.len
    }

    /// Adds `len` bytes of `kind`. False: they do not belong to the same extent, nothing changed.
    pub(crate) fn push(&mut self, kind: ExtentKind, len: Bytes) -> bool {
        let Some(first) = self.kind else {
            *self = Run { kind: Some(kind), len };
            return true;
        };
        let follows = match (first, kind) {
            (ExtentKind::Data { offset: a }, ExtentKind::Data { offset: b })
            | (ExtentKind::Zero { offset: Some(a) }, ExtentKind::Zero { offset: Some(b) }) => {
                a.checked_add(self.len) == Some(b)
            }
            (ExtentKind::Zero { offset: None }, ExtentKind::Zero { offset: None })
            | (ExtentKind::Unallocated, ExtentKind::Unallocated) => true,
            _ => false,
        };
        if follows {
            self.len += len;
        }
        follows
    }

    /// The extent; `None` while nothing was added.
    pub(crate) fn extent(&self) -> Option<Extent> {
        self.kind.map(|kind| Extent { len: self.len, kind })
    }
}
