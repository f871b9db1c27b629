//! One virtqueue and the thread that drives it.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use ringdisk_export::stats::QueueCells;
use ringdisk_guest::driver::{Driver, GUEST_BASE, GuestRam};
use ringdisk_guest::{RingMemory, Segment};
use ringdisk_ring::Counters;
use rustix::time::{ClockId, clock_gettime};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::arguments::{Arguments, Wait};

const HEADER_BYTES: u32 = 16;
/// VIRTIO_BLK_T_IN and _OUT.
const READ: u32 = 0;
const WRITE: u32 = 1;
/// What no device writes into a status.
const NO_STATUS: u8 = 0xff;
/// Empty looks before others may run: about 10 µs.
const LOOKS: u32 = 500;

/// What happened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    ios: u64,
    pub(crate) failed: u64,
    seconds: f64,
    cpu: Duration,
    kicks: u64,
    calls: u64,
    waits: u64,
    batches: u64,
    /// Longest time without a completion.
    pause: Duration,
}

impl Figures {
    /// Those of two queues.
    pub(crate) fn plus(self, other: Figures) -> Figures {
        Figures {
            ios: self.ios + other.ios,
            failed: self.failed + other.failed,
            seconds: self.seconds.max(other.seconds),
            cpu: self.cpu + other.cpu,
            kicks: self.kicks + other.kicks,
            calls: self.calls + other.calls,
            waits: self.waits + other.waits,
            batches: self.batches + other.batches,
            pause: self.pause.max(other.pause),
        }
    }

    pub(crate) fn json(&self) -> String {
        let Figures { ios, failed, seconds, kicks, calls, waits, batches, .. } = self;
        let (cpu, pause) = (self.cpu.as_secs_f64(), self.pause.as_secs_f64());
        format!(
            "{{\"ios\": {ios}, \"failed\": {failed}, \"seconds\": {seconds:.6}, \"cpu_s\": \
             {cpu:.6}, \"kicks\": {kicks}, \
             \"calls\": {calls}, \"waits\": {waits}, \"batches\": {batches}, \"pause_s\": \
             {pause:.6}}}"
        )
    }
}

/// Where a request lies in memory of the guest.
#[derive(Clone, Copy, Debug)]
struct Place {
    header: u64,
    data: u64,
    status: u64,
}

pub(crate) struct Lane {
    driver: Driver,
    memory: RingMemory,
    kick: EventFd,
    call: EventFd,
    sleep: Epoll,
    places: Vec<Place>,
    /// The request of a chain by its id.
    of: Vec<usize>,
    /// When each request was sent.
    sent: Vec<Instant>,
    /// Number and depth of this queue, and how long its requests took.
    index: u16,
    depth: u16,
    cells: QueueCells,
    figures: Figures,
    /// First block of this queue, and how many it has.
    first: u64,
    blocks: u64,
    next: u64,
}

impl Lane {
    /// Lays requests into memory.
    pub(crate) fn new(
        arguments: &Arguments,
        index: u16,
        driver: Driver,
        ram: &mut GuestRam,
        (kick, call): (EventFd, EventFd),
    ) -> Result<Lane, Box<dyn std::error::Error>> {
        // Some servers make the call non-blocking, which is the same for both sides; so no thread
        // sleeps in the read of it.
        let sleep = Epoll::new()?;
        let event = EpollEvent::new(EventSet::IN, 0);
        sleep.ctl(ControlOperation::Add, call.as_raw_fd(), event)?;
        let block = usize::try_from(arguments.block).unwrap_or(usize::MAX);
        let mut seed = 0x9e37_79b9_7f4a_7c15 ^ u64::from(index + 1);
        let mut places = Vec::new();
        for _ in 0..arguments.depth(index) {
            let header = ram.take(u64::from(HEADER_BYTES), 32)?;
            places.push(Place { header, status: ram.take(1, 1)?, data: 0 });
        }
        for place in &mut places {
            place.data = ram.take(u64::from(arguments.block), 4096)?;
            // Every page is there, and what is written cannot be made smaller.
            let bytes: Vec<u8> = (0..block).map(|_| random(&mut seed).to_le_bytes()[0]).collect();
            ram.write(place.data, &bytes);
        }
        Ok(Lane {
            of: vec![0; usize::from(driver.config().size)],
            sent: vec![Instant::now(); places.len()],
            index,
            depth: arguments.depth(index),
            cells: QueueCells::default(),
            driver,
            memory: ram.memory().clone(),
            kick,
            call,
            sleep,
            places,
            figures: Figures::default(),
            first: u64::from(index) * arguments.blocks(),
            blocks: arguments.blocks(),
            next: seed,
        })
    }

