//! An image in the hands of the kernel.

use std::io::Write;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ringdisk_qcow2::{Bytes, Preallocation};
use ringdisk_ring::{Errno, Ring};

use super::{directory, open, qemu_img, run};
use crate::{
    Cache, CommitOptions, DetectZeroes, Disk, ErrorKind, Format, ImageOptions, NewSize,
    OverlayOptions, Progress, ResizeOptions,
};

#[test]
fn nothing_is_put_above_an_image_that_the_kernel_has() {
    run(|ring| async move {
        let directory = directory();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, vec![7; 65536]).expect("an image");
        let options = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
        let disk = open(&ring, path.clone(), &options).await.expect("open");
        let lent = disk.lend().expect("a plain raw image");
        assert!(disk.is_lent());
        let over = directory.path().join("over.qcow2");
        let error = disk.add_overlay(&ring, &over, OverlayOptions::default()).await;
        assert_eq!(error.expect_err("refused").kind(), ErrorKind::Unsupported);
        assert!(!over.exists());
        // Writes of the kernel show when the length is asked.
        let mut file = std::fs::File::from(lent.as_fd().try_clone_to_owned().expect("dup"));
        file.write_all(&[9; 70_000]).expect("write");
        assert_eq!(disk.size(), Bytes(65536));
        disk.follow_length(&ring).await.expect("longer");
        assert_eq!(disk.size(), Bytes(70_000));
    });
}

#[test]
fn only_a_file_that_is_the_disk_is_lent() {
    run(|ring| async move {
        let directory = directory();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, vec![7; 65536]).expect("an image");
        // Its first sector is protected, since the format was guessed.
        let guessed = ImageOptions::default();
        // Each of these is more than the kernel does.
        let raw = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
        let window = ImageOptions { window_offset: 4096, ..raw.clone() };
        let end = ImageOptions { window_size: Some(Bytes(4096)), ..raw.clone() };
        let direct = ImageOptions { cache: Cache::Writethrough, ..raw.clone() };
        let detects = ImageOptions { detect_zeroes: DetectZeroes::On, ..raw.clone() };
        for options in [guessed, window, end, direct, detects] {
            let disk = open(&ring, path.clone(), &options).await.expect("open");
            let refused = disk.lend().expect_err("refused");
            assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
            assert!(!disk.is_lent());
        }
        let disk = open(&ring, path.clone(), &raw).await.expect("open");
        disk.lend().expect("as it is");
    });
}

#[test]
fn a_part_of_a_file_that_a_commit_made_the_disk_is_not_lent() {
    let directory = directory();
    std::fs::write(directory.path().join("base.raw"), vec![7; 65536]).expect("an image");
    for part in [r#""offset":4096"#, r#""size":32768"#] {
        let base = format!(r#"json:{{"driver":"raw",{part},"file.filename":"base.raw"}}"#);
        let over = ["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", "over.qcow2"];
        qemu_img(&directory, &over);
        run(async |ring| {
            let path = directory.path().join("over.qcow2");
            let disk = open(&ring, path, &ImageOptions::default()).await.expect("open");
            let progress = Arc::new(Progress::new());
            disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("a commit");
            assert_eq!((disk.layers().len(), disk.layers()[0].format()), (1, Some(Format::Raw)));
            assert_eq!(disk.lend().expect_err("a part").kind(), ErrorKind::Unsupported);
        });
    }
}

/// Nothing says in the header of an overlay that the backing file that its backing file names is to
/// be left out.
#[test]
fn an_image_without_the_backing_file_that_it_names_gets_no_overlay() {
    let directory = directory();
    for (name, over) in [("below", None), ("base", Some("below"))] {
        let mut words = vec!["create", "-q", "-f", "qcow2"];
        words.extend(over.map(|over| ["-b", over, "-F", "qcow2"]).iter().flatten());
        qemu_img(&directory, &[&words[..], &[name, "1M"]].concat());
    }
    let base = r#"json:{"driver":"qcow2","backing":null,"file.filename":"base"}"#;
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", "top"]);
    run(async |ring| {
        let path = directory.path().join("top");
        let disk = open(&ring, path, &ImageOptions::default()).await.expect("open");
        let progress = Arc::new(Progress::new());
        disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("a commit");
        // Nobody knows what of that one would show.
        disk.grow(&ring, Bytes(2 << 20)).await.expect_err("it does not grow");
        let overlay = directory.path().join("overlay");
        let refused = disk.add_overlay(&ring, &overlay, OverlayOptions::default()).await;
        let error = refused.expect_err("another disk when it is opened again");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("without the backing file"), "{error}");
        assert!(!overlay.exists());
        disk.close(&ring).await.expect("close");
    });
}

