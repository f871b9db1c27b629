//! Images that are broken on purpose: every header field in turn, tables, entries, truncation. None
//! panics, takes much memory, or is served as if it were good.

// Test images are small.
#![allow(clippy::cast_possible_truncation)]

use std::path::{Path, PathBuf};

use ringdisk_qcow2::{Bytes, ErrorKind, GuestOffset, OpenOptions};
use ringdisk_ring::{Errno, Runtime};

use crate::common::{Images, KIB, MIB, read, runtime, try_open, try_open_with};

const CLUSTER: u64 = 64 * KIB;

/// Positions of the header fields (qcow2 specification, "Header").
const VERSION: usize = 4;
const BACKING_FILE_OFFSET: usize = 8;
const BACKING_FILE_SIZE: usize = 16;
const CLUSTER_BITS: usize = 20;
const SIZE: usize = 24;
const CRYPT_METHOD: usize = 32;
const L1_SIZE: usize = 36;
const L1_TABLE_OFFSET: usize = 40;
const REFCOUNT_TABLE_OFFSET: usize = 48;
const REFCOUNT_TABLE_CLUSTERS: usize = 56;
const NB_SNAPSHOTS: usize = 60;
const SNAPSHOTS_OFFSET: usize = 64;
const INCOMPATIBLE: usize = 72;
const AUTOCLEAR: usize = 88;
const REFCOUNT_ORDER: usize = 96;
const HEADER_LENGTH: usize = 100;
const COMPRESSION_TYPE: usize = 104;
/// Where the extensions of a header of 112 bytes start.
const EXTENSIONS: usize = 112;

/// A good image of 4 MiB with data, and changed copies of it.
struct Broken {
    images: Images,
    good: Vec<u8>,
}

impl Broken {
    fn new(options: &str) -> Broken {
        let images = Images::new();
        let path = images.create("good", options, 4 * MIB);
        images.qemu_io("good", &["write -q -P 1 0 256k".into(), "write -q -P 2 1M 64k".into()]);
        let good = std::fs::read(path).expect("the good image");
        Broken { images, good }
    }

    /// A copy with `changes`: position and bytes.
    fn with(&self, changes: &[(usize, &[u8])]) -> PathBuf {
        let mut bytes = self.good.clone();
        for (at, new) in changes {
            let end = at + new.len();
            bytes.resize(bytes.len().max(end), 0);
            bytes[*at..end].copy_from_slice(new);
        }
        self.write(&bytes)
    }

    fn write(&self, bytes: &[u8]) -> PathBuf {
        let path = self.images.path("broken.qcow2");
        std::fs::write(&path, bytes).expect("the broken image");
        path
    }

    fn u64_at(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.good[at..at + 8].try_into().expect("8 bytes"))
    }

    /// Position in the file of the L2 entry of a guest cluster (of the first table).
    fn l2_entry(&self, cluster: u64) -> usize {
        let l1 = self.u64_at(L1_TABLE_OFFSET) as usize;
        let table = self.u64_at(l1) & 0x00ff_ffff_ffff_fe00;
        (table + cluster * 8) as usize
    }
}

fn assert_refused(runtime: &mut Runtime, path: &Path, case: &str, kind: ErrorKind, words: &str) {
    let Err(error) = try_open(runtime, path) else { panic!("{case}: opened") };
    let message = error.to_string();
    assert_eq!(error.kind(), kind, "{case}: {message}");
    assert!(message.contains("broken.qcow2"), "{case}: no file name in: {message}");
    assert!(message.contains(words), "{case}: no '{words}' in: {message}");
    assert!(!error.advice().is_empty(), "{case}");
}

/// Name, position and new bytes, kind of the error, words of its message.
type Case<'a> = (&'a str, (usize, Vec<u8>), ErrorKind, &'a str);

fn word(value: u64) -> [u8; 8] {
    value.to_be_bytes()
}

fn half(value: u32) -> [u8; 4] {
    value.to_be_bytes()
}