    /// Keeps the depth until the time is over, then waits for what is in flight.
    pub(crate) fn run(mut self, arguments: &Arguments) -> Figures {
        let start = Instant::now();
        for request in 0..self.places.len() {
            self.send(arguments, request);
        }
        self.publish();
        let mut goes_on = true;
        let mut last = start;
        while self.driver.in_flight() > 0 {
            let mut taken = 0u64;
            // What the server makes while we look belongs to the batch, but what waits to be sent
            // must not wait for ever.
            while taken < self.places.len() as u64
                && let Some(used) = self.driver.pop_used()
            {
                taken += 1;
                let request = self.of[usize::from(used.id)];
                let status = self.memory.read_array::<1>(at(self.places[request].status));
                self.figures.failed += u64::from(status != [0]);
                if arguments.each {
                    let nanos = self.sent[request].elapsed().as_nanos();
                    self.cells.end(u64::try_from(nanos).unwrap_or(u64::MAX));
                }
                if goes_on {
                    self.send(arguments, request);
                }
            }
            if taken == 0 {
                self.wait(arguments.wait);
                continue;
            }
            self.figures.ios += taken;
            self.figures.batches += 1;
            let now = Instant::now();
            self.figures.pause = self.figures.pause.max(now - last);
            last = now;
            self.publish();
            goes_on = goes_on && now - start < arguments.time;
        }
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        // A thread's CPU time is positive and small.
        let (seconds, nanos) = (cpu.tv_sec.unsigned_abs(), u32::try_from(cpu.tv_nsec));
        self.figures.cpu = Duration::new(seconds, nanos.unwrap_or(0));
        self.figures.seconds = start.elapsed().as_secs_f64();
        if arguments.each {
            println!("{}", self.json());
        }
        self.figures
    }

    /// Latencies from when a request is laid until its answer is looked at.
    fn json(&self) -> String {
        let latency = self.cells.snapshot(0, None, &Counters::default()).latency;
        let micros = |fraction| latency.percentile(fraction).as_secs_f64() * 1e6;
        let (p50, p99, longest) = (micros(0.5), micros(0.99), micros(1.0));
        let (index, depth, ios) = (self.index, self.depth, self.figures.ios);
        format!(
            "{{\"queue\": {index}, \"depth\": {depth}, \"ios\": {ios}, \"p50_us\": {p50:.1}, \
             \"p99_us\": {p99:.1}, \
             \"longest_us\": {longest:.1}}}"
        )
    }

    /// Adds a request for the next place on the disk.
    fn send(&mut self, arguments: &Arguments, request: usize) {
        let block = if arguments.random {
            random(&mut self.next) % self.blocks
        } else {
            self.next = (self.next + 1) % self.blocks;
            self.next
        };
        let sector = (self.first + block) * u64::from(arguments.block / 512);
        let place = self.places[request];
        let kind = if arguments.write { WRITE } else { READ };
        self.memory.write_bytes(at(place.header), &kind.to_le_bytes());
        self.memory.write_bytes(at(place.header) + 8, &sector.to_le_bytes());
        self.memory.write_bytes(at(place.status), &[NO_STATUS]);
        let segments = [
            Segment { addr: place.header, len: HEADER_BYTES },
            Segment { addr: place.data, len: arguments.block },
            Segment { addr: place.status, len: 1 },
        ];
        let readable = if arguments.write { 2 } else { 1 };
        let id = if arguments.indirect {
            self.driver.add_indirect(&segments, readable)
        } else {
            self.driver.add(&segments, readable)
        };
        self.of[usize::from(id.expect("the queue has room for the depth"))] = request;
        if arguments.each {
            self.sent[request] = Instant::now();
        }
    }

    fn publish(&mut self) {
        if self.driver.publish() {
            self.figures.kicks += 1;
            self.kick.write(1).expect("an eventfd takes 1");
        }
    }

    fn wait(&mut self, how: Wait) {
        match how {
            Wait::Poll => {
                for _ in 0..LOOKS {
                    if self.driver.has_used() {
                        return;
                    }
                    std::hint::spin_loop();
                }
                std::thread::yield_now();
            }
            Wait::Call => {
                if !self.driver.enable_calls() {
                    let mut event = [EpollEvent::default()];
                    while self.sleep.wait(-1, &mut event).is_err() {}
                    // How often the server called since the last time.
                    self.figures.calls += self.call.read().expect("an eventfd can be read");
                    self.figures.waits += 1;
                }
                self.driver.disable_calls();
            }
        }
    }
}

/// Where an address of the guest lies in its memory.
fn at(guest_addr: u64) -> usize {
    usize::try_from(guest_addr - GUEST_BASE).unwrap_or(usize::MAX)
}

/// xorshift64*: good enough for offsets, and costs nothing.
fn random(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 8
}
