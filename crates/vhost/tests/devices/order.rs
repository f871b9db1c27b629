//! Messages in any order while requests are in flight: virtqueues stop, start and are switched off
//! and on, memory goes and comes back, a migration is logged, the inflight area is given again or
//! is another one, front ends go and come back, the process is killed, or hands its disk over. Each
//! request is carried out once: none is lost, none is done again.
//!
//! A step is one message, or what a front end cannot take apart; chance decides which, of those
//! that the state allows.

mod processes;

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::{Disk, Format, ImageOptions};
use ringdisk_guest::Segment;
use ringdisk_guest::driver::{Driver, GUEST_BASE};
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::images;
use ringdisk_testkit::limits::full;
use ringdisk_testkit::model::{BaseRule, Cut, Request, Vm, VmOptions, ask, bits, words};
use ringdisk_testkit::mount::scratch;
use ringdisk_testkit::process::until;
use ringdisk_testkit::sim::Prng;
use ringdisk_vhost::Threads;
use ringdisk_vhost::{CommonOptions, Export, ExportOptions, Listen};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::common::ledger::Ledger;
use crate::common::{MIB, Served, close, open, serve};

/// Bytes of the disk: each request has a sector of its own.
const DISK: u64 = 64 * MIB;
/// Requests at once in a virtqueue: those of three are many batches of a thread, and fewer than it
/// serves at a time.
const SLOTS: usize = 80;
/// A virtqueue that nobody uses, but to break the device of a process that is to be dead.
const SPARE: u32 = 7;
const TIMEOUT: Duration = Duration::from_secs(20);

/// A virtqueue, as the front end sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Runs,
    /// SET_VRING_ENABLE 0.
    Off,
    /// GET_VRING_BASE, which said this; `None`: it was never started.
    Stopped(Option<u32>),
}

/// What is served.
enum Backing {
    /// Storage that counts.
    Ledger(Ledger),
    /// A file, whose disk can be handed over.
    File(Arc<Disk>),
}

/// A front end and all processes that it has had behind it.
struct World {
    served: Option<Served>,
    backing: Backing,
    /// Processes that were killed, or are to be thought so.
    dead: Vec<(Served, Ledger)>,
    /// Writes that exports have served that handed their disk over.
    before: u64,
    vm: Vm,
    states: Vec<State>,
    /// Memory is announced.
    has_memory: bool,
    logs: bool,
    log: Option<OwnedFd>,
    /// End of the memory of the last virtqueue's requests.
    end: u64,
    /// The next sector.
    next: u64,
    /// Sectors that were asked for and not answered, with their virtqueue.
    asked: HashMap<u64, usize>,
    answered: HashSet<u64>,
    /// Those of a reset: done or not.
    lost: HashSet<u64>,
    threads: u16,
    packed: bool,
    prng: Prng,
    /// The last steps, for messages.
    story: Vec<String>,
}

fn options(packed: bool, queues: u16, seed: u64) -> VmOptions {
    let packed = if packed { bits::PACKED } else { 0 };
    VmOptions {
        features: VmOptions::default().features | packed,
        queues,
        size: 256,
        indirect: 8,
        regions: 3,
        slots: SLOTS,
        slot_bytes: 4 << 10,
        seed,
        ..VmOptions::default()
    }
}

/// What a sector holds once it was written.
fn content(sector: u64) -> Vec<u8> {
    (sector ^ 0x5bd1_e995).to_le_bytes().repeat(64)
}

fn start(disk: Arc<Disk>, threads: u16) -> Served {
    serve(disk, |options| options.common.threads.threads = Threads::Count(threads.into()))
}

impl World {
    fn new(packed: bool, queues: u16, threads: u16, seed: u64) -> World {
        let ledger = Ledger::of_counts(DISK, seed);
        World::of(Backing::Ledger(ledger), packed, queues, threads, seed)
    }