#[test]
fn every_broken_header_field_is_refused_with_its_name() {
    use ErrorKind::{Corrupt, Encrypted, NotQcow2, TooLarge, Unsupported};
    let broken = Broken::new("");
    let mut runtime = runtime();
    let len = broken.good.len() as u64;
    let beyond = len.next_multiple_of(CLUSTER) + 16 * CLUSTER;
    let w = |at: usize, value: u64| (at, word(value).to_vec());
    let h = |at: usize, value: u32| (at, half(value).to_vec());
    let cases: [Case; 48] = [
        ("magic", h(0, 0x5146_49fa), NotQcow2, "not a qcow2 image"),
        ("version 0", h(VERSION, 0), Unsupported, "version is 0"),
        ("version 1", h(VERSION, 1), Unsupported, "version is 1"),
        ("version 4", h(VERSION, 4), Unsupported, "version is 4"),
        ("backing name in the header", w(BACKING_FILE_OFFSET, 8), Corrupt, ""),
        ("cluster_bits 0", h(CLUSTER_BITS, 0), Corrupt, "cluster_bits is 0"),
        ("cluster_bits 8", h(CLUSTER_BITS, 8), Corrupt, "cluster_bits is 8"),
        ("cluster_bits 22", h(CLUSTER_BITS, 22), Corrupt, "cluster_bits is 22"),
        ("cluster_bits all", h(CLUSTER_BITS, u32::MAX), Corrupt, "cluster_bits is 4294967295"),
        ("size 2^63", w(SIZE, 1 << 63), Corrupt, "size is 9223372036854775808"),
        ("size all", w(SIZE, u64::MAX), Corrupt, "size is"),
        ("size over l1", w(SIZE, 1 << 40), Corrupt, "l1_size is 1"),
        ("AES", h(CRYPT_METHOD, 1), Encrypted, "AES"),
        ("LUKS", h(CRYPT_METHOD, 2), Encrypted, "LUKS"),
        ("crypt 3", h(CRYPT_METHOD, 3), Encrypted, "crypt_method is 3"),
        ("l1_size 0", h(L1_SIZE, 0), Corrupt, "l1_size is 0"),
        ("l1_size over limit", h(L1_SIZE, (32 << 20) / 8 + 1), TooLarge, "l1_size"),
        ("l1_size all", h(L1_SIZE, u32::MAX), TooLarge, "l1_size is 4294967295"),
        ("l1_size to the end", h(L1_SIZE, (32 << 20) / 8), Corrupt, "L1 table"),
        ("l1 unaligned", w(L1_TABLE_OFFSET, 3 * CLUSTER + 512), Corrupt, "l1_table_offset"),
        ("l1 at 0", w(L1_TABLE_OFFSET, 0), Corrupt, "l1_table_offset"),
        ("l1 beyond", w(L1_TABLE_OFFSET, beyond), Corrupt, "L1 table ends at byte"),
        ("l1 overflow", w(L1_TABLE_OFFSET, !(CLUSTER - 1)), Corrupt, "l1_table_offset"),
        ("l1 on refcounts", w(L1_TABLE_OFFSET, CLUSTER), Corrupt, "overlaps the refcount table"),
        ("refcounts unaligned", w(REFCOUNT_TABLE_OFFSET, 8), Corrupt, "refcount_table_offset"),
        ("refcounts at 0", w(REFCOUNT_TABLE_OFFSET, 0), Corrupt, "refcount_table_offset"),
        ("refcounts beyond", w(REFCOUNT_TABLE_OFFSET, beyond), Corrupt, "refcount table"),
        ("no refcounts", h(REFCOUNT_TABLE_CLUSTERS, 0), Corrupt, "refcount_table_clusters is 0"),
        ("many refcounts", h(REFCOUNT_TABLE_CLUSTERS, 129), TooLarge, "refcount_table_clusters"),
        ("all refcounts", h(REFCOUNT_TABLE_CLUSTERS, u32::MAX), TooLarge, "refcount_table_clus"),
        ("snapshots at 0", h(NB_SNAPSHOTS, 1), Corrupt, "snapshots_offset"),
        ("many snapshots", h(NB_SNAPSHOTS, 65_537), TooLarge, "nb_snapshots is 65537"),
        ("all snapshots", h(NB_SNAPSHOTS, u32::MAX), TooLarge, "nb_snapshots"),
        ("snapshots unaligned", w(SNAPSHOTS_OFFSET, 1000), Corrupt, "snapshots_offset"),
        ("unknown bit", w(INCOMPATIBLE, 1 << 5), Unsupported, "bit 5 (no name recorded)"),
        ("unknown bits", w(INCOMPATIBLE, 3 << 62), Unsupported, "bit 62"),
        ("compression bit alone", w(INCOMPATIBLE, 1 << 3), Corrupt, "compression_type is 0"),
        ("refcount_order 7", h(REFCOUNT_ORDER, 7), Corrupt, "refcount_order is 7"),
        ("refcount_order all", h(REFCOUNT_ORDER, u32::MAX), Corrupt, "refcount_order"),
        ("header_length 0", h(HEADER_LENGTH, 0), Corrupt, "header_length is 0"),
        ("header_length 96", h(HEADER_LENGTH, 96), Corrupt, "header_length is 96"),
        ("header_length 105", h(HEADER_LENGTH, 105), Corrupt, "header_length is 105"),
        ("header_length long", h(HEADER_LENGTH, 65_544), Corrupt, "header_length is 65544"),
        ("header_length all", h(HEADER_LENGTH, u32::MAX), Corrupt, "header_length"),
        ("zstd without bit", (COMPRESSION_TYPE, vec![1]), Corrupt, "compression_type is 1"),
        ("compression 2", (COMPRESSION_TYPE, vec![2]), Unsupported, "compression type 2"),
        ("extension length", h(EXTENSIONS + 4, u32::MAX), Corrupt, "header extension"),
        ("raw, no data file", w(AUTOCLEAR, 2), Corrupt, "data file is a raw image"),
    ];
    for (case, (at, bytes), kind, words) in &cases {
        let mut changes: Vec<(usize, &[u8])> = vec![(*at, bytes)];
        let size = half(10);
        if *at == BACKING_FILE_OFFSET {
            changes.push((BACKING_FILE_SIZE, &size));
        }
        assert_refused(&mut runtime, &broken.with(&changes), case, *kind, words);
    }
}

