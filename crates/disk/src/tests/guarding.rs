//! The guard of a raw image whose format was guessed, on all the ways on which bytes get into that image: whoever opens it next without
//! saying what it is must find raw again, and not an image that a guest has written there.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringdisk_ring::{Errno, Ring, SharedMemory};
use tempfile::TempDir;

use super::{buffer, directory, open, run};
use crate::{
    Cache, CommitOptions, Disk, Error, ErrorKind, Format, ImageOptions, OverlayOptions, Progress,
};

const SECTOR: usize = 512;

/// A sector that makes an image look like qcow2.
fn header() -> Vec<u8> {
    let mut sector = b"QFI\xfb\0\0\0\x03".to_vec();
    sector.resize(SECTOR, 0);
    sector
}

fn image(directory: &TempDir) -> std::path::PathBuf {
    let path = directory.path().join("base.raw");
    std::fs::write(&path, vec![7; 1 << 20]).expect("an image");
    path
}

async fn write(ring: &Ring, disk: &Disk, bytes: &[u8]) -> Result<(), Errno> {
    let written = disk.write(ring, 0, &buffer(bytes)).await?;
    assert_eq!(written, bytes.len());
    Ok(())
}

async fn commit(ring: &Ring, disk: &Disk) -> Result<(), Error> {
    disk.commit(ring, CommitOptions::TOP, &Arc::new(Progress::new())).await
}

/// Whoever guesses the format of the image finds raw.
fn is_raw(path: &Path) -> bool {
    std::fs::read(path).expect("read").starts_with(b"\x07\x07\x07\x07")
}

/// The disk has an overlay above the guarded image: what would change the format of that does not get there.
async fn refuses(ring: &Ring, disk: &Disk, base: &Path) {
    assert!(disk.protects_raw());
    write(ring, disk, &header()).await.expect("the overlay takes anything");
    let error = commit(ring, disk).await.expect_err("the base would be qcow2");
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert!(error.message().contains("--format raw"), "{error}");
    assert!(is_raw(base));
    // The disk goes on as it was; with other bytes there the same commit succeeds.
    assert_eq!(disk.layers().len(), 2);
    write(ring, disk, &[7; SECTOR]).await.expect("writes go on");
    commit(ring, disk).await.expect("nothing is in the way");
    assert_eq!(disk.layers().len(), 1);
    assert_eq!(write(ring, disk, &header()).await, Err(Errno::PERM));
    assert_eq!(disk.close(ring).await, Ok(()));
    assert!(is_raw(base));
}

#[test]
fn a_guarded_image_stays_guarded_below_an_overlay_and_when_it_is_the_top_again() {
    let directory = directory();
    let base = image(&directory);
    run(async |ring| {
        let disk = open(&ring, &base, &ImageOptions::default()).await.expect("open");
        assert_eq!(write(&ring, &disk, &header()).await, Err(Errno::PERM));
        let overlay = directory.path().join("overlay.qcow2");
        disk.add_overlay(&ring, overlay, OverlayOptions::default()).await.expect("overlay");
        refuses(&ring, &disk, &base).await;
    });
}

#[test]
fn a_guarded_image_below_an_overlay_stays_guarded_in_another_process() {
    let directory = directory();
    let base = image(&directory);
    run(async |ring| {
        let options = ImageOptions::default();
        let old = open(&ring, &base, &options).await.expect("open");
        let overlay = directory.path().join("overlay.qcow2");
        old.add_overlay(&ring, overlay, OverlayOptions::default()).await.expect("overlay");
        let handed = old.hand_over(&ring).await.expect("handed over");
        let new = Disk::open_handed(&ring, handed, &options).await.expect("taken");
        new.take_charge();
        drop(old);
        refuses(&ring, &new, &base).await;
    });
}

#[test]
fn an_image_that_was_given_away_and_comes_back_is_guarded_below_its_overlay() {
    let directory = directory();
    let base = image(&directory);
    run(async |ring| {
        let disk = open(&ring, &base, &ImageOptions::default()).await.expect("open");
        let overlay = directory.path().join("overlay.qcow2");
        disk.add_overlay(&ring, overlay, OverlayOptions::default()).await.expect("overlay");
        disk.deactivate(&ring).await.expect("given away");
        disk.activate(&ring, std::time::Duration::ZERO).await.expect("back");
        refuses(&ring, &disk, &base).await;
    });
}

#[test]
fn an_image_whose_format_was_guessed_is_guarded_below_the_overlay_that_it_is_opened_with() {
    let directory = directory();
    let base = image(&directory);
    let overlay = Some(directory.path().join("overlay.qcow2"));
    run(async |ring| {
        let options = ImageOptions { overlay, ..ImageOptions::default() };
        let disk = open(&ring, &base, &options).await.expect("open");
        refuses(&ring, &disk, &base).await;
    });
}

#[test]
fn a_guess_of_a_process_before_this_one_counts_and_what_the_user_says_is_no_guess() {
    let directory = directory();
    let base = image(&directory);
    run(async |ring| {
        let format = Some(Format::Raw);
        let options = ImageOptions { format, protect_raw: true, ..ImageOptions::default() };
        let disk = open(&ring, &base, &options).await.expect("open");
        assert_eq!(write(&ring, &disk, &header()).await, Err(Errno::PERM));
        drop(disk);
        let options = ImageOptions { format, ..ImageOptions::default() };
        let disk = open(&ring, &base, &options).await.expect("open");
        assert!(!disk.protects_raw());
        let overlay = directory.path().join("overlay.qcow2");
        disk.add_overlay(&ring, overlay, OverlayOptions::default()).await.expect("overlay");
        write(&ring, &disk, &header()).await.expect("the user said raw");
        commit(&ring, &disk).await.expect("the user said raw");
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

/// Ends the thread that looks at it, after a failure too.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The memory of a guest changes while its write is judged: what is written is what was judged.
#[test]
fn a_guest_that_changes_its_memory_meanwhile_does_not_get_another_format_past_the_guard() {
    const WRITES: usize = 4000;
    let directory = directory();
    for (cache, len) in
        [(Cache::Writeback, SECTOR), (Cache::Writeback, 1 << 20), (Cache::None, 4096)]
    {
        let base = image(&directory);
        let memory = SharedMemory::new(len, 4096);
        memory.buffer().fill(7);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    memory.buffer().copy_from_slice(0, &header()[..8]);
                    memory.buffer().copy_from_slice(0, &[7; 8]);
                }
            });
            let _over = Over(&is_over);
            run(async |ring| {
                let options = ImageOptions { cache, ..ImageOptions::default() };
                let disk = open(&ring, &base, &options).await.expect("open");
                let mut taken = 0;
                for number in 0..WRITES {
                    match disk.write(&ring, 0, &memory.buffer()).await {
                        Ok(written) => taken += usize::from(written == len),
                        Err(errno) => assert_eq!(errno, Errno::PERM),
                    }
                    let mut first = [0; 4];
                    File::open(&base)
                        .and_then(|mut file| file.read_exact(&mut first))
                        .expect("read");
                    assert_ne!(&first, b"QFI\xfb", "{cache:?}, {len} bytes: write {number}");
                }
                assert!((1..WRITES).contains(&taken), "{cache:?}, {len} bytes: {taken} were taken");
                disk.close(&ring).await.expect("close");
            });
        });
    }
}
