//! `vhost_messages` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| ringdisk_fuzz::targets::vhost_messages::run(input));
