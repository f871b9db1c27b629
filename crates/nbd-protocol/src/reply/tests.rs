use proptest::prelude::*;

use super::*;
use crate::numbers::errno;

const CHUNK: Chunk = Chunk {
    flags: chunk_flags::DONE,
    kind: chunk::OFFSET_DATA,
    cookie: 0x0102_0304_0506_0708,
    offset: 0,
    len: 12,
};

#[test]
fn a_simple_reply_is_that_of_the_protocol() {
    let reply = SimpleReply { error: errno::EIO, cookie: 9 };
    let bytes = b"\x67\x44\x66\x98\x00\x00\x00\x05\x00\x00\x00\x00\x00\x00\x00\x09";
    assert_eq!(&reply.to_bytes(), bytes);
    for style in [Style::Simple, Style::Structured] {
        let parsed = ReplyHead::parse(style, bytes);
        assert_eq!(parsed, Ok(Some((ReplyHead::Simple(reply), SIMPLE_BYTES))));
    }
    assert!(ReplyHead::parse(Style::Extended, bytes).is_err());
}

#[test]
fn the_head_of_a_chunk_is_that_of_the_protocol() {
    let bytes = b"\x66\x8e\x33\xef\x00\x01\x00\x01\x01\x02\x03\x04\x05\x06\x07\x08\x00\x00\x00\x0c";
    let mut out = [0; EXTENDED_CHUNK_BYTES];
    assert_eq!(CHUNK.put(Style::Structured, &mut out), CHUNK_BYTES);
    assert_eq!(&out[..CHUNK_BYTES], bytes);
    let parsed = ReplyHead::parse(Style::Structured, bytes);
    assert_eq!(parsed, Ok(Some((ReplyHead::Chunk(CHUNK), CHUNK_BYTES))));
    assert!(ReplyHead::parse(Style::Simple, bytes).is_err());
    assert_eq!(ReplyHead::parse(Style::Structured, &bytes[..19]), Ok(None));
    assert_eq!(ReplyHead::parse(Style::Structured, &bytes[..3]), Ok(None));
}

#[test]
fn an_extended_head_of_a_chunk_is_that_of_the_protocol() {
    let bytes = b"\x6e\x8a\x27\x8c\x00\x01\x00\x01\x01\x02\x03\x04\x05\x06\x07\x08\
        \x00\x00\x00\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00\x0c";
    let chunk = Chunk { offset: 0x1000, ..CHUNK };
    let mut out = [0; EXTENDED_CHUNK_BYTES];
    assert_eq!(chunk.put(Style::Extended, &mut out), EXTENDED_CHUNK_BYTES);
    assert_eq!(&out, bytes);
    let parsed = ReplyHead::parse(Style::Extended, bytes);
    assert_eq!(parsed, Ok(Some((ReplyHead::Chunk(chunk), EXTENDED_CHUNK_BYTES))));
}

#[test]
fn payloads_go_both_ways() {
    let hole = Hole { offset: 4096, len: 512 };
    assert_eq!(Hole::parse(&hole.to_bytes()), Ok(hole));
    assert!(Hole::parse(&hole.to_bytes()[..11]).is_err());
    assert_eq!(parse_data_offset(&[0, 0, 0, 0, 0, 0, 1, 0, b'x']), Ok(256));
    assert!(parse_data_offset(&[0; 7]).is_err());
    let mut payload = ErrorPayload::head(errno::ENOSPC, 3).to_vec();
    payload.extend(b"not");
    let error = ErrorPayload { error: errno::ENOSPC, text: b"not", offset: None };
    assert_eq!(ErrorPayload::parse(chunk::ERROR, &payload), Ok(error));
    payload.extend(8u64.to_be_bytes());
    let error = ErrorPayload { offset: Some(8), ..error };
    assert_eq!(ErrorPayload::parse(chunk::ERROR_OFFSET, &payload), Ok(error));
    assert!(ErrorPayload::parse(chunk::ERROR, &payload).is_err());
    assert!(ErrorPayload::parse(chunk::ERROR, &[0, 0, 0, 0, 0, 0]).is_err());
    assert!(ErrorPayload::parse(chunk::ERROR, &[0, 0, 0, 5, 0, 9]).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_or_refused(bytes: Vec<u8>, kind: u16) {
        for style in [Style::Simple, Style::Structured, Style::Extended] {
            let _ = ReplyHead::parse(style, &bytes);
        }
        let _ = (Hole::parse(&bytes), parse_data_offset(&bytes));
        let _ = ErrorPayload::parse(kind, &bytes);
    }
}
