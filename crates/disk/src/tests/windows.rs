//! Windows: what a client sees of a disk, and what it never touches.

use ringdisk_qcow2::Bytes;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_ring::Ring;
use ringdisk_testkit::sim::Prng;
use tempfile::TempDir;

use super::{assert_same, buffer, directory, open, qemu_img, qemu_io, read_steps, refusal, run};
use crate::{
    CommitOptions, Disk, Errno, ErrorKind, Format, ImageOptions, Layer, OverlayOptions,
    ResizeOptions,
};

/// Size of the images, bytes: a few clusters, and not whole ones.
const SIZE: usize = 300 * 1024 + 512;
/// Windows: first byte and size, bytes. Some begin or end inside a sector.
const WINDOWS: [(u64, u64); 4] = [(0, 70_000), (65_536, 131_072), (1000, 200_001), (307_000, 712)];

/// What the disks of these tests hold at first.
fn content() -> Vec<u8> {
    (0..SIZE).map(|at| u8::try_from(at / 512 % 251 + 1).expect("a byte")).collect()
}

fn options(window: (u64, u64)) -> ImageOptions {
    ImageOptions {
        window_offset: window.0,
        window_size: Some(Bytes(window.1)),
        discard: crate::Discard::Unmap,
        ..ImageOptions::default()
    }
}

/// Makes `a.img` (raw), `a.qcow2`, and `over.qcow2`, a thin image above `base.qcow2`, all with the
/// same content.
fn images() -> TempDir {
    let directory = directory();
    fs::write(directory.path().join("a.img"), content()).expect("write");
    for name in ["a.qcow2", "base.qcow2"] {
        qemu_img(&directory, &["convert", "-f", "raw", "-O", "qcow2", "a.img", name]);
    }
    let over = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "over.qcow2"];
    qemu_img(&directory, &over);
    qemu_io(&directory, "qcow2", "over.qcow2", &["discard 64k 64k"]);
    fs::write(directory.path().join("a.img.part"), &content()[65_536..131_072]).expect("write");
    qemu_io(&directory, "qcow2", "over.qcow2", &["write -s a.img.part 65536 65536"]);
    directory
}

/// Every byte of an image's disk.
fn whole(path: &Path) -> Vec<u8> {
    run(async |ring| {
        let options = ImageOptions { read_only: true, ..ImageOptions::default() };
        let disk = open(&ring, path, &options).await.expect("open");
        read_steps(&ring, &disk, 65_536).await
    })
}

/// One request of a kind and a place that chance chooses, also past the end; what it means for the
/// content.
async fn request(ring: &Ring, disk: &Disk, prng: &mut Prng, expected: &mut [u8]) {
    let size = expected.len();
    let offset = prng.below(size as u64 + 2000);
    let len = 1 + usize::try_from(prng.below(150_000)).expect("small");
    let start = usize::try_from(offset).expect("small").min(size);
    let inside = len.min(size - start);
    let range = start..start + inside;
    let value = u8::try_from(prng.below(255)).expect("a byte") + 1;
    match prng.below(7) {
        0 | 1 => {
            let buf = buffer(&vec![value; len]);
            assert_eq!(disk.write(ring, offset, &buf).await, Ok(inside));
            expected[range].fill(value);
        }
        2 => {
            assert_eq!(disk.discard(ring, offset, Bytes::of(len)).await, Ok(()));
            expected[range].fill(0);
        }
        3 => {
            assert_eq!(disk.punch(ring, offset, Bytes::of(len)).await, Ok(()));
            expected[range].fill(0);
        }
        4 => {
            let may_unmap = prng.coin();
            assert_eq!(disk.write_zeroes(ring, offset, Bytes::of(len), may_unmap).await, Ok(()));
            expected[range].fill(0);
        }
        5 => assert_eq!(disk.flush(ring).await, Ok(())),
        _ => {
            let buf = buffer(&vec![0xa5; len]);
            assert_eq!(disk.read(ring, offset, &buf).await, Ok(inside));
            assert_same(&buf.to_vec()[..inside], &expected[range]);
        }
    }
}