#[test]
fn a_block_device_is_not_lent() {
    let directory = directory();
    let file = directory.path().join("device");
    std::fs::write(&file, vec![7; 1 << 20]).expect("a file");
    let Some(device) = ringdisk_testkit::mount::Loop::attach(&file, &[]) else { return };
    run(async |ring| {
        let options = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
        let disk = open(&ring, device.device(), &options).await.expect("open");
        assert_eq!(disk.lend().expect_err("a device").kind(), ErrorKind::Unsupported);
        assert!(!disk.is_lent());
    });
}

#[test]
fn watchers_hear_of_a_lent_disk_that_grows_and_an_error_is_told() {
    run(async |ring| {
        let directory = directory();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, vec![7; 65536]).expect("an image");
        let disk = lent(&ring, &path).await;
        let heard = Arc::new(Mutex::new(Vec::new()));
        let list = Arc::clone(&heard);
        let _watch = disk.watch_size(move |size| list.lock().expect("list").push(size));
        disk.grow(&ring, Bytes(100_000)).await.expect("grow");
        assert_eq!(*heard.lock().expect("list"), [Bytes(100_000)]);
        assert_eq!(disk.layers()[0].size(), Bytes(100_000));
        assert!(disk.grow(&ring, Bytes(u64::MAX / 2)).await.is_err());
        assert_eq!(disk.size(), Bytes(100_000));
    });
}

/// A disk of one file whose kernel is this test: it writes to the file by a descriptor of its own.
async fn lent(ring: &Ring, path: &Path) -> Arc<Disk> {
    let options = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
    let disk = open(ring, path, &options).await.expect("open");
    disk.lend().expect("a plain raw image");
    disk
}

/// Bytes of a block that is appended.
const BLOCK: usize = 512;
/// Blocks that are appended at most.
const BLOCKS_MAX: u64 = 100_000;

/// Appends numbered blocks while `change` runs on a lent disk; each must be there in the end, in
/// order.
fn nothing_appended_is_lost_beside(change: impl AsyncFn(&Ring, &Disk)) {
    let directory = directory();
    let path = directory.path().join("disk.img");
    std::fs::write(&path, "").expect("an image");
    let stop = AtomicBool::new(false);
    let appended = std::thread::scope(|scope| {
        let appender = scope.spawn(|| {
            let mut file = std::fs::File::options().append(true).open(&path).expect("open");
            let mut number = 0;
            while !stop.load(Ordering::Relaxed) && number < BLOCKS_MAX {
                number += 1;
                file.write_all(&u64::to_le_bytes(number).repeat(64)).expect("append");
            }
            number
        });
        run(|ring| {
            let (path, change) = (&path, &change);
            async move {
                let disk = lent(&ring, path).await;
                // The changes are beside appends, not before them.
                while std::fs::metadata(path).expect("the image").len() == 0 {
                    std::thread::yield_now();
                }
                for _ in 0..200 {
                    change(&ring, &disk).await;
                }
                let len = disk.follow_length(&ring).await.expect("a length");
                assert!(disk.size() == len && len > Bytes::ZERO);
            }
        });
        stop.store(true, Ordering::Relaxed);
        appender.join().expect("the appender")
    });
    let bytes = std::fs::read(&path).expect("the image");
    let mut count = 0;
    for block in bytes.chunks(BLOCK).filter(|block| block.iter().any(|byte| *byte != 0)) {
        count += 1;
        assert!(block == u64::to_le_bytes(count).repeat(64), "block {count} of {appended}");
    }
    assert_eq!(count, appended);
}

