//! What is known about the frozen state of a range, and reads of the fleecing file.
//!
//! A reader of a range that is not kept reads the disk, then asks again ([`Fleece::untouched`]):
//! bytes that are still not kept cannot have been overwritten before the answer, because a writer
//! marks them first, and changes them afterwards. Any other bytes it reads once more.
//!
//! Promises: bytes of another moment than the instant are never taken for frozen ones.

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};

use super::{Fleece, Known};

/// Most granules that are looked at in one step.
const RUN_MAX: u64 = 1 << 16;

impl Fleece {
    /// Refuses readers. Errors: EIO once it is over.
    pub(crate) fn check(&self) -> Result<(), Errno> {
        if self.is_running() { Ok(()) } else { Err(Errno::IO) }
    }

    /// What is known about the start of a range, and for how many bytes.
    ///
    /// * `len`: at least 1; the range lies inside the frozen disk.
    pub(crate) fn known(&self, offset: GuestOffset, len: Bytes) -> (Known, Bytes) {
        let mut granules = self.granules(offset, len);
        granules.end = granules.end.min(granules.start.saturating_add(RUN_MAX));
        let first = Known::from(self.states.get(granules.start));
        let count = self.states.alike(granules.clone(), first);
        let (start, bytes) = self.bytes(&(granules.start..granules.start + count));
        let before = offset.saturating_sub(start);
        (first, bytes.saturating_sub(before).min(len))
    }

    /// How many bytes of a range, which was read from the disk, are frozen ones.
    ///
    /// Errors: EIO once it is over: what was read may be of any moment.
    pub(crate) fn untouched(&self, offset: GuestOffset, len: Bytes) -> Result<Bytes, Errno> {
        let (known, count) = self.known(offset, len);
        // The look at the states comes first: a writer goes on without a copy only after the end.
        self.check()?;
        Ok(if known == Known::OnDisk { count } else { Bytes::ZERO })
    }

    /// Reads a range that is in the file, or on its way to it. Errors: those of the file; EIO once
    /// it is over.
    pub(crate) async fn read_file(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        buf: &IoBuf,
    ) -> Result<(), Errno> {
        self.in_file(offset, Bytes::of(buf.len())).await;
        let file = self.file()?;
        let done = file.read(ring, offset.0, buf).await?;
        self.check()?;
        // It was written whole, so it has been cut from outside.
        if done < buf.len() { Err(Errno::IO) } else { Ok(()) }
    }
}