/// Serves a window under random requests, then looks at the whole disk.
///
/// * `kept`: the image that holds what was written.
fn requests_stay_inside(path: &Path, kept: Option<&Path>, options: &ImageOptions, seed: u64) {
    let (start, len) = (options.window_offset, options.window_size.expect("a size"));
    let before = whole(path);
    let mut expected = before.clone();
    let from = usize::try_from(start).expect("small");
    let range = from..from + usize::try_from(len).expect("small");
    run(async |ring| {
        let disk = open(&ring, path, options).await.expect("open");
        assert_eq!((disk.size(), disk.window()), (len, Some((start, Some(len)))));
        let mut prng = Prng::new(seed);
        for _ in 0..60 {
            request(&ring, &disk, &mut prng, &mut expected[range.clone()]).await;
        }
        assert_same(&read_steps(&ring, &disk, 65_536).await, &expected[range.clone()]);
        assert!(disk.allocated_bytes() <= len);
        disk.close(&ring).await.expect("close");
    });
    match kept {
        Some(kept) => assert_same(&whole(kept), &expected),
        None => assert_same(&whole(path), &before),
    }
}

#[test]
fn no_request_reaches_a_byte_outside_a_window() {
    for (index, window) in WINDOWS.into_iter().enumerate() {
        let directory = images();
        for name in ["a.img", "a.qcow2", "over.qcow2"] {
            let path = directory.path().join(name);
            requests_stay_inside(&path, Some(&path), &options(window), index as u64);
        }
        assert_same(&whole(&directory.path().join("base.qcow2")), &content());
    }
}

#[test]
fn overlays_are_above_the_whole_disk_and_windows_above_overlays() {
    for name in ["a.img", "over.qcow2"] {
        let directory = images();
        let path = directory.path().join(name);
        let temporary = ImageOptions { temporary: true, ..options(WINDOWS[2]) };
        requests_stay_inside(&path, None, &temporary, 5);
        let top = directory.path().join("top.qcow2");
        let kept = ImageOptions { overlay: Some(top.clone()), ..options(WINDOWS[2]) };
        requests_stay_inside(&path, Some(&top), &kept, 6);
        assert_same(&whole(&path), &content());
    }
}

#[test]
fn a_window_of_a_probed_qcow2_is_one_of_its_disk() {
    let directory = images();
    let path = directory.path().join("a.qcow2");
    let before = fs::read(&path).expect("read");
    run(async |ring| {
        let window = ImageOptions { read_only: true, ..options((0, 65_536)) };
        let disk = open(&ring, &path, &window).await.expect("open");
        assert_eq!(disk.layers()[0].format(), Some(Format::Qcow2));
        assert_same(&read_steps(&ring, &disk, 4096).await, &content()[..65_536]);
        let window = ImageOptions { window_size: None, window_offset: 65_536, ..window };
        let disk = open(&ring, &path, &window).await.expect("open");
        assert_same(&read_steps(&ring, &disk, 4096).await, &content()[65_536..]);
    });
    assert_same(&fs::read(&path).expect("read"), &before);
}

#[test]
fn maps_and_status_count_from_the_start_of_the_window() {
    let directory = images();
    qemu_io(&directory, "qcow2", "a.qcow2", &["write -z -u 128k 64k"]);
    run(async |ring| {
        let path = directory.path().join("a.qcow2");
        let disk = open(&ring, &path, &options((65_536 + 512, 131_072))).await.expect("open");
        let mut runs = Vec::new();
        let each = |entry: &crate::MapEntry| {
            runs.push((entry.start, entry.status.len.0, entry.status.is_data()));
        };
        disk.map_entries(&ring, 0, Bytes::MAX, each).await.expect("map");
        assert_eq!(runs, [(0, 65_024, true), (65_024, 65_536, false), (130_560, 512, true)]);
        let past = disk.block_status(&ring, 131_072, Bytes(1)).await.expect("status");
        assert_eq!(past.len, Bytes::ZERO);
        let view = disk.view().await;
        let mapped = view.map(&ring, 0, Bytes(10)).await.expect("map").mapping;
        assert!(matches!(mapped, crate::Mapping::Data { len: Bytes(10), .. }), "{mapped:?}");
        let past = view.map(&ring, 131_072, Bytes(10)).await.expect("map").mapping;
        assert!(matches!(past, crate::Mapping::PastEnd), "{past:?}");
    });
}

