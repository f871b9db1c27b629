//! Reading, writing, holes and lengths; every kind of file against a model in memory.

use std::path::Path;

use ringdisk_ring::Ring;
use ringdisk_storage::{Allocation, Errno, Kind, OpenOptions, Preallocation, Storage};
use ringdisk_testkit::mount::{FileSystem, scratch};
use ringdisk_testkit::sim::Prng;

use crate::{DIRECT, block_on, buffer, file_system, image, open, read, write};

/// Bytes of the images of these tests: odd, so that the last block is not whole.
const LEN: usize = 300_001;

/// Offset and length of an operation: often around blocks and the end, where the mistakes are.
///
/// * `len`: of the storage.
/// * `room`: no operation goes past it.
fn span(prng: &mut Prng, len: u64, room: u64) -> (u64, u64) {
    let near = [0, 512, 4096, 65536, len][prng.below(5) as usize];
    let offset = match prng.below(3) {
        0 => prng.below(len + 1),
        1 => near.saturating_sub(prng.below(700)),
        _ => prng.below(len / 4096 + 1) * 4096,
    };
    let len = match prng.below(4) {
        0 => 4096 * prng.below(8),
        1 => prng.below(600),
        2 => prng.below(9000),
        _ => 512 * prng.below(20),
    };
    let offset = offset.min(room);
    (offset, len.min(room - offset))
}

/// Random operations of any alignment on the storage and on a vector; they must stay equal.
pub(crate) async fn compare_with_model(ring: &Ring, storage: &Storage, seed: u64, steps: u32) {
    let mut model = vec![0u8; usize::try_from(storage.len()).unwrap()];
    let growing = storage.kind() == Kind::Regular;
    let mut prng = Prng::new(seed);
    for step in 0..steps {
        let room = if growing { 400_000 } else { model.len() as u64 };
        let (offset, len) = span(&mut prng, model.len() as u64, room);
        let (start, end) = (offset as usize, (offset + len) as usize);
        let what = prng.below(12);
        let context = format!("seed {seed} step {step}: {what} at {offset} for {len}");
        if matches!(what, 3..=6 | 9) && growing && model.len() < end && len > 0 {
            model.resize(end, 0);
        }
        match what {
            0..=2 => {
                let buf = buffer(&vec![0xee; len as usize], prng.coin());
                let done = storage.read(ring, offset, &buf).await;
                let expected = &model[start.min(model.len())..end.min(model.len())];
                assert_eq!(done, Ok(expected.len()), "{context}");
                assert!(buf.to_vec()[..expected.len()] == *expected, "{context}");
            }
            3..=5 => {
                let mut bytes = vec![0; len as usize];
                prng.fill(&mut bytes);
                let buf = buffer(&bytes, prng.coin());
                assert_eq!(storage.write(ring, offset, &buf).await, Ok(bytes.len()), "{context}");
                model[start..end].copy_from_slice(&bytes);
            }
            6 => {
                let unmap = prng.coin();
                let result = storage.write_zeroes(ring, offset, len, unmap, true).await;
                assert_eq!(result, Ok(()), "{context}");
                if len > 0 {
                    model[start..end].fill(0);
                }
            }
            7 if growing => {
                let result = storage.discard(ring, offset, len).await;
                assert_eq!(result, Ok(()), "{context}");
                let stop = end.min(model.len());
                model[start.min(stop)..stop].fill(0);
            }
            8 if growing && prng.below(4) == 0 => {
                assert_eq!(storage.set_len(ring, offset).await, Ok(()), "{context}");
                model.resize(start, 0);
                model.resize(LEN, 0);
                assert_eq!(storage.set_len(ring, LEN as u64).await, Ok(()), "{context}");
            }
            9 if len > 0 => {
                let mode = [Preallocation::Off, Preallocation::Falloc][prng.below(2) as usize];
                let result = storage.preallocate(ring, offset, len, mode).await;
                assert_eq!(result, Ok(()), "{context}: {mode:?}");
            }
            10 => {
                let (kind, run) = storage.allocation(ring, offset, len).await.expect(&context);
                assert_eq!(run == 0, len == 0 || start >= model.len(), "{context}: {run}");
                assert!(run <= len, "{context}: {run}");
                let run = &model[start.min(model.len())..start.min(model.len()) + run as usize];
                let is_zero = run.iter().all(|byte| *byte == 0);
                assert!(kind == Allocation::Data || is_zero, "{context}: a hole with data");
            }
            _ => assert_eq!(storage.flush(ring).await, Ok(()), "{context}"),
        }
        assert_eq!(storage.len(), model.len() as u64, "{context}");
    }
    let whole = read(ring, storage, 0, model.len() + 10).await.unwrap();
    assert!(whole == model, "seed {seed}: the end");
    assert_eq!(storage.refresh_len(), Ok(model.len() as u64));
}

