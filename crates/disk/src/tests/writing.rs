//! Writable qcow2 disks: writes, freed space, refusals.

use ringdisk_qcow2::Bytes;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_ring::Ring;
use tempfile::TempDir;

use super::{assert_same, buffer, directory, open, qemu_img, qemu_io, read_steps, reading, run};
use crate::{Cache, DetectZeroes, Discard, Disk, Errno, ErrorKind, ImageOptions, Source};

const MIB: usize = 1 << 20;

/// `a.qcow2` of 8 MiB, all of it ones.
fn ones(directory: &TempDir, options: &str) {
    let mut create = vec!["create", "-q", "-f", "qcow2"];
    if !options.is_empty() {
        create.extend(["-o", options]);
    }
    create.extend(["a.qcow2", "8M"]);
    qemu_img(directory, &create);
    qemu_io(directory, "qcow2", "a.qcow2", &["write -P 1 0 8M"]);
}

async fn opened(ring: &Ring, directory: &TempDir, options: &ImageOptions) -> Arc<Disk> {
    open(ring, directory.path().join("a.qcow2"), options).await.expect("open")
}

/// Ends a disk and compares the image with what it must hold.
async fn end(ring: &Ring, directory: &TempDir, disk: Arc<Disk>, expected: &[u8]) {
    assert_same(&read_steps(ring, &disk, 100_000).await, expected);
    assert_eq!(disk.close(ring).await, Ok(()));
    // A second end is no harm, and nothing is written after it.
    assert_eq!(disk.close(ring).await, Ok(()));
    assert_eq!(disk.write(ring, 0, &buffer(&[1; 512])).await, Err(Errno::ROFS));
    for _ in 0..10 {
        ring.yield_now().await;
    }
    drop(disk);
    qemu_img(directory, &["check", "-q", "-f", "qcow2", "a.qcow2"]);
    qemu_img(directory, &["convert", "-O", "raw", "a.qcow2", "a.raw"]);
    assert_same(&fs::read(directory.path().join("a.raw")).expect("read"), expected);
}

fn allocated(directory: &TempDir) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(directory.path().join("a.qcow2")).expect("stat").blocks() * 512
}

#[test]
fn every_cache_mode_writes() {
    for cache in
        [Cache::Writeback, Cache::None, Cache::Writethrough, Cache::DirectSync, Cache::Unsafe]
    {
        // Not in /tmp, which may be without O_DIRECT.
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("directory");
        ones(&directory, "");
        run(async |ring| {
            let options = ImageOptions { cache, ..ImageOptions::default() };
            let disk = opened(&ring, &directory, &options).await;
            assert_eq!(disk.write(&ring, 777, &buffer(&vec![9; 100_000])).await, Ok(100_000));
            assert_eq!(disk.write_zeroes(&ring, 2 << 20, Bytes(1 << 20), true).await, Ok(()));
            assert_eq!(disk.flush(&ring).await, Ok(()));
            let past = buffer(&[5; 1024]);
            assert_eq!(disk.write(&ring, (8 << 20) - 512, &past).await, Ok(512));
            assert_eq!(disk.write(&ring, 8 << 20, &past).await, Ok(0));
            let mut expected = vec![1; 8 * MIB];
            expected[777..100_777].fill(9);
            expected[2 * MIB..3 * MIB].fill(0);
            expected[8 * MIB - 512..].fill(5);
            end(&ring, &directory, disk, &expected).await;
        });
    }
}

#[test]
fn a_flush_or_a_second_makes_writes_visible_to_others() {
    let directory = directory();
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "a.qcow2", "8M"]);
    run(async |ring| {
        let options = ImageOptions::default();
        let disk = opened(&ring, &directory, &options).await;
        let shown = async || {
            let share = ImageOptions { force_share: true, ..reading() };
            let other = opened(&ring, &directory, &share).await;
            read_steps(&ring, &other, MIB).await[..2].to_vec()
        };
        assert_eq!(disk.write(&ring, 0, &buffer(&[3])).await, Ok(1));
        assert_eq!(shown().await, [0, 0]);
        assert_eq!(disk.flush(&ring).await, Ok(()));
        assert_eq!(shown().await, [3, 0]);
        // In another cluster, so that metadata is dirty again.
        assert_eq!(disk.write(&ring, 4 << 20, &buffer(&[4])).await, Ok(1));
        assert_eq!(disk.write(&ring, 1, &buffer(&[5])).await, Ok(1));
        // No client flushes; a slow disk may take longer than the second.
        let mut seen = 0;
        for _ in 0..300 {
            ring.sleep(Duration::from_millis(100)).await;
            let share = ImageOptions { force_share: true, ..reading() };
            let other = opened(&ring, &directory, &share).await;
            seen = read_steps(&ring, &other, MIB).await[4 * MIB];
            if seen == 4 {
                break;
            }
        }
        assert_eq!(seen, 4);
        let mut expected = vec![0; 8 * MIB];
        (expected[0], expected[1], expected[4 * MIB]) = (3, 5, 4);
        end(&ring, &directory, disk, &expected).await;
    });
}

