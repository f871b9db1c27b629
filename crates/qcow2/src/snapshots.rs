//! The table of internal snapshots: parsed, listed, and looked into.
//!
//! Promises: memory is bounded by [`limits`](crate::limits); a snapshot that is chosen is the only
//! one that fits the choice best. Source: qcow2 specification, "Snapshots".

use std::fmt;
use std::str::FromStr;

use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use crate::cause::Cause;
use crate::concurrent::region::Region;
use crate::error::{Error, ErrorKind};
use crate::extensions::{u16_at, u32_at, u64_at};
use crate::header::Header;
use crate::info::Snapshot;
use crate::limits::{
    L1_BYTES_MAX, SECTOR, SNAPSHOT_ENTRY_BYTES_MIN as ENTRY_BYTES_MIN, SNAPSHOT_EXTRA_BYTES_MAX,
    SNAPSHOT_TABLE_BYTES_MAX,
};
use crate::table::TableReader;
use crate::units::{Bytes, HostOffset};

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
        vm_state_bytes: if extra.len() >= 8 { Bytes(u64_at(extra, 0)) } else { Bytes(vm_state) },
        disk_bytes: (extra.len() >= 16).then(|| u64_at(extra, 8)).map(Bytes),
        // All ones: not recorded.
        instruction_count: (extra.len() >= 24)
            .then(|| u64_at(extra, 16))
            .filter(|count| *count != u64::MAX),
        l1_table_offset: HostOffset(u64_at(&head, 0)),
        l1_entries: u32_at(&head, 8),
    })
}

/// Which internal snapshot is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotChoice {
    /// The one with this id or, if none has it, the first with this name.
    IdOrName(String),
    /// The first that has this id and this name, as far as they are given.
    Both {
        /// The id.
        id: Option<String>,
        /// The name.
        name: Option<String>,
    },
}

impl FromStr for SnapshotChoice {
    type Err = String;

    /// Reads an id or a name, or `snapshot.id=ID,snapshot.name=NAME` with one of them or both, as
    /// QEMU's programs do.
    ///
    /// Errors: nothing, and another key.
    fn from_str(text: &str) -> Result<SnapshotChoice, String> {
        if text.is_empty() {
            return Err(String::from("the name is empty"));
        }
        if !text.starts_with("snapshot.") {
            return Ok(SnapshotChoice::IdOrName(text.to_owned()));
        }
        let (mut id, mut name) = (None, None);
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("snapshot.id", value)) => id = Some(value.to_owned()),
                Some(("snapshot.name", value)) => name = Some(value.to_owned()),
                _ => return Err(format!("Failed in parsing snapshot param '{text}'")),
            }
        }
        Ok(SnapshotChoice::Both { id, name })
    }
}

impl fmt::Display for SnapshotChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SnapshotChoice::IdOrName(text) => f.write_str(text),
            SnapshotChoice::Both { id, name } => {
                let word = |key, value: &Option<String>| {
                    value.as_ref().map(|value| format!("snapshot.{key}={value}"))
                };
                let words = [word("id", id), word("name", name)];
                f.write_str(&words.into_iter().flatten().collect::<Vec<_>>().join(","))
            }
        }
    }
}

impl SnapshotChoice {
    fn find<'a>(&self, snapshots: &'a [Snapshot]) -> Option<&'a Snapshot> {
        match self {
            SnapshotChoice::IdOrName(text) => {
                let by_id = snapshots.iter().find(|snapshot| snapshot.id == *text);
                by_id.or_else(|| snapshots.iter().find(|snapshot| snapshot.name == *text))
            }
            SnapshotChoice::Both { id, name } => snapshots.iter().find(|snapshot| {
                id.as_ref().is_none_or(|id| snapshot.id == *id)
                    && name.as_ref().is_none_or(|name| snapshot.name == *name)
            }),
        }
    }

    /// Makes a header show the disk of the snapshot.
    ///
    /// Errors: `InvalidRequest` when there is no such snapshot; `Corrupt` when its L1 table or its
    /// size is out of bounds.
    pub(crate) fn look_into(
        &self,
        header: &mut Header,
        snapshots: &[Snapshot],
        storage: &Storage,
    ) -> Result<(), Error> {
        let Some(snapshot) = self.find(snapshots) else {
            let text = self.to_string();
            return Err(Error::new(
                ErrorKind::InvalidRequest,
                storage.name(),
                format!("Failed to load snapshot: Can't find snapshot '{}'", text.escape_debug()),
                "list the snapshots of the image to see their names and ids",
            )
            .because(Cause::NoSnapshotToLoad));
        };
        let size = snapshot.disk_bytes.unwrap_or(header.geometry.virtual_size);
        let bytes = Bytes(u64::from(snapshot.l1_entries) * 8);
        let end = snapshot.l1_table_offset.checked_add(bytes);
        let is_whole = snapshot.l1_table_offset.is_multiple_of(header.geometry.cluster_size())
            && end.is_some_and(|end| end <= HostOffset(storage.len()).next_multiple_of(SECTOR));
        let mut geometry = header.geometry;
        geometry.virtual_size = size;
        let needed = i64::try_from(size.0).ok().map(|_| Bytes(geometry.l1_entries() * 8));
        if bytes > L1_BYTES_MAX || !is_whole || needed.is_none_or(|bytes| bytes > L1_BYTES_MAX) {
            return Err(Error::corrupt(
                storage.name(),
                format!(
                    "the snapshot '{}' has {size} bytes and its L1 table, of {bytes} bytes, lies \
                     at {}",
                    snapshot.id.escape_debug(),
                    snapshot.l1_table_offset.0
                ),
            ));
        }
        header.geometry = geometry;
        header.l1_entries = snapshot.l1_entries;
        let start = snapshot.l1_table_offset;
        header.l1_table = Region { start, end: start + bytes };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::SnapshotChoice;

    #[test]
    fn a_choice_is_read_as_qemu_reads_it() {
        let both = |id: Option<&str>, name: Option<&str>| SnapshotChoice::Both {
            id: id.map(str::to_owned),
            name: name.map(str::to_owned),
        };
        for (text, choice) in [
            ("a=b", SnapshotChoice::IdOrName(String::from("a=b"))),
            ("snapshot.id=1", both(Some("1"), None)),
            ("snapshot.name=a", both(None, Some("a"))),
            ("snapshot.id=1,snapshot.name=a", both(Some("1"), Some("a"))),
        ] {
            assert_eq!(text.parse().as_ref(), Ok(&choice), "{text}");
            assert_eq!(choice.to_string(), text);
        }
        for wrong in ["", "snapshot.", "snapshot.date=1", "snapshot.id=1,name=a"] {
            assert!(wrong.parse::<SnapshotChoice>().is_err(), "{wrong}");
        }
    }
}
