//! Scattered buffers against a plain vector of bytes.

use ringdisk_testkit::sim::Prng;

use super::{IoBuf, Scatter};
use crate::{Config, Fd, Runtime, SharedMemory};

/// Pieces of random lengths and places in a few regions, in random order; none overlap.
fn pieces(random: &mut Prng, regions: &[IoBuf], count: u64) -> Vec<IoBuf> {
    let mut free: Vec<usize> = vec![0; regions.len()];
    let mut out = Vec::new();
    for _ in 0..count {
        let region = usize::try_from(random.below(regions.len() as u64)).unwrap();
        let gap = usize::try_from(random.below(3) * random.below(30)).unwrap();
        let len = usize::try_from(random.below(100)).unwrap();
        let start = (free[region] + gap).min(regions[region].len());
        let end = (start + len).min(regions[region].len());
        free[region] = end;
        out.push(regions[region].slice(start..end));
    }
    for at in (1..out.len()).rev() {
        out.swap(at, usize::try_from(random.below(at as u64 + 1)).unwrap());
    }
    out
}

fn bytes(random: &mut Prng, len: usize) -> Vec<u8> {
    (0..len).map(|_| u8::try_from(random.below(256)).unwrap()).collect()
}

/// A random part of `0..len`.
fn part(random: &mut Prng, len: usize) -> std::ops::Range<usize> {
    let end = usize::try_from(random.below(len as u64 + 1)).unwrap();
    usize::try_from(random.below(end as u64 + 1)).unwrap()..end
}

fn regions() -> Vec<IoBuf> {
    vec![
        IoBuf::new(3000, 16),
        SharedMemory::new(5000, 4096).buffer(),
        IoBuf::new(100_000, 4096).slice(50..4000),
    ]
}

#[test]
fn every_copy_is_what_it_is_for_plain_bytes() {
    let mut random = Prng::new(1);
    let regions = regions();
    let mut scatter = Scatter::new();
    for _ in 0..2000 {
        let count = random.below(20);
        let pieces = pieces(&mut random, &regions, count);
        let buf = scatter.fill(pieces.iter().cloned());
        let len = buf.len();
        assert_eq!(len, pieces.iter().map(IoBuf::len).sum::<usize>());
        let mut model = bytes(&mut random, len);
        buf.copy_from_slice(0, &model);
        let gathered: Vec<u8> = pieces.iter().flat_map(IoBuf::to_vec).collect();
        assert_eq!(gathered, model);
        let range = part(&mut random, len);
        let slice = buf.slice(range.clone());
        assert_eq!(slice.to_vec(), model[range.clone()]);
        assert_eq!(slice.pieces().flat_map(|p| p.to_vec()).collect::<Vec<_>>(), slice.to_vec());
        assert!(slice.pieces().all(|piece| piece.is_contiguous() && !piece.is_empty()));
        // A slice of a slice, written and read.
        let inner = part(&mut random, slice.len());
        let deep = slice.slice(inner.clone());
        let at = range.start + inner.start;
        let new = bytes(&mut random, deep.len());
        deep.copy_from_slice(0, &new);
        model[at..at + new.len()].copy_from_slice(&new);
        // Between scattered and contiguous memory, both ways.
        let plain = IoBuf::new(slice.len(), 16);
        plain.copy_from_buf(0, &slice);
        assert_eq!(plain.to_vec(), model[range.clone()]);
        plain.fill(7);
        slice.copy_from_buf(inner.start, &plain.slice(inner.clone()));
        model[at..at + inner.len()].fill(7);
        assert_eq!(buf.to_vec(), model);
        slice.fill(0);
        assert!(slice.is_zero());
        model[range].fill(0);
        assert_eq!(buf.is_zero(), model.iter().all(|b| *b == 0));
        assert_eq!(buf.to_vec(), model);
        drop((buf, slice, deep));
    }
}