#[test]
fn discards_give_space_back_unless_they_are_ignored() {
    for (discard, no_unref, gives_back) in [
        (Discard::Unmap, false, true),
        (Discard::Unmap, true, true),
        (Discard::Ignore, false, false),
    ] {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("directory");
        ones(&directory, "");
        let before = allocated(&directory);
        run(async |ring| {
            let options =
                ImageOptions { discard, discard_no_unref: no_unref, ..ImageOptions::default() };
            let disk = opened(&ring, &directory, &options).await;
            assert_eq!(disk.discard(&ring, 0, Bytes(4 << 20)).await, Ok(()));
            let mut expected = vec![1; 8 * MIB];
            if gives_back {
                expected[..4 * MIB].fill(0);
            }
            end(&ring, &directory, disk, &expected).await;
        });
        assert_eq!(allocated(&directory) + (3 << 20) < before, gives_back, "{discard:?}");
        run(async |ring| {
            let options = ImageOptions { discard, ..ImageOptions::default() };
            let disk = opened(&ring, &directory, &options).await;
            assert_eq!(disk.punch(&ring, 0, Bytes(6 << 20)).await, Ok(()));
            let mut expected = vec![1; 8 * MIB];
            expected[..6 * MIB].fill(0);
            end(&ring, &directory, disk, &expected).await;
        });
        assert_eq!(allocated(&directory) + (5 << 20) < before, gives_back, "{discard:?}");
    }
}

#[test]
fn writes_of_zeroes_are_noticed_where_that_was_asked_for() {
    for (detect_zeroes, keeps) in
        [(DetectZeroes::Off, true), (DetectZeroes::On, true), (DetectZeroes::Unmap, false)]
    {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("directory");
        ones(&directory, "");
        let before = allocated(&directory);
        run(async |ring| {
            let options = ImageOptions { detect_zeroes, ..ImageOptions::default() };
            let disk = opened(&ring, &directory, &options).await;
            assert_eq!(disk.write(&ring, 0, &buffer(&vec![0; 4 * MIB])).await, Ok(4 * MIB));
            let mut almost = vec![0; MIB];
            almost[MIB - 1] = 7;
            assert_eq!(disk.write(&ring, 4 << 20, &buffer(&almost)).await, Ok(MIB));
            let status = disk.block_status(&ring, 0, Bytes(1 << 20)).await.expect("status");
            assert_eq!(status.zero, detect_zeroes != DetectZeroes::Off);
            let mut expected = vec![1; 8 * MIB];
            expected[..5 * MIB].fill(0);
            expected[5 * MIB - 1] = 7;
            end(&ring, &directory, disk, &expected).await;
        });
        assert_eq!(allocated(&directory) + (3 << 20) > before, keeps, "{detect_zeroes:?}");
    }
    for (word, mode) in
        [("off", DetectZeroes::Off), ("on", DetectZeroes::On), ("unmap", DetectZeroes::Unmap)]
    {
        assert_eq!(word.parse::<DetectZeroes>().expect("a mode"), mode);
    }
    assert_eq!("maybe".parse::<DetectZeroes>().expect_err("no mode").kind(), ErrorKind::Invalid);
}

