//! Offers of several kernels and the answers to them.

use super::{InitAnswer, MAX_BACKGROUND, Negotiated, Profile, low_half, negotiate};
use crate::abi::flags::{
    FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, FOPEN_NOFLUSH, FOPEN_PARALLEL_DIRECT_WRITES,
    FOPEN_PASSTHROUGH, INIT_ASYNC_DIO, INIT_ATOMIC_O_TRUNC, INIT_AUTO_INVAL_DATA,
    INIT_DIRECT_IO_ALLOW_MMAP, INIT_EXPLICIT_INVAL_DATA, INIT_EXT, INIT_MAX_PAGES,
    INIT_OVER_IO_URING, INIT_PASSTHROUGH, INIT_WRITEBACK_CACHE,
};
use crate::abi::{InitIn, InitOut};

const DIRECT: Profile = Profile {
    page_bytes: 4096,
    max_pages: 256,
    kernel_cache: false,
    over_io_uring: false,
    passthrough: false,
};
const CACHED: Profile = Profile { kernel_cache: true, ..DIRECT };

/// An offer of everything, as of Linux 6.18.
const MODERN: InitIn = InitIn {
    major: 7,
    minor: 45,
    max_readahead: 131_072,
    flags: u32::MAX,
    flags2: u32::MAX,
    unused: [0; 11],
};

fn ready(init: &InitIn, profile: &Profile) -> (InitOut, Negotiated) {
    match negotiate(init, profile).expect("acceptable") {
        InitAnswer::Ready(out, negotiated) => (out, negotiated),
        InitAnswer::Again(_) => panic!("the version was ours"),
    }
}

#[test]
fn a_modern_kernel_gets_mebibyte_requests_and_async_direct_io() {
    let (out, negotiated) = ready(&MODERN, &DIRECT);
    assert_eq!((out.major, out.minor), (7, 45));
    assert_eq!(out.max_write, 1 << 20);
    assert_eq!(out.max_pages, 256);
    assert_eq!(out.max_background, MAX_BACKGROUND);
    assert!(out.congestion_threshold < out.max_background);
    assert_eq!(out.time_gran, 1);
    assert_eq!(out.request_timeout, 0);
    // ASYNC_READ, BIG_WRITES, ASYNC_DIO, PARALLEL_DIROPS, ABORT_ERROR, MAX_PAGES, KILLPRIV_V2, EXT.
    assert_eq!(out.flags, 0x5064_8021);
    // DIRECT_IO_ALLOW_MMAP, HAS_RESEND.
    assert_eq!(out.flags2, 0x90);
    assert!(negotiated.has(INIT_ASYNC_DIO | INIT_DIRECT_IO_ALLOW_MMAP));
    assert_eq!(negotiated.offered, u64::MAX);
}

#[test]
fn what_would_hurt_is_never_answered() {
    for profile in [DIRECT, CACHED] {
        let (_, negotiated) = ready(&MODERN, &profile);
        let unwanted = INIT_WRITEBACK_CACHE
            | INIT_ATOMIC_O_TRUNC
            | INIT_AUTO_INVAL_DATA
            | INIT_EXPLICIT_INVAL_DATA
            | INIT_OVER_IO_URING;
        assert_eq!(negotiated.flags & unwanted, 0);
        assert!(negotiated.has(INIT_ASYNC_DIO));
    }
}

#[test]
fn flags_that_were_not_offered_are_not_answered() {
    let init = InitIn { flags: MODERN.flags & !(1 << 22), flags2: 0, ..MODERN };
    let (out, negotiated) = ready(&init, &DIRECT);
    assert!(!negotiated.has(INIT_MAX_PAGES));
    assert_eq!(out.max_write, 32 * 4096);
    assert_eq!(out.max_pages, 0);
    assert_eq!(out.flags2, 0);
}

#[test]
fn the_upper_flags_count_only_with_the_extension() {
    let init = InitIn { flags: MODERN.flags & !(1 << 30), ..MODERN };
    let (out, negotiated) = ready(&init, &DIRECT);
    assert_eq!(negotiated.offered >> 32, 0);
    assert!(!negotiated.has(INIT_EXT));
    assert_eq!(out.flags2, 0);
}

