//! Conversions on real files, with `qemu-img` as the reference, and on storage that fails.

mod faults;
mod scanning;
mod targets;

use ringdisk_qcow2::Bytes;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use ringdisk_ring::Ring;
use tempfile::TempDir;

use super::{ConvertOptions, ConvertReport, convert};
use crate::tests::{assert_same, directory, open, qemu_img, qemu_io, reading, run};
use crate::{Disk, Error, ErrorKind, Format, ImageOptions, Progress};

/// What `qemu-img convert` makes of an image.
fn reference(directory: &TempDir, image: &str) -> Vec<u8> {
    qemu_img(directory, &["convert", "-O", "raw", image, "reference.raw"]);
    fs::read(directory.path().join("reference.raw")).expect("read")
}

/// Options for a target of a known format.
fn writing(format: Format) -> ImageOptions {
    ImageOptions { format: Some(format), ..ImageOptions::default() }
}

/// A new raw file of `size` bytes, open for writing.
async fn raw_target(ring: &Ring, path: &Path, size: u64) -> Arc<Disk> {
    fs::File::create(path).and_then(|file| file.set_len(size)).expect("a new file");
    open(ring, path, &writing(Format::Raw)).await.expect("open")
}

/// For a target that is new.
fn fresh() -> ConvertOptions {
    ConvertOptions { target_is_zero: true, ..ConvertOptions::default() }
}

