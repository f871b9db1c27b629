use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use ringdisk_ring::{IoBuf, Ring, Runtime};
use ringdisk_storage::{Allocation, Errno, Kind, Preallocation, Storage};

use super::image::STALE;
use super::{Fault, OpKind, Prng, SimStorage, When};

fn block_on<F: Future>(test: impl FnOnce(Ring) -> F) -> F::Output {
    let mut runtime = Runtime::new(ringdisk_ring::Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    runtime.block_on(test(ring))
}

fn buffer(len: usize, byte: u8) -> IoBuf {
    let buf = IoBuf::new(len, 512);
    buf.fill(byte);
    buf
}

async fn write(
    ring: &Ring,
    storage: &Storage,
    offset: u64,
    len: usize,
    byte: u8,
) -> Result<usize, Errno> {
    storage.write(ring, offset, &buffer(len, byte)).await
}

async fn read(ring: &Ring, storage: &Storage, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
    let buf = buffer(len, 0xee);
    let done = storage.read(ring, offset, &buf).await?;
    Ok(buf.to_vec()[..done].to_vec())
}

/// Starts a write as a task of its own; its number goes to `order` when it ends.
fn spawn_write(ring: &Ring, sim: &SimStorage, offset: u64, byte: u8, order: &Rc<RefCell<Vec<u8>>>) {
    let (storage, order, handle) = (sim.storage(), Rc::clone(order), ring.clone());
    ring.spawn(async move {
        let result = write(&handle, &storage, offset, 512, byte).await;
        order.borrow_mut().push(if result == Ok(512) { byte } else { 0xff });
    });
}

async fn settle(ring: &Ring) {
    for _ in 0..4 {
        ring.yield_now().await;
    }
}

#[test]
fn bytes_come_back_and_the_end_is_short() {
    block_on(|ring| async move {
        let sim = SimStorage::new(10_000, 1);
        let storage = sim.storage();
        assert_eq!(write(&ring, &storage, 4000, 500, 7).await, Ok(500));
        let expected = [vec![0; 100], vec![7; 500], vec![0; 100]].concat();
        assert_eq!(read(&ring, &storage, 3900, 700).await, Ok(expected));
        assert_eq!(read(&ring, &storage, 9_900, 700).await, Ok(vec![0; 100]));
        assert_eq!(read(&ring, &storage, 10_000, 1).await, Ok(vec![]));
        assert_eq!(storage.len(), 10_000);
    });
}

#[test]
fn rule_by_kind_range_and_count_fails_only_that_write() {
    block_on(|ring| async move {
        let sim = SimStorage::new(1 << 20, 1);
        let storage = sim.storage();
        sim.on(When::kind(OpKind::Write).at(4096..8192).skip(1).once(), Fault::Fail(Errno::NOSPC));
        assert_eq!(write(&ring, &storage, 0, 512, 1).await, Ok(512));
        assert_eq!(write(&ring, &storage, 4096, 512, 1).await, Ok(512));
        assert_eq!(write(&ring, &storage, 8191, 512, 1).await, Err(Errno::NOSPC));
        assert_eq!(write(&ring, &storage, 4096, 512, 1).await, Ok(512));
    });
}

#[test]
fn rule_by_number_fails_the_flush() {
    block_on(|ring| async move {
        let sim = SimStorage::new(4096, 1);
        let storage = sim.storage();
        sim.on(When::number(1), Fault::Fail(Errno::IO));
        assert_eq!(write(&ring, &storage, 0, 512, 1).await, Ok(512));
        assert_eq!(storage.flush(&ring).await, Err(Errno::IO));
        assert_eq!(storage.flush(&ring).await, Ok(()));
        assert_eq!(sim.count(OpKind::Flush), 2);
    });
}

#[test]
fn short_transfers_are_continued_and_errors_after_progress_end_short() {
    block_on(|ring| async move {
        let sim = SimStorage::new(8192, 1);
        let storage = sim.storage();
        sim.on(When::kind(OpKind::Read), Fault::Short(1000));
        assert_eq!(write(&ring, &storage, 0, 4096, 9).await, Ok(4096));
        assert_eq!(read(&ring, &storage, 0, 4096).await, Ok(vec![9; 4096]));
        assert_eq!(sim.count(OpKind::Read), 5);
        sim.clear_rules();
        sim.on(When::kind(OpKind::Write).once(), Fault::Short(1000));
        sim.on(When::kind(OpKind::Write), Fault::Fail(Errno::IO));
        assert_eq!(write(&ring, &storage, 0, 4096, 5).await, Ok(1000));
    });
}

#[test]
fn failing_write_may_leave_its_first_bytes() {
    block_on(|ring| async move {
        let sim = SimStorage::new(2048, 1);
        sim.on(When::kind(OpKind::Write), Fault::FailAfter(512, Errno::IO));
        assert_eq!(write(&ring, &sim.storage(), 0, 2048, 3).await, Err(Errno::IO));
        assert_eq!(sim.image(), [vec![3; 512], vec![0; 1536]].concat());
    });
}

#[test]
fn held_writes_take_effect_in_the_order_of_release() {
    block_on(|ring| async move {
        let sim = SimStorage::new(4096, 1);
        let order = Rc::new(RefCell::new(Vec::new()));
        sim.on(When::kind(OpKind::Write), Fault::Hold);
        spawn_write(&ring, &sim, 0, 1, &order);
        spawn_write(&ring, &sim, 0, 2, &order);
        settle(&ring).await;
        let held = sim.held();
        assert_eq!(held.len(), 2);
        assert_eq!(sim.image()[0], 0);
        assert!(sim.release(held[1].number));
        assert_eq!(sim.image()[0], 2);
        assert!(sim.release(held[0].number));
        assert!(!sim.release(held[0].number));
        settle(&ring).await;
        assert_eq!(sim.image()[0], 1);
        assert_eq!(order.borrow().len(), 2);
    });
}

#[test]
fn shuffled_release_repeats_with_the_seed() {
    let run = |seed| {
        block_on(|ring| async move {
            let sim = SimStorage::new(4096, seed);
            let order = Rc::new(RefCell::new(Vec::new()));
            sim.on(When::kind(OpKind::Write), Fault::Hold);
            (1..=6).for_each(|byte| spawn_write(&ring, &sim, 0, byte, &order));
            settle(&ring).await;
            assert_eq!(sim.release_shuffled(), 6);
            settle(&ring).await;
            sim.image()[0]
        })
    };
    let results: Vec<u8> = (0..20).map(run).collect();
    assert_eq!(results, (0..20).map(run).collect::<Vec<u8>>());
    assert!(results.iter().any(|&last| last != results[0]));
}

#[test]
fn random_delays_reorder() {
    block_on(|ring| async move {
        let sim = SimStorage::new(4096, 3);
        let order = Rc::new(RefCell::new(Vec::new()));
        let (from, to) = (Duration::ZERO, Duration::from_millis(40));
        sim.on(When::kind(OpKind::Write), Fault::DelayBetween(from, to));
        (1..=5).for_each(|byte| spawn_write(&ring, &sim, 512, byte, &order));
        while order.borrow().len() < 5 {
            ring.sleep(Duration::from_millis(1)).await;
        }
        let order = order.borrow().clone();
        assert_eq!(order.len(), 5);
        assert_ne!(order, [1, 2, 3, 4, 5]);
    });
}

#[test]
fn hanging_operation_never_ends_and_can_be_dropped() {
    block_on(|ring| async move {
        let sim = SimStorage::new(4096, 1);
        let storage = sim.storage();
        sim.on(When::kind(OpKind::Read), Fault::Hang);
        let limit = Duration::from_millis(20);
        let result = ring.within(limit, read(&ring, &storage, 0, 512)).await;
        assert!(result.is_err());
        assert_eq!((sim.hanging(), sim.release_all()), (0, 0));
    });
}

#[test]
fn held_write_whose_caller_left_can_still_arrive() {
    block_on(|ring| async move {
        let sim = SimStorage::new(4096, 1);
        let storage = sim.storage();
        sim.on(When::kind(OpKind::Write), Fault::Hold);
        let limit = Duration::from_millis(20);
        assert!(ring.within(limit, write(&ring, &storage, 0, 512, 4)).await.is_err());
        assert_eq!(sim.image()[0], 0);
        assert_eq!(sim.release_all(), 1);
        assert_eq!(sim.image()[0], 4);
    });
}

#[test]
fn power_cut_keeps_what_was_flushed_and_any_sectors_of_the_rest() {
    block_on(|ring| async move {
        let sim = SimStorage::new(4096, 1);
        let storage = sim.storage();
        write(&ring, &storage, 0, 1024, 1).await.unwrap();
        storage.flush(&ring).await.unwrap();
        write(&ring, &storage, 512, 3 * 512, 2).await.unwrap();
        assert_eq!(sim.unflushed(), 1);
        let images: Vec<Vec<u8>> = (0..64).map(|seed| sim.crash_image(seed)).collect();
        for image in &images {
            assert_eq!(image[..512], [1; 512]);
            assert!([1, 2].contains(&image[512]) && [0, 2].contains(&image[1024]));
            assert!(image.chunks(512).all(|sector| sector.iter().all(|&byte| byte == sector[0])));
            assert_eq!(image[2048..], [0; 2048]);
        }
        let mut kinds = images.clone();
        kinds.sort();
        kinds.dedup();
        // Three sectors, each there or not.
        assert_eq!(kinds.len(), 8);
        assert_eq!(sim.crash_image(9), images[9]);
        let after = sim.power_cut(9);
        assert_eq!(after.image(), images[9]);
        assert_eq!(after.durable_image(), images[9]);
        assert_eq!(write(&ring, &storage, 0, 512, 1).await, Err(Errno::IO));
    });
}

#[test]
fn flush_covers_only_what_ended_before_it_began() {
    block_on(|ring| async move {
        let sim = SimStorage::new(4096, 1);
        let storage = sim.storage();
        write(&ring, &storage, 0, 512, 1).await.unwrap();
        sim.on(When::kind(OpKind::Flush), Fault::Hold);
        let (other, handle) = (sim.storage(), ring.clone());
        ring.spawn(async move { other.flush(&handle).await.unwrap() });
        settle(&ring).await;
        write(&ring, &storage, 512, 512, 2).await.unwrap();
        sim.release_all();
        settle(&ring).await;
        assert_eq!(sim.unflushed(), 1);
        assert_eq!(sim.durable_image()[..1024], [vec![1; 512], vec![0; 512]].concat());
    });
}

#[test]
fn power_cut_ends_waiting_operations() {
    block_on(|ring| async move {
        let sim = SimStorage::new(4096, 1);
        let order = Rc::new(RefCell::new(Vec::new()));
        sim.on(When::any(), Fault::Hang);
        spawn_write(&ring, &sim, 0, 1, &order);
        settle(&ring).await;
        assert_eq!(sim.hanging(), 1);
        let after = sim.power_cut(0);
        settle(&ring).await;
        assert_eq!(*order.borrow(), [0xff]);
        assert_eq!(after.image().len(), 4096);
    });
}

#[test]
fn holes_zeroes_and_length() {
    block_on(|ring| async move {
        let sim = SimStorage::new(1 << 40, 1);
        let storage = sim.storage();
        write(&ring, &storage, 1 << 39, 4096, 1).await.unwrap();
        assert_eq!(storage.allocation(&ring, 0, 1 << 40).await, Ok((Allocation::Hole, 1 << 39)));
        assert_eq!(storage.allocation(&ring, 1 << 39, 1 << 20).await, Ok((Allocation::Data, 4096)));
        storage.write_zeroes(&ring, 1 << 39, 4096, true, false).await.unwrap();
        assert_eq!(storage.allocated_bytes(), 0);
        storage.set_len(&ring, 100).await.unwrap();
        storage.preallocate(&ring, 100, 5000, Preallocation::Falloc).await.unwrap();
        assert_eq!((storage.len(), storage.allocated_bytes()), (5100, 8192));
        assert_eq!(storage.allocation(&ring, 5100, 1).await, Ok((Allocation::Hole, 0)));
    });
}

#[test]
fn cut_and_grown_again_reads_zeroes() {
    block_on(|ring| async move {
        let sim = SimStorage::from_image(&[5; 6000], 1);
        let storage = sim.storage();
        sim.set_len_behind(4500);
        assert_eq!(read(&ring, &storage, 4000, 4096).await, Ok(vec![5; 500]));
        storage.set_len(&ring, 6000).await.unwrap();
        assert_eq!(read(&ring, &storage, 4500, 1500).await, Ok(vec![0; 1500]));
    });
}

#[test]
fn read_only_refuses_changes() {
    block_on(|ring| async move {
        let sim = SimStorage::new(4096, 1);
        sim.set_read_only(true);
        let storage = sim.storage();
        assert!(storage.is_read_only());
        assert_eq!(write(&ring, &storage, 0, 512, 1).await, Err(Errno::ROFS));
        assert_eq!(storage.set_len(&ring, 1).await, Err(Errno::ROFS));
        assert_eq!(storage.flush(&ring).await, Ok(()));
    });
}

#[test]
fn generator_gives_the_published_numbers() {
    // First outputs of SplitMix64 with seed 1234567, as used to test other implementations.
    let mut prng = Prng::new(1_234_567);
    let numbers: Vec<u64> = (0..3).map(|_| prng.next_u64()).collect();
    assert_eq!(
        numbers,
        [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
    );
}

#[test]
fn flush_that_lies_makes_nothing_durable() {
    block_on(|ring| async move {
        let sim = SimStorage::new(4096, 1);
        let storage = sim.storage();
        sim.on(When::kind(OpKind::Flush).once(), Fault::Lie);
        write(&ring, &storage, 0, 512, 1).await.unwrap();
        assert_eq!(storage.flush(&ring).await, Ok(()));
        assert_eq!((sim.unflushed(), sim.durable_image()[0]), (1, 0));
        assert_eq!(storage.flush(&ring).await, Ok(()));
        assert_eq!((sim.unflushed(), sim.durable_image()[0]), (0, 1));
    });
}

#[test]
fn state_without_the_last_flush_may_lack_what_it_covered() {
    block_on(|ring| async move {
        let sim = SimStorage::new(4096, 1);
        let storage = sim.storage();
        write(&ring, &storage, 0, 512, 1).await.unwrap();
        storage.flush(&ring).await.unwrap();
        storage.flush(&ring).await.unwrap();
        write(&ring, &storage, 512, 512, 2).await.unwrap();
        let kept: Vec<(u8, u8)> = (0..64)
            .map(|seed| {
                sim.crash_state_without_last_flush(seed, |_, _| true).expect("flushed").image()
            })
            .map(|image| (image[0], image[512]))
            .collect();
        assert!([(0, 0), (1, 0), (0, 2), (1, 2)].iter().all(|state| kept.contains(state)));
        assert!((0..64).all(|seed| sim.crash_state(seed).image()[0] == 1));
        let other = |seed| sim.crash_state_without_last_flush(seed, |offset, _| offset > 0);
        assert!((0..64).all(|seed| other(seed).expect("flushed").image()[0] == 1));
        assert_eq!(sim.around_last_flush(), (vec![(0, 512)], vec![(512, 512)]));
    });
}

#[test]
fn fork_is_a_storage_of_its_own() {
    block_on(|ring| async move {
        let sim = SimStorage::from_image(&[5; 6000], 1);
        let fork = sim.fork(2);
        write(&ring, &fork.storage(), 0, 512, 1).await.unwrap();
        let mut bytes = [0; 4];
        assert_eq!((sim.peek(0, &mut bytes), bytes), (4, [5; 4]));
        assert_eq!((fork.peek(5998, &mut bytes), fork.image()[0]), (2, 1));
    });
}

#[test]
fn chance_spares_some() {
    block_on(|ring| async move {
        let sim = SimStorage::new(4096, 1);
        sim.on(When::kind(OpKind::Write).chance(500), Fault::Fail(Errno::IO));
        let mut failed = 0;
        for _ in 0..100 {
            failed += usize::from(write(&ring, &sim.storage(), 0, 512, 1).await.is_err());
        }
        assert!((20..80).contains(&failed), "{failed}");
    });
}

#[test]
fn replay_lives_through_the_same_moments() {
    block_on(|ring| async move {
        let sim = SimStorage::from_image(&[9; 512], 1);
        let storage = sim.storage();
        write(&ring, &storage, 0, 512, 8).await.unwrap();
        sim.record();
        write(&ring, &storage, 512, 512, 1).await.unwrap();
        storage.flush(&ring).await.unwrap();
        write(&ring, &storage, 0, 512, 2).await.unwrap();
        let mut replay = sim.replay().expect("recorded");
        let mut moments = vec![(replay.sim().image(), replay.sim().unflushed())];
        while replay.advance() {
            moments.push((replay.sim().image(), replay.sim().unflushed()));
        }
        let both = |first, second| [vec![first; 512], vec![second; 512]].concat();
        let expected = [(vec![8; 512], 0), (both(8, 1), 1), (both(8, 1), 0), (both(2, 1), 1)];
        assert_eq!(moments, expected);
        assert_eq!((sim.recorded(), replay.at), (3, 3));
    });
}

/// A device of 8 KiB that was used by others before.
fn device() -> SimStorage {
    SimStorage::device(8192, 1)
}

#[test]
fn a_device_holds_old_bytes_until_they_are_written() {
    block_on(|ring| async move {
        let storage = device().storage();
        assert_eq!(storage.kind(), Kind::BlockDevice);
        assert_eq!(write(&ring, &storage, 4000, 200, 7).await, Ok(200));
        let expected = [vec![STALE; 4000], vec![7; 200], vec![STALE; 3992]].concat();
        assert!(read(&ring, &storage, 0, 8192).await == Ok(expected));
        assert_eq!(storage.allocation(&ring, 0, 9999).await, Ok((Allocation::Data, 8192)));
        assert_eq!(storage.allocated_bytes(), 0);
    });
}

#[test]
fn the_length_of_a_device_is_fixed() {
    block_on(|ring| async move {
        let storage = device().storage();
        assert_eq!(write(&ring, &storage, 8000, 512, 7).await, Ok(192), "what fits");
        assert_eq!(write(&ring, &storage, 8192, 512, 7).await, Err(Errno::NOSPC));
        assert_eq!(storage.set_len(&ring, 8192).await, Ok(()));
        assert_eq!(storage.set_len(&ring, 8191).await, Err(Errno::OPNOTSUPP));
        let full = Preallocation::Full;
        assert_eq!(storage.preallocate(&ring, 0, 8192, full).await, Ok(()));
        assert_eq!(storage.preallocate(&ring, 8192, 1, full).await, Err(Errno::NOSPC));
        assert_eq!(storage.write_zeroes(&ring, 8000, 200, true, true).await, Err(Errno::NOSPC));
        assert_eq!(storage.len(), 8192);
    });
}

#[test]
fn zeroes_on_a_device_are_zeroes_and_a_discard_is_anything() {
    block_on(|ring| async move {
        let sim = device();
        let storage = sim.storage();
        storage.write_zeroes(&ring, 100, 5000, true, false).await.expect("room");
        let expected = [vec![STALE; 100], vec![0; 5000], vec![STALE; 3092]].concat();
        assert!(sim.image() == expected);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..50 {
            write(&ring, &storage, 0, 4096, 7).await.expect("room");
            storage.discard(&ring, 0, 4096).await.expect("a device can");
            let bytes = read(&ring, &storage, 0, 4096).await.expect("inside");
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "no other bytes than one kind");
            seen.insert(bytes[0]);
        }
        assert_eq!(Vec::from_iter(seen), [0, 7, STALE], "all that a device may do happens");
    });
}

#[test]
fn a_power_cut_leaves_a_device_of_the_same_kind_and_length() {
    block_on(|ring| async move {
        let sim = device();
        sim.on(When::kind(OpKind::Write), Fault::Hold);
        let (storage, handle) = (sim.storage(), ring.clone());
        ring.spawn(async move {
            let _ = write(&handle, &storage, 7680, 1024, 7).await;
        });
        settle(&ring).await;
        assert_eq!(sim.held().len(), 1, "a write past the end is under way");
        let ends: Vec<u8> = (0..40)
            .map(|seed| {
                let after = sim.crash_state(seed);
                assert_eq!((after.len(), after.storage().kind()), (8192, Kind::BlockDevice));
                after.image()[8191]
            })
            .collect();
        assert!(ends.contains(&7) && ends.contains(&STALE), "it arrives or it does not");
    });
}
