use super::*;

#[test]
fn sizes_are_powers_of_1024() {
    for (text, bytes) in [
        ("0", 0),
        ("512", 512),
        ("512b", 512),
        ("1k", 1024),
        ("10G", 10 << 30),
        ("10GiB", 10 << 30),
        ("1.5T", 3 << 39),
        ("0.5K", 512),
        ("1.50M", 3 << 19),
        ("7E", 7 << 60),
        ("9223372036854775807", SIZE_MAX),
        ("0x1F", 31),
        ("0X7fffffffffffffff", SIZE_MAX),
    ] {
        assert_eq!(parse_size(text), Ok(bytes), "{text}");
    }
}

#[test]
fn bad_sizes_are_refused_with_a_reason() {
    for (text, reason) in [
        ("", "write a number of bytes"),
        ("G", "write a number of bytes"),
        ("-1", "cannot be negative"),
        ("1.", "write a number of bytes"),
        (".5G", "write a number of bytes"),
        ("1.2.3", "write a number of bytes"),
        ("10 G", "unknown unit"),
        ("10Q", "unknown unit"),
        ("10GB", "powers of 1000 or of 1024"),
        ("8E", "too large"),
        ("0x", "hexadecimal digits"),
        ("0x1K", "hexadecimal digits"),
        ("0x+1", "hexadecimal digits"),
        ("0x8000000000000000", "too large"),
        ("99999999999999999999999", "too large"),
        ("9999999999999999999999999999999999999999999", "write a number"),
        ("1.3T", "the next multiple of 512 is 1429365116416"),
        ("1e3", "unknown unit"),
        ("１０", "unknown unit"),
    ] {
        let error = parse_size(text).expect_err(text);
        assert!(error.contains(reason), "{text}: {error}");
    }
}

#[test]
fn changes_of_a_size_have_a_sign_and_stay_in_bounds() {
    assert_eq!(parse_size_change("2G"), Ok(SizeChange::To(2 << 30)));
    assert_eq!(parse_size_change("+512"), Ok(SizeChange::Grow(512)));
    assert_eq!(parse_size_change("-1k"), Ok(SizeChange::Shrink(1024)));
    for text in ["", "+", "-", "--1", "+-1", "8E", "+9E"] {
        assert!(parse_size_change(text).is_err(), "{text}");
    }
    assert_eq!(SizeChange::Shrink(512).apply(1024).ok(), Some(512));
    assert!(SizeChange::Shrink(2048).apply(1024).is_err());
    assert!(SizeChange::Shrink(1024).apply(1024).is_err());
    assert!(SizeChange::To(0).apply(1024).is_err());
    assert_eq!(SizeChange::To(0).apply(0).ok(), Some(0));
    assert!(SizeChange::Grow(SIZE_MAX).apply(1).is_err());
}

#[test]
fn times_need_a_unit() {
    assert_eq!(parse_time("1ms"), Ok(Duration::from_millis(1)));
    assert_eq!(parse_time("250us"), Ok(Duration::from_micros(250)));
    assert_eq!(parse_time("250µs"), Ok(Duration::from_micros(250)));
    assert_eq!(parse_time("5s"), Ok(Duration::from_secs(5)));
    assert_eq!(parse_time("1.5s"), Ok(Duration::from_millis(1500)));
    assert_eq!(parse_time("2min"), Ok(Duration::from_secs(120)));
    assert_eq!(parse_time("0"), Ok(Duration::ZERO));
    for (text, reason) in [
        ("", "write a number"),
        ("5", "a unit is missing"),
        ("5h", "unknown unit"),
        ("0.5ns", "finer than a nanosecond"),
        ("-5s", "write a number"),
        ("99999999999999999999s", "too long"),
    ] {
        let error = parse_time(text).expect_err(text);
        assert!(error.contains(reason), "{text}: {error}");
    }
}

#[test]
fn sizes_are_shown_with_three_digits() {
    for (bytes, text) in [
        (0, "0 B"),
        (512, "512 B"),
        (1000, "0.98 KiB"),
        (1024, "1 KiB"),
        (197_120, "192 KiB"),
        (528_384, "516 KiB"),
        (10 << 20, "10 MiB"),
        (1_100_000_000, "1.02 GiB"),
        (3 << 39, "1.5 TiB"),
        (u64::MAX, "16 EiB"),
    ] {
        assert_eq!(human_size(bytes), text, "{bytes}");
    }
}

#[test]
fn times_are_shown_with_three_digits() {
    for (ns, text) in [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_250, "1.25 us"),
        (85_000, "85.0 us"),
        (1_000_000, "1.00 ms"),
        (12_345_678_901, "12.3 s"),
    ] {
        assert_eq!(human_time(Duration::from_nanos(ns)), text);
    }
}
