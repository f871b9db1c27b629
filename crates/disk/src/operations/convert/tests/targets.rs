//! Conversions to qcow2, read back by `qemu-img`.

use ringdisk_qcow2::Bytes;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use super::{
    ConvertOptions, ConvertReport, Disk, Error, Format, Progress, convert, fresh, mixed, noise,
    reference, writing,
};
use crate::tests::{assert_same, directory, open, qemu_img, qemu_io, reading, run};
use tempfile::TempDir;

/// Makes a qcow2 image with these options and converts `source` to it.
fn to_qcow2(
    directory: &TempDir,
    source: &str,
    create: &[&str],
    options: &ConvertOptions,
) -> Result<ConvertReport, Error> {
    let mut words = vec!["create", "-q", "-f", "qcow2"];
    words.extend_from_slice(create);
    let size = run(async |ring| {
        open(&ring, directory.path().join(source), &reading()).await.expect("open").size()
    });
    let size = size.to_string();
    words.extend(["out.qcow2", &size]);
    qemu_img(directory, &words);
    into(directory, source, options, &Progress::new())
}

/// Converts `source` to the image `out.qcow2`.
fn into(
    directory: &TempDir,
    source: &str,
    options: &ConvertOptions,
    progress: &Progress,
) -> Result<ConvertReport, Error> {
    run(async |ring| {
        let source = open(&ring, directory.path().join(source), &reading()).await.expect("open");
        let out = directory.path().join("out.qcow2");
        let target = open(&ring, out, &writing(Format::Qcow2)).await.expect("open");
        let result = convert(&ring, &[Arc::clone(&source)], &target, options, progress).await;
        close(&ring, &target).await;
        result
    })
}

async fn close(ring: &ringdisk_ring::Ring, disk: &Disk) {
    disk.close(ring).await.expect("close");
}

/// The image is sound and holds these bytes.
fn assert_holds(directory: &TempDir, expected: &[u8]) {
    qemu_img(directory, &["check", "-q", "out.qcow2"]);
    assert_same(&reference(directory, "out.qcow2"), expected);
}

/// Text, noise, zeroes, and an end that is no multiple of anything but sectors.
fn source(directory: &TempDir) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..4u32 << 20).map(|at| (at / 9).to_le_bytes()[0] ^ 0x55).collect();
    bytes[1 << 20..2 << 20].copy_from_slice(&noise(1 << 20));
    bytes[2_500_000..3_300_000].fill(0);
    bytes.truncate((4 << 20) - 3 * 512);
    fs::write(directory.path().join("source"), &bytes).expect("write");
    bytes
}

#[test]
fn compressed_images_are_read_by_qemu() {
    let directory = directory();
    let expected = source(&directory);
    // With the longest image file that there may be. A quarter is noise; clusters of 512 bytes
    // hardly get smaller; with counts of one bit no two share a host cluster; the metadata of large
    // clusters is large.
    let images = [
        ("cluster_size=512", 5 << 20),
        ("cluster_size=4k,compression_type=zstd", 2_500_000),
        ("cluster_size=64k,compat=0.10", 2_500_000),
        ("cluster_size=64k,compression_type=zstd", 2_500_000),
        ("cluster_size=64k,compression_type=zstd,extended_l2=on,refcount_bits=64", 2_500_000),
        ("cluster_size=64k,extended_l2=on,refcount_bits=1", 5 << 20),
        ("cluster_size=2M,compression_type=zlib", 12 << 20),
        ("cluster_size=2M,compression_type=zstd", 12 << 20),
    ];
    for (create, len_max) in images {
        for (out_of_order, level) in [(false, None), (true, Some(1))] {
            let options = ConvertOptions { compressed: true, out_of_order, level, ..fresh() };
            to_qcow2(&directory, "source", &["-o", create], &options).expect(create);
            assert_holds(&directory, &expected);
            let len = fs::metadata(directory.path().join("out.qcow2")).expect("it is there").len();
            assert!(len <= len_max, "{create}: {len}");
        }
    }
}

#[test]
fn plain_images_are_read_by_qemu() {
    let directory = directory();
    let expected = source(&directory);
    for create in ["cluster_size=512", "cluster_size=64k,extended_l2=on", "cluster_size=2M"] {
        for (sparse_bytes, out_of_order) in [(4096, false), (4096, true), (0, false)] {
            let options =
                ConvertOptions { sparse_bytes: Bytes(sparse_bytes), out_of_order, ..fresh() };
            to_qcow2(&directory, "source", &["-o", create], &options).expect("convert");
            assert_holds(&directory, &expected);
        }
    }
}

