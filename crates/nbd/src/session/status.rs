//! Block status: what the contexts of a session say about a range.
//!
//! Promises: an answer has a bounded number of extents and of look-ups, and is shorter than asked
//! for where that is not enough; it has one extent at least. Allocates.

use std::ops::Range;

use ringdisk_disk::Bytes;
use ringdisk_nbd_protocol::numbers::extent_flags;
use ringdisk_nbd_protocol::numbers::{chunk, chunk_flags, command_flags as flags, errno};
use ringdisk_nbd_protocol::reply::{Chunk, EXTENDED_CHUNK_BYTES};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_nbd_protocol::status::{EXTENDED_EXTENT_BYTES, Extent, StatusFilter, push_extents};
use ringdisk_ring::Errno;

use super::slot::Slot;
use super::validate::{self, BAD_FILTER, Refusal, failed};
use super::{SMALL_BYTES, Session};
use crate::exported_disk::Context;
use crate::options::DirtyBitmap;

/// Look-ups of one answer for one context at most. Those whose tables are in memory take about
/// 0.1 µs each, and other requests get between from time to time.
const LOOKUPS_MAX: usize = 4096;
/// After so many look-ups other tasks run.
const LOOKUPS_IN_A_ROW: usize = 64;
/// Extents of one context in a reply at most.
const EXTENTS_MAX: usize = 2048;
/// Bytes of a chunk beside its extents, at most.
const CHUNK_ROOM_BYTES: usize = EXTENDED_CHUNK_BYTES + 8;

/// Carries out a request for block status and answers it.
pub(super) async fn status(
    session: &Session,
    slot: &Slot,
    request: &Request,
) -> Result<(), Refusal> {
    let (len, ids) = what_is_asked(session, slot, request)?;
    let range = request.offset..request.offset + len;
    let is_extended = session.style == Style::Extended;
    // In heads of 32 bits an extent is shorter than 4 GiB; the request is, too.
    let has_one = request.flags & flags::REQ_ONE != 0;
    let room = (SMALL_BYTES / ids.len().max(1) - CHUNK_ROOM_BYTES) / EXTENDED_EXTENT_BYTES;
    let limit = if has_one { 1 } else { room.min(EXTENTS_MAX) };
    slot.bytes.borrow_mut().clear();
    for (index, id) in ids.iter().enumerate() {
        let context = &session.export.contexts[session.contexts[*id as usize]];
        slot.extents.borrow_mut().clear();
        match context {
            Context::Dirty(bitmap) => {
                dirty(bitmap, range.clone(), limit, &mut slot.extents.borrow_mut());
            }
            Context::Allocation | Context::Depth => {
                let depth = matches!(context, Context::Depth);
                allocation(session, slot, range.clone(), limit, depth).await.map_err(failed)?;
            }
        }
        let is_last = index + 1 == ids.len();
        push_chunk(session, slot, request, *id, is_last, is_extended);
    }
    session.answer_bytes(slot);
    Ok(())
}

/// Length of the range, and the contexts: all, or those of the filter.
fn what_is_asked(
    session: &Session,
    slot: &Slot,
    request: &Request,
) -> Result<(u64, Vec<u32>), Refusal> {
    let count = u32::try_from(session.contexts.len()).unwrap_or(u32::MAX);
    if request.flags & flags::PAYLOAD_LEN == 0 {
        return Ok((request.len, (0..count).collect()));
    }
    let bad = || Refusal::new(errno::EINVAL, BAD_FILTER);
    // Judged before: a few thousand bytes at most.
    let payload = slot.data(usize::try_from(request.len).map_err(|_| bad())?).to_vec();
    let filter = StatusFilter::parse(&payload).map_err(|_| bad())?;
    let ids: Vec<u32> = filter.ids().collect();
    let are_known = ids.iter().all(|id| *id < count);
    let are_once = ids.iter().enumerate().all(|(at, id)| !ids[..at].contains(id));
    if ids.is_empty() || !are_known || !are_once {
        return Err(bad());
    }
    let size = session.export.disk.size();
    validate::check_range(request, request.offset, filter.len, size.0)?;
    if filter.len == 0 {
        return Err(Refusal::new(errno::EINVAL, "need non-zero length"));
    }
    Ok((filter.len, ids))
}

