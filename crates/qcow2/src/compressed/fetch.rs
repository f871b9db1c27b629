//! Brings compressed bytes from the image file to the helper threads.
//!
//! Promises: neighbours are read together, in one aligned operation into a buffer that is used
//! again; a failure of a common read fails only the clusters whose own bytes cannot be read. Runs
//! as a task of its own, so a request that is given up takes nothing from the others.

use std::cell::RefCell;

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};
use ringdisk_storage::{Limits, Storage};

use super::clusters::Ticket;
use super::decode::decompress;
use crate::info::CompressionType;
use crate::limits::{COMPRESSED_READ_BYTES, INLINE_DECOMPRESSION_BYTES};
use crate::sync::Arc;
use crate::units::{Bytes, HostOffset};

/// Bytes between two clusters that are rather read than skipped: about what the storage moves while
/// it turns to another operation.
const GAP_MAX: Bytes = Bytes(16 * 1024);
/// Buffers of each size that a thread keeps for the next reads: as many as a queue usually has
/// requests.
const BUFFERS_MAX: [usize; 2] = [32, 8];
/// The two sizes of buffers: for a cluster of 64 KiB with its alignment, and for a run of
/// neighbours with theirs. Of the second only what is used takes memory.
const BUFFER_BYTES: [usize; 2] = [128 << 10, 2 << 20];

thread_local! {
    /// A thread's free buffers, of each size: they are mappings, and making one costs as much as a
    /// read.
    static BUFFERS: RefCell<[Vec<IoBuf>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// How to decompress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Method {
    pub(super) kind: CompressionType,
    pub(super) cluster_size: usize,
}

/// Starts the loads of `tickets`, which are sorted by nothing but the order of the disk: runs of
/// neighbours in the image file become one read each.
pub(super) fn start(ring: &Ring, file: &Arc<Storage>, method: Method, tickets: Vec<Ticket>) {
    let mut group: Vec<Ticket> = Vec::new();
    for ticket in tickets {
        if let (Some(first), Some(last)) = (group.first(), group.last())
            && !is_neighbour(first, last, &ticket)
        {
            spawn(ring, file, method, std::mem::take(&mut group));
        }
        group.push(ticket);
    }
    if !group.is_empty() {
        spawn(ring, file, method, group);
    }
}

fn is_neighbour(first: &Ticket, last: &Ticket, next: &Ticket) -> bool {
    let (first, last, next) = (first.place(), last.place(), next.place());
    let end = last.host_end();
    // Clusters share the sector where one ends and the next begins.
    next.host_offset() >= last.host_offset()
        && next.host_offset() <= end.saturating_add(GAP_MAX)
        && next.host_end() - first.host_offset() <= COMPRESSED_READ_BYTES
}

fn spawn(ring: &Ring, file: &Arc<Storage>, method: Method, tickets: Vec<Ticket>) {
    let (handle, file) = (ring.clone(), file.clone());
    ring.spawn(async move { fetch(&handle, &file, method, tickets).await });
}

async fn fetch(ring: &Ring, file: &Storage, method: Method, tickets: Vec<Ticket>) {
    let start = tickets.iter().map(|ticket| ticket.place().host_offset()).min().unwrap_or_default();
    let end = tickets.iter().map(|ticket| ticket.place().host_end()).max().unwrap_or_default();
    match read(ring, file, start, end).await {
        Ok(bytes) => {
            for ticket in tickets {
                hand_over(ring, method, ticket, &bytes);
            }
            bytes.give_back();
        }
        Err(_) if tickets.len() > 1 => {
            for ticket in tickets {
                let place = ticket.place();
                match read(ring, file, place.host_offset(), place.host_end()).await {
                    Ok(bytes) => {
                        hand_over(ring, method, ticket, &bytes);
                        bytes.give_back();
                    }
                    Err(errno) => ticket.fail(errno),
                }
            }
        }
        Err(errno) => {
            for ticket in tickets {
                ticket.fail(errno);
            }
        }
    }
}

/// A piece of the image file.
struct Loaded {
    /// Where the first byte is in the file.
    start: HostOffset,
    /// Bytes that are there: fewer than asked for when the file ends inside the last sector.
    len: usize,
    buf: IoBuf,
}

impl Loaded {
    /// What there is of one compressed cluster, for another thread: a buffer and how much of it
    /// counts.
    fn copy(&self, ticket: &Ticket) -> Result<(Vec<u8>, usize), Errno> {
        let place = ticket.place();
        if place.host_offset() < self.start {
            return Err(Errno::IO);
        }
        let from = place.host_offset() - self.start;
        let from = usize::try_from(from).map_err(|_| Errno::IO)?.min(self.len);
        let to = from.saturating_add(place.host_len() as usize).min(self.len);
        let mut bytes = ticket.input(to - from);
        self.buf.copy_to_slice(from, &mut bytes[..to - from]);
        Ok((bytes, to - from))
    }

    fn give_back(self) {
        let Some(size) = BUFFER_BYTES.iter().position(|bytes| *bytes == self.buf.len()) else {
            return;
        };
        BUFFERS.with_borrow_mut(|buffers| {
            if buffers[size].len() < BUFFERS_MAX[size] {
                buffers[size].push(self.buf);
            }
        });
    }
}

/// Reads a range, widened to what suits the storage.
async fn read(
    ring: &Ring,
    file: &Storage,
    start: HostOffset,
    end: HostOffset,
) -> Result<Loaded, Errno> {
    let limits = file.limits();
    let align = Bytes::from(limits.offset_align).max(Bytes(1));
    let start = start.align_down(align);
    let end = end.from_start().checked_next_multiple_of(align).ok_or(Errno::IO)?;
    let len = usize::try_from(end - start.from_start()).map_err(|_| Errno::IO)?;
    let buf = buffer(len, &limits);
    let len = file.read(ring, start.0, &buf.slice(0..len)).await?;
    Ok(Loaded { start, len, buf })
}

fn buffer(len: usize, limits: &Limits) -> IoBuf {
    let align = limits.memory_align.max(1) as usize;
    let Some(size) = BUFFER_BYTES.iter().position(|bytes| *bytes >= len) else {
        return IoBuf::new(len, align);
    };
    let kept = BUFFERS.with_borrow_mut(|buffers| buffers[size].pop());
    match kept {
        Some(buf) if buf.is_aligned(align) => buf,
        _ => IoBuf::new(BUFFER_BYTES[size], align.max(4096)),
    }
}

fn hand_over(ring: &Ring, method: Method, ticket: Ticket, bytes: &Loaded) {
    let (compressed, len) = match bytes.copy(&ticket) {
        Ok(compressed) => compressed,
        Err(errno) => return ticket.fail(errno),
    };
    let work = move || {
        ticket.fill(compressed, |input, output| {
            let is_whole = output.len() == method.cluster_size;
            decompress(method.kind, &input[..len], output, is_whole)
        });
    };
    if method.cluster_size <= INLINE_DECOMPRESSION_BYTES {
        work();
    } else {
        // The ticket itself wakes the waiting requests.
        drop(ring.offload(work));
    }
}
