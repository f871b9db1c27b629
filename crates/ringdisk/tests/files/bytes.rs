//! Byte for byte: what is read through the mount equals what QEMU's own tool converts, for every
//! kind of qcow2.

use std::os::unix::fs::FileExt;
use std::path::Path;

use ringdisk_testkit::images::{assert_same, piece, qcow2, qemu_img, qemu_io, reference};
use ringdisk_testkit::limits::{full, needs_root};
use ringdisk_testkit::mount::{scratch, text};

use crate::common::serve;

/// Size of most images: several L2 slices at small clusters, and not a multiple of the large ones.
const SIZE: &str = "9000448";

/// Reads the image through a mount in several ways and compares with `qemu-img convert`.
fn assert_reads_like_qemu(image: &Path, what: &str) {
    let wanted = reference(image, "qcow2");
    for extra in [&["--threads", "2"][..], &["--direct"]] {
        let disk = serve(image, &[&["--read-only", "--format", "qcow2"], extra].concat());
        assert_same(disk.path(), &wanted, &format!("{what}, {extra:?}"));
        assert_odd_pieces_equal(disk.path(), &wanted, what);
        assert_eq!(disk.stop().code(), Some(0), "{what}");
    }
}

/// Pieces that start and end anywhere: across clusters, inside sectors, over the end.
fn assert_odd_pieces_equal(served: &Path, wanted: &Path, what: &str) {
    let len = std::fs::metadata(wanted).expect("stat").len();
    let file = std::fs::File::open(served).expect("open");
    for step in 1..40_u64 {
        let offset = step * 7_919 * 31 % len;
        let size = usize::try_from((step * 3_571 % 70_000 + 1).min(len - offset)).expect("small");
        let mut got = vec![0; size];
        file.read_exact_at(&mut got, offset).unwrap_or_else(|e| panic!("{what} at {offset}: {e}"));
        assert!(got == piece(wanted, offset, size), "{what}: {size} bytes at {offset}");
    }
}

/// Data of several patterns, zeroes, holes and, at the end of the image, a partial cluster.
fn fill(image: &Path) {
    qemu_io(
        image,
        "qcow2",
        &[
            "write -P 0x11 0 70k",
            "write -P 0x22 1M 300k",
            "write -P 0x33 1048064 512",
            "write -z 1100k 64k",
            "write -P 0x44 3M 1M",
            "discard 3200k 128k",
            "write -P 0x55 8999936 512",
            "write -z 5M 200k",
            "write -P 0x66 5130k 3k",
        ],
    );
}

fn check_options(options: &str) {
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    qcow2(&image, SIZE, options);
    fill(&image);
    assert_reads_like_qemu(&image, options);
}

/// Cluster sizes × versions × refcount widths; pairs of them unless everything is wanted.
fn combinations() -> Vec<String> {
    let clusters = ["512", "4096", "65536", "2097152"];
    let versions = ["compat=0.10", "compat=1.1"];
    let widths = ["1", "16", "64"];
    let mut out = Vec::new();
    for (i, cluster) in clusters.iter().enumerate() {
        for (j, version) in versions.iter().enumerate() {
            for (k, width) in widths.iter().enumerate() {
                // Version 2 has refcounts of 16 bits only.
                let possible = j == 1 || *width == "16";
                let chosen = full() || j == 0 || (i + k) % 3 == 0 || *width == "16" && i == 2;
                if possible && chosen {
                    out.push(format!("cluster_size={cluster},{version},refcount_bits={width}"));
                }
            }
        }
    }
    out
}

#[test]
fn all_cluster_sizes_versions_and_refcount_widths() {
    if !needs_root() {
        return;
    }
    for options in combinations() {
        check_options(&options);
    }
}

#[test]
fn extended_l2_entries() {
    if !needs_root() {
        return;
    }
    check_options("extended_l2=on,cluster_size=16384");
    check_options("extended_l2=on,cluster_size=65536,lazy_refcounts=on");
    check_options("extended_l2=on,cluster_size=2097152");
}

#[test]
fn external_data_files() {
    if !needs_root() {
        return;
    }
    for raw in ["on", "off"] {
        let directory = scratch();
        let image = directory.path().join("disk.qcow2");
        let data = directory.path().join("disk.data");
        let data_file = text(&data);
        qcow2(&image, SIZE, &format!("data_file={data_file},data_file_raw={raw}"));
        fill(&image);
        assert_reads_like_qemu(&image, &format!("data_file_raw={raw}"));
    }
}

#[test]
fn zlib_and_zstd_compressed_clusters() {
    if !needs_root() {
        return;
    }
    let clusters = if full() { &["512", "65536", "2097152"][..] } else { &["4096", "65536"] };
    for kind in ["zlib", "zstd"] {
        for cluster in clusters {
            let directory = scratch();
            let plain = directory.path().join("plain.qcow2");
            let image = directory.path().join("disk.qcow2");
            qcow2(&plain, SIZE, "");
            fill(&plain);
            let options = format!("compression_type={kind},cluster_size={cluster}");
            let (from, to) = (text(&plain), text(&image));
            qemu_img(&["convert", "-c", "-f", "qcow2", "-O", "qcow2", "-o", &options, from, to]);
            assert_reads_like_qemu(&image, &options);
        }
    }
}

