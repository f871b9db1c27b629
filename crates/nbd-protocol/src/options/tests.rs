use proptest::prelude::*;

use super::*;
use crate::numbers::option;

#[test]
fn a_request_for_information_goes_both_ways() {
    let request = InfoRequest { name: b"a", wanted: vec![info::NAME, info::BLOCK_SIZE] };
    let mut data = Vec::new();
    request.push(&mut data);
    assert_eq!(data, [0, 0, 0, 1, b'a', 0, 2, 0, 1, 0, 3]);
    assert_eq!(InfoRequest::parse(&data), Ok(request));
}

#[test]
fn a_request_for_information_with_wrong_lengths_is_refused() {
    for data in [
        &[][..],
        &[0, 0, 0],
        &[0, 0, 0, 0],
        &[0, 0, 0, 0, 0],
        &[0, 0, 0, 0, 0, 1],
        &[0, 0, 0, 0, 0, 0, 0],
        &[0, 0, 0, 9, b'a', 0, 0],
        &[0xff, 0xff, 0xff, 0xff, b'a', 0, 0],
        &[0, 0, 0, 1, 0, 0, 0],
    ] {
        assert!(InfoRequest::parse(data).is_err(), "{data:?}");
    }
}

#[test]
fn names_have_a_limit_and_no_nul() {
    assert!(parse_export_name(&[b'x'; NAME_BYTES_MAX]).is_ok());
    assert!(parse_export_name(&[b'x'; NAME_BYTES_MAX + 1]).is_err());
    assert!(parse_export_name(b"a\0b").is_err());
    assert_eq!(parse_export_name(b"a/../b"), Ok(&b"a/../b"[..]));
}

#[test]
fn a_request_for_contexts_goes_both_ways() {
    let request = MetaRequest { export: b"", queries: vec![b"base:allocation", b"qemu:"] };
    let mut data = Vec::new();
    request.push(&mut data);
    assert_eq!(data[..8], [0, 0, 0, 0, 0, 0, 0, 2]);
    assert_eq!(MetaRequest::parse(&data), Ok(request));
}

#[test]
fn a_request_for_contexts_with_wrong_lengths_is_refused() {
    for data in [
        &[][..],
        &[0, 0, 0, 0],
        &[0, 0, 0, 0, 0, 0, 0, 1],
        &[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
        &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, b'a'],
        &[0, 0, 0, 0, 0, 0, 0, 0, 0],
    ] {
        assert!(MetaRequest::parse(data).is_err(), "{data:?}");
    }
}

#[test]
fn replies_go_both_ways() {
    for reply in [
        InfoReply::Export(ExportInfo { size: 5, flags: 1 }),
        InfoReply::Name(b"n"),
        InfoReply::Description(b""),
        InfoReply::BlockSizes(BlockSizes { minimum: 1, preferred: 4096, maximum: 33_554_432 }),
    ] {
        let mut data = Vec::new();
        reply.push(&mut data);
        assert_eq!(InfoReply::parse(&data), Ok(reply));
    }
    assert_eq!(InfoReply::parse(&[0, 9, 1, 2]), Ok(InfoReply::Other(9)));
    assert!(InfoReply::parse(&[0, 0, 1, 2]).is_err());
    assert!(InfoReply::parse(&[0, 3, 0, 0, 0, 1]).is_err());
    let (listed, context) = (
        ListedExport { name: b"a", description: b"text" },
        MetaContext { id: 7, name: b"base:allocation" },
    );
    let (mut first, mut second) = (Vec::new(), Vec::new());
    listed.push(&mut first);
    context.push(&mut second);
    assert_eq!(ListedExport::parse(&first), Ok(listed));
    assert_eq!(MetaContext::parse(&second), Ok(context));
}

#[test]
fn an_option_and_a_reply_are_a_head_and_data() {
    let mut out = Vec::new();
    push_option(&mut out, option::ABORT, &[]);
    assert_eq!(out, b"IHAVEOPT\x00\x00\x00\x02\x00\x00\x00\x00");
    out.clear();
    push_reply(&mut out, option::ABORT, option_reply::ACK, b"xy");
    assert_eq!(out[8..], *b"\x00\x00\x00\x02\x00\x00\x00\x01\x00\x00\x00\x02xy");
    assert!(is_error(option_reply::TOO_BIG) && !is_error(option_reply::ACK));
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_or_refused(data: Vec<u8>) {
        let _ = (InfoRequest::parse(&data), MetaRequest::parse(&data), InfoReply::parse(&data));
        let _ = (ListedExport::parse(&data), MetaContext::parse(&data), parse_export_name(&data));
    }
}
