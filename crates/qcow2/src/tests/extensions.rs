use crate::ErrorKind;
use crate::extensions::parse;
use crate::info::{FeatureClass, UnknownExtension};

fn extension(kind: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap();
    let mut bytes = [kind.to_be_bytes(), len.to_be_bytes()].concat();
    bytes.extend_from_slice(data);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

#[test]
fn an_empty_area_has_no_extensions() {
    assert!(parse(&[], "x").unwrap().unknown.is_empty());
}

#[test]
fn everything_past_the_end_mark_is_ignored() {
    let area = [extension(0, &[]), vec![0xff; 64]].concat();
    assert!(parse(&area, "x").unwrap().unknown.is_empty());
}

#[test]
fn names_are_found() {
    let area = [extension(0xe279_2aca, b"raw"), extension(0x4441_5441, b"disk.data")].concat();
    let found = parse(&area, "x").unwrap();
    assert_eq!(found.backing_format.as_deref(), Some("raw"));
    assert_eq!(found.data_file.as_deref(), Some(&b"disk.data"[..]));
}

#[test]
fn unknown_extensions_are_kept_without_padding() {
    let area = extension(0x1234_5678, b"abc");
    let kept = UnknownExtension { kind: 0x1234_5678, data: b"abc".to_vec() };
    assert_eq!(parse(&area, "x").unwrap().unknown, [kept]);
}

#[test]
fn feature_names_are_read_and_nonsense_among_them_skipped() {
    let mut table = vec![0; 3 * 48 + 5];
    table[..8].copy_from_slice(b"\x00\x05future");
    table[48..54].copy_from_slice(b"\x02\x01auto");
    table[96..101].copy_from_slice(b"\x09\x01bad");
    let found = parse(&extension(0x6803_f857, &table), "x").unwrap().feature_names;
    assert_eq!(found.len(), 2);
    assert_eq!((found[0].class, found[0].bit), (FeatureClass::Incompatible, 5));
    assert_eq!(found[0].name, "future");
    assert_eq!(found[1].name, "auto");
}

#[test]
fn broken_extensions_are_refused() {
    let cases: [(&str, Vec<u8>); 7] = [
        ("longer than the area", [0x1234u32.to_be_bytes(), 9u32.to_be_bytes()].concat()),
        ("huge", [0x1234u32.to_be_bytes(), u32::MAX.to_be_bytes()].concat()),
        ("length cut off", 0x1234u32.to_be_bytes().to_vec()),
        ("long format", extension(0xe279_2aca, &[b'x'; 16])),
        ("NUL in the data file name", extension(0x4441_5441, b"a\0b")),
        ("an encryption pointer", extension(0x0537_be77, &[0; 16])),
        ("two formats", [extension(0xe279_2aca, b"raw"), extension(0xe279_2aca, b"raw")].concat()),
    ];
    for (case, area) in cases {
        let error = parse(&area, "disk.qcow2").expect_err(case);
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{case}");
        assert!(error.to_string().contains("disk.qcow2"), "{case}: {error}");
    }
}

#[test]
fn an_empty_backing_format_says_as_much_as_none() {
    let found = parse(&extension(0xe279_2aca, &[]), "x").unwrap();
    assert_eq!(found.backing_format, None);
}

#[test]
fn a_bitmaps_extension_that_says_nothing_is_told_apart_from_none() {
    let reserved = [&[0, 0, 0, 1, 0, 0, 0, 1][..], &[0; 16]].concat();
    for data in [&[0; 23][..], &[0; 25], &reserved] {
        let found = parse(&extension(0x2385_2875, data), "x").unwrap();
        assert!(found.bitmaps.is_none() && found.bitmaps_bad.is_some(), "{data:?}");
    }
    assert!(parse(&[], "x").unwrap().bitmaps_bad.is_none());
}

#[test]
fn too_many_extensions_are_refused() {
    let area = extension(0x1234, &[]).repeat(300);
    assert_eq!(parse(&area, "x").unwrap_err().kind(), ErrorKind::TooLarge);
}
