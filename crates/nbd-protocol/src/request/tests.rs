use proptest::prelude::*;

use super::*;
use crate::numbers::{command, command_flags};

const REQUEST: Request = Request {
    flags: command_flags::FUA,
    command: command::WRITE,
    cookie: 0x0102_0304_0506_0708,
    offset: 0x1000,
    len: 0x200,
};

#[test]
fn a_compact_head_is_that_of_the_protocol() {
    let bytes = b"\x25\x60\x95\x13\x00\x01\x00\x01\x01\x02\x03\x04\x05\x06\x07\x08\
        \x00\x00\x00\x00\x00\x00\x10\x00\x00\x00\x02\x00";
    assert_eq!(&REQUEST.to_compact(), bytes);
    assert_eq!(Request::parse(Style::Simple, bytes), Ok(REQUEST));
    assert_eq!(Request::parse(Style::Structured, bytes), Ok(REQUEST));
}

#[test]
fn an_extended_head_is_that_of_the_protocol() {
    let bytes = b"\x21\xe4\x1c\x71\x00\x01\x00\x01\x01\x02\x03\x04\x05\x06\x07\x08\
        \x00\x00\x00\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x02\x00";
    assert_eq!(&REQUEST.to_extended(), bytes);
    assert_eq!(Request::parse(Style::Extended, bytes), Ok(REQUEST));
}

#[test]
fn the_head_of_another_style_is_named() {
    let wrong = Request::parse(Style::Extended, &REQUEST.to_compact()).unwrap_err();
    assert_eq!(wrong, WrongMagic { got: REQUEST_MAGIC, expected: EXTENDED_REQUEST_MAGIC });
    assert_eq!(Request::parse(Style::Simple, &[]).unwrap_err().got, 0);
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_or_refused(bytes: Vec<u8>) {
        for style in [Style::Simple, Style::Structured, Style::Extended] {
            let _ = Request::parse(style, &bytes);
        }
    }

    #[test]
    fn any_request_goes_both_ways(
        flags: u16, command: u16, cookie: u64, offset: u64, short: u32, long: u64,
    ) {
        let compact = Request { flags, command, cookie, offset, len: u64::from(short) };
        prop_assert_eq!(Request::parse(Style::Simple, &compact.to_compact()), Ok(compact));
        let extended = Request { len: long, ..compact };
        prop_assert_eq!(Request::parse(Style::Extended, &extended.to_extended()), Ok(extended));
    }
}
