//! Random requests, and an oracle that knows what they may read.
//!
//! Promises: equal seeds make equal requests. Each answer is judged by the oracle when it comes,
//! and the whole disk when nothing is in flight.

use std::collections::HashMap;
use std::ops::Range;

use super::{Cut, Done, Kind, Request, Vm, bits, range};
use crate::oracle::{Begun, Below, Content, Oracle, SECTOR};
use crate::sim::Prng;

/// What a range may hold once it was discarded. (A device that does not offer discards is not asked
/// for any.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discards {
    /// Zeroes: what queue threads promise for a file and for a qcow2 image.
    Zero,
    /// Zeroes or what was there before: it was a hint.
    Hint,
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Bytes of the disk.
    pub size: u64,
    /// The unit of requests, bytes.
    pub block: u64,
    /// Bytes of the largest request; with what a slot must hold beside them less than
    /// `VmOptions::slot_bytes`.
    pub bytes_max: u64,
    /// Segments of one, at most.
    pub segments: usize,
    /// Requests at once in each virtqueue.
    pub depth: usize,
    /// What discards leave.
    pub discards: Discards,
    /// Of all chance.
    pub seed: u64,
}

#[derive(Debug)]
struct Flying {
    begun: Begun,
    range: Range<u64>,
}

/// Requests of all virtqueues of a machine.
#[derive(Debug)]
pub struct Load {
    /// What may be on the disk.
    pub oracle: Oracle,
    /// Requests that were answered.
    pub answered: u64,
    options: LoadOptions,
    prng: Prng,
    flying: HashMap<(usize, u16), Flying>,
}

impl Load {
    /// A disk of zeroes.
    #[must_use]
    pub fn new(options: LoadOptions) -> Load {
        let oracle = Oracle::new(7, options.size, Below::NOTHING);
        let prng = Prng::new(options.seed);
        Load { oracle, answered: 0, options, prng, flying: HashMap::new() }
    }

