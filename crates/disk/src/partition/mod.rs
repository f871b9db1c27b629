//! Finds the bytes of partition N of a disk.
//!
//! Promises: reads the table through the disk, so it is found in any format and through any chain;
//! writes nothing. The table is not trusted: whatever it says, memory and reads are bounded by
//! constants, every number is checked, and a partition that lies past the end, over another one or
//! over the table is refused. Numbers are those of the kernel: the place in the
//! table, and from 5 on for logical partitions of an MBR, in the order of their chain.
//!
//! Why no library: of those that read such tables, `gpt` 4.1 and `gptman` 3.1 allocate what the
//! table asks for before they check it (4 G entries) and assert its sizes, and `mbrman` 0.6
//! overflows on sums of its sectors and follows a chain of any length. A table comes from a guest.
//!
//! Control path. Sources: UEFI specification 2.10, chapter 5 (GPT); "MBR" as fdisk and the kernel's
//! `Documentation/admin-guide` describe their numbering.

mod gpt;
mod mbr;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_storage::Kind;

use crate::graph::Window;
use crate::layer::Node;
use crate::limits::SECTOR_BYTES;
use crate::{Disk, Error, ErrorKind};

/// Alignment of buffers: a page suits every storage.
const BUFFER_ALIGN: usize = 4096;
/// Partitions that a message names at most.
const LISTED_MAX: usize = 24;

/// The source of a partition table.
pub(crate) trait Source {
    /// Size of the disk.
    fn size(&self) -> Bytes;

    /// Sector size that an MBR counts in; the MBR does not state it.
    fn sector(&self) -> Bytes {
        SECTOR_BYTES
    }

    /// Reads bytes; fewer at the end of the disk only.
    async fn read(&self, offset: GuestOffset, len: usize) -> Result<Vec<u8>, Errno>;
}

/// A disk on a ring.
struct OnDisk<'a>(&'a Ring, &'a Disk);

impl Source for OnDisk<'_> {
    fn size(&self) -> Bytes {
        self.1.size()
    }

    /// The sector size of the kernel: the logical block of the device at the bottom of the chain,
    /// if there is one.
    fn sector(&self) -> Bytes {
        let layers = self.1.layers();
        let device = layers.last().and_then(|layer| match &layer.node {
            Node::Raw(raw) => Some(&raw.storage).filter(|it| it.kind() == Kind::BlockDevice),
            Node::Qcow2(_) | Node::Null(_) | Node::Frozen(_) => None,
        });
        device.map_or(SECTOR_BYTES, |device| Bytes::from(device.device_limits().logical_block))
    }

    async fn read(&self, offset: GuestOffset, len: usize) -> Result<Vec<u8>, Errno> {
        let buf = IoBuf::new(len, BUFFER_ALIGN);
        let done = self.1.read(self.0, offset.0, &buf).await?;
        let mut bytes = vec![0; len];
        buf.copy_to_slice(0, &mut bytes);
        bytes.truncate(done);
        Ok(bytes)
    }
}

/// Kinds of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// Four entries in the first sector, and chains of logical partitions.
    Mbr,
    /// GUID partition table.
    Gpt,
}

/// One partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Partition {
    /// As the kernel numbers it, from 1 on.
    pub(crate) number: u32,
    /// First byte on the disk.
    pub(crate) start: GuestOffset,
    /// Length.
    pub(crate) len: Bytes,
    /// It is a container of logical partitions.
    pub(crate) is_extended: bool,
    /// The error in its numbers, if there is one.
    pub(crate) fault: Option<&'static str>,
}

impl Partition {
    fn end(&self) -> GuestOffset {
        self.start.saturating_add(self.len)
    }

    fn meets(&self, start: GuestOffset, len: Bytes) -> bool {
        let is_any = !self.len.is_zero() && !len.is_zero();
        is_any && self.start < start.saturating_add(len) && start < self.end()
    }
}

/// The partition table of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) scheme: Scheme,
    pub(crate) partitions: Vec<Partition>,
    /// Ranges of the table itself: first byte and length.
    pub(crate) own: Vec<(GuestOffset, Bytes)>,
    /// Why the list may be incomplete.
    pub(crate) damage: Option<String>,
}

