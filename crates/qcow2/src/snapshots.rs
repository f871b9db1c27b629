//! The table of internal snapshots: parsed and listed.
//!
//! Promises: memory is bounded by [`limits`](crate::limits). Source: qcow2 specification,
//! "Snapshots".

use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use crate::concurrent::region::Region;
use crate::error::Error;
use crate::extensions::{u16_at, u32_at, u64_at};
use crate::header::Header;
use crate::info::Snapshot;
use crate::limits::{
    SNAPSHOT_ENTRY_BYTES_MIN as ENTRY_BYTES_MIN, SNAPSHOT_EXTRA_BYTES_MAX, SNAPSHOT_TABLE_BYTES_MAX,
};
use crate::table::TableReader;
use crate::units::HostOffset;

/// Reads the table. The region is where it lies, rounded up to clusters.
///
/// Errors: `Corrupt` when an entry does not fit into the file or the limits; `Io`.
pub(crate) async fn read(
    ring: &Ring,
    storage: &Storage,
    header: &Header,
) -> Result<(Vec<Snapshot>, Region), Error> {
    if header.snapshots == 0 {
        return Ok((Vec::new(), Region::default()));
    }
    let start = header.snapshots_offset;
    let what = "the snapshot table";
    let mut table = TableReader::new(ring, storage, what, start, SNAPSHOT_TABLE_BYTES_MAX);
    let mut snapshots = Vec::new();
    for _ in 0..header.snapshots {
        snapshots.push(entry(&mut table, storage.name()).await?);
    }
    // Below 2^63: inside the file.
    let end = table.position().next_multiple_of(header.geometry.cluster_size());
    Ok((snapshots, Region { start, end }))
}

async fn entry(table: &mut TableReader<'_>, file: &str) -> Result<Snapshot, Error> {
    table.align().await?;
    let head: [u8; ENTRY_BYTES_MIN] = {
        let bytes = table.take(ENTRY_BYTES_MIN).await?;
        bytes.try_into().unwrap_or([0; ENTRY_BYTES_MIN])
    };
    let id_len = usize::from(u16_at(&head, 12));
    let name_len = usize::from(u16_at(&head, 14));
    let extra_len = u32_at(&head, 36);
    if extra_len > SNAPSHOT_EXTRA_BYTES_MAX {
        return Err(Error::corrupt(
            file,
            format!(
                "a snapshot has {extra_len} bytes of extra data; the limit is \
                 {SNAPSHOT_EXTRA_BYTES_MAX}"
            ),
        ));
    }
    let extra_len = extra_len as usize;
    let body_len = extra_len + id_len + name_len;
    let body = table.take(body_len).await?;
    let (extra, names) = body.split_at(extra_len);
    let (id, name) = names.split_at(id_len);
    let vm_state = u64::from(u32_at(&head, 32));
    Ok(Snapshot {
        id: String::from_utf8_lossy(id).into_owned(),
        name: String::from_utf8_lossy(name).into_owned(),
        date_seconds: u32_at(&head, 16),
        date_nanoseconds: u32_at(&head, 20),
        vm_clock_nanoseconds: u64_at(&head, 24),
        vm_state_bytes: if extra.len() >= 8 { u64_at(extra, 0) } else { vm_state },
        disk_bytes: (extra.len() >= 16).then(|| u64_at(extra, 8)),
        // All ones: not recorded.
        instruction_count: (extra.len() >= 24)
            .then(|| u64_at(extra, 16))
            .filter(|count| *count != u64::MAX),
        l1_table_offset: HostOffset(u64_at(&head, 0)),
        l1_entries: u32_at(&head, 8),
    })
}
