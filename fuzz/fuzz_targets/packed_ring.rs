//! `packed_ring` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| ringdisk_fuzz::targets::packed_ring::run(input));