fn model_test(directory: &Path, options: &OpenOptions) {
    for seed in 0..6 {
        let path = image(directory, &format!("image-{seed}"), LEN as u64);
        let storage = open(&path, options);
        assert_eq!(storage.limits().direct, options.direct);
        block_on(|ring| async move { compare_with_model(&ring, &storage, seed, 400).await });
    }
}

#[test]
fn buffered_file_equals_the_model() {
    model_test(scratch().path(), &OpenOptions::default());
}

#[test]
fn direct_file_equals_the_model() {
    model_test(scratch().path(), &DIRECT);
}

#[test]
fn buffered_file_in_memory_equals_the_model() {
    let directory = scratch();
    let memory = FileSystem::tmpfs(&directory.path().join("tmpfs"), 64 << 20);
    model_test(memory.path(), &OpenOptions::default());
}

#[test]
fn direct_file_in_memory_equals_the_model_or_is_refused() {
    let directory = scratch();
    let memory = FileSystem::tmpfs(&directory.path().join("tmpfs"), 64 << 20);
    let path = image(memory.path(), "image", 0);
    match Storage::open(&path, &DIRECT) {
        Ok(_) => model_test(memory.path(), &DIRECT),
        Err(error) => assert!(error.to_string().contains("--cache writeback"), "{error}"),
    }
}

#[test]
fn direct_file_on_xfs_equals_the_model() {
    if let Some((_directory, mounted)) = file_system("xfs", 512 << 20) {
        model_test(mounted.path(), &DIRECT);
    }
}

#[test]
fn direct_file_on_ext4_equals_the_model() {
    if let Some((_directory, mounted)) = file_system("ext4", 64 << 20) {
        model_test(mounted.path(), &DIRECT);
    }
}

#[test]
fn reading_up_to_an_odd_end_with_direct_io_is_short() {
    let directory = scratch();
    let path = directory.path().join("image");
    std::fs::write(&path, vec![3; 1000]).unwrap();
    let storage = open(&path, &DIRECT);
    block_on(|ring| async move {
        assert_eq!(read(&ring, &storage, 0, 4096).await, Ok(vec![3; 1000]));
        assert_eq!(read(&ring, &storage, 999, 5).await, Ok(vec![3; 1]));
        assert_eq!(read(&ring, &storage, 1000, 5).await, Ok(vec![]));
        assert_eq!(read(&ring, &storage, 8192, 4096).await, Ok(vec![]));
    });
}

#[test]
fn writing_past_an_odd_end_with_direct_io_grows_to_the_byte() {
    let directory = scratch();
    let path = directory.path().join("image");
    std::fs::write(&path, vec![3; 1000]).unwrap();
    let storage = open(&path, &DIRECT);
    block_on(|ring| async move {
        assert_eq!(write(&ring, &storage, 1000, &[4; 1]).await, Ok(1));
        assert_eq!(storage.len(), 1001);
        assert_eq!(write(&ring, &storage, 20_000, &[5; 5000]).await, Ok(5000));
        assert_eq!(storage.refresh_len(), Ok(25_000));
        storage.flush(&ring).await.unwrap();
    });
    let content = std::fs::read(&path).unwrap();
    let expected = [vec![3; 1000], vec![4; 1], vec![0; 18_999], vec![5; 5000]].concat();
    assert!(content == expected);
}

#[test]
fn large_unaligned_transfer_crosses_the_bounce_buffer() {
    let directory = scratch();
    let storage = open(&image(directory.path(), "image", 8 << 20), &DIRECT);
    block_on(|ring| async move {
        let mut bytes = vec![0; 3 * (1 << 20) + 17];
        Prng::new(1).fill(&mut bytes);
        assert_eq!(storage.write(&ring, 12_345, &buffer(&bytes, true)).await, Ok(bytes.len()));
        assert!(read(&ring, &storage, 12_345, bytes.len()).await == Ok(bytes));
    });
}

#[test]
fn request_past_the_largest_offset_is_invalid() {
    let directory = scratch();
    let storage = open(&image(directory.path(), "image", 4096), &OpenOptions::default());
    block_on(|ring| async move {
        for offset in [u64::MAX, u64::MAX - 4095, 1 << 63, (1 << 63) - 1] {
            assert_eq!(read(&ring, &storage, offset, 4096).await, Err(Errno::INVAL));
            assert_eq!(write(&ring, &storage, offset, &[0; 4096]).await, Err(Errno::INVAL));
            assert_eq!(storage.discard(&ring, offset, 4096).await, Err(Errno::INVAL));
            let zeroes = storage.write_zeroes(&ring, offset, 4096, true, true).await;
            assert_eq!(zeroes, Err(Errno::INVAL));
            assert_eq!(storage.allocation(&ring, offset, 1).await, Ok((Allocation::Hole, 0)));
        }
        assert_eq!(storage.set_len(&ring, u64::MAX).await, Err(Errno::FBIG));
    });
}