    fn of(backing: Backing, packed: bool, queues: u16, threads: u16, seed: u64) -> World {
        let disk = match &backing {
            Backing::Ledger(ledger) => ledger.disk(),
            Backing::File(disk) => Arc::clone(disk),
        };
        let served = start(disk, threads);
        let vm = served.vm(options(packed, queues, seed));
        let mut world = World {
            served: Some(served),
            backing,
            dead: Vec::new(),
            before: 0,
            states: vec![State::Runs; usize::from(queues)],
            has_memory: true,
            logs: false,
            log: None,
            end: vm.ram.taken(),
            vm,
            next: 0,
            asked: HashMap::new(),
            answered: HashSet::new(),
            lost: HashSet::new(),
            threads,
            packed,
            prng: Prng::new(seed),
            story: Vec::new(),
        };
        // Another area, with room for the spare one.
        for index in 0..world.states.len() {
            world.stop(index);
        }
        world.vm.inflight = None;
        world.take_area();
        for index in 0..world.states.len() {
            world.start(index);
        }
        world
    }

    fn take_area(&mut self) {
        let used = std::mem::replace(&mut self.vm.options.queues, 8);
        self.vm.take_inflight().expect("an area");
        self.vm.options.queues = used;
    }

    fn served(&self) -> &Served {
        self.served.as_ref().expect("it is served")
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.prng.below(bound as u64)).expect("small")
    }

    /// How often a sector was written, by all processes.
    fn writes(&self, sector: u64) -> u32 {
        let dead: u32 = self.dead.iter().map(|(_, ledger)| ledger.writes(sector)).sum();
        match &self.backing {
            Backing::Ledger(ledger) => dead + ledger.writes(sector),
            Backing::File(_) => u32::from(self.answered.contains(&sector)),
        }
    }

    fn told(&self) -> String {
        let from = self.story.len().saturating_sub(30);
        format!("{:?}\n{}", self.states, self.story[from..].join("\n"))
    }

    /// Adds requests to a virtqueue.
    fn fill(&mut self, index: usize) {
        let most = 1 + self.below(8);
        self.add(index, most);
    }

    fn add(&mut self, index: usize, most: usize) {
        for _ in 0..most {
            let sector = self.next;
            let request = Request::write(sector, content(sector));
            let request = match self.below(3) {
                0 => request,
                1 => request.cut(Cut::Anywhere(5)),
                _ => request.cut(Cut::Pieces(3)).indirect(),
            };
            if self.vm.queues[index].add(&self.vm.ram, request).is_err() {
                break;
            }
            self.next += 1;
            self.asked.insert(sector, index);
        }
        if self.below(4) == 0 {
            self.vm.queues[index].driver.publish();
            self.vm.queues[index].kick_anyway();
        } else {
            self.vm.queues[index].kick();
        }
    }

    /// Takes the answers that are there.
    fn reap(&mut self) {
        for index in 0..self.states.len() {
            while let Some(done) = self.vm.queues[index].reap(&self.vm.ram) {
                self.take(done.request.sector, done.status);
            }
        }
    }

    fn take(&mut self, sector: u64, status: u8) {
        assert_eq!(status, 0, "sector {sector}: {}", self.told());
        assert!(self.asked.remove(&sector).is_some(), "sector {sector} twice: {}", self.told());
        assert!(self.answered.insert(sector));
        assert_eq!(self.writes(sector), 1, "writes of sector {sector}: {}", self.told());
    }

    fn stop(&mut self, index: usize) {
        if matches!(self.states[index], State::Stopped(_)) {
            return;
        }
        let number = u32::try_from(index).expect("few");
        let base = self.vm.front.vring_base(number);
        let base = base.unwrap_or_else(|refused| panic!("{refused:?}: {}", self.told()));
        self.states[index] = State::Stopped(Some(base));
    }

    fn start(&mut self, index: usize) {
        let State::Stopped(base) = self.states[index] else { return };
        if !self.has_memory {
            return;
        }
        let started = self.vm.start_queue(index, base);
        started.unwrap_or_else(|refused| panic!("{refused:?}: {}", self.told()));
        self.states[index] = State::Runs;
    }

    fn switch(&mut self, index: usize) {
        let number = u32::try_from(index).expect("few");
        let (value, state) = match self.states[index] {
            State::Runs => (0, State::Off),
            State::Off if self.has_memory => (1, State::Runs),
            _ => return,
        };
        let switched = self.vm.front.vring(ask::SET_VRING_ENABLE, number, value);
        switched.unwrap_or_else(|refused| panic!("{refused:?}: {}", self.told()));
        self.states[index] = state;
        if value == 0 {
            // What it had taken is answered, and nothing else is.
            self.reap();
            let before = self.asked.len();
            self.fill(index);
            self.reap();
            let of_it = self.asked.values().filter(|of| **of == index).count();
            assert!(before == 0 || of_it > 0 || self.vm.queues[index].in_flight() == 0);
        }
    }

    fn memory(&mut self) {
        let mut regions = self.vm.regions.clone();
        if self.has_memory {
            for region in regions {
                self.vm.front.remove_region(region).expect("it was added");
            }
        } else {
            // The rings' last: they go on at once.
            regions.reverse();
            for region in regions {
                self.vm.front.add_region(region, self.vm.ram.fd()).expect("it fits again");
            }
        }
        self.has_memory = !self.has_memory;
    }

    /// All memory anew, in other pieces; it may have been away.
    fn table(&mut self) {
        let (guest, _, user, _) = self.vm.regions[0].into();
        let all: u64 = self.vm.regions.iter().map(|region| region[1]).sum();
        self.vm.regions = if self.vm.regions.len() == 1 {
            let first = self.end - 77_777;
            vec![[guest, first, user, 0], [guest + first, all - first, user + first, first]]
        } else {
            vec![[guest, all, user, 0]]
        };
        let fds = vec![self.vm.ram.fd(); self.vm.regions.len()];
        self.vm.front.memory_table(&self.vm.regions, &fds).expect("a table");
        self.has_memory = true;
    }

    fn other_region(&mut self) {
        let fd = memory(1 << 20);
        let at = [1 << 50, 0x3b10, 1 << 46, 7];
        self.vm.front.add_region(at, fd.as_fd()).expect("there is room");
        self.vm.front.remove_region(at).expect("it was added");
    }

    fn migrate(&mut self) {
        if self.log.is_none() {
            let bytes = (GUEST_BASE + self.vm.ram.size()) / 4096 / 8;
            let log = memory(bytes);
            let base = words(&[bytes, 0]);
            self.vm.front.ask(ask::SET_LOG_BASE, &base, &[log.as_fd()]).expect("a log");
            self.log = Some(log);
        }
        self.logs = !self.logs;
        let log = if self.logs { bits::LOG_ALL } else { 0 };
        self.vm.front.set(ask::SET_FEATURES, self.vm.features | log).expect("under way");
    }

    fn eventfds(&mut self, index: usize) {
        self.vm.change_call(index).expect("another call");
        if self.states[index] == State::Runs && self.has_memory {
            // It stops and goes on.
            let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            let kick = kick.expect("an eventfd");
            let set = self.vm.front.vring_fd(ask::SET_VRING_KICK, index as u64, Some(kick.as_fd()));
            set.unwrap_or_else(|refused| panic!("{refused:?}: {}", self.told()));
            self.vm.queues[index].kick = kick;
            self.vm.queues[index].kick_anyway();
        }
    }

    /// The area is given again, or there is another one; neither while a virtqueue runs.
    fn area(&mut self) {
        let is_at_rest = self.states.iter().all(|state| matches!(state, State::Stopped(_)));
        let is_busy = self.states.contains(&State::Runs);
        if is_busy {
            let again = self.vm.take_inflight();
            assert!(again.is_err(), "virtqueues run: {}", self.told());
        } else if is_at_rest {
            if self.prng.coin() {
                self.vm.inflight = None;
            }
            self.take_area();
        }
    }

    /// A reset by the driver, which forgets what it asked for.
    fn reset(&mut self) {
        self.vm.front.set(ask::SET_STATUS, 0).expect("a reset");
        self.reap();
        self.vm.front.set(ask::SET_FEATURES, self.vm.features).expect("as before");
        self.logs = false;
        self.vm.make_queues();
        self.end = self.vm.ram.taken();
        self.lost.extend(self.asked.drain().map(|(sector, _)| sector));
        self.states.fill(State::Stopped(None));
        for index in 0..self.states.len() {
            self.start(index);
        }
    }

    /// One step.
    fn step(&mut self) {
        let index = self.below(self.states.len());
        let pick = self.below(24);
        let name = match pick {
            0..5 => "fill",
            5 | 6 => "stop",
            7 | 8 => "start",
            9..12 => "switch",
            12 | 13 => "memory",
            14 => "table",
            15 => "region",
            16 => "log",
            17 => "eventfds",
            18 => "area",
            19 => "reset",
            20 => "reconnect",
            21 => "kill",
            22 => "hand over",
            _ => "nothing",
        };
        self.story.push(format!("{name} {index}"));
        match pick {
            0..5 => self.fill(index),
            5 | 6 => self.stop(index),
            7 | 8 => self.start(index),
            9..12 => self.switch(index),
            12 | 13 => self.memory(),
            14 => self.table(),
            15 => self.other_region(),
            16 => self.migrate(),
            17 => self.eventfds(index),
            18 => self.area(),
            // A disk in a file counts by what was served: nothing of it may be uncertain.
            19 if matches!(self.backing, Backing::Ledger(_)) => self.reset(),
            20 => self.reconnect(),
            21 => self.kill(),
            22 => self.hand_over(),
            _ => std::thread::sleep(Duration::from_micros(300)),
        }
        self.reap();
        let reason = self.served().export.broken_reason();
        assert_eq!(reason, None, "{}", self.told());
    }

    /// Everything runs, and all that was asked for is answered.
    fn finish(&mut self) {
        self.story.push(String::from("the end"));
        if !self.has_memory {
            self.memory();
        }
        for index in 0..self.states.len() {
            self.start(index);
            if self.states[index] == State::Off {
                self.switch(index);
            }
        }
        for index in 0..self.states.len() {
            while self.vm.queues[index].in_flight() > 0 {
                let done = self.vm.queues[index].wait_for(&self.vm.ram, TIMEOUT * 3);
                let done = done.unwrap_or_else(|| {
                    panic!("virtqueue {index}: {:?} are lost: {}", self.asked, self.told())
                });
                self.take(done.request.sector, done.status);
            }
        }
        assert_eq!(self.asked.len(), 0, "{}", self.told());
        for sector in 0..self.next {
            let writes = self.writes(sector);
            let is_right = if self.lost.contains(&sector) { writes <= 1 } else { writes == 1 };
            assert!(is_right, "sector {sector} was written {writes} times");
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.dead.iter().for_each(|(_, ledger)| ledger.end());
        if let Backing::Ledger(ledger) = &self.backing {
            ledger.end();
        }
    }
}

