//! Random images: random options, random commands of `qemu-io`, read through the library and
//! compared with `qemu-img convert`.

use proptest::prelude::{Just, Strategy, any, prop, prop_oneof, proptest};
use proptest::test_runner::Config;

use crate::common::{Images, KIB, check, runtime};

/// Size of the disk: a few dozen to a few thousand clusters.
const SIZE: u64 = 3 * 512 * KIB + 512;

/// Options that go together.
fn options() -> impl Strategy<Value = (String, bool)> {
    let plain = (9..=21u32, prop_oneof![Just("0.10"), Just("1.1")]).prop_map(|(bits, compat)| {
        (format!("cluster_size={},compat={compat}", 1u64 << bits), true)
    });
    let extended =
        (14..=21u32, prop_oneof![Just("zlib"), Just("zstd")]).prop_map(|(bits, kind)| {
            let cluster = 1u64 << bits;
            (format!("cluster_size={cluster},extended_l2=on,compression_type={kind}"), true)
        });
    let external = (9..=16u32)
        .prop_map(|bits| (format!("cluster_size={},data_file=image.data", 1u64 << bits), false));
    prop_oneof![plain, extended, external]
}

/// One command; compressed writes cover a whole cluster at most, which `qemu-io` checks itself.
fn command() -> impl Strategy<Value = String> {
    let range = (0..SIZE / 512, 1..300u64)
        .prop_map(|(at, len)| (at * 512, (len * 512).min(SIZE - at * 512)));
    (0..10u8, any::<u8>(), range).prop_map(|(kind, pattern, (at, len))| match kind {
        0..=4 => format!("write -q -P {pattern} {at} {len}"),
        5 | 6 => format!("write -q -z {at} {len}"),
        7 => format!("write -q -z -u {at} {len}"),
        8 => format!("discard -q {at} {len}"),
        _ => format!("write -q -P {} {at} 512", pattern | 1),
    })
}

proptest! {
    #![proptest_config(Config { cases: 24, failure_persistence: None, ..Config::default() })]

    #[test]
    fn random_images_are_read_right(
        (options, compressible) in options(),
        before in prop::collection::vec(command(), 0..12),
        after in prop::collection::vec(command(), 0..12),
        snapshot in any::<bool>(),
        rewrite_compressed in any::<bool>(),
    ) {
        let images = Images::new();
        images.create("image", &options, SIZE);
        images.qemu_io("image", &before);
        if rewrite_compressed && compressible {
            let options = options.as_str();
            images.qemu_img(&["convert", "-q", "-c", "-O", "qcow2", "-o", options, "image", "new"]);
            std::fs::rename(images.path("new"), images.path("image")).expect("same directory");
        }
        if snapshot && compressible {
            images.qemu_img(&["snapshot", "-c", "one", "image"]);
        }
        images.qemu_io("image", &after);
        check(&mut runtime(), &images, "image", &[]);
    }
}
