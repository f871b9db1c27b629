use super::write::{Step, steps};
use super::{HeaderImage, NewHeader, Subject};
use crate::ErrorKind;
use crate::extensions::{BitmapDirectory, FEATURE_NAMES};
use crate::info::{CompressionType, FeatureClass};
use crate::limits::SECTOR_LEN;
use crate::units::{Bytes, HostOffset};

const SUBJECT: Subject<'static> = Subject { name: "x", len: Bytes(1 << 30) };
const DIRECTORY: BitmapDirectory =
    BitmapDirectory { count: 1, offset: HostOffset(1 << 20), len: Bytes(32) };

/// A header that passes the checks.
fn header(version: u32, cluster_bits: u32) -> HeaderImage {
    let compression = CompressionType::Zlib;
    let new = NewHeader { file: "x", version, cluster_bits, refcount_order: 4, compression };
    let mut header = HeaderImage::new(&new);
    header.set_refcount_table(HostOffset(1 << cluster_bits), 1);
    header.set_l1_table(HostOffset(2 << cluster_bits), 1);
    header.set_size(Bytes(4096));
    header
}

/// The first cluster as it is on the disk, with something in the unused part.
fn on_disk(header: &HeaderImage) -> Vec<u8> {
    let mut disk = vec![0xee; 1 << header.cluster_bits()];
    disk[..header.bytes.len()].copy_from_slice(&header.bytes);
    disk
}

fn parse(disk: &[u8]) -> HeaderImage {
    HeaderImage::parse(disk, SUBJECT).expect("a header that opens")
}

/// What a reader gets to know.
fn meaning(header: &HeaderImage) -> impl PartialEq + std::fmt::Debug + use<> {
    let parsed = header.header(SUBJECT.len, false).expect("a header that opens");
    let extensions = &parsed.extensions;
    (
        parsed.backing_file.clone(),
        extensions.backing_format.clone(),
        extensions.data_file.clone(),
        extensions.bitmaps,
        extensions.unknown.clone(),
    )
}

/// Puts sectors of `bytes` at `at` into `disk`, those whose bit is set in `chosen`.
fn write_some(disk: &mut [u8], at: usize, bytes: &[u8], chosen: u64) {
    for (index, sector) in bytes.chunks(SECTOR_LEN).enumerate() {
        if chosen >> (index % 64) & 1 != 0 {
            let at = at + index * SECTOR_LEN;
            disk[at..at + sector.len()].copy_from_slice(sector);
        }
    }
}

/// Goes from `old` to `new` with a power cut at each point: the header on the disk always means one
/// of the two.
fn check_power_cuts(old: &HeaderImage, new: &HeaderImage) -> Vec<u8> {
    let mut disk = on_disk(old);
    let old = parse(&disk);
    let allowed = [meaning(&old), meaning(new)];
    for Step { at, behind, first } in steps(&old, new) {
        for chosen in 0..256 {
            let mut torn = disk.clone();
            write_some(&mut torn, at, &behind, chosen * 0x0101_0101);
            let found = meaning(&parse(&torn));
            assert!(allowed.contains(&found), "after a part of the first write: {found:?}");
        }
        write_some(&mut disk, at, &behind, u64::MAX);
        write_some(&mut disk, 0, &first, 1);
        let found = meaning(&parse(&disk));
        assert!(allowed.contains(&found), "after a step: {found:?}");
    }
    assert_eq!(meaning(&parse(&disk)), allowed[1]);
    disk
}

#[test]
fn a_new_header_has_the_fields_and_names_that_qemu_writes() {
    let header = header(3, 16);
    assert_eq!((header.version(), header.cluster_bits(), header.size()), (3, 16, Bytes(4096)));
    assert_eq!(
        (header.l1_table(), header.refcount_table()),
        ((HostOffset(0x20000), 1), (HostOffset(0x10000), 1))
    );
    let parsed = header.header(SUBJECT.len, true).expect("sound");
    assert_eq!((parsed.header_length, parsed.refcount_order), (112, 4));
    let names = &parsed.extensions.feature_names;
    assert_eq!(names.len(), 8);
    assert_eq!((names[7].class, names[7].bit), (FeatureClass::Autoclear, 1));
    assert_eq!(names[7].name, "raw external data");
}

