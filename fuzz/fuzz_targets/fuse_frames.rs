//! `fuse_frames` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| ringdisk_fuzz::targets::fuse_frames::run(input));
