use super::{Header, Kind, Range, Status, range_count};

fn header(kind: u32, sector: u64) -> Header {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    Header::parse(&bytes)
}

fn range(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..].copy_from_slice(&flags.to_le_bytes());
    bytes
}

#[test]
fn kinds_are_told_apart_and_others_are_unknown() {
    let kinds = [0, 1, 4, 8, 11, 13].map(|kind| header(kind, 0).kind);
    use Kind::{Discard, Flush, GetId, Read, Write, WriteZeroes};
    assert_eq!(kinds, [Read, Write, Flush, GetId, Discard, WriteZeroes]);
    for other in [2, 3, 5, 14, 24, u32::MAX] {
        assert_eq!(header(other, 0).kind, Kind::Unknown);
    }
}

#[test]
fn a_place_lies_on_the_disk_and_in_whole_blocks() {
    assert_eq!(header(0, 3).place(512, 512, 2048), Some(1536));
    assert_eq!(header(0, 3).place(1024, 512, 2048), None);
    assert_eq!(header(0, 4).place(0, 512, 2048), Some(2048));
    assert_eq!(header(0, u64::MAX).place(512, 512, u64::MAX), None);
    assert_eq!(header(0, u64::MAX / 512).place(u64::MAX, 512, u64::MAX), None);
    assert_eq!(header(0, 1).place(4096, 4096, 1 << 20), None);
    assert_eq!(header(0, 8).place(4096, 4096, 1 << 20), Some(4096));
    assert_eq!(header(0, 0).place(100, 512, 1 << 20), None);
}

#[test]
fn ranges_are_checked() {
    let parse = |bytes, kind| Range::parse(&bytes, kind, 512, 1 << 20);
    let good = Range { offset: 512, len: 1024, may_unmap: true };
    assert_eq!(parse(range(1, 2, 1), Kind::WriteZeroes), Ok(good));
    assert_eq!(parse(range(1, 2, 1), Kind::Discard), Err(Status::Unsupported));
    assert_eq!(parse(range(1, 2, 2), Kind::WriteZeroes), Err(Status::Unsupported));
    assert_eq!(parse(range(2048, 1, 0), Kind::Discard), Err(Status::IoError));
    assert_eq!(parse(range(0, u32::MAX, 0), Kind::Discard), Err(Status::IoError));
    assert_eq!(parse(range(u64::MAX, 1, 0), Kind::Discard), Err(Status::IoError));
    assert_eq!([0, 15, 16, 1024, 1040].map(range_count), [None, None, Some(1), Some(64), None]);
}
