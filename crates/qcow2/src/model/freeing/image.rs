//! What the threads do, step by step as the engine does it.
//!
//! Promises: the table, the reference counts and the gate of the checkpoints are the engine's own
//! code; only the storage is another one ([`World`]). Only tests build it.

// A few clusters.
#![allow(clippy::cast_possible_truncation)]

use shuttle::thread;

use super::super::grace::Graces;
use super::super::registry::Registry;
use super::super::slices::{SliceCache, SliceIndex};
use super::super::small_cache;
use super::super::sync::{Arc, AtomicU64, Mutex, Ordering, lock};
use super::super::unlinked::UnlinkedClusters;
use super::world::{CLUSTERS, World, entry, host, version};
use super::{Mistake, pause};
use crate::refcounts::{Blocked, DirtyRefcounts, RefcountParts, Refcounts};
use crate::units::{Bytes, HostCluster, HostOffset};

/// log2 of the cluster size.
const BITS: u32 = 9;
/// The entries of guest clusters 0 and 1 name the two clusters of data.
const FIRST: u64 = 3;
const SLICE: SliceIndex = SliceIndex(1);

/// A checkpoint found no space for what it writes.
#[derive(Debug)]
pub(super) struct NoSpace;

pub(super) struct Image {
    slices: SliceCache,
    counts: Mutex<Refcounts>,
    graces: Graces,
    pub(super) unlinked: UnlinkedClusters,
    gate: Registry,
    wanted: AtomicU64,
    served: AtomicU64,
    changed: AtomicU64,
    settled: AtomicU64,
    times_freed: AtomicU64,
    /// Checkpoints that are to fail yet.
    failures: AtomicU64,
    mistake: Mistake,
    world: std::sync::Mutex<World>,
}

impl Image {
    pub(super) fn new(failures: u64, mistake: Mistake) -> Arc<Image> {
        let mut counts = Refcounts::new(RefcountParts {
            cluster_bits: BITS,
            refcount_order: 4,
            table: vec![HostOffset(2 << BITS)],
            table_offset: HostOffset(1 << BITS),
            table_clusters: 1,
            file_len: Bytes((CLUSTERS as u64) << BITS),
            can_grow: false,
            reads_zero_past_end: false,
            disk_clusters: 0,
        });
        let mut block = [0; 1 << BITS];
        (0..CLUSTERS).for_each(|cluster| block[cluster * 2 + 1] = 1);
        counts.put_block(0, &block);
        let entries = [entry(0, FIRST), entry(0, FIRST + 1), 0];
        let slices = small_cache();
        slices.publish(SLICE, &entries);
        let number = || AtomicU64::new(0);
        Arc::new(Image {
            slices,
            counts: Mutex::new(counts),
            graces: Graces::new(),
            unlinked: UnlinkedClusters::default(),
            gate: Registry::new(),
            wanted: number(),
            served: number(),
            changed: number(),
            settled: number(),
            times_freed: number(),
            failures: AtomicU64::new(failures),
            mistake,
            world: std::sync::Mutex::new(World::new(entries)),
        })
    }

