//! New contents of bitmaps on their way to the image file.
//!
//! Promises: contents go to new clusters; nothing that is there already is overwritten.

use ringdisk_ring::{Errno, Ring};

use crate::bitmaps::bits::Bits;
use crate::bitmaps::tables::ALL_ONES;
use crate::engine::Qcow2;
use crate::header::write_bytes;
use crate::refcounts::Run;
use crate::table::bytes_of;
use crate::units::{Bytes, HostOffset};

/// Contents are written in pieces of this size, or of a cluster.
const PIECE_BYTES: usize = 1 << 20;

/// Writes `bits` to new clusters of `image`, and a table for them. Durable after the next
/// checkpoint; nothing refers to it yet.
///
/// * `taken`: gets the clusters, also when this fails, so that the caller can give them back.
///
/// Returns host offset and entries of the table. Errors: `ENOSPC` and those of the storage.
pub(crate) async fn store(
    image: &Qcow2,
    ring: &Ring,
    bits: &Bits,
    taken: &mut Vec<Run>,
) -> Result<(HostOffset, u32), Errno> {
    let cluster_bits = image.geometry.cluster_bits;
    let cluster_size = image.cluster_bytes();
    let cluster_words = cluster_size / 8;
    let words = |cluster: usize| cluster * cluster_words..(cluster + 1) * cluster_words;
    let alike = |cluster, value| words(cluster).all(|index| bits.word(index) == value);
    let count = bits.bytes().div_ceil(Bytes::of(cluster_size));
    let mut table = vec![0; usize::try_from(count).map_err(|_| Errno::FBIG)?];
    let mut mixed = Vec::new();
    for (cluster, entry) in table.iter_mut().enumerate() {
        if alike(cluster, u64::MAX) {
            *entry = ALL_ONES;
        } else if !alike(cluster, 0) {
            mixed.push(cluster);
        }
    }
    for piece in mixed.chunks((PIECE_BYTES / cluster_size).max(1)) {
        let mut left = piece;
        while !left.is_empty() {
            let run = image.allocate(ring, left.len() as u64, None, false).await?;
            taken.push(run);
            let start = run.start << cluster_bits;
            // No longer than what was asked for.
            let (now, later) = left.split_at(usize::try_from(run.count).unwrap_or(0));
            left = later;
            let mut bytes = Vec::with_capacity(now.len() * cluster_size);
            for (index, cluster) in now.iter().enumerate() {
                table[*cluster] = (start + Bytes::of(index * cluster_size)).0;
                bytes.extend(words(*cluster).flat_map(|index| bits.word(index).to_le_bytes()));
            }
            write_bytes(ring, &image.file, start, &bytes).await?;
        }
    }
    let offset = write_clusters(image, ring, &bytes_of(&table), taken).await?;
    Ok((offset, u32::try_from(table.len()).map_err(|_| Errno::FBIG)?))
}

/// Writes `bytes` to new clusters that follow one another, zeroes past them. Returns the host
/// offset.
pub(crate) async fn write_clusters(
    image: &Qcow2,
    ring: &Ring,
    bytes: &[u8],
    taken: &mut Vec<Run>,
) -> Result<HostOffset, Errno> {
    let cluster_size = image.cluster_bytes();
    let padded = bytes.len().max(1).next_multiple_of(cluster_size);
    let run = image.allocate(ring, (padded / cluster_size) as u64, None, true).await?;
    taken.push(run);
    let offset = run.start << image.geometry.cluster_bits;
    let mut bytes = bytes.to_vec();
    bytes.resize(padded, 0);
    write_bytes(ring, &image.file, offset, &bytes).await?;
    Ok(offset)
}