#[test]
fn a_source_of_many_kinds_of_clusters_is_compressed_as_it_reads() {
    let directory = directory();
    mixed(&directory, "image", "cluster_size=4k");
    let expected = reference(&directory, "image");
    for create in ["cluster_size=512", "cluster_size=64k", "cluster_size=1M,compression_type=zstd"]
    {
        let options = ConvertOptions { compressed: true, ..fresh() };
        to_qcow2(&directory, "image", &["-o", create], &options).expect("convert");
        assert_holds(&directory, &expected);
    }
}

#[test]
fn nothing_is_left_out_of_a_compressed_image_where_that_is_not_wanted() {
    let directory = directory();
    let expected = source(&directory);
    let options = ConvertOptions { compressed: true, sparse_bytes: Bytes::ZERO, ..fresh() };
    to_qcow2(&directory, "source", &[], &options).expect("convert");
    assert_holds(&directory, &expected);
    let map = qemu_img(&directory, &["map", "--output=json", "out.qcow2"]);
    assert!(!map.contains("\"present\": false"), "{map}");
}

#[test]
fn an_existing_image_is_overwritten_compressed_or_not() {
    let directory = directory();
    let expected = source(&directory);
    for compressed in [false, true] {
        qemu_img(&directory, &["create", "-q", "-f", "qcow2", "out.qcow2", "4194304"]);
        let old = ["write -P 9 0 300k", "write -c -P 8 2M 1M", "write -P 7 3M 1M"];
        qemu_io(&directory, "qcow2", "out.qcow2", &old);
        let options = ConvertOptions { compressed, ..ConvertOptions::default() };
        into(&directory, "source", &options, &Progress::new()).expect("convert");
        let mut whole = expected.clone();
        // What the source does not reach stays.
        whole.resize(4 << 20, 7);
        assert_holds(&directory, &whole);
    }
}

#[test]
fn a_target_with_a_backing_file_gets_what_the_source_has_itself() {
    let directory = directory();
    mixed(&directory, "base", "cluster_size=64k");
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "top"]);
    let commands = ["write -P 9 100k 100k", "write -z 1M 64k", "write -P 8 7M 5k"];
    qemu_io(&directory, "qcow2", "top", &commands);
    let expected = reference(&directory, "top");
    for compressed in [false, true] {
        let options =
            ConvertOptions { compressed, target_has_backing: true, ..ConvertOptions::default() };
        let create = ["-b", "base", "-F", "qcow2"];
        let report = to_qcow2(&directory, "top", &create, &options).expect("convert");
        assert_holds(&directory, &expected);
        // Clusters of the top image only.
        assert!(report.read_bytes <= Bytes(5 * 65536), "{compressed} {report:?}");
    }
}

/// Pieces that the file system copies are done out of order, between pieces that wait for their
/// turn.
#[test]
fn pieces_that_the_file_system_copies_leave_no_piece_waiting() {
    let directory = directory();
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "image", "32M"]);
    let writes: Vec<String> =
        (0..64).map(|at| format!("write -q -P 5 {}k 128k", at * 512)).collect();
    qemu_io(&directory, "qcow2", "image", &writes.iter().map(String::as_str).collect::<Vec<_>>());
    let expected = reference(&directory, "image");
    let out = directory.path().join("out.raw");
    let options = ConvertOptions { copy_range: true, ..ConvertOptions::default() };
    let (sender, ended) = std::sync::mpsc::channel();
    let image = directory.path().join("image");
    std::thread::spawn({
        let out = out.clone();
        move || {
            for _ in 0..20 {
                fs::write(&out, vec![9; 32 << 20]).expect("write");
                run(async |ring| {
                    let source = open(&ring, &image, &reading()).await.expect("open");
                    let target = open(&ring, &out, &writing(Format::Raw)).await.expect("open");
                    let progress = Progress::new();
                    convert(&ring, &[source], &target, &options, &progress).await.expect("convert");
                });
            }
            sender.send(()).expect("the test waits");
        }
    });
    ended.recv_timeout(Duration::from_secs(120)).expect("no piece waits forever");
    assert_same(&fs::read(out).expect("read"), &expected);
}

#[test]
fn a_cancelled_conversion_leaves_a_sound_image() {
    let directory = directory();
    source(&directory);
    for compressed in [false, true] {
        let options = ConvertOptions { compressed, ..fresh() };
        qemu_img(&directory, &["create", "-q", "-f", "qcow2", "out.qcow2", "4M"]);
        let progress = std::sync::Arc::new(Progress::new());
        let other = progress.clone();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(3));
            other.cancel();
        });
        // Sooner or later than the end: both are good.
        let _ = into(&directory, "source", &options, &progress);
        thread.join().expect("it only waits");
        qemu_img(&directory, &["check", "-q", "out.qcow2"]);
    }
}
