//! `map` and `info`: the answers of `qemu-img`, key by key.

use ringdisk_qcow2::Bytes;
use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use super::{directory, open, qemu_img, qemu_io, reading, run};
use crate::{Mapping, describe};

/// Lines of `map`, ours, as JSON.
fn our_map(directory: &TempDir, image: &str) -> Vec<Value> {
    run(async |ring| {
        let path = directory.path().join(image);
        let disk = open(&ring, path, &reading()).await.expect("open");
        let mut entries = Vec::new();
        disk.map_entries(&ring, 0, Bytes::MAX, |entry| entries.push(entry.to_json()))
            .await
            .expect("map");
        entries
    })
}

/// Every key that their value has must be the same in ours.
fn assert_covers(ours: &Value, theirs: &Value, path: &str) {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, value) in theirs {
                let here = format!("{path}.{key}");
                let our_value = ours.get(key).unwrap_or_else(|| panic!("{here} is missing"));
                assert_covers(our_value, value, &here);
            }
        }
        (Value::Array(ours), Value::Array(theirs)) => {
            assert_eq!(ours.len(), theirs.len(), "{path}: {ours:?} {theirs:?}");
            for (index, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                assert_covers(ours, theirs, &format!("{path}[{index}]"));
            }
        }
        _ => assert_eq!(ours, theirs, "{path}"),
    }
}

fn compare_map(directory: &TempDir, image: &str) {
    let theirs = qemu_img(directory, &["map", "--output=json", image]);
    let theirs: Value = serde_json::from_str(&theirs).expect("json");
    assert_covers(&Value::Array(our_map(directory, image)), &theirs, image);
}

fn compare_info(directory: &TempDir, image: &str) {
    // With the full path, names are those of a disk that is opened by its full path.
    let path = directory.path().join(image);
    let text = path.to_str().expect("text");
    let theirs = qemu_img(directory, &["info", "--backing-chain", "--output=json", text]);
    let theirs: Value = serde_json::from_str(&theirs).expect("json");
    let ours = run(async |ring| {
        let disk = open(&ring, path, &reading()).await.expect("open");
        describe::chain(&disk)
    });
    assert_covers(&ours, &theirs, image);
}

/// Chains of different kinds; the images of all of them.
fn images(directory: &TempDir) -> Vec<&'static str> {
    let create = |arguments: &[&str]| {
        let mut all = vec!["create", "-q", "-f", "qcow2"];
        all.extend_from_slice(arguments);
        qemu_img(directory, &all);
    };
    qemu_img(directory, &["create", "-q", "-f", "raw", "base.raw", "10M"]);
    qemu_io(directory, "raw", "base.raw", &["write -P 1 1M 1M", "write -P 1 6M 64k"]);
    create(&["-b", "base.raw", "-F", "raw", "mid.qcow2", "20M"]);
    let commands = ["write -P 2 3M 128k", "write -z 4M 64k", "write -c -P 3 5M 128k"];
    qemu_io(directory, "qcow2", "mid.qcow2", &commands);
    create(&["-b", "mid.qcow2", "-F", "qcow2", "-o", "extended_l2=on", "top.qcow2", "30M"]);
    let commands = ["write -P 4 100k 4k", "write -z 200k 8k", "write -P 5 25M 1M"];
    qemu_io(directory, "qcow2", "top.qcow2", &commands);
    create(&["-b", "mid.qcow2", "-F", "qcow2", "short.qcow2", "2M"]);
    create(&["-o", "preallocation=metadata", "metadata.qcow2", "4M"]);
    qemu_io(directory, "qcow2", "metadata.qcow2", &["write -P 6 1M 64k"]);
    create(&["-o", "compat=0.10", "old.qcow2", "4M"]);
    qemu_io(directory, "qcow2", "old.qcow2", &["write -P 7 1M 64k", "write -P 7 3M 64k"]);
    create(&["-o", "data_file=data.bin,data_file_raw=on", "data.qcow2", "4M"]);
    qemu_io(directory, "qcow2", "data.qcow2", &["write -P 8 1M 64k"]);
    create(&["-o", "cluster_size=4k,refcount_bits=8,lazy_refcounts=on", "small.qcow2", "4M"]);
    let commands = ["write -P 9 1M 64k", "write -z 2M 64k", "discard 1M 4k"];
    qemu_io(directory, "qcow2", "small.qcow2", &commands);
    qemu_img(directory, &["bitmap", "--add", "small.qcow2", "bitmap"]);
    qemu_img(directory, &["snapshot", "-c", "first", "small.qcow2"]);
    vec![
        "base.raw",
        "mid.qcow2",
        "top.qcow2",
        "short.qcow2",
        "metadata.qcow2",
        "old.qcow2",
        "data.qcow2",
        "small.qcow2",
    ]
}

#[test]
fn map_is_equal_to_qemu_img() {
    let directory = directory();
    for image in images(&directory) {
        compare_map(&directory, image);
    }
}

#[test]
fn info_is_equal_to_qemu_img() {
    let directory = directory();
    for image in images(&directory) {
        compare_info(&directory, image);
    }
}

#[test]
fn a_map_names_the_storage_that_holds_the_bytes() {
    let directory = directory();
    images(&directory);
    run(async |ring| {
        let path = directory.path().join("top.qcow2");
        let disk = open(&ring, path, &reading()).await.expect("open");
        let base = fs::canonicalize(directory.path().join("base.raw")).expect("path");
        let view = disk.view().await;
        match view.map(&ring, 1 << 20, Bytes(64 << 10)).await.expect("map").mapping {
            Mapping::Data { storage, offset, len } => {
                assert_eq!(storage.name(), base.to_str().expect("text"));
                assert_eq!((offset, len), (1 << 20, Bytes(64 << 10)));
            }
            other => panic!("{other:?}"),
        }
        let zero = view.map(&ring, 4 << 20, Bytes(1 << 20)).await.expect("map").mapping;
        assert!(matches!(zero, Mapping::Zero { len: Bytes(65536) }), "{zero:?}");
        let compressed = view.map(&ring, 5 << 20, Bytes(4096)).await.expect("map").mapping;
        assert!(matches!(compressed, Mapping::ReadOnly { len: Bytes(4096) }), "{compressed:?}");
        let end = view.map(&ring, 30 << 20, Bytes(4096)).await.expect("map").mapping;
        assert!(matches!(end, Mapping::PastEnd), "{end:?}");
    });
}

#[test]
fn the_map_of_an_empty_disk_is_empty() {
    let directory = directory();
    fs::write(directory.path().join("empty.raw"), b"").expect("write");
    assert!(our_map(&directory, "empty.raw").is_empty());
}