#[test]
fn small_clusters_and_version_2_get_no_feature_names() {
    for header in [header(3, 9), header(3, 12), header(2, 16)] {
        assert!(header.extensions.is_empty());
    }
    assert_eq!(header(2, 16).header(SUBJECT.len, true).expect("sound").header_length, 72);
}

#[test]
fn a_changed_field_changes_nothing_else() {
    let disk = on_disk(&header(3, 16));
    let mut header = parse(&disk);
    header.set_snapshots(HostOffset(0x50000), 3);
    header.set_incompatible(super::DIRTY);
    let mut expected = disk[..SECTOR_LEN].to_vec();
    expected[63] = 3;
    expected[69] = 5;
    expected[79] = 1;
    assert_eq!(header.bytes, expected);
    assert!(!header.laid_out);
}

#[test]
fn feature_bits_of_version_2_stay_away() {
    let mut header = header(2, 16);
    let before = header.bytes.clone();
    header.set_autoclear(1);
    header.set_incompatible(1);
    header.set_compatible(1);
    assert_eq!((header.bytes.clone(), header.autoclear()), (before, 0));
}

#[test]
fn unknown_extensions_stay_byte_for_byte() {
    let mut header = header(3, 16);
    header.extensions.push((0x1234_5678, b"odd".to_vec()));
    header.extensions.push((0x1234_5678, vec![7; 900]));
    header.set_bitmaps(Some(DIRECTORY)).expect("room");
    header.set_backing_file(Some(b"base.img"), Some("raw")).expect("room");
    let mut again = parse(&on_disk(&header));
    again.set_bitmaps(None).expect("room");
    let unknown = again.header(SUBJECT.len, true).expect("sound").extensions.unknown;
    assert_eq!(unknown.len(), 2);
    assert_eq!(
        (unknown[0].data.as_slice(), unknown[1].data.as_slice()),
        (&b"odd"[..], &[7; 900][..])
    );
    assert_eq!(again.backing_file(), Some(&b"base.img"[..]));
}

#[test]
fn a_power_cut_leaves_the_old_or_the_new_bitmaps_extension() {
    for backing in [None, Some(&b"base"[..]), Some(&[b'n'; 1023])] {
        let mut old = header(3, 16);
        old.set_backing_file(backing, Some("qcow2")).expect("room");
        let mut new = old.clone();
        new.set_bitmaps(Some(DIRECTORY)).expect("room");
        check_power_cuts(&old, &new);
        let disk = check_power_cuts(&new, &old);
        assert_eq!(parse(&disk).extensions, old.extensions);
    }
}

#[test]
fn a_power_cut_leaves_the_old_or_the_new_backing_file() {
    let names = [None, Some(vec![b'a'; 1]), Some(vec![b'b'; 600]), Some(vec![b'c'; 1023])];
    for (version, cluster_bits) in [(2, 16), (3, 16), (3, 21), (2, 13), (3, 13), (3, 12)] {
        for old_name in &names {
            for new_name in &names {
                let mut old = header(version, cluster_bits);
                old.set_backing_file(old_name.as_deref(), Some("raw")).expect("room");
                let mut new = old.clone();
                new.set_backing_file(new_name.as_deref(), Some("qcow2")).expect("room");
                check_power_cuts(&old, &new);
            }
        }
    }
}

#[test]
fn a_change_inside_the_first_sector_is_one_write() {
    let mut old = header(3, 16);
    old.set_bitmaps(Some(DIRECTORY)).expect("room");
    let mut new = parse(&on_disk(&old));
    new.set_bitmaps(Some(BitmapDirectory { count: 2, ..DIRECTORY })).expect("room");
    let steps = steps(&old, &new);
    assert_eq!(steps.len(), 1);
}

#[test]
fn names_of_features_make_room_for_what_matters() {
    let mut header = header(3, 13);
    header.extensions.push((0x1234_5678, vec![7; 7000]));
    header.set_backing_file(Some(&[b'n'; 1000]), None).expect("room");
    assert!(header.extensions.iter().all(|(kind, _)| *kind != FEATURE_NAMES));
}

#[test]
fn what_has_no_room_changes_nothing() {
    let mut header = header(3, 9);
    let before = header.bytes.clone();
    let error = header.set_backing_file(Some(&[b'n'; 500]), None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidRequest);
    assert_eq!((header.bytes.clone(), header.backing_file()), (before, None));
}
