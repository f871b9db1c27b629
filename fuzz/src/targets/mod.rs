//! The fuzz targets: what each does with one input.
//!
//! Promises: a program of `fuzz_targets` runs one of them under libFuzzer, and `replay` runs all of
//! them; a mistake that is found is a panic, or is seen by the sanitizer.

/// Declares the targets, and lists them by their names.
macro_rules! targets {
    ($($name:ident)*) => {
        $(pub mod $name;)*

        /// All targets: name, and what runs one input.
        pub const ALL: &[(&str, fn(&[u8]))] = &[$((stringify!($name), $name::run)),*];
    };
}

targets! {
    qcow2_open_map
    qcow2_write
    qcow2_snapshots
    qcow2_bitmaps
    qcow2_repair
    ring_entries
    fuse_frames
    nbd_messages
    nbd_server
    nbd_replies
    vhost_messages
    split_ring
    packed_ring
    helper_words
}
