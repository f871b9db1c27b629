use rustix::io::Errno;

use crate::ExtentKind;
use crate::concurrent::region::Region;
use crate::entry::{Lengths, Rules};
use crate::geometry::Geometry;
use crate::units::{Bytes, HostOffset};

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const CLUSTER: u64 = 65536;
const WHOLE: Bytes = Bytes(CLUSTER);
const LENGTHS: Lengths = Lengths { file: Bytes(100 * CLUSTER), data: Bytes(100 * CLUSTER) };
const METADATA: [Region; 3] = [
    Region { start: HostOffset(3 * CLUSTER), end: HostOffset(4 * CLUSTER) },
    Region { start: HostOffset(CLUSTER), end: HostOffset(2 * CLUSTER) },
    Region { start: HostOffset(7 * CLUSTER), end: HostOffset(9 * CLUSTER) },
];

fn rules(version: u32, extended: bool, external: bool) -> Rules {
    Rules::new(&Geometry::new(Bytes(1 << 30), 16, extended), version, external, METADATA)
}

fn standard(entry: u64) -> Result<(ExtentKind, Bytes), Errno> {
    rules(3, false, false).piece(entry, 0, Bytes::ZERO, LENGTHS)
}

fn extended(entry: u64, bitmap: u64, in_cluster: u64) -> Result<(ExtentKind, Bytes), Errno> {
    rules(3, true, false).piece(entry, bitmap, Bytes(in_cluster), LENGTHS)
}

#[test]
fn standard_entries_mean_what_the_specification_says() {
    let host = 5 * CLUSTER;
    assert_eq!(standard(0), Ok((ExtentKind::Unallocated, WHOLE)));
    assert_eq!(standard(host), Ok((ExtentKind::Data { offset: HostOffset(host) }, WHOLE)));
    assert_eq!(standard(host | COPIED), Ok((ExtentKind::Data { offset: HostOffset(host) }, WHOLE)));
    assert_eq!(standard(1), Ok((ExtentKind::Zero { offset: None }, WHOLE)));
    assert_eq!(
        standard(host | COPIED | 1),
        Ok((ExtentKind::Zero { offset: Some(HostOffset(host)) }, WHOLE))
    );
}

#[test]
fn the_offset_in_the_cluster_is_added() {
    let piece = rules(3, false, false).piece(5 * CLUSTER, 0, Bytes(4096), LENGTHS);
    let offset = 5 * CLUSTER + 4096;
    assert_eq!(piece, Ok((ExtentKind::Data { offset: HostOffset(offset) }, Bytes(CLUSTER - 4096))));
}

#[test]
fn each_reserved_bit_of_a_standard_entry_is_refused() {
    for bit in (1..=8).chain(56..=61) {
        assert_eq!(standard((5 * CLUSTER) | (1 << bit)), Err(Errno::IO), "bit {bit}");
    }
}

#[test]
fn each_unaligned_offset_bit_is_refused() {
    for bit in 9..16 {
        assert_eq!(standard((5 * CLUSTER) | (1 << bit)), Err(Errno::IO), "bit {bit}");
    }
}

#[test]
fn the_zero_flag_is_reserved_in_version_2() {
    assert_eq!(rules(2, false, false).piece(1, 0, Bytes::ZERO, LENGTHS), Err(Errno::IO));
}

#[test]
fn data_on_top_of_metadata_is_refused() {
    for cluster in [1, 3, 7, 8] {
        assert_eq!(standard(cluster * CLUSTER), Err(Errno::IO), "cluster {cluster}");
        assert_eq!(standard((cluster * CLUSTER) | 1), Err(Errno::IO), "zero, cluster {cluster}");
    }
}

#[test]
fn data_past_the_end_of_the_file_is_refused() {
    assert_eq!(standard(100 * CLUSTER), Err(Errno::IO));
    assert_eq!(standard(0x00ff_ffff_ffff_0000), Err(Errno::IO));
    assert!(standard(99 * CLUSTER).is_ok());
}

