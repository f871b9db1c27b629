//! Random writes, zeroes, discards and flushes, several at a time, against a model in memory; then
//! `qemu-img check` and `qemu-img convert`.

// Test images are small.
#![allow(clippy::cast_possible_truncation)]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use ringdisk_qcow2::{Bytes, ExtentKind, GuestOffset, Nothing, OpenOptions, Qcow2};
use ringdisk_ring::{IoBuf, Ring};
use ringdisk_storage::Storage;
use ringdisk_testkit::sim::Prng;

use crate::common::{Images, KIB, MIB, runtime};

async fn read(image: &Qcow2, ring: &Ring, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    let mut done = 0;
    while done < len {
        let _grace = image.enter();
        let extent = image
            .map(ring, GuestOffset(offset + done as u64), Bytes::of(len - done))
            .await
            .expect("map");
        let part = IoBuf::new(extent.len.0 as usize, 4096);
        match extent.kind {
            ExtentKind::Data { offset } => {
                let n = image.data_storage().read(ring, offset.0, &part).await.expect("read");
                assert_eq!(n, part.len());
            }
            ExtentKind::Zero { .. } | ExtentKind::Unallocated => {}
            ExtentKind::Compressed(c) => {
                let within = GuestOffset(offset + done as u64) % image.info().cluster_size();
                image
                    .read_compressed(ring, c, GuestOffset::after(within), &part)
                    .await
                    .expect("compressed");
            }
        }
        let end = done + part.len();
        part.copy_to_slice(0, &mut out[done..end]);
        done = end;
    }
    out
}

fn run(options: &str, seed: u64, steps: usize) {
    println!("options {options} seed {seed}");
    let images = Images::new();
    let size = 6 * MIB + 3 * 512;
    let path = images.create("a.qcow2", options, size);
    let mut model = vec![0u8; size as usize];
    let mut prng = Prng::new(seed);
    let mut rt = runtime();
    for _round in 0..2 {
        let ring = rt.ring().clone();
        let direct = seed.is_multiple_of(2);
        let options = ringdisk_storage::OpenOptions { direct, ..Default::default() };
        let storage = Arc::new(Storage::open(&path, &options).expect("open"));
        rt.block_on(async {
            let open = OpenOptions { writable: true, ..OpenOptions::default() };
            let mut image = Qcow2::open(&ring, storage, &open).await.expect("open");
            if let Some(name) = image.info().data_file.clone() {
                let _ = name;
                let data =
                    Storage::open(&images.path("a.data"), &Default::default()).expect("data");
                image.set_data_file(Arc::new(data)).expect("data file");
            }
            let image = Rc::new(image);
            let busy: Rc<RefCell<usize>> = Rc::default();
            for step in 0..steps {
                let kind = prng.below(10);
                let max = if prng.below(4) == 0 { 700 * KIB } else { 20 * KIB };
                let offset = prng.below(size - 1);
                let mut len = 1 + prng.below(max.min(size - offset));
                let mut offset = offset;
                if prng.below(2) == 0 {
                    offset = offset / 4096 * 4096;
                    len = len.next_multiple_of(4096).min(size - offset);
                }
                let range = offset as usize..(offset + len) as usize;
                match kind {
                    0..=5 => {
                        let byte = (step % 255) as u8 + 1;
                        model[range].fill(byte);
                        let buf = IoBuf::new(len as usize, 4096);
                        buf.fill(byte);
                        let n = image
                            .write(&ring, GuestOffset(offset), &buf, &Nothing)
                            .await
                            .expect("write");
                        assert_eq!(n as u64, len);
                    }
                    6 => {
                        model[range].fill(0);
                        let unmap = prng.below(2) == 0;
                        image
                            .write_zeroes(&ring, GuestOffset(offset), Bytes(len), unmap, &Nothing)
                            .await
                            .expect("zero");
                    }
                    7 => {
                        model[range].fill(0);
                        image
                            .discard(&ring, GuestOffset(offset), Bytes(len), &Nothing)
                            .await
                            .expect("discard");
                    }
                    8 => image.flush(&ring).await.expect("flush"),
                    _ => {
                        let got = read(&image, &ring, offset, len as usize).await;
                        assert!(got == model[range], "step {step}");
                    }
                }
            }
            let _ = busy;
            image.close(&ring).await.expect("close");
        });
        let check = images.qemu_img(&["check", "a.qcow2"]);
        assert!(check.contains("No errors were found"), "{check}");
        assert!(images.converted("a.qcow2") == model, "content");
    }
}

#[test]
fn random_changes_leave_the_right_bytes_and_a_sound_image() {
    for (index, options) in [
        "compat=1.1",
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=512,refcount_bits=64",
        "cluster_size=2M",
        "refcount_bits=1",
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k",
        "lazy_refcounts=on",
        "data_file=a.data",
        "data_file=a.data,data_file_raw=on",
        "preallocation=metadata",
        "preallocation=falloc",
    ]
    .into_iter()
    .enumerate()
    {
        run(options, 1000 + index as u64, 150);
    }
}
