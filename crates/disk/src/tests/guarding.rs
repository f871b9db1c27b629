//! The guard of a raw image whose format was guessed, on all the ways on which bytes get into that
//! image: a program that opens it without a format must find raw again, and not an image
//! that a guest has written there.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringdisk_ring::{Errno, Ring, SharedMemory};
use tempfile::TempDir;

use super::{buffer, directory, open, run};
use crate::{
    Backing, Cache, CommitOptions, Disk, Error, ErrorKind, Format, ImageOptions, OverlayOptions,
    Progress, operations,
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

/// A probe of the image finds raw.
fn is_raw(path: &Path) -> bool {
    std::fs::read(path).expect("read").starts_with(b"\x07\x07\x07\x07")
}

/// The disk has an overlay above the guarded image: what would change the format of that does not
/// get there.
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

/// An overlay above `base`, made by a disk that is not there any more: only the overlay says that
/// the base is raw.
async fn overlay_of(ring: &Ring, directory: &TempDir, base: &Path) -> std::path::PathBuf {
    let options = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
    let disk = open(ring, base, &options).await.expect("open");
    let overlay = directory.path().join("overlay.qcow2");
    disk.add_overlay(ring, &overlay, OverlayOptions::default()).await.expect("overlay");
    disk.close(ring).await.expect("close");
    overlay
}

#[test]
fn an_image_that_only_an_overlay_calls_raw_is_guarded() {
    let directory = directory();
    let base = image(&directory);
    run(async |ring| {
        let overlay = overlay_of(&ring, &directory, &base).await;
        let disk = open(&ring, &overlay, &ImageOptions::default()).await.expect("open");
        refuses(&ring, &disk, &base).await;
    });
}

#[test]
fn a_backing_file_that_a_disk_gets_while_it_is_in_use_is_guarded() {
    let directory = directory();
    let base = image(&directory);
    let other = directory.path().join("other.raw");
    std::fs::write(&other, vec![7; 1 << 20]).expect("an image");
    run(async |ring| {
        let overlay = overlay_of(&ring, &directory, &other).await;
        let disk = open(&ring, &overlay, &ImageOptions::default()).await.expect("open");
        let file = base.to_str().expect("utf-8").as_bytes().to_vec();
        let backing = Some(Backing { file, format: Format::Raw });
        let progress = Arc::new(Progress::new());
        disk.change_backing(&ring, backing, &progress).await.expect("another backing file");
        refuses(&ring, &disk, &base).await;
    });
}

#[test]
fn a_commit_of_an_image_that_nobody_serves_is_refused_unless_the_user_says_raw() {
    let directory = directory();
    let base = image(&directory);
    run(async |ring| {
        let overlay = overlay_of(&ring, &directory, &base).await;
        let disk = open(&ring, &overlay, &ImageOptions::default()).await.expect("open");
        write(&ring, &disk, &header()).await.expect("the overlay takes anything");
        disk.close(&ring).await.expect("close");
        drop(disk);
        let before = std::fs::read(&base).expect("read");
        let commit = async |trust_base_format, base_format| {
            let options = ImageOptions { trust_base_format, ..ImageOptions::default() };
            let disk = open(&ring, &overlay, &options).await.expect("open");
            let job = operations::Commit { base_format, ..operations::Commit::default() };
            operations::commit(&ring, &disk, &job, &Arc::new(Progress::new())).await
        };
        let error = commit(false, None).await.expect_err("the base would be qcow2");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert!(error.message().contains("--base-format raw"), "{error}");
        assert_eq!(std::fs::read(&base).expect("read"), before);
        let error = commit(false, Some(Format::Qcow2)).await.expect_err("it is raw");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert_eq!(std::fs::read(&base).expect("read"), before);
        commit(true, Some(Format::Raw)).await.expect("the user said raw");
        assert!(!is_raw(&base));
        // It begins like qcow2 now, and the overlay still says raw: nothing is won by a refusal.
        let disk = open(&ring, &overlay, &ImageOptions::default()).await.expect("open");
        let mut other = header();
        other[100] = 9;
        write(&ring, &disk, &other).await.expect("the overlay takes anything");
        disk.close(&ring).await.expect("close");
        drop(disk);
        commit(false, None).await.expect("it did not look raw before");
        assert!(std::fs::read(&base).expect("read").starts_with(&other));
    });
}

/// The guard judges the beginning of the file, which a later probe reads, also where the
/// layer begins some bytes after it.
#[test]
fn a_base_that_is_a_part_of_a_file_cannot_make_the_file_look_like_another_format() {
    for (offset, begins) in [(1, &b"Q"[..]), (3, b"QFI"), (511, b"QFI\x07"), (512, b"QFI\x07")] {
        let directory = directory();
        let base = image(&directory);
        run(async |ring| {
            let overlay = overlay_of(&ring, &directory, &base).await;
            let mut bytes = vec![7; 2 << 20];
            bytes[..begins.len()].copy_from_slice(begins);
            std::fs::write(&base, &bytes).expect("an image");
            let name = format!(
                r#"json:{{"driver":"raw","offset":{offset},"size":1048576,"file.filename":"base.raw"}}"#
            );
            super::qemu_img(
                &directory,
                &["rebase", "-u", "-b", &name, "-F", "raw", "overlay.qcow2"],
            );
            let disk = open(&ring, &overlay, &ImageOptions::default()).await.expect("open");
            // The rest of the magic word comes to its place, if the layer begins in it.
            let word = b"QFI\xfb\0\0\0\x03";
            let rest = if offset < 4 { &word[offset..] } else { &word[..] };
            let mut first = rest.to_vec();
            first.resize(SECTOR, 0);
            write(&ring, &disk, &first).await.expect("the overlay takes anything");
            match (offset, commit(&ring, &disk).await) {
                (1 | 3, Err(error)) => {
                    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
                }
                (1 | 3, Ok(())) => panic!("the file looks like qcow2 now: offset {offset}"),
                // The file's own beginning stays as it was.
                (_, committed) => committed.unwrap_or_else(|error| panic!("{offset}: {error}")),
            }
            assert!(!std::fs::read(&base).expect("read").starts_with(b"QFI\xfb"), "{offset}");
            assert!(std::fs::read(&base).expect("read").starts_with(begins), "{offset}");
            disk.close(&ring).await.expect("close");
        });
    }
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
    let directory = directory();
    for (cache, len, writes) in [
        (Cache::Writeback, SECTOR, 4000),
        (Cache::Writeback, 1 << 20, 300),
        (Cache::None, 4096, 2000),
    ] {
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
                let (mut taken, mut number) = (0, 0);
                // On a busy machine the other thread may get no turn for a while.
                while number < writes || (taken == 0 || taken == number) && number < 100 * writes {
                    number += 1;
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
                assert!((1..number).contains(&taken), "{cache:?}, {len} bytes: {taken} were taken");
                disk.close(&ring).await.expect("close");
            });
        });
    }
}