/// Bytes that repeat nowhere nearby (a multiplication spreads the position over all bits).
fn noise(len: usize) -> Vec<u8> {
    let word = |at: usize| (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (at as u64) << 7;
    (0..len.div_ceil(8)).flat_map(|at| word(at).to_le_bytes()).take(len).collect()
}

/// Converts an image to raw and returns what came out.
fn to_raw(
    directory: &TempDir,
    image: &str,
    options: &ConvertOptions,
) -> Result<(Vec<u8>, ConvertReport), Error> {
    let out = directory.path().join("out.raw");
    let report = run(async |ring| {
        let source = open(&ring, directory.path().join(image), &reading()).await.expect("open");
        let target = raw_target(&ring, &out, source.size().0).await;
        let progress = Progress::new();
        let report = convert(&ring, &[Arc::clone(&source)], &target, options, &progress).await;
        assert!(report.is_err() || progress.done() == source.size());
        report
    })?;
    Ok((fs::read(out).expect("read"), report))
}

/// A qcow2 image with a bit of everything.
fn mixed(directory: &TempDir, name: &str, options: &str) {
    qemu_img(directory, &["create", "-q", "-f", "qcow2", "-o", options, name, "9M"]);
    let commands = [
        "write -P 1 0 300k",
        "write -P 2 1M 70000",
        "write -c -P 3 2M 64k",
        "write -c -P 4 4M 64k",
        "write -z 5M 1M",
        "write -P 5 6000k 1k",
        "write -P 6 9000k 216k",
    ];
    // Compressed writes are of whole clusters, which these are unless clusters are larger.
    let is_large = options.contains("cluster_size=2M");
    let commands: Vec<&str> =
        commands.into_iter().filter(|command| !(is_large && command.contains("-c"))).collect();
    qemu_io(directory, "qcow2", name, &commands);
}

#[test]
fn every_kind_of_source_gives_the_bytes_that_qemu_img_gives() {
    let directory = directory();
    let images = [
        ("a", "cluster_size=512"),
        ("b", "cluster_size=4k,compression_type=zstd"),
        ("c", "cluster_size=64k,compat=0.10"),
        ("d", "cluster_size=64k,compression_type=zstd,extended_l2=on"),
        ("e", "cluster_size=2M"),
    ];
    for (name, create) in images {
        mixed(&directory, name, create);
        let expected = reference(&directory, name);
        for out_of_order in [false, true] {
            let options = ConvertOptions { out_of_order, ..fresh() };
            let (bytes, report) = to_raw(&directory, name, &options).expect("convert");
            assert_same(&bytes, &expected);
            // Holes are not read.
            assert!(report.read_bytes < Bytes(8 << 20), "{name}: {report:?}");
        }
    }
}

#[test]
fn compressed_images_are_read_whatever_wrote_them() {
    let directory = directory();
    let mut source = noise(3 << 20);
    source[1 << 20..2 << 20].copy_from_slice(&vec![7; 1 << 20]);
    source.truncate((3 << 20) - 1000);
    fs::write(directory.path().join("source"), &source).expect("write");
    for (kind, cluster) in [("zlib", "512"), ("zlib", "64k"), ("zstd", "4k"), ("zstd", "2M")] {
        let options = format!("compression_type={kind},cluster_size={cluster}");
        let convert = ["convert", "-c", "-O", "qcow2", "-o", &options, "source", "packed"];
        qemu_img(&directory, &convert);
        let (bytes, _) = to_raw(&directory, "packed", &fresh()).expect("convert");
        let expected = reference(&directory, "packed");
        assert_same(&bytes, &expected);
        assert_same(&bytes[..source.len()], &source);
    }
}

#[test]
fn a_chain_is_converted_as_a_whole() {
    let directory = directory();
    mixed(&directory, "base", "cluster_size=64k");
    qemu_img(
        &directory,
        &["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "top", "12M"],
    );
    qemu_io(&directory, "qcow2", "top", &["write -P 9 100k 100k", "write -z 1M 64k"]);
    let (bytes, _) = to_raw(&directory, "top", &fresh()).expect("convert");
    assert_same(&bytes, &reference(&directory, "top"));
}

#[test]
fn odd_sizes_and_one_task_are_no_problem() {
    let directory = directory();
    for size in [0, 1, 511, 4097, (1 << 20) + 7] {
        let source = noise(size);
        fs::write(directory.path().join("source"), &source).expect("write");
        for tasks in [1, 16] {
            let options = ConvertOptions { tasks, ..fresh() };
            let (bytes, report) = to_raw(&directory, "source", &options).expect("convert");
            assert_same(&bytes, &source);
            assert_eq!(report.written_bytes, Bytes::of(size));
        }
    }
}

#[test]
fn zeroes_inside_data_take_no_space_unless_that_is_asked_for() {
    use std::os::unix::fs::MetadataExt;
    let directory = directory();
    let mut source = vec![0; 8 << 20];
    source[..4096].fill(1);
    source[5 << 20..(5 << 20) + 100].fill(2);
    fs::write(directory.path().join("source"), &source).expect("write");
    let blocks = |options: &ConvertOptions| {
        let (bytes, report) = to_raw(&directory, "source", options).expect("convert");
        assert_same(&bytes, &source);
        (fs::metadata(directory.path().join("out.raw")).expect("it is there").blocks(), report)
    };
    let (sparse, report) = blocks(&fresh());
    assert!(sparse * 512 <= 1 << 20, "{sparse} blocks");
    assert_eq!(report.written_bytes, Bytes(8192));
    let (wide, report) = blocks(&ConvertOptions { sparse_bytes: Bytes(1 << 16), ..fresh() });
    assert!(wide >= sparse);
    assert_eq!(report.written_bytes, Bytes(8192));
    let (full, report) = blocks(&ConvertOptions { sparse_bytes: Bytes::ZERO, ..fresh() });
    assert!(full * 512 >= 8 << 20, "{full} blocks");
    assert_eq!(report.written_bytes, Bytes(8 << 20));
}

#[test]
fn what_an_existing_target_has_becomes_zero_where_the_source_is() {
    let directory = directory();
    mixed(&directory, "image", "cluster_size=64k");
    let expected = reference(&directory, "image");
    let path = directory.path().join("old.raw");
    fs::write(&path, vec![0xee; expected.len() + 5000]).expect("write");
    run(async |ring| {
        let source = open(&ring, directory.path().join("image"), &reading()).await.expect("open");
        let target = open(&ring, path.clone(), &writing(Format::Raw)).await.expect("open");
        let options = ConvertOptions::default();
        convert(&ring, &[Arc::clone(&source)], &target, &options, &Progress::new())
            .await
            .expect("convert");
    });
    let bytes = fs::read(path).expect("read");
    assert_same(&bytes[..expected.len()], &expected);
    assert_eq!(bytes[expected.len()..], [0xee; 5000]);
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let directory = directory();
    fs::write(directory.path().join("source"), noise(8192)).expect("write");
    let refused = |options: &ConvertOptions| {
        to_raw(&directory, "source", options).expect_err("refused").kind()
    };
    for tasks in [0, 17] {
        assert_eq!(refused(&ConvertOptions { tasks, ..fresh() }), ErrorKind::Invalid);
    }
    assert_eq!(
        refused(&ConvertOptions { sparse_bytes: Bytes(100), ..fresh() }),
        ErrorKind::Invalid
    );
    let both = ConvertOptions { target_has_backing: true, ..fresh() };
    assert_eq!(refused(&both), ErrorKind::Invalid);
    let compressed = ConvertOptions { compressed: true, ..fresh() };
    assert_eq!(refused(&compressed), ErrorKind::Unsupported);
}

#[test]
fn a_target_that_is_too_small_is_refused_before_anything_is_written() {
    let directory = directory();
    fs::write(directory.path().join("source"), noise(8192)).expect("write");
    run(async |ring| {
        let source = open(&ring, directory.path().join("source"), &reading()).await.expect("open");
        let target = raw_target(&ring, &directory.path().join("small"), 8191).await;
        let refused =
            convert(&ring, &[Arc::clone(&source)], &target, &fresh(), &Progress::new()).await;
        let refused = refused.expect_err("too small");
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        assert!(refused.to_string().contains("8191"), "{refused}");
    });
    assert_eq!(fs::read(directory.path().join("small")).expect("read"), [0; 8191]);
}
