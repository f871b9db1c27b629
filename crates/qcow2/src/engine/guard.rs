//! Keeps data off metadata: checks L2 entries before data is written where they point, and before
//! clusters are freed because of them.
//!
//! Promises: no write of data lands on a cluster that holds metadata at the time of the check
//! (header, tables, refcount blocks, what snapshots and bitmaps have), and no entry frees such a
//! cluster; the request that tries gets `EIO`, and the image is marked corrupt. A damaged entry
//! stops requests at its own cluster; its neighbours are served.
//!
//! For writes in place the check is one load ([`Marks`](crate::refcounts::Marks)); what that cannot
//! rule out, and everything else, is checked here under the lock of the reference counts.

use rustix::io::Errno;

use ringdisk_ring::Ring;

use super::Engine;
use super::Qcow2;
use super::action::Words;
use crate::entry::{COMPRESSED, COPIED};
use crate::sync::lock;
use crate::units::{Bytes, GuestOffset, HostCluster};

impl Engine {
    /// Whether a cluster may be metadata, so that a write there has to be checked. No lock.
    #[inline]
    pub(super) fn may_be_metadata(&self, cluster: HostCluster) -> bool {
        self.marks.may_be(cluster)
    }
}

impl Qcow2 {
    /// Checks an entry of which a cluster is going to be used or freed. No lock.
    ///
    /// Errors: `EIO` for one that cannot be right, or that names what lies past the end of the
    /// file: the file must not grow to wherever a damaged entry points, and nothing is counted
    /// there that could be freed. (Space of an external data file that reads as zeroes may lie past
    /// its end.)
    ///
    /// * `guest`: any offset of the disk inside the cluster.
    #[inline]
    pub(super) fn check_entry(&self, words: Words, guest: GuestOffset) -> Result<(), Errno> {
        self.rules.check_place(words.entry, guest)?;
        self.rules.check_words(words)?;
        let host = match words.entry & COMPRESSED {
            0 => self.rules.host(words),
            _ => Some(self.rules.compressed_place(words.entry).0),
        };
        let has_data = || !self.rules.is_zero(words) && (!self.rules.extended || words.has_data());
        match host {
            Some(host)
                if host.0 >= self.data_storage().len() && (!self.rules.external || has_data()) =>
            {
                Err(Errno::IO)
            }
            _ => Ok(()),
        }
    }

    /// How many of `entries`, from the first on, may be used and freed; at least one.
    ///
    /// * `guest`: any offset of the disk inside the first cluster.
    ///
    /// Errors: `EIO` when that is none: the first one cannot be right, or names metadata (the image
    /// is marked corrupt then).
    pub(super) async fn leading_sound(
        &self,
        ring: &Ring,
        guest: GuestOffset,
        entries: &[Words],
    ) -> Result<usize, Errno> {
        for (index, words) in entries.iter().enumerate() {
            let at = guest + Bytes::of_clusters(index as u64, self.geometry.cluster_bits);
            let refused = match self.check_entry(*words, at) {
                Err(errno) => Some(errno),
                Ok(()) => match self.metadata_of(*words)? {
                    None => None,
                    // Found when the request gets there.
                    Some(_) if index > 0 => Some(Errno::IO),
                    Some(cluster) => {
                        let host = cluster << self.geometry.cluster_bits;
                        let reason = format!(
                            "an L2 entry names the cluster at {host:#x}, which is metadata"
                        );
                        Some(self.mark_corrupt(ring, &reason).await)
                    }
                },
            };
            match refused {
                Some(errno) if index == 0 => return Err(errno),
                Some(_) => return Ok(index),
                None => {}
            }
        }
        Ok(entries.len())
    }

    /// The first cluster of metadata that an entry refers to.
    fn metadata_of(&self, words: Words) -> Result<Option<HostCluster>, Errno> {
        let engine = self.engine()?;
        let Some(place) = self.rules.reference(words) else { return Ok(None) };
        if !engine.marks.may_have(place.start, place.count) {
            return Ok(None);
        }
        Ok(lock(&engine.refcounts).first_metadata(place.start, place.count))
    }

    /// Looks at the entries of a slice that was loaded. From now on no cluster that they name is
    /// free before it was freed. Where one calls metadata its data, which a write would overwrite,
    /// the image is marked corrupt.
    ///
    /// * `words`: the slice, in the byte order of the machine.
    pub(crate) async fn check_loaded(&self, ring: &Ring, words: &[u64]) {
        let Ok(engine) = self.engine() else { return };
        if self.info.external_data_file {
            return;
        }
        let step = self.geometry.entry_words();
        let mut runs: Vec<(HostCluster, u64)> = Vec::new();
        let mut overlap = None;
        for entry in words.iter().step_by(step).copied() {
            let words = Words { entry, bitmap: 0 };
            let Some(place) = self.rules.reference(words) else { continue };
            if entry & (COPIED | COMPRESSED) == COPIED
                && overlap.is_none()
                && engine.marks.may_be(place.start)
            {
                let found = lock(&engine.refcounts).is_metadata(place.start);
                overlap = found.then_some(place.start);
            }
            match runs.last_mut() {
                Some((start, count)) if *start + *count == place.start => *count += place.count,
                _ => runs.push((place.start, place.count)),
            }
        }
        {
            let mut space = lock(&engine.refcounts);
            runs.iter().for_each(|(start, count)| space.note_named(*start, *count));
        }
        if let Some(cluster) = overlap {
            let host = cluster << self.geometry.cluster_bits;
            let reason = format!("an L2 entry names the cluster at {host:#x}, which is metadata");
            let _ = self.mark_corrupt(ring, &reason).await;
        }
    }
}
