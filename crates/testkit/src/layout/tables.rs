//! Reading the tables of an image.
//!
//! Promises: any bytes may be read: what is past the end is 0, and nothing panics.

use super::{Bytes, Header, Snapshot};

/// Bits 9 to 55 of an L1 or L2 entry.
pub(super) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
pub(super) const COPIED: u64 = 1 << 63;
pub(super) const COMPRESSED: u64 = 1 << 62;
/// Clusters of an image that are looked at; test images are small.
const CLUSTERS_MAX: u64 = 1 << 24;

/// A big-endian number of up to 8 bytes at `at`; 0 where there is nothing.
pub(super) fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes.get(at..at + len).map_or(0, |b| b.iter().fold(0, |value, &b| value << 8 | u64::from(b)))
}

pub(super) fn number32(bytes: &[u8], at: usize) -> u32 {
    u32::try_from(number(bytes, at, 4)).unwrap_or(0)
}

/// `len` bytes; what is past the end reads as zeroes.
pub(super) fn read(image: &(impl Bytes + ?Sized), offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    image.read_at(offset, &mut bytes);
    bytes
}

/// 64-bit big-endian words.
pub(super) fn words(image: &(impl Bytes + ?Sized), offset: u64, count: u64) -> Vec<u64> {
    let bytes = read(image, offset, count.min(CLUSTERS_MAX) * 8);
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)).collect()
}

pub(super) fn header(image: &(impl Bytes + ?Sized)) -> Result<Header, String> {
    let b = read(image, 0, 4096);
    if &b[..4] != b"QFI\xfb" {
        return Err("no magic".into());
    }
    let version = number32(&b, 4);
    let new = version >= 3;
    let header = Header {
        version,
        cluster_bits: number32(&b, 20),
        size: number(&b, 24, 8),
        l1_size: number32(&b, 36),
        l1_offset: number(&b, 40, 8),
        refcount_table_offset: number(&b, 48, 8),
        refcount_table_clusters: number32(&b, 56),
        nb_snapshots: number32(&b, 60),
        snapshots_offset: number(&b, 64, 8),
        incompatible: if new { number(&b, 72, 8) } else { 0 },
        compatible: if new { number(&b, 80, 8) } else { 0 },
        autoclear: if new { number(&b, 88, 8) } else { 0 },
        refcount_order: if new { number32(&b, 96) } else { 4 },
        compression: if new && number32(&b, 100) > 104 { b[104] } else { 0 },
    };
    let sane = (2..=3).contains(&version)
        && (9..=21).contains(&header.cluster_bits)
        && header.refcount_order <= 6
        && u64::from(header.l1_size) < CLUSTERS_MAX
        && header.l1_offset.is_multiple_of(header.cluster())
        && header.refcount_table_offset.is_multiple_of(header.cluster())
        && header.refcount_table_offset != 0
        && header.incompatible & !31 == 0;
    if sane { Ok(header) } else { Err(format!("a header that makes no sense: {header:?}")) }
}

/// Header extensions: type and content.
pub(super) fn extensions(image: &(impl Bytes + ?Sized), header: &Header) -> Vec<(u32, Vec<u8>)> {
    let first = read(image, 0, header.cluster());
    let mut at = if header.version == 2 { 72 } else { number32(&first, 100) as usize };
    let mut out = Vec::new();
    while at + 8 <= first.len() {
        let (kind, len) = (number32(&first, at), number32(&first, at + 4) as usize);
        let Some(content) = first.get(at + 8..at + 8 + len).filter(|_| kind != 0) else { break };
        out.push((kind, content.to_vec()));
        at += 8 + len.next_multiple_of(8);
    }
    out
}

/// Snapshots and the bytes that their table takes.
pub(super) fn snapshots(
    image: &(impl Bytes + ?Sized),
    header: &Header,
) -> Result<(Vec<Snapshot>, u64), String> {
    let mut at = header.snapshots_offset;
    let mut out = Vec::new();
    for number_ in 0..header.nb_snapshots {
        let fixed = read(image, at, 40);
        let id_len = number(&fixed, 12, 2);
        let name_len = number(&fixed, 14, 2);
        let extra_len = number(&fixed, 36, 4);
        if extra_len > 1024 || at > image.size() {
            return Err(format!("snapshot {number_}: {extra_len} bytes of extra data at {at}"));
        }
        let rest = read(image, at + 40, extra_len + id_len + name_len);
        let split = usize::try_from(extra_len).unwrap_or(0);
        let (extra, names) = rest.split_at(split);
        let (id, name) = names.split_at(usize::try_from(id_len).unwrap_or(0));
        out.push(Snapshot {
            id: String::from_utf8_lossy(id).into_owned(),
            name: String::from_utf8_lossy(name).into_owned(),
            l1_offset: number(&fixed, 0, 8),
            l1_size: number32(&fixed, 8),
            size: if extra_len >= 16 { number(extra, 8, 8) } else { header.size },
        });
        at = (at + 40 + extra_len + id_len + name_len).next_multiple_of(8);
    }
    Ok((out, at - header.snapshots_offset))
}

/// Host bytes of a compressed cluster: first byte, and the end (a multiple of 512).
pub(super) fn compressed(header: &Header, entry: u64) -> (u64, u64) {
    let bits = 62 - (header.cluster_bits - 8);
    let offset = entry & ((1 << bits) - 1);
    let sectors = (entry & (COMPRESSED - 1)) >> bits;
    (offset, (offset / 512 + sectors + 1) * 512)
}