#[test]
fn the_part_of_the_last_cluster_past_the_end_of_the_file_reads_as_zeroes() {
    let lengths = Lengths { file: Bytes(5 * CLUSTER + 1000), data: Bytes(5 * CLUSTER + 1000) };
    let rules = rules(3, false, false);
    let host = 5 * CLUSTER;
    let data = rules.piece(host, 0, Bytes::ZERO, lengths);
    let tail = rules.piece(host, 0, Bytes(1000), lengths);
    assert_eq!(data, Ok((ExtentKind::Data { offset: HostOffset(host) }, Bytes(1000))));
    assert_eq!(
        tail,
        Ok((ExtentKind::Zero { offset: Some(HostOffset(host + 1000)) }, Bytes(CLUSTER - 1000)))
    );
}

#[test]
fn offset_zero_is_a_place_in_an_external_data_file_when_bit_63_is_set() {
    let rules = rules(3, false, true);
    let piece = |entry| rules.piece(entry, 0, Bytes::ZERO, LENGTHS);
    assert_eq!(piece(COPIED), Ok((ExtentKind::Data { offset: HostOffset(0) }, WHOLE)));
    assert_eq!(piece(0), Ok((ExtentKind::Unallocated, WHOLE)));
    assert_eq!(piece(COPIED | 1), Ok((ExtentKind::Zero { offset: Some(HostOffset(0)) }, WHOLE)));
    // The tables lie in the other file.
    let offset = 3 * CLUSTER;
    assert_eq!(
        piece(offset | COPIED),
        Ok((ExtentKind::Data { offset: HostOffset(offset) }, WHOLE))
    );
}

#[test]
fn a_copied_bit_without_an_offset_is_unallocated_in_the_image_itself() {
    assert_eq!(standard(COPIED), Ok((ExtentKind::Unallocated, WHOLE)));
}

#[test]
fn compressed_clusters_are_refused_with_an_external_data_file() {
    let entry = COMPRESSED | (5 * CLUSTER);
    assert_eq!(rules(3, false, true).piece(entry, 0, Bytes::ZERO, LENGTHS), Err(Errno::IO));
}

#[test]
fn a_compressed_entry_gives_offset_and_length() {
    // Clusters of 64 KiB: offset in bits 0 to 53, sectors in bits 54 to 61.
    let host = 5 * CLUSTER + 700;
    let (kind, len) = standard(COMPRESSED | host | 3 << 54).unwrap();
    let ExtentKind::Compressed(cluster) = kind else { panic!("{kind:?}") };
    assert_eq!(len, WHOLE);
    assert_eq!(cluster.host_offset(), HostOffset(host));
    assert_eq!(u64::from(cluster.host_len()), 4 * 512 - 700 % 512);
}

#[test]
fn a_compressed_cluster_is_cut_at_the_end_of_the_file() {
    let host = HostOffset::after(LENGTHS.file) - Bytes(10);
    let (kind, _) = standard(COMPRESSED | host.0 | 3 << 54).unwrap();
    let ExtentKind::Compressed(cluster) = kind else { panic!("{kind:?}") };
    assert_eq!(cluster.host_len(), 10);
}

#[test]
fn a_compressed_cluster_outside_the_file_or_on_metadata_is_refused() {
    assert_eq!(standard(COMPRESSED | LENGTHS.file.0), Err(Errno::IO));
    assert_eq!(standard(COMPRESSED), Err(Errno::IO));
    assert_eq!(standard(COMPRESSED | (3 * CLUSTER + 17)), Err(Errno::IO));
    assert_eq!(standard(u64::MAX), Err(Errno::IO));
}