#[test]
fn broken_backing_file_names_are_refused() {
    let broken = Broken::new("");
    let mut runtime = runtime();
    let cases: [(u64, u32, &str); 9] = [
        (1, 0, "backing_file_offset"),
        (0x190, 0, "header extension"),
        (CLUSTER + 1, 0, "backing_file_offset"),
        (1 << 63, 0, "backing_file_offset"),
        (CLUSTER, 4, "backing_file_offset"),
        (u64::MAX, 4, "backing_file_offset"),
        (512, 1024, "backing_file_size is 1024"),
        (CLUSTER - 4, 5, "backing_file_size is 5"),
        (1 << 15, 3, "NUL"),
    ];
    for (offset, len, words) in cases {
        let (offset_bytes, len_bytes) = (word(offset), half(len));
        let changes: [(usize, &[u8]); 2] =
            [(BACKING_FILE_OFFSET, &offset_bytes), (BACKING_FILE_SIZE, &len_bytes)];
        let path = broken.with(&changes);
        assert_refused(&mut runtime, &path, words, ErrorKind::Corrupt, words);
    }
}

#[test]
fn an_unknown_feature_is_named_from_the_image() {
    let broken = Broken::new("");
    let name = b"\x00\x09time travel";
    let table = EXTENSIONS + 8;
    let changes: [(usize, &[u8]); 2] = [(table, name), (INCOMPATIBLE, &word(1 << 9))];
    let path = broken.with(&changes);
    assert_refused(&mut runtime(), &path, "named", ErrorKind::Unsupported, "'time travel' (bit 9)");
}

