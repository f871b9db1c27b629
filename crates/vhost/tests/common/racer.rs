//! A guest whose second CPU changes every byte of a request's memory while the device serves it.
//!
//! The driver lays descriptors by hand, and believes nothing that the rings say: the device's
//! counters tell what was served. So whatever the other CPU does to the rings, this side goes on.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ringdisk_guest::driver::GUEST_BASE;
use ringdisk_guest::{Areas, Layout, RingMemory};
use ringdisk_testkit::model::Vm;
use ringdisk_testkit::sim::Prng;

use super::raw::{Descriptor, INDIRECT, NEXT, WRITE, entry};

/// Requests that are laid at once.
pub(crate) const BURST: usize = 32;
/// Descriptors of the ring: two bursts of the longest chains, so that none is used again before the
/// device has given it back.
pub(crate) const RING: u16 = 512;
/// Memory of one request: header, segments, data, status, table.
const ROOM: u64 = 16 << 10;
const HEADER_AT: u64 = 8;
const DATA_AT: u64 = 512;
const STATUS_AT: u64 = 8 << 10;
const TABLE_AT: u64 = 12 << 10;
/// Bytes of a piece of the rings.
const PIECE: usize = 256;
/// Longest chain.
const CHAIN_MAX: usize = 6;

/// In a packed ring.
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// The driver's side.
pub(crate) struct Hand {
    areas: Areas,
    layout: Layout,
    memory: RingMemory,
    /// First byte of the requests' memory, an address of the guest.
    place: u64,
    /// Sectors of the disk.
    sectors: u64,
    /// Bursts so far; the avail index, or place and lap of the packed ring.
    bursts: u16,
    avail: u16,
    lap: bool,
    prng: Prng,
}

impl Hand {
    /// Of the first virtqueue of a machine, with requests from `place` on.
    pub(crate) fn new(vm: &Vm, place: u64, sectors: u64, seed: u64) -> Hand {
        Hand {
            areas: vm.queues[0].driver.areas().clone(),
            layout: vm.queues[0].driver.config().layout,
            memory: vm.ram.memory().clone(),
            place,
            sectors,
            bursts: 0,
            avail: 0,
            lap: true,
            prng: Prng::new(seed),
        }
    }

    /// All memory that belongs to requests, as areas of bytes.
    pub(crate) fn targets(&self) -> Vec<RingMemory> {
        let start = offset(self.place);
        // In pieces, so that each has as many turns as its length deserves.
        let mut targets = Vec::new();
        for area in [&self.areas.descriptors, &self.areas.driver, &self.areas.device] {
            targets.extend(pieces(area));
        }
        for number in 0..BURST {
            let slot = start + number * usize::try_from(ROOM).expect("small");
            let part =
                |at: u64, len| self.memory.part(slot + usize::try_from(at).expect("small"), len);
            targets.push(part(HEADER_AT, 64));
            targets.push(part(DATA_AT, 64));
            targets.extend(pieces(&part(DATA_AT + 64, 960)));
            targets.push(part(STATUS_AT, 8));
            targets.push(part(TABLE_AT, 16 * CHAIN_MAX));
        }
        targets
    }

    /// The rings are as those of a virtqueue that begins.
    pub(crate) fn begin(&mut self) {
        for area in [&self.areas.descriptors, &self.areas.driver, &self.areas.device] {
            area.write_bytes(0, &vec![0; area.len()]);
        }
        (self.bursts, self.avail, self.lap) = (0, 0, true);
    }

    /// Where a device that was connected anew goes on.
    pub(crate) fn base(&self) -> u32 {
        match self.layout {
            Layout::Split => u32::from(self.avail),
            Layout::Packed => {
                let word = u32::from(self.avail) | u32::from(self.lap) << 15;
                word | word << 16
            }
        }
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_bytes(offset(at), bytes);
    }

