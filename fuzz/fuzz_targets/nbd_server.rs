//! `nbd_server` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| ringdisk_fuzz::targets::nbd_server::run(input));