    /// Requests that were asked and not answered.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.flying.len()
    }

    fn place(&mut self) -> Range<u64> {
        let LoadOptions { size, block, bytes_max, .. } = self.options;
        // Half of all requests are small.
        let most = if self.prng.coin() { block * 2 } else { bytes_max };
        let len = block * (1 + self.prng.below(most.min(size) / block));
        let start = block * self.prng.below((size - len) / block + 1);
        start..start + len
    }

    fn next(&mut self, features: u64) -> (Request, Option<Flying>) {
        let segments = self.options.segments;
        let indirect = features & bits::INDIRECT != 0 && self.prng.coin();
        let at = self.place();
        let (sector, len) = (at.start / SECTOR, at.end - at.start);
        let zeroes = features & bits::WRITE_ZEROES != 0;
        let discards = features & bits::DISCARD != 0;
        let (request, begun) = match self.prng.below(20) {
            0..9 => {
                let begun = self.oracle.begin_read(at.clone());
                (Request::read(sector, usize::try_from(len).expect("small")), begun)
            }
            9..17 => {
                let begun = self.oracle.begin(at.clone(), Content::Stamped);
                (Request::write(sector, self.oracle.bytes(&begun)), begun)
            }
            17 if zeroes || discards => {
                let begun = self.oracle.begin(at.clone(), Content::Zero);
                let sectors = u32::try_from(len / SECTOR).expect("small");
                let is_discard = discards && (!zeroes || self.prng.coin());
                // A discard has no flags.
                let flags = u32::from(!is_discard && self.prng.coin());
                let kind = if is_discard { Kind::Discard } else { Kind::WriteZeroes };
                (Request::ranges(kind, &[range(sector, sectors, flags)]), begun)
            }
            18 => (Request::get_id(20), self.oracle.begin_read(0..0)),
            _ => (Request::flush(), self.oracle.begin_flush()),
        };
        let cut = match self.prng.below(3) {
            0 => Cut::Plain,
            1 => Cut::Pieces(segments.saturating_sub(2).max(1)),
            _ => Cut::Anywhere(segments),
        };
        let request = request.cut(cut);
        let request = if indirect { request.indirect() } else { request };
        (request, Some(Flying { begun, range: at }))
    }

    /// Fills a virtqueue up to the depth, with one kick at most. Gives how many were asked.
    pub fn fill(&mut self, vm: &mut Vm, queue: usize) -> usize {
        let mut asked = 0;
        while vm.queues[queue].in_flight() < self.options.depth {
            let (request, flying) = self.next(vm.features);
            let flying = flying.expect("each has one");
            match vm.queues[queue].add(&vm.ram, request) {
                Ok(id) => {
                    self.flying.insert((queue, id), flying);
                    asked += 1;
                }
                Err(request) => {
                    // It never happened.
                    self.end(&request, &flying, 1, &[]);
                    break;
                }
            }
        }
        vm.queues[queue].kick();
        asked
    }

    fn end(&mut self, request: &Request, flying: &Flying, status: u8, data: &[u8]) {
        let Flying { begun, range } = flying;
        match request.kind {
            Kind::Read if status == 0 => {
                let judged = self.oracle.end_read(begun, data);
                judged.unwrap_or_else(|wrong| panic!("{range:?}: {wrong}"));
            }
            Kind::Read | Kind::GetId => self.oracle.forget_read(begun),
            Kind::Flush if status == 0 => self.oracle.end_flush(begun),
            Kind::Flush => {}
            // It may have done nothing, and a part of it as well.
            Kind::Discard if self.options.discards == Discards::Hint => {
                self.oracle.end(begun, false);
            }
            _ => self.oracle.end(begun, status == 0),
        }
    }

    /// Takes an answer, which must be a success.
    pub fn take(&mut self, queue: usize, done: &Done) {
        let flying = self.flying.remove(&(queue, done.id)).expect("it was asked");
        let Done { request, status, data, .. } = done;
        assert_eq!(*status, 0, "{:?} of {:?}", request.kind, flying.range);
        self.end(request, &flying, *status, data);
        self.answered += 1;
    }

    /// Takes all answers that are there. Gives how many.
    pub fn reap(&mut self, vm: &mut Vm) -> usize {
        let mut count = 0;
        for index in 0..vm.queues.len() {
            while let Some(done) = vm.queues[index].reap(&vm.ram) {
                self.take(index, &done);
                count += 1;
            }
        }
        count
    }

    /// Keeps all virtqueues busy until so many more requests were answered.
    pub fn run(&mut self, vm: &mut Vm, requests: u64) {
        let end = self.answered + requests;
        while self.answered < end {
            for index in 0..vm.queues.len() {
                self.fill(vm, index);
            }
            if self.reap(vm) == 0 {
                let index = usize::try_from(self.prng.below(vm.queues.len() as u64));
                let index = index.expect("few");
                let done = vm.queues[index].wait(&vm.ram);
                self.take(index, &done);
            }
        }
    }

    /// What is in flight is never answered, and may have happened or not.
    pub fn forget(&mut self) {
        for (_, flying) in self.flying.drain() {
            self.oracle.forget_read(&flying.begun);
        }
    }

    /// Waits for all that is in flight.
    pub fn drain(&mut self, vm: &mut Vm) {
        for index in 0..vm.queues.len() {
            while vm.queues[index].in_flight() > 0 {
                let done = vm.queues[index].wait(&vm.ram);
                self.take(index, &done);
            }
        }
        assert_eq!(self.flying.len(), 0, "requests are missing");
    }

    /// Reads all of the disk through the device and judges it.
    pub fn read_all(&mut self, vm: &mut Vm) {
        let step = self.options.bytes_max;
        for start in (0..self.options.size).step_by(usize::try_from(step).expect("small")) {
            let at = start..(start + step).min(self.options.size);
            let begun = self.oracle.begin_read(at.clone());
            let len = usize::try_from(at.end - at.start).expect("small");
            let done = vm.run(0, Request::read(start / SECTOR, len));
            let flying = Flying { begun, range: at };
            assert_eq!(done.status, 0);
            self.end(&done.request, &flying, 0, &done.data);
        }
    }

    /// Judges the content of the disk, read without the device, when nothing is in flight.
    pub fn judge(&mut self, bytes: &[u8]) {
        let begun = self.oracle.begin_read(0..bytes.len() as u64);
        let judged = self.oracle.end_read(&begun, bytes);
        judged.unwrap_or_else(|wrong| panic!("{wrong}"));
    }
}