#[test]
fn the_first_sector_of_a_probed_image_is_protected_in_windows_that_have_it() {
    let directory = images();
    let path = directory.path().join("a.img");
    let magic = buffer(b"QFI\xfb\0\0\0\x03");
    run(async |ring| {
        let disk = open(&ring, &path, &options((0, 4096))).await.expect("open");
        assert_eq!(disk.write(&ring, 0, &magic).await, Err(Errno::PERM));
        assert!(disk.protection_reason().is_some());
        drop(disk);
        let disk = open(&ring, &path, &options((508, 4096))).await.expect("open");
        // Its first bytes are the last of the sector, where no format has its magic.
        assert_eq!(disk.write(&ring, 0, &magic).await, Ok(8));
        drop(disk);
        let disk = open(&ring, &path, &options((512, 4096))).await.expect("open");
        assert_eq!(disk.write(&ring, 0, &magic).await, Ok(8));
        assert_eq!(disk.protection_reason(), None);
    });
}

#[test]
fn windows_past_the_end_are_refused_before_anything_is_made() {
    let directory = images();
    let top = directory.path().join("top.qcow2");
    for name in ["a.img", "a.qcow2"] {
        let path = directory.path().join(name);
        for window in [(SIZE as u64 + 1, 0), (0, SIZE as u64 + 1), (u64::MAX, 2), (1, u64::MAX)] {
            let kept = ImageOptions { overlay: Some(top.clone()), ..options(window) };
            for options in [options(window), kept] {
                let error = refusal(&path, &options);
                assert_eq!(error.kind(), ErrorKind::Invalid);
                assert!(error.message().contains("307712 bytes"), "{error}");
            }
        }
    }
    assert!(!top.exists());
}

#[test]
fn a_window_with_a_size_cannot_be_resized_and_one_without_can() {
    for name in ["a.img", "a.qcow2"] {
        let directory = images();
        let path = directory.path().join(name);
        run(async |ring| {
            let disk = open(&ring, &path, &options((512, 4096))).await.expect("open");
            assert!(!disk.can_resize());
            assert_eq!(disk.resize(&ring, Bytes(512)).await, Err(Errno::OPNOTSUPP));
            assert_eq!(disk.grow(&ring, Bytes(1 << 20)).await, Err(Errno::OPNOTSUPP));
            let asked = ResizeOptions { shrink: true, ..ResizeOptions::default() };
            let error = disk.resize_with(&ring, Bytes(1 << 20), asked).await.expect_err("fixed");
            assert!(error.message().contains("part of its image"), "{error}");
            disk.close(&ring).await.expect("close");
            drop(disk);
            let open_end = ImageOptions { window_size: None, ..options((512, 0)) };
            let disk = open(&ring, &path, &open_end).await.expect("open");
            assert_eq!(disk.size(), Bytes(SIZE as u64 - 512));
            let error = disk.resize_with(&ring, Bytes(1024), ResizeOptions::default()).await;
            let error = error.expect_err("shrinks");
            assert!(
                error.message().contains("1024 bytes are less than the disk has (307200)"),
                "{error}"
            );
            assert_eq!(disk.resize(&ring, Bytes(1024)).await, Ok(()));
            assert_eq!(disk.size(), Bytes(1024));
            assert_eq!(disk.grow(&ring, Bytes(4096)).await, Ok(()));
            assert_eq!(disk.size(), Bytes(4096));
            disk.close(&ring).await.expect("close");
        });
        let mut expected = content()[..1536].to_vec();
        expected.resize(4608, 0);
        assert_same(&whole(&path), &expected);
    }
}

/// The bytes of the window, and that it is still one.
async fn still(ring: &Ring, disk: &Disk, expected: &[u8]) {
    assert_eq!(disk.window(), Some((65_536, Some(Bytes(131_072)))));
    assert_eq!(disk.size(), Bytes(131_072));
    assert_same(&read_steps(ring, disk, 65_536).await, expected);
}