#[test]
fn extended_l2_needs_clusters_of_16_kib() {
    let broken = Broken::new("cluster_size=8k");
    let path = broken.with(&[(INCOMPATIBLE, &word(1 << 4))]);
    assert_refused(&mut runtime(), &path, "8 KiB", ErrorKind::Corrupt, "cluster_bits is 13");
}

#[test]
fn a_corrupt_image_is_read_but_not_written() {
    let broken = Broken::new("");
    let mut runtime = runtime();
    let path = broken.with(&[(INCOMPATIBLE, &word(1 << 1))]);
    assert!(try_open(&mut runtime, &path).expect("reading is fine").info().corrupt);
    let writable = OpenOptions { writable: true, ..Default::default() };
    let error = try_open_with(&mut runtime, &path, &writable).expect_err("marked corrupt");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("broken.qcow2") && error.to_string().contains("corrupt"));
    // The bit is what stands in the way.
    assert!(try_open_with(&mut runtime, &broken.with(&[]), &writable).is_ok());
}

#[test]
fn unknown_compatible_and_autoclear_bits_are_no_obstacle() {
    let broken = Broken::new("");
    let path = broken.with(&[(INCOMPATIBLE + 8, &word(!0)), (AUTOCLEAR, &word(!2))]);
    let image = try_open(&mut runtime(), &path).expect("only incompatible bits matter");
    assert_eq!(image.info().autoclear_features, !2);
}

#[test]
fn a_size_that_is_no_multiple_of_512_is_served_to_the_byte() {
    let broken = Broken::new("");
    let mut runtime = runtime();
    let path = broken.with(&[(SIZE, &word(100_001))]);
    let image = try_open(&mut runtime, &path).expect("any size");
    let bytes = crate::common::read_all(&mut runtime, &image, &[], 4096);
    assert_eq!(bytes, vec![1; 100_001]);
}

#[test]
fn truncated_files_are_refused_or_read_with_errors_at_the_missing_places() {
    let broken = Broken::new("");
    let mut runtime = runtime();
    let l1 = broken.u64_at(L1_TABLE_OFFSET) as usize;
    let lengths = [4, 5, 71, 72, 103, 104, 111, 112, 150, 4096, 65_536, 131_072, l1, l1 + 7];
    for len in lengths {
        let path = broken.write(&broken.good[..len]);
        let case = format!("{len} bytes");
        assert_refused(&mut runtime, &path, &case, ErrorKind::Corrupt, "");
    }
    for len in [0, 3] {
        let path = broken.write(&broken.good[..len]);
        assert_refused(&mut runtime, &path, "empty", ErrorKind::NotQcow2, "not a qcow2");
    }
    // All tables are there, some data is not.
    let first_data = broken.u64_at(broken.l2_entry(0)) & 0x00ff_ffff_ffff_fe00;
    let path = broken.write(&broken.good[..(first_data + CLUSTER + 100) as usize]);
    let image = try_open(&mut runtime, &path).expect("the tables are there");
    let ring = runtime.ring().clone();
    let mut at = |offset| runtime.block_on(read(&ring, &image, &[], offset, 100));
    assert_eq!(at(0), Ok(vec![1; 100]));
    assert_eq!(at(CLUSTER), Ok(vec![1; 100]));
    assert_eq!(at(2 * CLUSTER), Err(Errno::IO));
    assert_eq!(at(3 * MIB), Ok(vec![0; 100]));
}

/// Reads a bit of guest clusters 0 and 1 of an image whose table entries were changed.
fn first_two(runtime: &mut Runtime, path: &Path) -> [Result<Vec<u8>, Errno>; 2] {
    let image = try_open(runtime, path).expect("the header is good");
    let ring = runtime.ring().clone();
    [0, CLUSTER].map(|at| runtime.block_on(read(&ring, &image, &[], at, 10)))
}