#[test]
fn one_piece_is_itself_and_neighbours_become_one() {
    let region = IoBuf::new(100, 16);
    let mut scatter = Scatter::new();
    let one = scatter.fill([region.slice(10..20)]);
    assert!(one.is_contiguous() && one.address() == region.address() + 10);
    let joined = scatter.fill([region.slice(10..20), region.slice(20..20), region.slice(20..50)]);
    assert!(joined.is_contiguous() && joined.len() == 40);
    let apart = scatter.fill([region.slice(20..50), region.slice(10..20)]);
    assert!(apart.is_scattered() && apart.is_ours() && !apart.is_aligned(1));
    assert!(apart.slice(30..40).is_contiguous(), "a part of one piece has an address");
    assert!(apart.slice(40..40).is_empty());
    assert!(scatter.fill([]).is_empty());
    assert!(Scatter::new().buffer().is_empty());
    // Scattered buffers among the pieces; the second begins where the first ends.
    let flat = Scatter::new().fill([apart.clone(), apart.slice(0..35)]);
    assert_eq!((flat.len(), flat.pieces().count()), (75, 3));
}

#[test]
fn a_buffer_that_is_held_keeps_its_pieces() {
    let (a, b) = (IoBuf::new(10, 16), IoBuf::new(10, 16));
    let mut scatter = Scatter::new();
    let held = scatter.fill([a.clone(), b.clone()]);
    held.copy_from_slice(0, &[5; 20]);
    let next = scatter.fill([b.slice(0..2), a.slice(0..2)]);
    assert_eq!((held.len(), next.len()), (20, 4));
    drop(held);
    drop(next);
    assert!(a.is_shared(), "the pieces are held until they are let go");
    scatter.clear();
    assert!(!a.is_shared() && !b.is_shared());
}

#[test]
fn operations_reach_the_pieces() {
    let mut random = Prng::new(2);
    let regions = regions();
    let file = tempfile::tempfile().unwrap();
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let mut scatter = Scatter::new();
    runtime.block_on(async {
        for round in 0..1000 {
            let count = 2 + random.below(20);
            let pieces = pieces(&mut random, &regions, count);
            let buf = scatter.fill(pieces);
            let len = buf.len();
            let model = bytes(&mut random, len);
            buf.copy_from_slice(0, &model);
            let range = part(&mut random, len);
            let slice = buf.slice(range.clone());
            let at = random.below(10_000);
            let done = ring.write(Fd::of(&file), at, &slice).await.unwrap() as usize;
            assert_eq!(done, slice.len(), "round {round}");
            slice.fill(0);
            let plain = IoBuf::new(done, 16);
            assert_eq!(ring.read(Fd::of(&file), at, &plain).await.unwrap() as usize, done);
            assert_eq!(plain.to_vec(), model[range]);
            assert_eq!(ring.read(Fd::of(&file), at, &slice).await.unwrap() as usize, done);
            assert_eq!(buf.to_vec(), model, "round {round}: and nothing around it changed");
        }
    });
}

#[test]
fn more_pieces_than_the_kernel_takes_are_a_short_operation() {
    let file = tempfile::tempfile().unwrap();
    let memory = IoBuf::new(4000, 16);
    memory.fill(3);
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let buf = Scatter::new().fill((0..1500).map(|at| memory.slice(at * 2..at * 2 + 1)));
    assert_eq!(buf.len(), 1500);
    runtime.block_on(async {
        assert_eq!(ring.write(Fd::of(&file), 0, &buf).await, Ok(1024));
        assert_eq!(ring.write(Fd::of(&file), 1024, &buf.slice(1024..1500)).await, Ok(476));
        memory.fill(0);
        assert_eq!(ring.read(Fd::of(&file), 0, &buf).await, Ok(1024));
        assert!(buf.slice(1024..1500).is_zero() && buf.slice(0..1024).to_vec() == [3; 1024]);
    });
}

#[test]
#[should_panic(expected = "not ours to gather")]
fn pages_of_a_client_are_no_piece() {
    Scatter::new().push(IoBuf::client_pages(1, 4096));
}
