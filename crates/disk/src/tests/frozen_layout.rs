//! A frozen disk, whose bytes the kernel reads and writes directly.

use ringdisk_qcow2::Bytes;
use std::cell::RefCell;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{directory, open, run};
use crate::{
    Cache, Change, DetectZeroes, Discard, ErrorKind, Format, ImageOptions, OverlayOptions,
};

fn plain_options() -> ImageOptions {
    ImageOptions { format: Some(Format::Raw), cache: Cache::None, ..ImageOptions::default() }
}

#[test]
fn a_change_waits_for_who_holds_the_disk_and_says_so() {
    run(|ring| async move {
        let directory = directory();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, vec![7; 65536]).expect("an image");
        let disk = open(&ring, path.clone(), &plain_options()).await.expect("open");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&seen);
        disk.watch_changes(move |change| told.lock().expect("a list").push(change));
        let (begun, ended) = (Rc::new(RefCell::new(false)), Rc::new(RefCell::new(false)));
        let holder = {
            let (begun, ended, seen) = (Rc::clone(&begun), Rc::clone(&ended), Arc::clone(&seen));
            let (disk, ring) = (Arc::clone(&disk), ring.clone());
            async move {
                let held = disk.hold_plain(async |plain| {
                    *begun.borrow_mut() = true;
                    assert_eq!((plain.size, plain.is_block_device), (Bytes(65536), false));
                    assert!(!plain.read_only && !plain.write_through && plain.memory_align > 0);
                    let mut byte = [0];
                    rustix::io::pread(plain.fd.as_fd(), &mut byte, 0).expect_err("direct I/O");
                    while seen.lock().expect("a list").is_empty() {
                        ring.sleep(Duration::from_millis(1)).await;
                    }
                    ring.sleep(Duration::from_millis(20)).await;
                    *ended.borrow_mut() = true;
                });
                held.await.expect("a plain disk");
            }
        };
        ring.spawn(holder);
        while !*begun.borrow() {
            ring.yield_now().await;
        }
        let over = directory.path().join("over.qcow2");
        disk.add_overlay(&ring, &over, OverlayOptions::default()).await.expect("an overlay");
        assert!(*ended.borrow(), "the change did not wait");
        assert_eq!(*seen.lock().expect("a list"), [Change::Coming, Change::Over]);
        let refused = disk.hold_plain(async |_| ()).await.expect_err("refused");
        assert!(refused.to_string().contains("an overlay is above"), "{refused}");
        disk.close(&ring).await.expect("close");
    });
}

#[test]
fn only_a_disk_that_is_the_bytes_of_a_file_is_plain() {
    run(|ring| async move {
        let directory = directory();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, vec![7; 65536]).expect("an image");
        for (options, why) in [
            (ImageOptions { format: None, ..plain_options() }, "nobody said that the image is raw"),
            (ImageOptions { cache: Cache::Writeback, ..plain_options() }, "page cache"),
            (ImageOptions { cache: Cache::Unsafe, ..plain_options() }, "flushes"),
            (ImageOptions { window_offset: 512, ..plain_options() }, "window"),
            (ImageOptions { window_size: Some(Bytes(4096)), ..plain_options() }, "window"),
            (ImageOptions { detect_zeroes: DetectZeroes::On, ..plain_options() }, "zeroes"),
            (ImageOptions { discard: Discard::Ignore, ..plain_options() }, "discards"),
        ] {
            let disk = open(&ring, path.clone(), &options).await.expect("open");
            let error = disk.check_plain().expect_err(why);
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(why), "{error}");
            disk.close(&ring).await.expect("close");
        }
        let disk = open(&ring, path, &plain_options()).await.expect("open");
        disk.check_plain().expect("a plain disk");
    });
}
