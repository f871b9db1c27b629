//! Protects the first sector of a probed raw image.
//!
//! Promises: an image whose raw format was found by looking at it cannot be made to look like
//! another format through the export, so the next open finds raw again and no guest can turn its
//! disk into an image that names files of the host. Requests past the first sector never come
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
            "the format of '{}' was not given and looked raw, so writes to its first sector that \
             would make it look like another format are refused; give `--format raw` to allow them",
            printable_path(&self.name)
        )
    }

    /// Whether a request touches the protected bytes.
    pub(crate) fn covers(offset: u64) -> bool {
        offset < PROBE_LEN as u64
    }

    /// Lets a write to the first sector in, alone, if the sector still looks raw afterwards.
    ///
    /// * `offset`: of the write in the image; inside the first sector.
    /// * `len`: bytes of the write.
    /// * `data`: what is written, in memory that nobody else can change before it is; `None` for zeroes.
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
            // What the write leaves is as it is; bytes that are not there are zeroes.
            raw.storage.read(ring, raw.offset, &sector).await?;
        }
        let part = sector.slice(start..start + count);
        match data {
            Some(data) => part.copy_from_buf(0, &data.slice(0..count)),
            None => part.fill(0),
        }
        let mut bytes = [0; PROBE_LEN];
        sector.copy_to_slice(0, &mut bytes);
        if probe(&bytes) == Probed::Raw {
            return Ok(pass);
        }
        if !self.said.swap(true, Ordering::Relaxed) {
            tracing::warn!("{}", self.reason());
        }
        Err(Errno::PERM)
    }
}