#[test]
fn a_disk_that_is_opened_for_reading_refuses_every_change() {
    let directory = directory();
    ones(&directory, "");
    run(async |ring| {
        let disk = opened(&ring, &directory, &reading()).await;
        let refused = Err(Errno::ROFS);
        assert_eq!(disk.write(&ring, 0, &buffer(&[0; 512])).await, Err(Errno::ROFS));
        assert_eq!(disk.write_zeroes(&ring, 0, Bytes(512), true).await, refused);
        assert_eq!(disk.discard(&ring, 0, Bytes(512)).await, refused);
        assert_eq!(disk.punch(&ring, 0, Bytes(512)).await, refused);
        assert_eq!(disk.grow(&ring, Bytes(1 << 30)).await, refused);
        assert_eq!(disk.write_compressed(&ring, 0, &[0]).await, refused);
        let path = directory.path().join("b.qcow2");
        let overlay = disk.add_overlay(&ring, &path, crate::OverlayOptions::default()).await;
        assert_eq!(overlay.expect_err("refused").kind(), ErrorKind::PermissionDenied);
        assert!(!path.exists());
        assert_eq!(disk.flush(&ring).await, Ok(()));
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn a_data_file_is_written_too() {
    let directory = directory();
    qemu_img(
        &directory,
        &["create", "-q", "-f", "qcow2", "-o", "data_file=a.data", "a.qcow2", "8M"],
    );
    run(async |ring| {
        let disk = opened(&ring, &directory, &ImageOptions::default()).await;
        assert_eq!(disk.write(&ring, 12_345, &buffer(&vec![9; 300_000])).await, Ok(300_000));
        assert_eq!(disk.resize(&ring, Bytes(16 << 20)).await, Ok(()));
        assert_eq!(disk.write(&ring, 15 << 20, &buffer(&vec![8; 1000])).await, Ok(1000));
        let mut expected = vec![0; 16 * MIB];
        expected[12_345..312_345].fill(9);
        expected[15 * MIB..15 * MIB + 1000].fill(8);
        end(&ring, &directory, disk, &expected).await;
    });
}

#[test]
fn only_the_top_of_a_chain_is_opened_where_its_base_is_gone() {
    let directory = directory();
    ones(&directory, "");
    let create = ["create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "b.qcow2"];
    qemu_img(&directory, &create);
    fs::remove_file(directory.path().join("a.qcow2")).expect("remove");
    run(async |ring| {
        let path = directory.path().join("b.qcow2");
        let error = open(&ring, &path, &reading()).await.expect_err("no base");
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let options = ImageOptions { without_backing: true, ..reading() };
        let disk = open(&ring, &path, &options).await.expect("open");
        assert_eq!(disk.layers().len(), 1);
        assert_eq!(disk.size(), Bytes(8 << 20));
        assert_same(&read_steps(&ring, &disk, MIB).await, &vec![0; 8 * MIB]);
    });
}

#[test]
fn what_is_written_over_a_temporary_overlay_leaves_no_trace() {
    for (name, format) in [("a.qcow2", "qcow2"), ("b.raw", "raw")] {
        let directory = directory();
        ones(&directory, "");
        qemu_img(&directory, &["convert", "-O", "raw", "a.qcow2", "b.raw"]);
        let path = directory.path().join(name);
        let before = fs::read(&path).expect("read");
        let files = fs::read_dir(directory.path()).expect("list").count();
        run(async |ring| {
            let options = ImageOptions {
                temporary: true,
                format: Some(format.parse().expect("format")),
                ..ImageOptions::default()
            };
            let disk = open(&ring, &path, &options).await.expect("open");
            assert!(!disk.is_read_only());
            assert_eq!(disk.write(&ring, 12_345, &buffer(&[9; 3000])).await, Ok(3000));
            assert_eq!(disk.flush(&ring).await, Ok(()));
            assert_eq!(disk.resize(&ring, Bytes(10 << 20)).await, Ok(()));
            let mut expected = vec![1; 8 * MIB];
            expected.resize(10 * MIB, 0);
            expected[12_345..15_345].fill(9);
            assert_same(&read_steps(&ring, &disk, MIB).await, &expected);
            // The image may be read by others meanwhile.
            open(&ring, &path, &reading()).await.expect("a second reader");
            assert_eq!(disk.close(&ring).await, Ok(()));
        });
        assert_same(&fs::read(&path).expect("read"), &before);
        assert_eq!(fs::read_dir(directory.path()).expect("list").count(), files);
    }
}

#[test]
fn a_kept_overlay_is_made_and_used_again() {
    let directory = directory();
    ones(&directory, "");
    let image = directory.path().join("a.qcow2");
    fs::create_dir(directory.path().join("overlays")).expect("mkdir");
    for name in ["o.qcow2", "overlays/o.qcow2", "odd:name.qcow2"] {
        let before = fs::read(&image).expect("read");
        let overlay = directory.path().join(name);
        let options = ImageOptions { overlay: Some(overlay.clone()), ..ImageOptions::default() };
        run(async |ring| {
            let disk = open(&ring, &image, &options).await.expect("made");
            assert_eq!(disk.layers()[0].name(), overlay);
            assert_eq!(disk.write(&ring, 0, &buffer(&[9; 1000])).await, Ok(1000));
            assert_eq!(disk.close(&ring).await, Ok(()));
        });
        run(async |ring| {
            let disk = open(&ring, &image, &options).await.expect("used");
            assert_eq!(disk.write(&ring, 1000, &buffer(&[8; 1000])).await, Ok(1000));
            let mut expected = vec![1; 8 * MIB];
            expected[..1000].fill(9);
            expected[1000..2000].fill(8);
            assert_same(&read_steps(&ring, &disk, MIB).await, &expected);
            assert_eq!(disk.close(&ring).await, Ok(()));
        });
        assert_same(&fs::read(&image).expect("read"), &before);
        let path = overlay.to_str().expect("text");
        qemu_img(&directory, &["check", "-q", "-f", "qcow2", &format!("file:{path}")]);
        let info = qemu_img(&directory, &["info", "-f", "qcow2", &format!("file:{path}")]);
        assert!(info.contains("backing file format: qcow2"), "{info}");
    }
}

#[test]
fn an_overlay_of_another_image_is_refused() {
    let directory = directory();
    ones(&directory, "");
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "b.qcow2", "8M"]);
    run(async |ring| {
        let path = directory.path().join("a.qcow2");
        for read_only in [false, true] {
            let overlay = Some(directory.path().join("b.qcow2"));
            let options = ImageOptions { overlay, read_only, ..ImageOptions::default() };
            let error = Disk::open(&ring, Source::Path(path.clone()), &options).await;
            assert_eq!(error.expect_err("refused").kind(), ErrorKind::Invalid);
        }
        let options = ImageOptions {
            overlay: Some(directory.path().join("missing/o.qcow2")),
            ..ImageOptions::default()
        };
        let error = Disk::open(&ring, Source::Path(path.clone()), &options).await;
        assert_eq!(error.expect_err("refused").kind(), ErrorKind::NotFound);
    });
}

/// What a process that takes over would find: the files as they are, without a flush or a close of
/// this disk.
#[test]
fn what_was_answered_is_in_the_file_when_it_shall_outlive_the_process() {
    let directory = directory();
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "a.qcow2", "8M"]);
    let options = ImageOptions {
        outlives_process: true,
        // Flushes of the host would only cost time here.
        cache: Cache::Unsafe,
        ..ImageOptions::default()
    };
    let path = directory.path().join("a.qcow2");
    let seen = |name: &str, steps: &[&str]| {
        let copy = format!("{name}.qcow2");
        fs::copy(&path, directory.path().join(&copy)).expect("copy");
        qemu_io(&directory, "qcow2", &copy, steps);
    };
    run(async |ring| {
        let disk = opened(&ring, &directory, &options).await;
        disk.write(&ring, 70_000, &buffer(&[7; 1000])).await.expect("a new cluster");
        seen("new", &["read -P 7 70000 1000"]);
        disk.write(&ring, 72_000, &buffer(&[8; 1000])).await.expect("in place");
        seen("in_place", &["read -P 7 70000 1000", "read -P 8 72000 1000"]);
        disk.write_zeroes(&ring, 70_500, Bytes(500), true).await.expect("zeroes");
        disk.punch(&ring, 65_536, Bytes(4096)).await.expect("part of a cluster");
        seen("zeroes", &["read -P 0 65536 4096", "read -P 0 70500 500", "read -P 8 72000 1000"]);
        disk.punch(&ring, 65_536, Bytes(65_536)).await.expect("a cluster");
        seen("hole", &["read -P 0 65536 65536"]);
        disk.close(&ring).await.expect("close");
    });
}