    /// Writes a request into its memory. Gives its segments.
    fn dress(&mut self, number: usize) -> Vec<(u64, u32, bool)> {
        let slot = self.place + number as u64 * ROOM;
        let pick = self.prng.below(16);
        let (kind, out, room): (u32, u32, u32) = match pick {
            0..6 => (0, 0, 1024),
            6..12 => (1, 1024, 0),
            12 => (4, 0, 0),
            13 => (8, 0, 20),
            14 => (11, 32, 0),
            _ => (13, 32, 0),
        };
        let sector = self.prng.below(self.sectors - 1);
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.put(slot + HEADER_AT, &header);
        if out == 32 {
            // Two ranges of a sector each.
            for range in 0..2 {
                let mut bytes = [0; 16];
                bytes[..8].copy_from_slice(&(sector + range).to_le_bytes());
                bytes[8] = 1;
                self.put(slot + DATA_AT + range * 16, &bytes);
            }
        }
        let mut segments = Vec::with_capacity(CHAIN_MAX);
        match self.prng.below(3) {
            0 => segments.extend([(slot + HEADER_AT, 5, false), (slot + HEADER_AT + 5, 11, false)]),
            _ => segments.push((slot + HEADER_AT, 16, false)),
        }
        let write = room > 0;
        let len = out.max(room);
        let first = if len > 32 && self.prng.coin() { 100 } else { len };
        for (at, part) in [(0, first), (first, len - first)] {
            if part > 0 {
                segments.push((slot + DATA_AT + u64::from(at), part, write));
            }
        }
        segments.push((slot + STATUS_AT, 1, true));
        segments
    }

    /// Descriptors of a chain of these segments: those for the ring.
    fn chain(&mut self, number: usize, segments: &[(u64, u32, bool)]) -> Vec<Descriptor> {
        let last = segments.len() - 1;
        let describe = |(at, (addr, len, write)): (usize, &(u64, u32, bool))| -> Descriptor {
            let flags = if *write { WRITE } else { 0 } | if at < last { NEXT } else { 0 };
            (*addr, *len, flags, u16::try_from(at + 1).expect("small"))
        };
        let chain: Vec<Descriptor> = segments.iter().enumerate().map(describe).collect();
        if self.prng.coin() {
            return chain;
        }
        let table = self.place + number as u64 * ROOM + TABLE_AT;
        for (at, descriptor) in chain.iter().enumerate() {
            let (addr, len, flags, next) = *descriptor;
            // In a table of a packed ring only WRITE means anything.
            let flags = if self.layout == Layout::Packed { flags & WRITE } else { flags };
            self.put(table + at as u64 * 16, &entry(self.layout, (addr, len, flags, next)));
        }
        vec![(table, u32::try_from(chain.len() * 16).expect("small"), INDIRECT, 0)]
    }

    /// Lays a burst of requests and shows it to the device.
    pub(crate) fn lay(&mut self) {
        let chains: Vec<Vec<Descriptor>> = (0..BURST)
            .map(|number| {
                let segments = self.dress(number);
                self.chain(number, &segments)
            })
            .collect();
        match self.layout {
            Layout::Split => self.lay_split(&chains),
            Layout::Packed => self.lay_packed(&chains),
        }
        self.bursts = self.bursts.wrapping_add(1);
    }

    fn store(&self, place: u16, (addr, len, third, fourth): (u64, u32, u16, u16)) {
        let (ring, at) = (&self.areas.descriptors, usize::from(place) * 16);
        ring.store_u64(at, addr, Ordering::Relaxed);
        ring.store_u32(at + 8, len, Ordering::Relaxed);
        ring.store_u16(at + 12, third, Ordering::Relaxed);
        ring.store_u16(at + 14, fourth, Ordering::Release);
    }

    fn lay_split(&mut self, chains: &[Vec<Descriptor>]) {
        // Those of the last burst may not have been given back yet, though they were served.
        let mut next = if self.bursts.is_multiple_of(2) { 0 } else { RING / 2 };
        let ring = &self.areas.driver;
        for chain in chains {
            let place = self.avail & (RING - 1);
            ring.store_u16(4 + 2 * usize::from(place), next, Ordering::Relaxed);
            self.avail = self.avail.wrapping_add(1);
            for (addr, len, flags, _) in chain {
                self.store(next, (*addr, *len, *flags, next + 1));
                next += 1;
            }
        }
        ring.store_u16(2, self.avail, Ordering::Release);
    }

