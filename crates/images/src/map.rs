//! Where the bytes of a disk are; or what a bitmap of an NBD server has marked (`x-dirty-bitmap`),
//! in the words that qemu-img has for it: marked is neither data nor zeroes, and not present.
//!
//! Promises: memory does not grow with the image; ranges with the same answer are shown as one.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::terminal::{self, Results};
use ringdisk_disk::{BlockStatus, Bytes, Disk, MapEntry};
use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Storage;

use crate::inspect::{self, Look};

/// Most that is asked for at once, bytes. Keeps a single answer, and with it an interruption, short
/// on huge images; neighbours are joined anyway.
const STEP_BYTES: u64 = 1 << 30;

/// What qemu-img says where there is nothing to say anything about.
const NOTHING: BlockStatus = BlockStatus {
    len: Bytes::ZERO,
    data: false,
    zero: false,
    present: false,
    depth: 0,
    offset: None,
    compressed: false,
};

/// Takes `next` into `range` if it goes on where that ends, with the same answer.
fn join(range: &mut MapEntry, next: &BlockStatus) -> bool {
    let mine = &mut range.status;
    let follows = mine.offset.map(|offset| offset.saturating_add(mine.len.0)) == next.offset;
    let same = BlockStatus { len: next.len, offset: next.offset, ..*mine } == *next;
    if follows && same {
        mine.len += next.len;
    }
    follows && same
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The image.
    pub look: Look,
    /// First byte.
    pub start_offset: u64,
    /// Bytes; `None`: to the end.
    pub max_length: Option<u64>,
    /// The result is JSON.
    pub json: bool,
}

/// Prints the map.
///
/// Errors: those of opening and reading the image.
pub fn run(request: &Request) -> Result<(), Failure> {
    let mut runtime = inspect::runtime()?;
    let disk = request.look.open(&mut runtime)?;
    let ring = runtime.ring().clone();
    let bitmap = bitmap_of(&disk, &request.look.image)?;
    let end = match request.max_length {
        Some(length) => request.start_offset.saturating_add(length).min(disk.size().0),
        None => disk.size().0,
    };
    let mut printer = Printer { out: Results::lock(), json: request.json, count: 0, hidden: false };
    let mut at = request.start_offset;
    let mut pending: Option<MapEntry> = None;
    let mut written = printer.begin();
    while at < end && written.is_ok() {
        let step = STEP_BYTES.min(end - at);
        let status = runtime
            .block_on(async {
                let status = disk.block_status(&ring, at, Bytes(step)).await?;
                match &bitmap {
                    Some(storage) => marked(&ring, storage, status).await,
                    None => Ok(status),
                }
            })
            .map_err(|errno| inspect::unreadable(&request.look.image, errno))?;
        if status.len == Bytes::ZERO {
            // The image became shorter under us.
            break;
        }
        let joined = pending.as_mut().is_some_and(|range| join(range, &status));
        if !joined && let Some(done) = pending.replace(MapEntry { start: at, status }) {
            written = printer.range(&disk, &done);
        }
        at += status.len.0;
    }
    if let (Ok(()), Some(done)) = (&written, pending) {
        written = printer.range(&disk, &done);
    }
    if printer.json && printer.count == 0 && written.is_ok() {
        // As qemu-img: a range without bytes.
        let nothing = MapEntry { start: at, status: NOTHING };
        written = printer.range(&disk, &nothing);
    }
    let hidden = printer.hidden;
    terminal::ended(written.and_then(|()| printer.end()))?;
    printer.out.finish()?;
    match hidden {
        true => Err(Failure::new(
            Exit::General,
            "the image has compressed clusters, which have no place in the file that others could \
             read",
        )
        .hint("--json shows every range")),
        false => Ok(()),
    }
}

/// The export whose bitmap is to be shown, if there is one.
///
/// Errors: the bitmap is that of an export that holds an image of another format.
fn bitmap_of(disk: &Disk, image: &Path) -> Result<Option<Arc<Storage>>, Failure> {
    let top = disk.layers().first().cloned();
    let Some(storage) = top.as_ref().and_then(|top| top.file()).filter(|file| file.shows_bitmap())
    else {
        return Ok(None);
    };
    if top.as_ref().is_some_and(|top| top.qcow2().is_some()) {
        let text = format!(
            "'{}' is a qcow2 image in the export, and the bitmap is of the bytes of the export",
            image.display()
        );
        return Err(
            Failure::new(Exit::Usage, text).hint("map it as raw, or without x-dirty-bitmap")
        );
    }
    Ok(Some(Arc::clone(storage)))
}