#[test]
fn a_newer_minor_version_is_answered_with_ours() {
    let (out, _) = ready(&InitIn { minor: 99, ..MODERN }, &DIRECT);
    assert_eq!(out.minor, 46);
}

#[test]
fn a_newer_major_version_is_asked_again() {
    let answer = negotiate(&InitIn { major: 8, minor: 1, ..MODERN }, &DIRECT).expect("again");
    assert!(matches!(answer, InitAnswer::Again(out) if out.major == 7));
}

#[test]
fn an_old_kernel_is_refused_with_its_version() {
    let error = negotiate(&InitIn { minor: 22, ..MODERN }, &DIRECT).expect_err("too old");
    assert_eq!(error.to_string(), "the kernel speaks FUSE 7.22, ringdisk needs 7.23 or newer");
    assert!(negotiate(&InitIn { major: 6, ..MODERN }, &DIRECT).is_err());
}

#[test]
fn a_kernel_without_async_direct_io_is_refused() {
    let init = InitIn { flags: MODERN.flags & !(1 << 15), ..MODERN };
    assert!(negotiate(&init, &DIRECT).expect_err("no ASYNC_DIO").without_async_dio);
}

#[test]
fn the_limit_of_the_machine_bounds_the_requests() {
    let cases = [
        (4096, None, 1 << 20),
        (4096, Some(1024), 1 << 20),
        (4096, Some(32), 128 << 10),
        (4096, Some(0), 4096),
        (65536, None, 1 << 20),
    ];
    for (page, limit, expected) in cases {
        assert_eq!(Profile::new(page, limit, false).transfer_bytes(), expected);
    }
    assert_eq!(Profile::new(4096, Some(1), false).request_bytes_max(), 8192);
    assert_eq!(Profile::new(4096, None, false).request_bytes_max(), (1 << 20) + 80);
}

#[test]
fn opens_are_direct_and_parallel_or_keep_the_cache() {
    assert_eq!(DIRECT.open_flags(true), FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES);
    assert_eq!(CACHED.open_flags(true), FOPEN_KEEP_CACHE);
    assert_eq!(CACHED.open_flags(false), FOPEN_KEEP_CACHE | FOPEN_NOFLUSH);
}

#[test]
fn io_uring_is_taken_when_it_is_offered_and_the_rings_are_there() {
    let offered = INIT_EXT | INIT_ASYNC_DIO | INIT_OVER_IO_URING;
    let profile = Profile { over_io_uring: true, ..DIRECT };
    for (offer, profile, taken) in [
        (offered, profile, true),
        (offered, DIRECT, false),
        (offered & !INIT_OVER_IO_URING, profile, false),
    ] {
        let init = InitIn {
            major: 7,
            minor: 45,
            flags: low_half(offer),
            flags2: low_half(offer >> 32),
            ..InitIn::default()
        };
        let Ok(InitAnswer::Ready(out, negotiated)) = negotiate(&init, &profile) else {
            panic!("a good offer")
        };
        assert_eq!(negotiated.has(INIT_OVER_IO_URING), taken);
        assert_eq!(out.flags2 & low_half(INIT_OVER_IO_URING >> 32) != 0, taken);
    }
}

#[test]
fn passthrough_is_asked_for_only_when_it_is_wanted() {
    for passthrough in [false, true] {
        let (out, negotiated) = ready(&MODERN, &Profile { passthrough, ..DIRECT });
        assert_eq!(negotiated.has(INIT_PASSTHROUGH), passthrough);
        assert_eq!(out.max_stack_depth, u32::from(passthrough));
    }
    let profile = Profile { passthrough: true, ..DIRECT };
    // Any other flag beside it fails the open.
    assert_eq!(profile.open_flags(true), FOPEN_PASSTHROUGH);
    assert_eq!(profile.open_flags(false), FOPEN_PASSTHROUGH | FOPEN_NOFLUSH);
}