/// Fills the extents of the slot for `base:allocation` or `qemu:allocation-depth`.
async fn allocation(
    session: &Session,
    slot: &Slot,
    range: Range<u64>,
    limit: usize,
    is_depth: bool,
) -> Result<(), Errno> {
    let (offset, len) = (range.start, range.end - range.start);
    let disk = &session.export.disk;
    let mut at = 0;
    for lookups in 1..=LOOKUPS_MAX {
        let status = disk.block_status(session.ring(), offset + at, Bytes(len - at)).await?;
        // Nothing is known past the end of a disk that has become smaller.
        let count =
            if status.len == Bytes::ZERO { len - at } else { status.len.min(Bytes(len - at)).0 };
        let value = if is_depth {
            if status.present { u64::from(status.depth) + 1 } else { 0 }
        } else {
            let hole = if status.data { 0 } else { extent_flags::HOLE };
            let zero = if status.zero { extent_flags::ZERO } else { 0 };
            hole | zero
        };
        let extent = Extent { len: count, flags: value };
        if !push_extent(&mut slot.extents.borrow_mut(), extent, limit) {
            break;
        }
        at += count;
        if at == len {
            break;
        }
        if lookups % LOOKUPS_IN_A_ROW == 0 {
            session.ring().yield_now().await;
        }
    }
    Ok(())
}

/// Fills extents for `qemu:dirty-bitmap:NAME`.
fn dirty(bitmap: &DirtyBitmap, range: Range<u64>, limit: usize, extents: &mut Vec<Extent>) {
    let Range { start: mut at, end } = range;
    let first = bitmap.ranges.partition_point(|marked| marked.end <= at);
    for marked in &bitmap.ranges[first..] {
        if at >= end {
            return;
        }
        let (start, stop) = (marked.start.clamp(at, end), marked.end.clamp(at, end));
        let clean = Extent { len: start - at, flags: 0 };
        let dirty = Extent { len: stop - start, flags: extent_flags::DIRTY };
        if !push_extent(extents, clean, limit) || !push_extent(extents, dirty, limit) {
            return;
        }
        at = stop;
    }
    push_extent(extents, Extent { len: end - at, flags: 0 }, limit);
}

/// Appends an extent, as a part of the last one where the two are alike. `false`: there is no room
/// for it.
fn push_extent(extents: &mut Vec<Extent>, extent: Extent, limit: usize) -> bool {
    if extent.len == 0 {
        return true;
    }
    let is_full = extents.len() == limit;
    match extents.last_mut().filter(|last| last.flags == extent.flags) {
        Some(last) => last.len += extent.len,
        None if is_full => return false,
        None => extents.push(extent),
    }
    true
}

/// Appends the chunk of one context to the bytes of the slot.
fn push_chunk(
    session: &Session,
    slot: &Slot,
    request: &Request,
    id: u32,
    is_last: bool,
    is_extended: bool,
) {
    let (extents, mut bytes) = (slot.extents.borrow(), slot.bytes.borrow_mut());
    let mut payload = Vec::with_capacity(8 + extents.len() * EXTENDED_EXTENT_BYTES);
    push_extents(&mut payload, is_extended, id, &extents);
    let mut head = [0; EXTENDED_CHUNK_BYTES];
    let chunk = Chunk {
        flags: if is_last { chunk_flags::DONE } else { 0 },
        kind: if is_extended { chunk::BLOCK_STATUS_EXTENDED } else { chunk::BLOCK_STATUS },
        cookie: request.cookie,
        offset: request.offset,
        len: payload.len() as u64,
    };
    let count = chunk.put(session.style, &mut head);
    bytes.extend(&head[..count]);
    bytes.extend(payload);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn extents(list: &[(u64, u64)]) -> Vec<Extent> {
        list.iter().map(|&(len, flags)| Extent { len, flags }).collect()
    }

    #[test]
    fn a_bitmap_says_what_is_clean_and_what_is_dirty() {
        let ranges = Arc::new([100..200, 300..400]);
        let bitmap = DirtyBitmap { name: String::from("b"), ranges };
        for (offset, len, limit, expected) in [
            (0, 1000, 9, vec![(100, 0), (100, 1), (100, 0), (100, 1), (600, 0)]),
            (150, 100, 9, vec![(50, 1), (50, 0)]),
            (150, 10, 9, vec![(10, 1)]),
            (500, 10, 9, vec![(10, 0)]),
            (0, 1000, 1, vec![(100, 0)]),
            (0, 1000, 2, vec![(100, 0), (100, 1)]),
        ] {
            let mut found = Vec::new();
            dirty(&bitmap, offset..offset + len, limit, &mut found);
            assert_eq!(found, extents(&expected), "{offset} {len} {limit}");
        }
    }

    #[test]
    fn extents_that_are_alike_become_one_also_at_the_limit() {
        let mut found = Vec::new();
        assert!(push_extent(&mut found, Extent { len: 5, flags: 3 }, 1));
        assert!(push_extent(&mut found, Extent { len: 6, flags: 3 }, 1));
        assert!(!push_extent(&mut found, Extent { len: 7, flags: 0 }, 1));
        assert_eq!(found, extents(&[(11, 3)]));
    }
}