#[test]
fn holes_are_found_and_made() {
    let directory = scratch();
    let storage = open(&image(directory.path(), "image", 1 << 20), &OpenOptions::default());
    block_on(|ring| async move {
        let map = |offset, len| storage.allocation(&ring, offset, len);
        assert_eq!(map(0, 1 << 20).await, Ok((Allocation::Hole, 1 << 20)));
        write(&ring, &storage, 65536, &[1; 65536]).await.unwrap();
        assert_eq!(map(0, 1 << 20).await, Ok((Allocation::Hole, 65536)));
        assert_eq!(map(65536, 1 << 20).await, Ok((Allocation::Data, 65536)));
        assert_eq!(map(70000, 10).await, Ok((Allocation::Data, 10)));
        assert_eq!(map(131_072, 1 << 30).await, Ok((Allocation::Hole, (1 << 20) - 131_072)));
        assert_eq!(map(1 << 20, 1).await, Ok((Allocation::Hole, 0)));
        storage.flush(&ring).await.unwrap();
        let full = storage.allocated_bytes();
        storage.discard(&ring, 65536, 32768).await.unwrap();
        assert_eq!(map(65536, 1 << 20).await, Ok((Allocation::Hole, 32768)));
        assert_eq!(storage.allocated_bytes(), full - 32768);
    });
}

#[test]
fn zeroes_without_unmap_stay_reserved_and_with_it_are_a_hole() {
    let directory = scratch();
    let storage = open(&image(directory.path(), "image", 1 << 20), &OpenOptions::default());
    block_on(|ring| async move {
        write(&ring, &storage, 0, &[1; 131_072]).await.unwrap();
        storage.flush(&ring).await.unwrap();
        let full = storage.allocated_bytes();
        storage.write_zeroes(&ring, 0, 65536, false, false).await.unwrap();
        assert_eq!(storage.allocated_bytes(), full);
        storage.write_zeroes(&ring, 0, 65536, true, false).await.unwrap();
        assert_eq!(storage.allocated_bytes(), full - 65536);
        assert_eq!(read(&ring, &storage, 0, 65536).await, Ok(vec![0; 65536]));
        storage.write_zeroes(&ring, (1 << 20) - 5, 10, true, false).await.unwrap();
        assert_eq!(storage.refresh_len(), Ok((1 << 20) + 5));
    });
}

#[test]
fn preallocation_reserves_or_writes() {
    let directory = scratch();
    let storage = open(&image(directory.path(), "image", 0), &OpenOptions::default());
    block_on(|ring| async move {
        storage.preallocate(&ring, 0, 1 << 20, Preallocation::Off).await.unwrap();
        assert_eq!((storage.len(), storage.allocated_bytes()), (1 << 20, 0));
        storage.preallocate(&ring, 0, 1 << 20, Preallocation::Falloc).await.unwrap();
        assert_eq!((storage.len(), storage.allocated_bytes()), (1 << 20, 1 << 20));
        let below = storage.preallocate(&ring, 0, 2 << 20, Preallocation::Full).await;
        assert_eq!(below, Err(Errno::INVAL));
        storage.preallocate(&ring, 1 << 20, 1 << 20, Preallocation::Full).await.unwrap();
        storage.flush(&ring).await.unwrap();
        assert_eq!((storage.len(), storage.allocated_bytes()), (2 << 20, 2 << 20));
    });
}

#[test]
fn read_only_storage_refuses_every_change() {
    let directory = scratch();
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let storage = open(&image(directory.path(), "image", 4096), &options);
    block_on(|ring| async move {
        assert_eq!(write(&ring, &storage, 0, &[1]).await, Err(Errno::ROFS));
        assert_eq!(storage.discard(&ring, 0, 1).await, Err(Errno::ROFS));
        assert_eq!(storage.write_zeroes(&ring, 0, 1, true, true).await, Err(Errno::ROFS));
        assert_eq!(storage.set_len(&ring, 1).await, Err(Errno::ROFS));
        let reserve = storage.preallocate(&ring, 0, 1, Preallocation::Falloc).await;
        assert_eq!(reserve, Err(Errno::ROFS));
        assert_eq!(storage.flush(&ring).await, Ok(()));
        assert_eq!(read(&ring, &storage, 0, 1).await, Ok(vec![0]));
    });
}
