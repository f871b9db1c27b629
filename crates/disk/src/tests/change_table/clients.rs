//! Requests that are in flight while the disk is changed, and what they do to its bytes.

use ringdisk_qcow2::Bytes;
use std::ops::Range;

use ringdisk_ring::{Errno, IoBuf, Ring};

use super::world::{CLUSTER, SIZE};
use crate::Disk;

/// What a client has in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Read,
    /// Of a place that the image has.
    Overwrite,
    /// Of a place that only the backing file has, in the middle of a cluster.
    Allocate,
    /// Past the end: the disk grows first.
    Append,
    Discard,
    WriteZeroes,
    Flush,
}

/// What a request changes.
#[derive(Clone, Debug)]
pub(super) struct Effect {
    pub(super) range: Range<usize>,
    pub(super) byte: u8,
}

impl Request {
    pub(super) const ALL: [Request; 7] = [
        Request::Read,
        Request::Overwrite,
        Request::Allocate,
        Request::Append,
        Request::Discard,
        Request::WriteZeroes,
        Request::Flush,
    ];

    pub(super) fn effect(self) -> Option<Effect> {
        let at = |start: usize, len: usize, byte| Some(Effect { range: start..start + len, byte });
        match self {
            Request::Read | Request::Flush => None,
            Request::Overwrite => at(2 * CLUSTER + 512, 8192, 0x11),
            Request::Allocate => at(20 * CLUSTER + 4096, CLUSTER, 0x12),
            Request::Append => at(SIZE, 3 * 512, 0x13),
            Request::Discard => at(4 * CLUSTER, 4 * CLUSTER, 0),
            Request::WriteZeroes => at(9 * CLUSTER + 512, 2 * CLUSTER, 0),
        }
    }

    pub(super) async fn make(self, ring: &Ring, disk: &Disk) -> Result<(), Errno> {
        let effect = self.effect();
        let (offset, len) = effect
            .as_ref()
            .map_or((0, 0), |effect| (effect.range.start as u64, effect.range.len() as u64));
        match self {
            Request::Read => disk.read(ring, 0, &IoBuf::new(SIZE, 4096)).await.map(drop),
            Request::Flush => disk.flush(ring).await,
            Request::Discard => disk.discard(ring, offset, Bytes(len)).await,
            Request::WriteZeroes => disk.write_zeroes(ring, offset, Bytes(len), true).await,
            Request::Append => {
                disk.grow(ring, Bytes(offset + len)).await?;
                write(ring, disk, effect).await
            }
            Request::Overwrite | Request::Allocate => write(ring, disk, effect).await,
        }
    }
}

/// Writes all of an effect.
pub(super) async fn write(ring: &Ring, disk: &Disk, effect: Option<Effect>) -> Result<(), Errno> {
    let Some(Effect { range, byte }) = effect else { return Ok(()) };
    let buf = IoBuf::new(range.len(), 4096);
    buf.fill(byte);
    let mut done = 0;
    while done < buf.len() {
        let rest = buf.slice(done..buf.len());
        match disk.write(ring, (range.start + done) as u64, &rest).await? {
            // A client that was cut off by a disk that became smaller.
            0 => return Err(Errno::NOSPC),
            written => done += written,
        }
    }
    Ok(())
}