    fn lay_packed(&mut self, chains: &[Vec<Descriptor>]) {
        for (number, chain) in (0..).zip(chains) {
            let mut held = None;
            for (addr, len, flags, _) in chain {
                let flags = flags | if self.lap { AVAIL } else { USED };
                let descriptor = (*addr, *len, number, flags);
                match held {
                    // Shown last.
                    None => held = Some((self.avail, descriptor)),
                    Some(_) => self.store(self.avail, descriptor),
                }
                self.avail += 1;
                if self.avail == RING {
                    (self.avail, self.lap) = (0, !self.lap);
                }
            }
            if let Some((place, descriptor)) = held {
                self.store(place, descriptor);
            }
        }
    }

    /// Shows the last burst once more: what the other CPU has put back may have been older.
    pub(crate) fn show_again(&self) {
        if self.layout == Layout::Split {
            self.areas.driver.store_u16(2, self.avail, Ordering::Release);
        }
    }
}

/// An area in pieces that have a byte changed about as often.
pub(crate) fn pieces(area: &RingMemory) -> impl Iterator<Item = RingMemory> {
    let starts = (0..area.len()).step_by(PIECE);
    starts.map(|at| area.part(at, PIECE.min(area.len() - at)))
}

fn offset(guest_addr: u64) -> usize {
    usize::try_from(guest_addr - GUEST_BASE).expect("in memory")
}

/// What the second CPU does, and has done.
#[derive(Debug, Default)]
pub(crate) struct Switch {
    stops: AtomicBool,
    rests: AtomicBool,
    is_resting: AtomicBool,
    flips: AtomicU64,
    rounds: AtomicU64,
}

impl Switch {
    /// Bytes that were changed.
    pub(crate) fn flips(&self) -> u64 {
        self.flips.load(Ordering::Relaxed)
    }

    /// Times that each of them was, at least.
    pub(crate) fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// Ends it.
    pub(crate) fn stop(&self) {
        self.stops.store(true, Ordering::SeqCst);
    }

    /// Lets it rest while something is done.
    pub(crate) fn without<T>(&self, what: impl FnOnce() -> T) -> T {
        self.rests.store(true, Ordering::SeqCst);
        while !self.is_resting.load(Ordering::SeqCst) && !self.stops.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let result = what();
        self.rests.store(false, Ordering::SeqCst);
        result
    }
}

/// Bytes that are changed at once, at most.
const AT_ONCE: u64 = 6;

/// The second CPU: changes a few bytes, lets the device see them for a moment, and puts them back.
/// Of each target every byte has its turn.
pub(crate) fn race(targets: &[RingMemory], switch: &Switch, seed: u64) {
    let mut prng = Prng::new(seed);
    let mut counts: Vec<usize> = vec![0; targets.len()];
    let mut changed = Vec::with_capacity(8);
    let mut turn = 0_u32;
    while !switch.stops.load(Ordering::Relaxed) {
        if switch.rests.load(Ordering::SeqCst) {
            switch.is_resting.store(true, Ordering::SeqCst);
            while switch.rests.load(Ordering::SeqCst) && !switch.stops.load(Ordering::Relaxed) {
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
            switch.is_resting.store(false, Ordering::SeqCst);
        }
        for _ in 0..=prng.below(AT_ONCE) {
            let number = usize::try_from(prng.below(targets.len() as u64)).expect("few");
            let target = &targets[number];
            let place = counts[number] % target.len();
            counts[number] += 1;
            let before = target.load_u8(place, Ordering::Relaxed);
            target.store_u8(place, before ^ prng.below(256).to_le_bytes()[0], Ordering::Relaxed);
            changed.push((number, place, before));
        }
        // Now and then until another thread has run, in case all of them share a CPU.
        match turn % 16 {
            0 => std::thread::sleep(std::time::Duration::from_micros(1)),
            _ => (0..prng.below(100)).for_each(|_| std::hint::spin_loop()),
        }
        while let Some((number, place, before)) = changed.pop() {
            targets[number].store_u8(place, before, Ordering::Relaxed);
        }
        turn += 1;
        if turn.is_multiple_of(256) {
            let rounds = counts.iter().zip(targets).map(|(count, target)| count / target.len());
            switch.flips.store(counts.iter().sum::<usize>() as u64, Ordering::Relaxed);
            switch.rounds.store(rounds.min().unwrap_or(0) as u64, Ordering::Relaxed);
        }
    }
}

/// Bytes of the requests' memory, from `place` on.
pub(crate) fn room(place: u64) -> Range<u64> {
    place..place + BURST as u64 * ROOM
}
