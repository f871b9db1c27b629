use std::path::Path;

use super::{Class, Guest, Layout, Shape};
use crate::images::{qemu_img, qemu_io, reference};
use crate::limits::needs;
use crate::mount::{scratch, text};
use crate::process::has;

fn shapes() -> Vec<Shape> {
    let plain = Shape::default();
    let small =
        |cluster_bits, refcount_order| Shape { cluster_bits, refcount_order, ..Shape::default() };
    vec![
        plain.clone(),
        Shape { version: 2, cluster_bits: 12, ..plain.clone() },
        small(9, 0),
        small(9, 6),
        small(10, 1),
        small(12, 2),
        small(16, 3),
        small(12, 5),
        Shape { extended: true, cluster_bits: 14, zstd: true, ..plain.clone() },
        Shape { lazy: true, size: 3 << 20, cluster_bits: 21, ..plain },
    ]
}

fn looked_at(path: &Path) -> Layout {
    Layout::of(&std::fs::read(path).expect("readable")[..])
}

#[test]
fn empty_images_of_every_shape_are_sound_to_qemu_and_to_us() {
    if !needs("qemu-img", has("qemu-img")) {
        return;
    }
    let directory = scratch();
    let path = directory.path().join("image");
    for shape in shapes() {
        std::fs::write(&path, shape.make()).expect("room");
        qemu_img(&["check", "-q", "-f", "qcow2", text(&path)]);
        let layout = looked_at(&path);
        assert!(layout.is_sound() && layout.leaks == 0, "{shape:?}: {layout}");
    }
}

#[test]
fn images_that_qemu_fills_are_sound_and_read_as_qemu_reads_them() {
    if !needs("qemu-img", has("qemu-img")) {
        return;
    }
    let directory = scratch();
    let path = directory.path().join("image");
    for shape in shapes() {
        std::fs::write(&path, shape.make()).expect("room");
        let cluster = 1u64 << shape.cluster_bits;
        let at = |number: u64| (number * cluster).min(shape.size - 2048);
        let commands = [
            format!("write -P 1 {} {cluster}", at(0)),
            format!("write -P 2 {} 1536", at(3)),
            format!("write -z {} {cluster}", at(0)),
            format!("write -P 3 {} 512", shape.size - 512),
        ];
        let plain = &commands;
        qemu_io(&path, "qcow2", &plain.iter().map(String::as_str).collect::<Vec<_>>());
        if 2 * cluster <= shape.size {
            qemu_io(&path, "qcow2", &[&format!("write -c -P 4 {cluster} {cluster}")]);
        }
        if shape.refcount_order > 0 {
            qemu_img(&["snapshot", "-c", "one", text(&path)]);
            qemu_io(&path, "qcow2", &plain.iter().map(String::as_str).collect::<Vec<_>>());
        }
        let layout = looked_at(&path);
        assert!(layout.is_sound() && layout.leaks == 0, "{shape:?}: {layout}");
        let image = std::fs::read(&path).expect("readable");
        let guest = Guest::active(&image[..], &image[..]).expect("a sound header");
        let mut ours = vec![0; usize::try_from(guest.size).expect("small")];
        guest.read(0, &mut ours, &|_, out| out.fill(0)).expect("readable");
        assert!(ours == std::fs::read(reference(&path, "qcow2")).expect("readable"), "{shape:?}");
        if let Some(snapshot) = layout.snapshots.first() {
            let guest = Guest::snapshot(&image[..], snapshot).expect("a sound header");
            guest.read(0, &mut ours, &|_, out| out.fill(0)).expect("readable");
            assert_eq!((ours[0], ours[ours.len() - 1]), (0, 3), "{shape:?}");
        }
    }
}

#[test]
fn damage_is_found() {
    let directory = scratch();
    if !needs("qemu-img", has("qemu-img")) {
        return;
    }
    let path = directory.path().join("image");
    std::fs::write(&path, Shape { cluster_bits: 12, ..Shape::default() }.make()).expect("room");
    qemu_io(&path, "qcow2", &["write -P 1 0 12k"]);
    let good = std::fs::read(&path).expect("readable");
    let layout = Layout::of(&good[..]);
    let l2 = layout.references.iter().find(|r| r.1.0 == Class::L2).expect("an L2 table").0 << 12;
    let l2 = usize::try_from(l2).expect("small");
    let block = 2 << 12;
    let data = |n: usize| good[l2 + 8 * n..l2 + 8 * n + 8].to_vec();
    let damages: [(&str, usize, Vec<u8>); 6] = [
        ("refcount 0", block + 2 * ((l2 >> 12) + 1), vec![0, 0]),
        ("refcount 2, COPIED", block + 2 * ((l2 >> 12) + 1), vec![0, 2]),
        ("shared", l2, data(1)),
        ("table as data", l2, (1 << 63 | l2 as u64).to_be_bytes().to_vec()),
        ("odd offset", l2, (1 << 63 | 0x5200u64).to_be_bytes().to_vec()),
        (
            "not COPIED",
            l2,
            data(0).iter().enumerate().map(|(i, b)| b & !(u8::from(i == 0) << 7)).collect(),
        ),
    ];
    for (what, at, bytes) in damages {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(&bytes);
        assert!(!Layout::of(&bad[..]).is_sound(), "{what} was not seen");
    }
    let mut leaky = good.clone();
    leaky[block + 2 * 100 + 1] = 1;
    let layout = Layout::of(&leaky[..]);
    assert!(layout.is_sound() && (layout.leaks, layout.leaks_beyond) == (0, 1));
    leaky.resize(101 << 12, 0);
    let layout = Layout::of(&leaky[..]);
    assert!(layout.is_sound() && (layout.leaks, layout.leaks_beyond) == (1, 0));
}

#[test]
fn a_table_of_a_length_that_is_rubbish_is_noted_up_to_the_end_of_the_file() {
    let directory = scratch();
    if !needs("qemu-img", has("qemu-img")) {
        return;
    }
    let path = directory.path().join("image");
    std::fs::write(&path, Shape { cluster_bits: 9, ..Shape::default() }.make()).expect("room");
    qemu_img(&["snapshot", "-c", "one", text(&path)]);
    let mut image = std::fs::read(&path).expect("readable");
    let layout = Layout::of(&image[..]);
    assert!(layout.is_sound(), "{layout}");
    let at = usize::try_from(layout.header.snapshots_offset).expect("small");
    // Entries of the snapshot's L1 table: 32 GiB of them.
    image[at + 8..at + 12].fill(0xff);
    let layout = Layout::of(&image[..]);
    assert!(!layout.is_sound());
    let most = image.len() / 512 + 20;
    assert!(layout.references.len() < most, "{} of {most}", layout.references.len());
}