/// The window that is partition `number` of a disk.
///
/// * `name`: what the user calls the disk, for messages.
///
/// Errors: `Invalid` when there is no such partition, or it shares bytes with another one;
/// `Corrupt` for a table that is damaged; those of the storage.
pub(crate) async fn find(
    ring: &Ring,
    disk: &Disk,
    number: u32,
    name: &str,
) -> Result<Window, Error> {
    let source = OnDisk(ring, disk);
    let found = match table(&source).await {
        Ok(table) => table.window(number, source.size()),
        Err(error) => Err(error),
    };
    found.map_err(|error| error.context(format!("partition {number} of '{name}'")))
}

/// Reads the table of a disk.
///
/// Errors: as [`find`].
pub(crate) async fn table(source: &impl Source) -> Result<Table, Error> {
    let first = read(source, GuestOffset::ZERO, SECTOR_BYTES).await?;
    let Some(entries) = first.as_deref().and_then(mbr::entries) else {
        return Err(Error::new(
            ErrorKind::Invalid,
            "there is no partition table on the disk (neither MBR nor GPT); without --partition \
             the whole disk is served",
        ));
    };
    if mbr::is_protective(&entries) {
        return gpt::table(source).await;
    }
    mbr::table(source, &entries).await
}

/// Reads a whole range; `None` when the disk ends before it does.
async fn read(
    source: &impl Source,
    offset: GuestOffset,
    len: Bytes,
) -> Result<Option<Vec<u8>>, Error> {
    // Nothing here asks for more than `gpt::TABLE_MAX`.
    let wanted = usize::try_from(len).unwrap_or(usize::MAX);
    let inside =
        offset.checked_add(len).is_some_and(|end| end <= GuestOffset::after(source.size()));
    if !inside {
        return Ok(None);
    }
    let bytes = source
        .read(offset, wanted)
        .await
        .map_err(|errno| Error::os("cannot read the partition table", errno))?;
    Ok((bytes.len() == wanted).then_some(bytes))
}

impl Table {
    /// The bytes of partition `number`.
    ///
    /// * `size`: of the disk.
    ///
    /// Errors: as [`find`].
    pub(crate) fn window(&self, number: u32, size: Bytes) -> Result<Window, Error> {
        let refuse = |text: String| Err(Error::new(ErrorKind::Invalid, text));
        let Some(asked) = self.partitions.iter().find(|each| each.number == number) else {
            return refuse(format!("there is no such partition; {}", self.list()));
        };
        let (start, len, end) = (asked.start, asked.len, asked.end());
        let by_hand = "; what you know to be right can be served with --offset and --size";
        if asked.is_extended {
            return refuse(format!(
                "it is an extended partition, which only holds others; {}",
                self.list()
            ));
        }
        if let Some(fault) = asked.fault {
            return refuse(format!("its entry in the table makes no sense: {fault}{by_hand}"));
        }
        if end > GuestOffset::after(size) {
            return refuse(format!(
                "it ends at byte {end}, past the end of the disk at {size} bytes: the disk was \
                 cut, or the table is that of another one"
            ));
        }
        let is_logical = self.scheme == Scheme::Mbr && number > mbr::PRIMARIES;
        let other = self.partitions.iter().find(|other| {
            let holds_it = is_logical && other.is_extended;
            other.number != number && !holds_it && asked.meets(other.start, other.len)
        });
        if let Some(other) = other {
            return refuse(format!(
                "it shares bytes with partition {} (this one has {len} bytes at {start}, that one \
                 {} at {}), so a write to one would change the other{by_hand}",
                other.number, other.len, other.start
            ));
        }
        if self.own.iter().any(|&(start, len)| asked.meets(start, len)) {
            return refuse(format!("it lies over the partition table itself{by_hand}"));
        }
        Ok(Window::new(start, Some(len)))
    }

    /// The list of partitions, for messages.
    fn list(&self) -> String {
        let table = match self.scheme {
            Scheme::Mbr => "the MBR",
            Scheme::Gpt => "the GPT",
        };
        let mut text = match self.partitions.len() {
            0 => format!("{table} is empty"),
            _ => format!("{table} has "),
        };
        for (index, each) in self.partitions.iter().take(LISTED_MAX).enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            let what = if each.is_extended { ", extended" } else { "" };
            let fault = if each.fault.is_some() { ", damaged" } else { "" };
            let (number, start, len) = (each.number, each.start, each.len);
            let _ = write!(text, "{comma}{number} ({len} bytes at {start}{what}{fault})");
        }
        if self.partitions.len() > LISTED_MAX {
            let _ = write!(text, " and {} more", self.partitions.len() - LISTED_MAX);
        }
        if let Some(damage) = &self.damage {
            let _ = write!(text, "; there may be others: {damage}");
        }
        text
    }
}