#[test]
fn the_longest_compressed_cluster_of_each_size_fits_in_its_type() {
    for cluster_bits in 9..=21 {
        let geometry = Geometry::new(Bytes(1 << 30), cluster_bits, false);
        let rules = Rules::new(&geometry, 3, false, [Region::default(); 3]);
        let lengths = Lengths { file: Bytes(1 << 60), data: Bytes(1 << 60) };
        let all_sectors = ((1u64 << 62) - 1) & !((1 << (62 - (cluster_bits - 8))) - 1);
        let host = 1 << cluster_bits;
        let (kind, _) =
            rules.piece(COMPRESSED | all_sectors | host, 0, Bytes::ZERO, lengths).unwrap();
        let ExtentKind::Compressed(cluster) = kind else { panic!("{kind:?}") };
        assert_eq!(u64::from(cluster.host_len()), 2 << cluster_bits);
    }
}

#[test]
fn subclusters_are_data_zeroes_or_unallocated() {
    let host = 5 * CLUSTER;
    // 2 KiB each: 0 to 3 data, 4 to 7 zeroes, the rest not allocated.
    let bitmap = 0x0000_00f0_0000_000f;
    let piece = |in_cluster| extended(host | COPIED, bitmap, in_cluster);
    assert_eq!(piece(0), Ok((ExtentKind::Data { offset: HostOffset(host) }, Bytes(8192))));
    assert_eq!(
        piece(2049),
        Ok((ExtentKind::Data { offset: HostOffset(host + 2049) }, Bytes(8192 - 2049)))
    );
    assert_eq!(
        piece(8192),
        Ok((ExtentKind::Zero { offset: Some(HostOffset(host + 8192)) }, Bytes(8192)))
    );
    assert_eq!(piece(16384), Ok((ExtentKind::Unallocated, Bytes(CLUSTER - 16384))));
}

#[test]
fn a_whole_cluster_of_alike_subclusters_is_one_piece() {
    let host = 5 * CLUSTER;
    assert_eq!(
        extended(host, 0xffff_ffff, 0),
        Ok((ExtentKind::Data { offset: HostOffset(host) }, WHOLE))
    );
    assert_eq!(
        extended(0, 0xffff_ffff_0000_0000, 0),
        Ok((ExtentKind::Zero { offset: None }, WHOLE))
    );
    assert_eq!(extended(0, 0, 0), Ok((ExtentKind::Unallocated, WHOLE)));
    assert_eq!(extended(host, 0, 0), Ok((ExtentKind::Unallocated, WHOLE)));
}

#[test]
fn the_last_subcluster_ends_with_the_cluster() {
    let host = 5 * CLUSTER;
    let last = CLUSTER - 2048;
    let piece = extended(host, 0x8000_0000, last);
    assert_eq!(piece, Ok((ExtentKind::Data { offset: HostOffset(host + last) }, Bytes(2048))));
}

#[test]
fn contradictory_subclusters_are_refused() {
    let host = 5 * CLUSTER;
    assert_eq!(extended(host, 0x0000_0001_0000_0001, 0), Err(Errno::IO));
    assert_eq!(extended(0, 1, 0), Err(Errno::IO));
    assert_eq!(extended(host | 1, 1, 0), Err(Errno::IO));
    assert_eq!(extended(COMPRESSED | host, 1, 0), Err(Errno::IO));
}

#[test]
fn l1_entries_are_checked() {
    let rules = rules(3, false, false);
    let table = |entry| rules.l2_table(entry, LENGTHS.file);
    assert_eq!(table(0), Ok(None));
    assert_eq!(table(COPIED), Ok(None));
    assert_eq!(table(COPIED | (5 * CLUSTER)), Ok(Some(HostOffset(5 * CLUSTER))));
    assert_eq!(table(3 * CLUSTER), Err(Errno::IO));
    assert_eq!(table(100 * CLUSTER), Err(Errno::IO));
    for bit in (0..16).chain(56..63) {
        assert_eq!(table((5 * CLUSTER) | (1 << bit)), Err(Errno::IO), "bit {bit}");
    }
}