fn memory(bytes: u64) -> OwnedFd {
    let fd = memfd_create(c"more", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&fd, bytes).expect("a memfd");
    fd
}

/// Seeds of this run.
fn seeds(few: u64, many: u64) -> std::ops::Range<u64> {
    0..if full() { many } else { few }
}

#[test]
fn each_request_is_carried_out_once_in_whatever_order_messages_come() {
    for seed in seeds(4, 150) {
        for packed in [false, true] {
            for (queues, threads) in [(1, 1), (3, 1), (4, 2)] {
                let mut world = World::new(packed, queues, threads, seed);
                world.story.push(format!("packed {packed}, {queues} on {threads}, seed {seed}"));
                (0..60).for_each(|_| world.step());
                world.finish();
            }
        }
    }
}

#[test]
fn each_request_is_served_once_by_processes_that_hand_their_disk_on() {
    for seed in seeds(2, 60) {
        for packed in [false, true] {
            let directory = scratch();
            let path = directory.path().join("disk");
            images::sparse(&path, DISK);
            let disk = open(&path, Format::Raw);
            let mut world = World::of(Backing::File(disk), packed, 3, 1, 100 + seed);
            world.story.push(format!("packed {packed}, seed {seed}"));
            (0..60).for_each(|_| world.step());
            world.hand_over();
            world.finish();
            let stats = world.served().export.stats_reader()();
            let now: u64 = stats.queues.iter().map(|queue| queue.writes).sum();
            assert_eq!(world.before + now, world.next, "{}", world.told());
            let Backing::File(disk) = &world.backing else { unreachable!("as it was made") };
            let disk = Arc::clone(disk);
            let count = world.next;
            drop(world);
            close(&disk);
            let bytes = std::fs::read(&path).expect("the image");
            for sector in 0..count {
                let at = usize::try_from(sector * 512).expect("small");
                assert!(bytes[at..at + 512] == content(sector), "sector {sector}");
            }
        }
    }
}