/// What the bitmap says of a range of raw bytes.
async fn marked(ring: &Ring, storage: &Storage, status: BlockStatus) -> Result<BlockStatus, Errno> {
    let Some(offset) = status.offset.filter(|_| status.data) else { return Ok(status) };
    let (is_marked, run) = storage.dirty(ring, offset, status.len.0).await?;
    let len = if run == 0 { status.len } else { status.len.min(Bytes(run)) };
    Ok(match is_marked {
        true => BlockStatus { len, ..NOTHING },
        false => BlockStatus { len, ..status },
    })
}

/// Writes ranges as they come.
struct Printer {
    out: Results,
    json: bool,
    count: u64,
    /// The table for people cannot say where some range is.
    hidden: bool,
}

impl Printer {
    fn begin(&mut self) -> io::Result<()> {
        if self.json {
            self.out.write_all(b"[")
        } else {
            writeln!(self.out, "{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to")
        }
    }

    fn range(&mut self, disk: &Disk, range: &MapEntry) -> io::Result<()> {
        if !self.json {
            let status = &range.status;
            self.hidden |= status.data && !status.zero && status.offset.is_none();
            let layers = disk.layers();
            return human(&mut self.out, range, |layer| {
                layers.get(layer).map(|layer| layer.host_name())
            });
        }
        if self.count > 0 {
            self.out.write_all(b",\n")?;
        }
        self.count += 1;
        let text = serde_json::to_string(&range.to_json()).map_err(io::Error::from)?;
        self.out.write_all(spaced(&text).as_bytes())
    }

    fn end(&mut self) -> io::Result<()> {
        if self.json { self.out.write_all(b"]\n") } else { Ok(()) }
    }
}

/// JSON of numbers and switches with the spaces of qemu-img, for scripts that look for its text.
fn spaced(text: &str) -> String {
    text.replace(',', ", ").replace(':', ": ").replace('{', "{ ")
}

/// A line for people: only ranges whose bytes are somewhere as they are, or compressed.
fn human<'a>(
    out: &mut impl Write,
    range: &MapEntry,
    name: impl Fn(usize) -> Option<&'a Path>,
) -> io::Result<()> {
    let status = &range.status;
    if !status.data || status.zero {
        return Ok(());
    }
    let hex = |number: u64| if number == 0 { String::from("0") } else { format!("{number:#x}") };
    let place = match status.offset {
        Some(offset) => hex(offset),
        None if status.compressed => String::from("compressed"),
        None => String::from("-"),
    };
    let name = usize::try_from(status.depth).ok().and_then(name).unwrap_or(Path::new("-"));
    writeln!(out, "{:<16}{:<16}{place:<16}{}", hex(range.start), hex(status.len.0), name.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(len: u64, offset: u64) -> BlockStatus {
        BlockStatus {
            len: Bytes(len),
            data: true,
            zero: false,
            present: true,
            depth: 0,
            offset: Some(offset),
            compressed: false,
        }
    }

    #[test]
    fn neighbours_are_joined_only_where_their_bytes_are_neighbours_too() {
        let mut range = MapEntry { start: 0, status: data(512, 1024) };
        assert!(join(&mut range, &data(512, 1536)));
        assert_eq!(range.status.len, Bytes(1024));
        assert!(!join(&mut range, &data(512, 4096)));
        assert!(!join(&mut range, &BlockStatus { depth: 1, ..data(512, 2048) }));
        assert!(!join(&mut range, &BlockStatus { offset: None, ..data(512, 2048) }));
    }

    #[test]
    fn people_see_data_only() {
        let line = |status| {
            let mut out = Vec::new();
            human(&mut out, &MapEntry { start: 1 << 20, status }, |_| Some(Path::new("a.img")))
                .expect("write");
            String::from_utf8(out).expect("text")
        };
        assert_eq!(
            line(data(0x40000, 0x50000)),
            "0x100000        0x40000         0x50000         a.img\n"
        );
        assert_eq!(
            line(BlockStatus { compressed: true, offset: None, ..data(512, 0) }),
            "0x100000        0x200           compressed      a.img\n"
        );
        assert_eq!(line(BlockStatus { zero: true, data: false, ..data(512, 0) }), "");
    }
}
