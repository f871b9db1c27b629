//! `helper_words` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| ringdisk_fuzz::targets::helper_words::run(input));