#[test]
fn a_broken_l2_entry_is_an_error_for_its_cluster_only() {
    let broken = Broken::new("");
    let mut runtime = runtime();
    let at = broken.l2_entry(0);
    let good = broken.u64_at(at);
    let beyond = (broken.good.len() as u64).next_multiple_of(CLUSTER) + CLUSTER;
    let copied = 1 << 63;
    let cases = [
        ("unaligned", good | 512),
        ("reserved low", good | 2),
        ("reserved high", good | 1 << 60),
        ("beyond the file", copied | beyond),
        ("far beyond", copied | 0x00ff_ffff_ffff_0000),
        ("on the refcount table", copied | CLUSTER),
        ("on the L1 table", copied | broken.u64_at(L1_TABLE_OFFSET)),
        ("compressed, beyond", 1 << 62 | beyond),
        ("compressed, on the header", 1 << 62 | 100),
        ("compressed, rubbish", 1 << 62 | (good & 0x00ff_ffff_ffff_0000)),
        ("compressed, long", 1 << 62 | 0xff << 54 | (good & 0x00ff_ffff_ffff_0000)),
        ("all ones", u64::MAX),
    ];
    for (case, entry) in cases {
        let path = broken.with(&[(at, &word(entry))]);
        let [first, second] = first_two(&mut runtime, &path);
        assert_eq!(first, Err(Errno::IO), "{case}");
        assert_eq!(second, Ok(vec![1; 10]), "{case}");
    }
}

#[test]
fn a_broken_l1_entry_is_an_error_for_its_table_only() {
    let broken = Broken::new("");
    let mut runtime = runtime();
    let l1 = broken.u64_at(L1_TABLE_OFFSET) as usize;
    let good = broken.u64_at(l1);
    let beyond = (broken.good.len() as u64).next_multiple_of(CLUSTER) + CLUSTER;
    let cases = [
        ("unaligned", good | 512),
        ("reserved low", good | 1),
        ("reserved high", good | 1 << 62),
        ("beyond", beyond),
        ("on itself", l1 as u64),
        ("on the refcount table", CLUSTER),
        ("all ones", u64::MAX),
    ];
    for (case, entry) in cases {
        let path = broken.with(&[(l1, &word(entry))]);
        assert_eq!(first_two(&mut runtime, &path), [Err(Errno::IO), Err(Errno::IO)], "{case}");
    }
}

#[test]
fn an_l2_table_that_is_cut_off_by_the_end_of_the_file_is_an_error() {
    let broken = Broken::new("");
    let l1 = broken.u64_at(L1_TABLE_OFFSET) as usize;
    let last = (broken.good.len() as u64).next_multiple_of(CLUSTER);
    let mut bytes = broken.good.clone();
    bytes[l1..l1 + 8].copy_from_slice(&word(last));
    bytes.resize(last as usize + 1000, 0);
    let path = broken.write(&bytes);
    assert_eq!(first_two(&mut runtime(), &path), [Err(Errno::IO), Err(Errno::IO)]);
}

#[test]
fn the_zero_flag_in_version_2_is_an_error() {
    let broken = Broken::new("compat=0.10");
    let at = broken.l2_entry(0);
    let path = broken.with(&[(at, &word(broken.u64_at(at) | 1))]);
    let [first, second] = first_two(&mut runtime(), &path);
    assert_eq!((first, second), (Err(Errno::IO), Ok(vec![1; 10])));
}

#[test]
fn broken_snapshot_tables_are_refused() {
    let images = Images::new();
    let path = images.create("good", "", MIB);
    images.qemu_img(&["snapshot", "-c", "name", "good"]);
    let good = std::fs::read(&path).expect("the good image");
    let broken = Broken { images, good };
    let mut runtime = runtime();
    let table = broken.u64_at(SNAPSHOTS_OFFSET) as usize;
    for (case, at, value) in [
        ("extra data over its limit", table + 36, 1025),
        ("extra data over everything", table + 36, u32::MAX),
        ("id and name beyond the file", table + 12, u32::MAX),
        ("more snapshots than there are", NB_SNAPSHOTS, 60_000),
    ] {
        let path = broken.with(&[(at, &half(value))]);
        assert_refused(&mut runtime, &path, case, ErrorKind::Corrupt, "snapshot");
    }
    let path = broken.with(&[(SNAPSHOTS_OFFSET, &word(1 << 40))]);
    assert_refused(&mut runtime, &path, "beyond", ErrorKind::Corrupt, "snapshot table");
}