    pub(super) fn world<T>(&self, look: impl FnOnce(&mut World) -> T) -> T {
        look(&mut self.world.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// I/O: other threads run before and after it.
    fn disk(&self, change: impl FnOnce(&mut World)) {
        thread::yield_now();
        self.world(|world| {
            change(world);
            world.check();
        });
        thread::yield_now();
    }

    /// As `Qcow2::entries`.
    pub(super) fn entry(&self, word: usize) -> u64 {
        loop {
            let found = self.slices.find(SLICE).expect("never evicted");
            let entry = found.word(word);
            if found.still_there() {
                return entry;
            }
        }
    }

    /// As `Qcow2::set_entries`. Each entry has one writer, as the claims of clusters see to.
    fn set_entry(&self, word: usize, host: u64, links: bool) {
        let new = entry(version(self.entry(word)) + 1, host);
        let done = self.slices.update(SLICE, false, links, |words| {
            self.changed.fetch_add(1, Ordering::SeqCst);
            words.set(word, new);
        });
        done.expect("never evicted");
    }

    fn unlink(&self, cluster: u64) {
        let index = self.world(|world| world.unlink(cluster));
        self.unlinked.unlink(HostCluster(cluster), 1);
        self.world(|world| world.known(index));
    }

    fn answer(&self, word: usize) {
        let version = version(self.entry(word));
        self.world(|world| world.answered[word] = version);
    }

    pub(super) fn discard(&self, word: usize) {
        pause(60);
        let old = host(self.entry(word));
        if self.mistake == Mistake::UnlinkFirst {
            self.unlink(old);
            self.set_entry(word, 0, false);
        } else {
            self.set_entry(word, 0, false);
            self.unlink(old);
        }
        self.answer(word);
    }

    /// As `Qcow2::write_group`, always to a new cluster. Whether there was one.
    pub(super) async fn write(&self, word: usize) -> bool {
        pause(60);
        let Some(cluster) = self.allocate_or_reclaim().await else { return false };
        // The data.
        thread::yield_now();
        let old = host(self.entry(word));
        self.set_entry(word, cluster, true);
        if old != 0 {
            self.unlink(old);
        }
        self.answer(word);
        true
    }

    /// Reads a guest cluster. Returns the version of its entry.
    pub(super) fn read(&self, word: usize) -> u64 {
        let _grace = self.graces.enter();
        let entry = self.entry(word);
        let cluster = host(entry) as usize;
        if cluster != 0 {
            self.world(|world| world.users[cluster] += 1);
            // For longer than two checkpoints take.
            pause(400);
            self.world(|world| world.users[cluster] -= 1);
        }
        version(entry)
    }

    async fn allocate_or_reclaim(&self) -> Option<u64> {
        loop {
            let mut seen = self.times_freed.load(Ordering::SeqCst);
            if let Some(cluster) = self.allocate() {
                return Some(cluster);
            }
            if self.mistake == Mistake::SeenLate {
                pause(10);
                seen = self.times_freed.load(Ordering::SeqCst);
            }
            if !self.reclaim(seen).await {
                return None;
            }
        }
    }

    fn allocate(&self) -> Option<u64> {
        let mut counts = lock(&self.counts);
        match counts.allocate(1, None, false) {
            Ok(run) => {
                self.world(|world| world.take(run.start.0));
                Some(run.start.0)
            }
            Err(Blocked::Full) => None,
            Err(other) => panic!("{other:?}"),
        }
    }

    async fn reclaim(&self, seen: u64) -> bool {
        loop {
            if let Some(answer) = self.try_reclaim(seen).await {
                return answer;
            }
            thread::yield_now();
        }
    }

    async fn try_reclaim(&self, seen: u64) -> Option<bool> {
        let is_in_turn = self.mistake != Mistake::NoGate || self.unlinked.has_fresh();
        let _gate = if is_in_turn { Some(self.gate.claim(0, 1).await) } else { None };
        if self.times_freed.load(Ordering::SeqCst) != seen {
            return Some(true);
        }
        if self.unlinked.has_fresh() {
            if self.run_steps().is_err() {
                return Some(false);
            }
        } else {
            self.reap();
        }
        if self.times_freed.load(Ordering::SeqCst) != seen {
            return Some(true);
        }
        let on_their_way = self.world(|world| world.on_their_way());
        if self.unlinked.is_busy() {
            return None;
        }
        self.world(|world| {
            let is_free = world.has_free();
            world.require(on_their_way == 0, format_args!("full, and clusters are on their way"));
            world.require(!is_free, format_args!("full, and clusters are free"));
        });
        Some(false)
    }

    pub(super) async fn flush(&self) -> Result<(), NoSpace> {
        let ticket = self.wanted.fetch_add(1, Ordering::SeqCst) + 1;
        let _claim = self.gate.claim(0, 1).await;
        if self.served.load(Ordering::SeqCst) >= ticket {
            return Ok(());
        }
        let mut serves = self.wanted.load(Ordering::SeqCst);
        if self.mistake == Mistake::ServesFailed {
            self.served.store(serves, Ordering::SeqCst);
        }
        self.run_steps()?;
        if self.mistake == Mistake::ServesLate {
            serves = self.wanted.load(Ordering::SeqCst);
        }
        self.served.store(serves, Ordering::SeqCst);
        Ok(())
    }

    pub(super) async fn flush_mapping(&self) -> Result<(), NoSpace> {
        if self.settled.load(Ordering::SeqCst) == self.changed.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.flush().await
    }

    /// As `Qcow2::run_steps`, with `Work`: its end, or what becomes of it when it is dropped
    /// before.
    fn run_steps(&self) -> Result<(), NoSpace> {
        let mut changed = self.changed.load(Ordering::SeqCst);
        let early = (self.mistake == Mistake::CopyFirst).then(|| {
            let slices = self.slices.take_dirty(usize::MAX);
            pause(10);
            slices
        });
        let mut unlinked = self.unlinked.take_fresh();
        let slices = early.unwrap_or_else(|| self.slices.take_dirty(usize::MAX));
        let links = slices.iter().any(|slice| slice.links);
        let counts = {
            let mut counts = lock(&self.counts);
            (links && counts.is_dirty()).then(|| counts.take_dirty())
        };
        if let Some(counts) = &counts {
            self.write_counts(counts);
        }
        if links && self.mistake != Mistake::NoFirstBarrier {
            self.barrier();
        }
        for slice in &slices {
            self.disk(|world| world.write_table(&slice.words));
        }
        if self.mistake == Mistake::DurableEarly {
            self.unlinked.durable(self.graces.mark(), std::mem::take(&mut unlinked));
            self.reap();
        }
        let fails = self.failures.load(Ordering::SeqCst) > 0;
        if fails {
            self.failures.fetch_sub(1, Ordering::SeqCst);
        } else {
            self.barrier();
        }
        self.slices.written(&slices, !fails);
        if let Some(counts) = &counts {
            lock(&self.counts).written(counts, !fails);
        }
        if fails {
            self.unlinked.put_back(unlinked);
            return Err(NoSpace);
        }
        self.unlinked.durable(self.graces.mark(), unlinked);
        if self.mistake == Mistake::SettlesLate {
            changed = self.changed.load(Ordering::SeqCst);
        }
        self.settled.store(changed, Ordering::SeqCst);
        self.reap();
        Ok(())
    }

    fn barrier(&self) {
        pause(20);
        self.disk(World::barrier);
    }

    fn write_counts(&self, counts: &DirtyRefcounts) {
        for block in &counts.blocks {
            self.disk(|world| world.write_counts(&block.bytes));
        }
    }

    /// As `Qcow2::reap` and `Qcow2::release`.
    fn reap(&self) {
        let is_over = |mark| self.mistake == Mistake::NoGrace || self.graces.passed(mark);
        let mut freed = Vec::new();
        for (start, count) in self.unlinked.take_passed(is_over) {
            let result = lock(&self.counts).decrement(start, count, &mut freed);
            result.expect("it is counted");
            thread::yield_now();
        }
        for run in freed {
            let mut counts = lock(&self.counts);
            self.world(|world| world.free(run));
            counts.release(run);
            drop(counts);
            self.times_freed.fetch_add(1, Ordering::SeqCst);
        }
    }
}
