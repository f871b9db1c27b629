//! Growing files beside others who write to them.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

use ringdisk_storage::{Errno, OpenOptions, Preallocation};
use ringdisk_testkit::mount::scratch;

use crate::{DIRECT, block_on, file_system, image, open};

const MIB: u64 = 1 << 20;
/// Never cancelled.
const GO_ON: fn() -> Result<(), Errno> = || Ok(());

#[test]
fn a_file_is_extended_and_prepared_from_where_it_ends() {
    for (mode, from, least, most) in [
        (Preallocation::Off, 0, 0, 64 << 10),
        (Preallocation::Falloc, 0, 3 * MIB, 4 * MIB),
        (Preallocation::Falloc, 3 * MIB, MIB, 2 * MIB),
        (Preallocation::Full, 0, 3 * MIB, 4 * MIB),
    ] {
        let directory = scratch();
        let path = image(directory.path(), "image", MIB);
        let storage = open(&path, &OpenOptions::default());
        block_on(|ring| async move {
            storage.extend(&ring, from, 4 * MIB, mode, &GO_ON).await.expect("extend");
            storage.flush(&ring).await.expect("flush");
            assert_eq!(storage.len(), 4 * MIB);
            let taken = storage.allocated_bytes();
            assert!((least..=most).contains(&taken), "{mode:?} from {from}: {taken}");
            storage.extend(&ring, 0, MIB, mode, &GO_ON).await.expect("nothing to do");
            assert_eq!(storage.refresh_len(), Ok(4 * MIB));
        });
        assert_eq!(std::fs::metadata(&path).expect("stat").len(), 4 * MIB);
    }
}

#[test]
fn a_file_that_others_made_longer_is_not_cut() {
    for mode in [Preallocation::Off, Preallocation::Falloc, Preallocation::Full] {
        let directory = scratch();
        let path = image(directory.path(), "image", MIB);
        let storage = open(&path, &OpenOptions::default());
        let mut other = std::fs::File::options().append(true).open(&path).expect("open");
        other.write_all(&vec![7; 1 << 20]).expect("append");
        block_on(|ring| async move {
            storage.extend(&ring, 0, MIB + 4096, mode, &GO_ON).await.expect("it is longer");
            assert_eq!(storage.len(), 2 * MIB);
        });
        let bytes = std::fs::read(&path).expect("read");
        assert!(bytes[1 << 20..] == vec![7; 1 << 20]);
    }
}

#[test]
fn what_cannot_be_reserved_leaves_the_file_as_long_as_it_was() {
    let directory = scratch();
    let path = image(directory.path(), "image", MIB);
    let storage = open(&path, &OpenOptions::default());
    let direct = image(directory.path(), "direct", MIB);
    let direct = open(&direct, &DIRECT);
    block_on(|ring| async move {
        for mode in [Preallocation::Falloc, Preallocation::Full] {
            assert_eq!(storage.extend(&ring, 0, 1 << 50, mode, &GO_ON).await, Err(Errno::NOSPC));
            assert_eq!(storage.refresh_len(), Ok(MIB));
        }
        let full = direct.extend(&ring, 0, 2 * MIB, Preallocation::Full, &GO_ON).await;
        assert_eq!(full, Err(Errno::OPNOTSUPP));
        assert_eq!(direct.refresh_len(), Ok(MIB));
    });
}

#[test]
fn a_file_system_that_cannot_reserve_extends_by_appending_only() {
    // ext4's driver, and files without extents.
    let Some((_directory, mounted)) = file_system("ext3", 32 << 20) else { return };
    let storage = open(&image(mounted.path(), "image", MIB), &OpenOptions::default());
    block_on(|ring| async move {
        for mode in [Preallocation::Off, Preallocation::Falloc] {
            assert_eq!(
                storage.extend(&ring, 0, 2 * MIB, mode, &GO_ON).await,
                Err(Errno::OPNOTSUPP)
            );
            assert_eq!(storage.refresh_len(), Ok(MIB));
        }
        storage.extend(&ring, 0, 2 * MIB, Preallocation::Full, &GO_ON).await.expect("zeroes");
        assert_eq!(storage.refresh_len(), Ok(2 * MIB));
    });
}

/// Rounds of a race that the old code lost in some of a hundred.
const ROUNDS: u64 = 400;

#[test]
fn zeroing_past_the_end_cuts_off_nothing_that_is_written_behind_meanwhile() {
    // It punches holes, and cannot reserve.
    let Some((_directory, mounted)) = file_system("ext3", 32 << 20) else { return };
    let path = image(mounted.path(), "image", 0);
    let file = std::fs::File::options().read(true).write(true).open(&path).expect("open");
    for options in [OpenOptions::default(), DIRECT] {
        let (begin, end) = (Barrier::new(2), Barrier::new(2));
        let spins = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    begin.wait();
                    // Somewhere in the course of the request.
                    for _ in 0..round * 331 % 20_000 {
                        spins.fetch_add(1, Ordering::Relaxed);
                    }
                    file.write_all_at(&[9; 4096], MIB).expect("write");
                    end.wait();
                }
            });
            let storage = open(&path, &options);
            let (begin, end, file) = (&begin, &end, &file);
            block_on(|ring| async move {
                let mut lost = Vec::new();
                for round in 0..ROUNDS {
                    storage.set_len(&ring, 0).await.expect("empty");
                    begin.wait();
                    storage.write_zeroes(&ring, 0, 8192, true, true).await.expect("zeroes");
                    end.wait();
                    let mut bytes = [0; 4096];
                    let done = file.read_at(&mut bytes, MIB).expect("read");
                    // Not at once: the other thread waits for this one.
                    if done != 4096 || bytes != [9; 4096] {
                        lost.push(round);
                    }
                }
                assert!(lost.is_empty(), "cut off in rounds {lost:?}");
            });
        });
    }
}

#[test]
fn what_others_have_appended_is_discarded_where_asked() {
    let directory = scratch();
    let path = image(directory.path(), "image", MIB);
    let storage = open(&path, &OpenOptions::default());
    let mut other = std::fs::File::options().append(true).open(&path).expect("open");
    other.write_all(&vec![7; 1 << 20]).expect("append");
    block_on(|ring| async move {
        storage.discard(&ring, MIB, 65536).await.expect("discard");
    });
    let bytes = std::fs::read(&path).expect("read");
    assert!(bytes[1 << 20..][..65536] == vec![0; 65536]);
    assert!(bytes[(1 << 20) + 65536..] == vec![7; (1 << 20) - 65536]);
}
