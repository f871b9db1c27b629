//! Protects the first sector of a raw image whose format the user did not state, or whose file can
//! keep no note of the format ([`crate::format_note`]).
//!
//! Promises: if the format was probed, or only the image above states that this one is raw, neither
//! clients nor a commit can make the image look like another format. So a program that probes the
//! image later finds raw again, and no guest turns its disk into an image that names files of the
//! host. Requests past the first sector never come here; requests that touch it run one after the
//! other.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use ringdisk_qcow2::{Bytes, HostOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_storage::Storage;

use crate::name::printable_path;
use crate::probe::{PROBE_LEN, Probed, probe};
use crate::task_mutex::{TaskGuard, TaskMutex};

/// Alignment of a buffer for the first sector of an image, bytes: a page suits every device.
pub const SECTOR_ALIGN: usize = 4096;

/// Guard of one image.
#[derive(Debug)]
pub(crate) struct SectorGuard {
    mutex: TaskMutex,
    name: PathBuf,
    /// The first refused write was logged.
    is_logged: AtomicBool,
}

impl SectorGuard {
    pub(crate) fn new(name: PathBuf) -> SectorGuard {
        SectorGuard { mutex: TaskMutex::default(), name, is_logged: AtomicBool::new(false) }
    }

    /// Why writes are refused, and what the user can do.
    pub(crate) fn reason(&self) -> String {
        format!(
            "nobody said that '{}' is raw, or its file system keeps no note of it (an extended \
             attribute), so writes to its first sector that would make it look like another format \
             are refused; where such attributes can be kept, `--format raw` where it is served, \
             and `--base-format raw` where it is the base of `ringdisk commit`, allow them",
            printable_path(&self.name)
        )
    }

    /// Whether a request touches the protected bytes.
    ///
    /// * `offset`: where it begins in the file, of which the image may be a part.
    pub(crate) fn covers(offset: HostOffset) -> bool {
        offset.0 < PROBE_LEN as u64
    }

    /// Admits one write to the first sector of the file, if the sector will still look raw
    /// afterwards, or does not look raw now. The write holds the guard until it has ended.
    ///
    /// * `offset`: of the write in the file, of which the image may be a part; inside the first
    ///   sector.
    /// * `len`: bytes of the write.
    /// * `data`: the bytes to write, in memory that no client can change meanwhile; `None` for
    ///   zeroes.
    ///
    /// Errors: EPERM; those of the storage.
    pub(crate) async fn admit(
        &self,
        ring: &Ring,
        storage: &Storage,
        offset: HostOffset,
        len: Bytes,
        data: Option<&IoBuf>,
    ) -> Result<TaskGuard<'_>, Errno> {
        let guard = self.mutex.lock().await;
        let sector = IoBuf::new(PROBE_LEN, SECTOR_ALIGN);
        let start = usize::try_from(offset.0).unwrap_or(PROBE_LEN).min(PROBE_LEN);
        let room = PROBE_LEN - start;
        let count = usize::try_from(len).map_or(room, |len| len.min(room));
        if count < PROBE_LEN {
            read_sector(ring, storage, &sector).await?;
        }
        let part = sector.slice(start..start + count);
        match data {
            Some(data) => part.copy_from_buf(0, &data.slice(0..count)),
            None => part.fill(0),
        }
        if looks_raw(&sector) {
            return Ok(guard);
        }
        // An image that already begins like another format, and was opened as raw all the same, may
        // keep that beginning.
        sector.fill(0);
        read_sector(ring, storage, &sector).await?;
        if !looks_raw(&sector) {
            return Ok(guard);
        }
        if !self.is_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!("{}", self.reason());
        }
        Err(Errno::PERM)
    }
}

/// Reads the first sector of the file into a buffer of zeroes: bytes past the end of the file stay
/// zero. Programs that probe a format read this sector, wherever the image begins in the file.
async fn read_sector(ring: &Ring, storage: &Storage, sector: &IoBuf) -> Result<(), Errno> {
    storage.read(ring, 0, sector).await?;
    Ok(())
}

fn looks_raw(sector: &IoBuf) -> bool {
    let mut bytes = [0; PROBE_LEN];
    sector.copy_to_slice(0, &mut bytes);
    probe(&bytes) == Probed::Raw
}
