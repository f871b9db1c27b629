use proptest::prelude::*;

use super::*;
use crate::numbers::{export_flags, option, option_reply};

#[test]
fn the_greeting_is_that_of_the_protocol() {
    let bytes = greeting(handshake_flags::FIXED_NEWSTYLE | handshake_flags::NO_ZEROES);
    assert_eq!(&bytes, b"NBDMAGICIHAVEOPT\x00\x03");
    assert_eq!(parse_greeting(&bytes), Ok(3));
}

#[test]
fn a_peer_that_is_no_server_or_an_old_one_is_named_so() {
    assert!(parse_greeting(b"SSH-2.0-OpenSSH_9.").unwrap_err().0.contains("no NBD server"));
    let old = b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53\x00\x00";
    assert!(parse_greeting(old).unwrap_err().0.contains("old style"));
}

#[test]
fn client_flags_that_were_not_offered_are_refused() {
    assert_eq!(parse_client_flags([0, 0, 0, 3]), Ok(3));
    assert_eq!(client_flags(1), [0, 0, 0, 1]);
    assert!(parse_client_flags([0, 0, 0, 4]).is_err());
    assert!(parse_client_flags([0, 1, 0, 1]).is_err());
}

#[test]
fn the_head_of_an_option_is_that_of_the_protocol() {
    let head = OptionHead { option: option::GO, len: 0x0102 };
    assert_eq!(&head.to_bytes(), b"IHAVEOPT\x00\x00\x00\x07\x00\x00\x01\x02");
    assert_eq!(OptionHead::parse(&head.to_bytes()), Ok(head));
    assert!(OptionHead::parse(b"IHAVEOPS\x00\x00\x00\x07\x00\x00\x01\x02").is_err());
}

#[test]
fn the_head_of_a_reply_is_that_of_the_protocol() {
    let head = OptionReplyHead { option: option::LIST, kind: option_reply::POLICY, len: 5 };
    let bytes = b"\x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x03\x80\x00\x00\x02\x00\x00\x00\x05";
    assert_eq!(&head.to_bytes(), bytes);
    assert_eq!(OptionReplyHead::parse(bytes), Ok(head));
}

#[test]
fn the_reply_to_export_name_has_zeroes_where_they_were_not_left_out() {
    let info = ExportInfo { size: 1 << 20, flags: export_flags::HAS_FLAGS };
    let (mut long, mut short) = (Vec::new(), Vec::new());
    info.push_export_name_reply(true, &mut long);
    info.push_export_name_reply(false, &mut short);
    assert_eq!(short, [0, 0, 0, 0, 0, 0x10, 0, 0, 0, 1]);
    assert_eq!((long.len(), &long[..10]), (134, &short[..]));
    assert!(long[10..].iter().all(|byte| *byte == 0));
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_or_refused(a: [u8; 18], b: [u8; 16], c: [u8; 20], d: [u8; 4]) {
        let _ = (parse_greeting(&a), OptionHead::parse(&b), OptionReplyHead::parse(&c));
        let _ = parse_client_flags(d);
    }
}