#[test]
fn a_new_top_image_is_told_before_anything_is_written_to_it() {
    let directory = directory();
    ones(&directory, "");
    run(async |ring| {
        let disk = opened(&ring, &directory, &ImageOptions::default()).await;
        let told: Arc<std::sync::Mutex<Vec<(std::path::PathBuf, u64)>>> = Arc::default();
        let (heard, overlay) = (Arc::clone(&told), directory.path().join("b.qcow2"));
        let at = overlay.clone();
        disk.watch_chain(
            |_| Ok(()),
            move |chain| {
                let len = fs::metadata(&at).map_or(0, |meta| meta.len());
                heard.lock().expect("no panic").push((chain[0].name().to_owned(), len));
            },
        );
        let before = disk.layers()[0].name().to_owned();
        disk.add_overlay(&ring, &overlay, crate::OverlayOptions::default()).await.expect("overlay");
        disk.write(&ring, 0, &buffer(&[2; 4096])).await.expect("write");
        let progress = Arc::default();
        disk.commit(&ring, crate::CommitOptions::TOP, &progress).await.expect("commit");
        let told = told.lock().expect("no panic").clone();
        assert_eq!(
            told.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>(),
            [overlay, before]
        );
        assert!(told[0].1 > 0, "the overlay is there, whole, when it is told");
        disk.close(&ring).await.expect("close");
    });
}
