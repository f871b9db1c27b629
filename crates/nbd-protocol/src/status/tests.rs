use proptest::prelude::*;

use super::*;
use crate::numbers::extent_flags;

const EXTENTS: [Extent; 2] = [
    Extent { len: 65_536, flags: extent_flags::HOLE | extent_flags::ZERO },
    Extent { len: 512, flags: 0 },
];

#[test]
fn extents_go_both_ways_in_both_widths() {
    for (is_extended, kind, len) in
        [(false, chunk::BLOCK_STATUS, 20), (true, chunk::BLOCK_STATUS_EXTENDED, 40)]
    {
        let mut payload = Vec::new();
        push_extents(&mut payload, is_extended, 3, &EXTENTS);
        assert_eq!(payload.len(), len);
        let status = StatusPayload::parse(kind, &payload).unwrap();
        assert_eq!(status.id, 3);
        assert!(status.extents().eq(EXTENTS));
    }
}

#[test]
fn status_that_is_cut_off_empty_or_lies_about_its_count_is_refused() {
    let mut payload = Vec::new();
    push_extents(&mut payload, true, 3, &EXTENTS);
    fn parse(payload: &[u8]) -> Result<StatusPayload<'_>, Malformed> {
        StatusPayload::parse(chunk::BLOCK_STATUS_EXTENDED, payload)
    }
    assert!(parse(&payload[..payload.len() - 1]).is_err());
    assert!(parse(&payload[..payload.len() - 16]).is_err());
    assert!(parse(&payload[..8]).is_err());
    payload[7] = 3;
    assert!(parse(&payload).is_err());
    let empty = [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1];
    assert!(StatusPayload::parse(chunk::BLOCK_STATUS, &empty).is_err());
    assert!(StatusPayload::parse(chunk::BLOCK_STATUS, &empty[..4]).is_err());
    assert!(StatusPayload::parse(chunk::OFFSET_DATA, &empty).is_err());
}

#[test]
fn a_filter_goes_both_ways() {
    let mut payload = Vec::new();
    StatusFilter::push(&mut payload, 1 << 40, &[0, 7]);
    let filter = StatusFilter::parse(&payload).unwrap();
    assert_eq!(filter.len, 1 << 40);
    assert!(filter.ids().eq([0, 7]));
    assert!(StatusFilter::parse(&payload[..9]).is_err());
    assert!(StatusFilter::parse(&payload[..7]).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_or_refused(bytes: Vec<u8>) {
        for kind in [chunk::BLOCK_STATUS, chunk::BLOCK_STATUS_EXTENDED] {
            if let Ok(status) = StatusPayload::parse(kind, &bytes) {
                prop_assert!(status.extents().count() > 0);
            }
        }
        if let Ok(filter) = StatusFilter::parse(&bytes) {
            prop_assert!(filter.ids().count() <= bytes.len() / 4);
        }
    }
}