#[test]
fn compressed_clusters_between_plain_ones() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    qcow2(&image, SIZE, "compression_type=zstd");
    let commands = [
        "write -c -P 0x10 0 64k",
        "write -P 0x20 64k 64k",
        "write -c -P 0x30 128k 128k",
        "write -P 0x40 130k 1k",
        "write -c -P 0x50 8978432 22016",
    ];
    qemu_io(&image, "qcow2", &commands);
    assert_reads_like_qemu(&image, "mixed");
}

/// The image that the project promises to read: compressed with zstd, overlaid, extended L2.
#[test]
fn a_zstd_compressed_overlaid_extended_l2_image() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let at = |name: &str| directory.path().join(name);
    let (plain, base, top) = (at("plain.qcow2"), at("base.qcow2"), at("top.qcow2"));
    qcow2(&plain, SIZE, "");
    fill(&plain);
    let options = "compression_type=zstd,extended_l2=on";
    let (from, to) = (text(&plain), text(&base));
    qemu_img(&["convert", "-c", "-f", "qcow2", "-O", "qcow2", "-o", options, from, to]);
    let words = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "-o", options];
    qemu_img(&[&words[..], &[text(&top)]].concat());
    let commands =
        ["write -P 0x77 100k 2k", "write -c -P 0x78 2M 64k", "write -z 3M 100k", "discard 1M 4k"];
    qemu_io(&top, "qcow2", &commands);
    assert_reads_like_qemu(&top, "zstd, overlay, extended L2");
}

#[test]
fn chains_of_any_mix_and_length() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let at = |name: &str| directory.path().join(name);
    ringdisk_testkit::images::raw(&at("base.raw"), 5_000_192, 3);
    let overlay = |name: &str, on: &str, format: &str, size: &str, options: &str| {
        let path = at(name);
        let words = ["create", "-q", "-f", "qcow2", "-b", on, "-F", format];
        let options = if options.is_empty() { vec![] } else { vec!["-o", options] };
        qemu_img(&[&words[..], &options, &[text(&path), size]].concat());
        path
    };
    // Longer than its base, then shorter than its base, then longer again.
    let a = overlay("a.qcow2", "base.raw", "raw", "9M", "cluster_size=4096");
    qemu_io(&a, "qcow2", &["write -P 0xa1 4M 2M", "write -z 1M 64k"]);
    let b = overlay("b.qcow2", "a.qcow2", "qcow2", "4500k", "compat=0.10");
    qemu_io(&b, "qcow2", &["write -P 0xb1 100k 100k", "write -c -P 0xb2 2M 64k"]);
    let c = overlay("c.qcow2", "b.qcow2", "qcow2", "12M", "extended_l2=on");
    qemu_io(&c, "qcow2", &["write -P 0xc1 3M 2k", "write -P 0xc2 11M 1k"]);
    for (image, what) in [(&a, "on raw"), (&b, "shorter"), (&c, "longer again")] {
        assert_reads_like_qemu(image, what);
    }
}

#[test]
fn json_names_of_plain_files() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let at = |name: &str| directory.path().join(name);
    ringdisk_testkit::images::raw(&at("base.raw"), 2 << 20, 4);
    let (base, top) = (at("base.raw"), at("top.qcow2"));
    let name = format!(
        "json:{{\"driver\":\"raw\",\"file\":{{\"driver\":\"file\",\"filename\":\"{}\"}}}}",
        text(&base)
    );
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", &name, "-F", "raw", text(&top), "3M"]);
    qemu_io(&top, "qcow2", &["write -P 0x61 1M 5k"]);
    assert_reads_like_qemu(&top, "json: name");
}

#[test]
fn internal_snapshots_do_not_matter() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    qcow2(&image, SIZE, "");
    fill(&image);
    qemu_img(&["snapshot", "-c", "one", text(&image)]);
    qemu_io(&image, "qcow2", &["write -P 0x99 0 2M"]);
    qemu_img(&["snapshot", "-c", "two", text(&image)]);
    qemu_io(&image, "qcow2", &["discard 1M 1M"]);
    assert_reads_like_qemu(&image, "snapshots");
}

#[test]
fn preallocated_and_bitmap_images() {
    if !needs_root() {
        return;
    }
    check_options("preallocation=metadata");
    check_options("preallocation=falloc");
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    qcow2(&image, SIZE, "");
    fill(&image);
    qemu_img(&["bitmap", "--add", "-f", "qcow2", text(&image), "b0"]);
    qemu_io(&image, "qcow2", &["write -P 0x12 6M 100k"]);
    assert_reads_like_qemu(&image, "bitmap");
}

#[test]
fn the_format_is_found_when_it_is_not_named() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    qcow2(&image, SIZE, "");
    fill(&image);
    let wanted = reference(&image, "qcow2");
    let disk = serve(&image, &["--read-only"]);
    assert_same(disk.path(), &wanted, "probed");
}

#[test]
fn raw_images_of_odd_sizes_are_served_whole() {
    if !needs_root() {
        return;
    }
    for len in [1, 511, 513, 4097, (1 << 20) + 1] {
        let (directory, image) = crate::common::raw_image(len, 8);
        for extra in [&[][..], &["--direct"]] {
            let disk = serve(&image, &[&["--read-only", "--format", "raw"], extra].concat());
            let got = std::fs::read(disk.path()).expect("read");
            let wanted = std::fs::read(&image).expect("read");
            let rest = &got[wanted.len().min(got.len())..];
            assert_eq!(got.get(..wanted.len()), Some(&wanted[..]), "{len} bytes, {extra:?}");
            assert!(rest.len() < 512 && rest.iter().all(|b| *b == 0), "{len} bytes, {extra:?}");
        }
        drop(directory);
    }
}