#[test]
fn live_changes_keep_the_window() {
    for name in ["a.img", "a.qcow2"] {
        let directory = images();
        let (path, top) = (directory.path().join(name), directory.path().join("top.qcow2"));
        let mut expected = content()[65_536..196_608].to_vec();
        run(async |ring| {
            let disk = open(&ring, &path, &options(WINDOWS[1])).await.expect("open");
            let overlay = OverlayOptions::default();
            disk.add_overlay(&ring, &top, overlay).await.expect("overlay");
            still(&ring, &disk, &expected).await;
            assert_eq!(disk.layers().first().map(|top| top.size()), Some(Bytes(SIZE as u64)));
            assert_eq!(disk.write(&ring, 131_000, &buffer(&[7; 200])).await, Ok(72));
            expected[131_000..].fill(7);
            disk.commit(&ring, CommitOptions::TOP, &Arc::default()).await.expect("commit");
            still(&ring, &disk, &expected).await;
            disk.deactivate(&ring).await.expect("deactivate");
            disk.activate(&ring, Duration::from_secs(10)).await.expect("activate");
            still(&ring, &disk, &expected).await;
            let handed = disk.hand_over(&ring).await.expect("hand over");
            let options = ImageOptions::default();
            let next = Disk::open_handed(&ring, handed, &options).await.expect("take over");
            next.take_charge();
            still(&ring, &next, &expected).await;
            next.close(&ring).await.expect("close");
        });
        let mut all = content();
        all[65_536..196_608].copy_from_slice(&expected);
        assert_same(&whole(&path), &all);
    }
}

#[test]
fn what_moves_bytes_past_us_gets_no_window() {
    let directory = images();
    let path = directory.path().join("a.img");
    let raw = ImageOptions { format: Some(Format::Raw), ..options((0, SIZE as u64)) };
    run(async |ring| {
        let disk = open(&ring, &path, &raw).await.expect("open");
        let error = disk.lend().expect_err("refused");
        assert!(error.message().contains("window"), "{error}");
        assert!(disk.check_plain().expect_err("refused").message().contains("window"));
    });
}

/// An MBR with one partition over `start` and `sectors`.
fn mbr(number: usize, start: u32, sectors: u32) -> Vec<u8> {
    let mut sector = vec![0; 512];
    let entry = &mut sector[446 + 16 * (number - 1)..][..16];
    entry[4] = 0x83;
    entry[8..12].copy_from_slice(&start.to_le_bytes());
    entry[12..].copy_from_slice(&sectors.to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

#[test]
fn a_partition_is_found_through_a_chain_and_served_as_a_window() {
    let directory = images();
    // The table is in the backing file, the partition's bytes in both.
    fs::write(directory.path().join("mbr"), mbr(2, 128, 256)).expect("write");
    qemu_io(&directory, "qcow2", "base.qcow2", &["write -s mbr 0 512"]);
    let path = directory.path().join("over.qcow2");
    run(async |ring| {
        let options = ImageOptions { partition: Some(2), ..ImageOptions::default() };
        let disk = open(&ring, &path, &options).await.expect("open");
        still(&ring, &disk, &content()[65_536..196_608]).await;
        let names: Vec<_> =
            disk.layers().iter().map(|layer| Layer::name(layer).to_owned()).collect();
        assert_eq!(names.len(), 2);
        drop(disk);
        let options = ImageOptions { temporary: true, ..options };
        let disk = open(&ring, &path, &options).await.expect("open");
        still(&ring, &disk, &content()[65_536..196_608]).await;
    });
    let missing = ImageOptions { partition: Some(3), ..ImageOptions::default() };
    let error = refusal(&path, &missing);
    assert_eq!(error.kind(), ErrorKind::Invalid);
    for part in ["partition 3 of", "over.qcow2", "2 (131072 bytes at 65536)"] {
        assert!(error.message().contains(part), "{part} in {error}");
    }
    let none = refusal(directory.path().join("a.qcow2"), &missing);
    assert!(none.message().contains("no partition table"), "{none}");
}
