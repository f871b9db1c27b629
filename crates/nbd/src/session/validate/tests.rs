use super::*;

const SIZE: u64 = 64 << 20;
const RULES: Rules =
    Rules { style: Style::Extended, size: SIZE, is_read_only: false, has_contexts: true };

fn request(command: u16, offset: u64, len: u64) -> Request {
    Request { command, offset, len, ..Request::default() }
}

fn with_flags(command: u16, flags: u16) -> Request {
    Request { flags, ..request(command, 0, 512) }
}

fn refusal(request: &Request) -> (u32, String) {
    let refusal = judge(request, &RULES).expect_err("a refusal");
    (refusal.error, refusal.text)
}

#[test]
fn what_lies_inside_the_disk_is_served() {
    for command in 0..=7 {
        assert_eq!(judge(&request(command, SIZE - 512, 512), &RULES), Ok(()), "{command}");
    }
    // Nothing is asked for, also at the end.
    assert_eq!(judge(&request(command::READ, SIZE, 0), &RULES), Ok(()));
    // A flush ignores its place.
    assert_eq!(judge(&request(command::FLUSH, u64::MAX, u64::MAX), &RULES), Ok(()));
}

#[test]
fn what_leaves_the_disk_is_refused_and_writes_learn_that_there_is_no_space() {
    let text = "operation past EOF; From: 67108608, Len: 512, Size: 67108864";
    let at = SIZE - 256;
    assert_eq!(refusal(&request(command::READ, at, 512)), (errno::EINVAL, text.into()));
    assert_eq!(refusal(&request(command::WRITE, at, 512)), (errno::ENOSPC, text.into()));
    for (offset, len) in [(u64::MAX, 1), (1, u64::MAX), (1 << 63, 1 << 63), (0, SIZE + 1)] {
        assert!(judge(&request(command::TRIM, offset, len), &RULES).is_err());
        assert!(judge(&request(command::BLOCK_STATUS, offset, len), &RULES).is_err());
        assert!(judge(&request(command::WRITE_ZEROES, offset, len), &RULES).is_err());
    }
}

#[test]
fn flags_belong_to_commands() {
    for allowed in [
        with_flags(command::READ, flags::DF),
        with_flags(command::READ, flags::FUA),
        with_flags(command::CACHE, flags::FUA),
        with_flags(command::FLUSH, flags::FUA),
        with_flags(command::WRITE, flags::FUA | flags::PAYLOAD_LEN),
        with_flags(command::WRITE_ZEROES, flags::FUA | flags::NO_HOLE | flags::FAST_ZERO),
        with_flags(command::BLOCK_STATUS, flags::REQ_ONE),
    ] {
        assert_eq!(judge(&allowed, &RULES), Ok(()), "{allowed:?}");
    }
    let text = "unsupported flags for command read (got 0x8)";
    let refused = with_flags(command::READ, flags::REQ_ONE);
    assert_eq!(refusal(&refused), (errno::EINVAL, text.into()));
    assert!(judge(&with_flags(command::READ, flags::PAYLOAD_LEN), &RULES).is_err());
    assert!(judge(&with_flags(command::READ, 1 << 15), &RULES).is_err());
    let simple = Rules { style: Style::Simple, ..RULES };
    assert!(judge(&with_flags(command::READ, flags::DF), &simple).is_err());
    assert!(judge(&with_flags(command::WRITE, flags::PAYLOAD_LEN), &simple).is_err());
}

#[test]
fn requests_that_are_too_long_are_refused_where_they_carry_data() {
    let text = "len (34603008) is larger than max len (33554432)";
    for command in [command::READ, command::WRITE, command::CACHE] {
        assert_eq!(refusal(&request(command, 0, 33 << 20)), (errno::EINVAL, text.into()));
    }
    for command in [command::TRIM, command::WRITE_ZEROES, command::BLOCK_STATUS] {
        assert_eq!(judge(&request(command, 0, SIZE), &RULES), Ok(()));
    }
}

#[test]
fn other_refusals_have_their_texts() {
    let read_only = Rules { is_read_only: true, ..RULES };
    for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
        let refused = judge(&request(command, 0, 512), &read_only).expect_err("read-only");
        assert_eq!(refused, Refusal::new(errno::EPERM, "Export is read-only"));
    }
    assert_eq!(judge(&request(command::FLUSH, 0, 0), &read_only), Ok(()));
    let text = "invalid request type (99) received";
    assert_eq!(refusal(&request(99, 0, 0)), (errno::EINVAL, text.into()));
    assert_eq!(refusal(&request(command::RESIZE, 0, 0)).0, errno::EINVAL);
    let text = "need non-zero length";
    assert_eq!(refusal(&request(command::BLOCK_STATUS, 0, 0)), (errno::EINVAL, text.into()));
    let without = Rules { has_contexts: false, ..RULES };
    let text = judge(&request(command::BLOCK_STATUS, 0, 1), &without).expect_err("no contexts");
    assert_eq!(text, Refusal::new(errno::EINVAL, "CMD_BLOCK_STATUS not negotiated"));
}

#[test]
fn a_filter_of_block_status_has_a_limit() {
    let with_filter = |len| Request {
        flags: flags::PAYLOAD_LEN,
        ..request(command::BLOCK_STATUS, u64::MAX, len)
    };
    assert_eq!(judge(&with_filter(12), &RULES), Ok(()));
    assert_eq!(refusal(&with_filter(1 << 20)), (errno::EINVAL, BAD_FILTER.into()));
}

#[test]
fn payloads_are_known_before_a_request_is_judged() {
    let write = request(command::WRITE, 0, 4096);
    assert_eq!(payload_bytes(&write, Style::Simple), 4096);
    assert_eq!(payload_bytes(&write, Style::Extended), 4096);
    let read = with_flags(command::READ, flags::PAYLOAD_LEN);
    assert_eq!(payload_bytes(&read, Style::Extended), 512);
    assert_eq!(payload_bytes(&read, Style::Structured), 0);
    assert!(!ends_the_connection(32 << 20) && ends_the_connection((32 << 20) + 1));
}