#[test]
fn broken_bitmap_directories_are_refused_unless_they_are_stale() {
    let images = Images::new();
    let path = images.create("good", "", MIB);
    images.qemu_img(&["bitmap", "--add", "good", "name"]);
    let good = std::fs::read(&path).expect("the good image");
    let broken = Broken { images, good };
    let mut runtime = runtime();
    let extension = half(0x2385_2875);
    let at = broken.good.windows(4).position(|w| w == extension).expect("the extension") + 8;
    let directory = broken.u64_at(at + 16) as usize;
    let cases: [(&str, usize, &[u8], ErrorKind); 7] = [
        ("count 0", at, &half(0), ErrorKind::Corrupt),
        ("count over the limit", at, &half(65_536), ErrorKind::TooLarge),
        ("size over the limit", at + 8, &word(65 << 20), ErrorKind::TooLarge),
        ("offset beyond", at + 16, &word(1 << 40), ErrorKind::Corrupt),
        ("offset unaligned", at + 16, &word(8), ErrorKind::Corrupt),
        ("type 2", directory + 16, &[2], ErrorKind::Corrupt),
        ("granularity 2^64", directory + 17, &[64], ErrorKind::Corrupt),
    ];
    for (case, at, bytes, kind) in cases {
        assert_refused(&mut runtime, &broken.with(&[(at, bytes)]), case, kind, "bitmap");
        let stale = broken.with(&[(at, bytes), (AUTOCLEAR, &word(0))]);
        assert!(try_open(&mut runtime, &stale).expect(case).info().bitmaps.is_empty());
    }
}

#[test]
fn a_data_file_for_an_image_without_one_is_refused() {
    let broken = Broken::new("");
    let mut runtime = runtime();
    let path = broken.with(&[]);
    let mut image = try_open(&mut runtime, &path).expect("a good image");
    let error = image.set_data_file(crate::common::storage(&path)).expect_err("it has none");
    assert_eq!(error.kind(), ErrorKind::InvalidRequest);
}

#[test]
fn a_sparse_file_with_huge_tables_takes_little_memory() {
    let broken = Broken::new("");
    let mut runtime = runtime();
    // The largest L1 table, in the hole of a sparse file: 2 PiB of disk.
    let path = broken.with(&[
        (SIZE, &word(1 << 51)),
        (L1_SIZE, &half(4 << 20)),
        (L1_TABLE_OFFSET, &word(1 << 30)),
    ]);
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("the file");
    file.set_len((1 << 30) + (32 << 20)).expect("sparse");
    let before = resident_bytes();
    let image = try_open(&mut runtime, &path).expect("allowed");
    let grown = resident_bytes().saturating_sub(before);
    assert_eq!(
        image
            .map_cached(GuestOffset(1 << 50), Bytes(1 << 40))
            .expect("good")
            .expect("no table")
            .len,
        Bytes(1 << 40)
    );
    assert!(grown < 24 << 20, "{grown} bytes");
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("procfs");
    let pages: u64 = statm.split(' ').nth(1).and_then(|p| p.parse().ok()).expect("a number");
    pages * 4096
}

#[test]
fn every_single_byte_of_the_header_may_be_anything() {
    let broken = Broken::new("");
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    for at in 0..160 {
        for value in [0x00, 0x01, 0x7f, 0x80, 0xff] {
            let path = broken.with(&[(at, &[value])]);
            if let Ok(image) = try_open(&mut runtime, &path) {
                let len = image.virtual_size().min(Bytes(64 * KIB)).0 as usize;
                let _ = runtime.block_on(read(&ring, &image, &[], 0, len));
            }
        }
    }
}
