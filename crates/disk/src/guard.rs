//! Protects the first sector of a raw image that nobody has called raw, or that can keep no note of
//! it ([`crate::note`]).
//!
//! Promises: an image whose format was found by looking at it, or is raw only by the word of an
//! image above it, cannot be made to look like another format through us: neither by clients nor by
//! a commit. So whoever opens it next without saying its format finds raw again, and no guest turns
//! its disk into an image that names files of the host. Requests past the first sector never come
//! here; those that touch it run one after the other.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::gate::{Gate, Pass};
use crate::layer::Raw;
use crate::name::printable_path;
use crate::probe::{PROBE_LEN, Probed, probe};

/// Alignment of the buffer for the sector: a page suits every device.
pub(crate) const SECTOR_ALIGN: usize = 4096;

/// Guard of one image.
#[derive(Debug)]
pub(crate) struct SectorGuard {
    gate: Gate,
    name: PathBuf,
    said: AtomicBool,
}

impl SectorGuard {
    pub(crate) fn new(name: PathBuf) -> SectorGuard {
        SectorGuard { gate: Gate::default(), name, said: AtomicBool::new(false) }
    }

    /// Why writes are refused, and what the user can do.
    pub(crate) fn reason(&self) -> String {
        format!(
            "nobody said that '{}' is raw, or its file system keeps no note of it (an extended attribute), so writes to its first sector \
             that would make it look like another format are refused; where such attributes can be kept, `--format raw` where it is served, \
             and `--base-format raw` where it is the base of `ringdisk commit`, allow them",
            printable_path(&self.name)
        )
    }

    /// Whether a request touches the protected bytes.
    ///
    /// * `offset`: where it begins in the file, of which the image may be a part.
    pub(crate) fn covers(offset: u64) -> bool {
        offset < PROBE_LEN as u64
    }

    /// Lets a write to the first sector of the file in, alone, if the sector still looks raw
    /// afterwards, or did not before.
    ///
    /// * `offset`: of the write in the file, of which the image may be a part; inside the first
    ///   sector.
    /// * `len`: bytes of the write.
    /// * `data`: what is written, in memory that nobody else can change before it is; `None` for
    ///   zeroes.
    ///
    /// Errors: EPERM; those of the storage.
    pub(crate) async fn enter(
        &self,
        ring: &Ring,
        raw: &Raw,
        offset: u64,
        len: u64,
        data: Option<&IoBuf>,
    ) -> Result<Pass<'_>, Errno> {
        let pass = self.gate.enter().await;
        let sector = IoBuf::new(PROBE_LEN, SECTOR_ALIGN);
        let start = usize::try_from(offset).unwrap_or(PROBE_LEN).min(PROBE_LEN);
        let room = PROBE_LEN - start;
        let count = usize::try_from(len).map_or(room, |len| len.min(room));
        if count < PROBE_LEN {
            read_sector(ring, raw, &sector).await?;
        }
        let part = sector.slice(start..start + count);
        match data {
            Some(data) => part.copy_from_buf(0, &data.slice(0..count)),
            None => part.fill(0),
        }
        if looks_raw(&sector) {
            return Ok(pass);
        }
        // An image that begins like another format already, and was named as raw all the same, may
        // go on to do so.
        sector.fill(0);
        read_sector(ring, raw, &sector).await?;
        if !looks_raw(&sector) {
            return Ok(pass);
        }
        if !self.said.swap(true, Ordering::Relaxed) {
            tracing::warn!("{}", self.reason());
        }
        Err(Errno::PERM)
    }
}

/// Reads the first sector of the file into zeroes: bytes that the file does not have are zeroes.
/// Who guesses a format looks there, wherever the image begins in the file.
async fn read_sector(ring: &Ring, raw: &Raw, sector: &IoBuf) -> Result<(), Errno> {
    raw.storage.read(ring, 0, sector).await?;
    Ok(())
}

fn looks_raw(sector: &IoBuf) -> bool {
    let mut bytes = [0; PROBE_LEN];
    sector.copy_to_slice(0, &mut bytes);
    probe(&bytes) == Probed::Raw
}