#[test]
fn following_the_length_cuts_off_nothing_that_is_appended_meanwhile() {
    nothing_appended_is_lost_beside(async |ring, disk| {
        disk.follow_length(ring).await.expect("a length");
    });
}

#[test]
fn growing_a_lent_disk_cuts_off_nothing_that_is_appended_meanwhile() {
    nothing_appended_is_lost_beside(async |ring, disk| {
        let size = disk.follow_length(ring).await.expect("a length") + Bytes(4096);
        disk.grow(ring, size).await.expect("grow");
        assert!(disk.size() >= size);
        let size = disk.follow_length(ring).await.expect("a length") + Bytes(4096);
        disk.allocate(ring, size.0, Bytes(4096)).await.unwrap_or_else(|errno| {
            // An append was faster, so the range is not past the end.
            assert_eq!(errno, Errno::OPNOTSUPP);
        });
    });
}

#[test]
fn no_preallocation_of_a_lent_disk_touches_what_is_appended_meanwhile() {
    for preallocation in [Preallocation::Off, Preallocation::Falloc, Preallocation::Full] {
        nothing_appended_is_lost_beside(async |ring, disk| {
            let options = ResizeOptions { preallocation, ..ResizeOptions::default() };
            let size = NewSize::Grow(Bytes(8192));
            let resized = disk.resize_with(ring, size, options).await.expect("resize");
            assert!(resized.after >= resized.before + Bytes(8192));
        });
    }
}

#[test]
fn a_lent_disk_of_which_the_file_is_longer_is_not_shortened_by_a_size_in_between() {
    run(|ring| async move {
        let directory = directory();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, vec![7; 65536]).expect("an image");
        let disk = lent(&ring, &path).await;
        let mut file = std::fs::File::options().append(true).open(&path).expect("open");
        file.write_all(&vec![8; 1 << 20]).expect("append");
        let whole = 65536 + (1 << 20);
        let refused = disk.resize_with(&ring, Bytes(100_000), ResizeOptions::default()).await;
        assert_eq!(refused.expect_err("smaller").kind(), ErrorKind::Invalid);
        assert_eq!(disk.lengthen(&ring, Bytes(100_000)).await, Err(Errno::INVAL));
        assert_eq!(disk.grow(&ring, Bytes(100_000)).await, Ok(()));
        assert_eq!(std::fs::metadata(&path).expect("stat").len(), whole);
        assert_eq!(disk.size(), Bytes(whole));
        // What is relative counts from the file, too.
        let shrink = ResizeOptions { shrink: true, ..ResizeOptions::default() };
        file.write_all(&[9; 4096]).expect("append");
        let resized =
            disk.resize_with(&ring, NewSize::Shrink(Bytes(4096)), shrink).await.expect("shrink");
        assert_eq!((resized.before, resized.after), (Bytes(whole + 4096), Bytes(whole)));
        assert_eq!(std::fs::metadata(&path).expect("stat").len(), whole);
    });
}

#[test]
fn a_lent_disk_grows_with_its_space() {
    use std::os::unix::fs::MetadataExt;
    for preallocation in [Preallocation::Falloc, Preallocation::Full] {
        run(|ring| async move {
            let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("directory");
            let path = directory.path().join("disk.img");
            std::fs::write(&path, vec![7; 1000]).expect("an image");
            let disk = lent(&ring, &path).await;
            let options = ResizeOptions { preallocation, ..ResizeOptions::default() };
            disk.resize_with(&ring, Bytes(3 << 20), options).await.expect("resize");
            assert_eq!(disk.flush(&ring).await, Ok(()));
            let stat = std::fs::metadata(&path).expect("stat");
            assert_eq!(stat.len(), 3 << 20);
            assert!(stat.blocks() * 512 >= 3 << 20, "{preallocation:?}: {}", stat.blocks());
            // More than any file system has.
            let huge =
                disk.resize_with(&ring, Bytes(1 << 50), options).await.expect_err("no space");
            assert_eq!(huge.errno(), Some(Errno::NOSPC));
            assert_eq!(disk.size(), Bytes(3 << 20));
        });
    }
}
