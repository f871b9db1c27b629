//! The promise of `CAN_MULTI_CONN`, against a model: a flush that is answered on one connection
//! covers every write that was answered before on any, also with FUA, and no connection reads old
//! data.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_disk::{Disk, ImageOptions};
use ringdisk_nbd::NamedDisk;
use ringdisk_nbd_protocol::numbers::{command, command_flags};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_testkit::sim::{Fault, SimStorage, When};

use crate::client::{Client, Server, data, flagged, options, request};

const BLOCK: u64 = 512;
const BLOCKS: u64 = 64;
const STEPS: u64 = 400;

/// Numbers that look random (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// What is answered, and of that what must be durable.
struct Model {
    answered: Vec<u8>,
    durable: Vec<Option<u8>>,
}

impl Model {
    fn write(&mut self, block: u64, value: u8) {
        self.answered[block as usize] = value;
        // The storage may have either, until the next flush.
        self.durable[block as usize] = None;
    }

    fn flush(&mut self) {
        self.durable = self.answered.iter().copied().map(Some).collect();
    }

    fn check(&self, image: &[u8]) {
        for (block, value) in self.durable.iter().enumerate() {
            if let Some(value) = value {
                assert_eq!(image[block * BLOCK as usize], *value, "block {block}");
            }
        }
    }
}

#[test]
fn a_flush_on_one_connection_covers_what_was_answered_on_all() {
    for seed in 1..=10 {
        let sim = SimStorage::new(BLOCKS * BLOCK, seed);
        let longest = Duration::from_micros(100);
        sim.on(When::any(), Fault::DelayBetween(Duration::ZERO, longest));
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        let server = Server::start(vec![NamedDisk::new("", disk)], options(3));
        let style = Style::Structured;
        let mut clients: Vec<Client> = (0..5).map(|_| server.client(style)).collect();
        let none = vec![0; BLOCKS as usize];
        let mut model = Model { durable: none.iter().copied().map(Some).collect(), answered: none };
        let mut random = Random(seed * 0x9e37_79b9);
        for step in 0..STEPS {
            let client = &mut clients[random.below(5) as usize];
            let (block, value) = (random.below(BLOCKS), (step % 255) as u8 + 1);
            match random.below(10) {
                0 => {
                    assert_eq!(client.call(style, request(command::FLUSH, 0, 0), &[]).error, 0);
                    model.flush();
                    model.check(&sim.durable_image());
                }
                1 => {
                    let fua = command_flags::FUA;
                    let write = flagged(command::WRITE, fua, block * BLOCK, BLOCK);
                    let bytes = vec![value; BLOCK as usize];
                    assert_eq!(client.call(style, write, &bytes).error, 0);
                    model.write(block, value);
                    model.flush();
                    model.check(&sim.durable_image());
                }
                2..=6 => {
                    let write = request(command::WRITE, block * BLOCK, BLOCK);
                    let bytes = vec![value; BLOCK as usize];
                    assert_eq!(client.call(style, write, &bytes).error, 0);
                    model.write(block, value);
                }
                _ => {
                    let read = request(command::READ, block * BLOCK, BLOCK);
                    let reply = client.call(style, read, &[]);
                    let expected = vec![model.answered[block as usize]; BLOCK as usize];
                    assert_eq!(data(&reply, block * BLOCK, BLOCK as usize), expected);
                }
            }
        }
    }
}

/// Writes in flight on one connection.
const DEPTH: usize = 16;

/// Ends the writer also when the test fails.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Writes numbers that grow to all blocks but the first one, many at once, until it is told to end.
/// A block has one write in flight at a time.
///
/// * `answered`: the number of the last answered write of each block.
fn write_many(mut client: Client, seed: u64, answered: &Mutex<Vec<u64>>, is_done: &AtomicBool) {
    let mut random = Random(seed * 0x9e37_79b9);
    let mut in_flight = HashMap::new();
    for number in 1_u64.. {
        if is_done.load(Ordering::Relaxed) {
            break;
        }
        let block = 1 + random.below(BLOCKS - 1);
        if in_flight.values().any(|other| *other == block) {
            continue;
        }
        let bytes = number.to_le_bytes().repeat(BLOCK as usize / 8);
        let write = Request { cookie: number, ..request(command::WRITE, block * BLOCK, BLOCK) };
        client.start(Style::Structured, write, &bytes);
        in_flight.insert(number, block);
        if in_flight.len() == DEPTH {
            let reply = client.reply_of(Style::Structured, |_| 0);
            assert_eq!(reply.error, 0);
            let block = in_flight.remove(&reply.cookie).expect("a request of ours");
            answered.lock().unwrap()[block as usize] = reply.cookie;
        }
    }
    for _ in 0..in_flight.len() {
        assert_eq!(client.reply_of(Style::Structured, |_| 0).error, 0);
    }
}

#[test]
fn a_flush_beside_writes_in_flight_covers_those_that_were_answered() {
    for seed in 1..=5 {
        let sim = SimStorage::new(BLOCKS * BLOCK, seed);
        let longest = Duration::from_micros(100);
        sim.on(When::any(), Fault::DelayBetween(Duration::ZERO, longest));
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        let server = Server::start(vec![NamedDisk::new("", disk)], options(3));
        let [writer, mut flusher] = [(); 2].map(|()| server.client(Style::Structured));
        let answered = Mutex::new(vec![0; BLOCKS as usize]);
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| write_many(writer, seed, &answered, &is_done));
            let _done = Done(&is_done);
            for number in 0..100 {
                let before = answered.lock().unwrap().clone();
                let (flush, bytes) = match number % 3 {
                    0 => (flagged(command::WRITE, command_flags::FUA, 0, BLOCK), &[1; 512][..]),
                    _ => (request(command::FLUSH, 0, 0), &[][..]),
                };
                assert_eq!(flusher.call(Style::Structured, flush, bytes).error, 0);
                let image = sim.durable_image();
                for (block, answered) in before.iter().enumerate().skip(1) {
                    let at = block * BLOCK as usize;
                    let durable = u64::from_le_bytes(image[at..at + 8].try_into().unwrap());
                    assert!(durable >= *answered, "{number}: block {block}: {durable}, {answered}");
                }
            }
        });
        let answered = answered.into_inner().unwrap();
        assert!(answered.iter().filter(|number| **number > 0).count() > 8, "{answered:?}");
    }
}
