//! The machine: a front end with its memory and its virtqueues.
//!
//! Promises: dropped, its socket and its memory go, as those of a killed front end do. A device
//! that refuses the set-up fails the test.

use std::os::fd::{AsFd, OwnedFd};

use ringdisk_guest::Layout;
use ringdisk_guest::driver::{Driver, DriverConfig, GUEST_BASE, GuestRam, USER_BASE};

use super::queue::{Queue, event};
use super::{Done, FrontEnd, Refused, Request, ask, bits, words};

/// What a machine is like.
#[derive(Clone, Copy, Debug)]
pub struct VmOptions {
    /// Features that the driver knows; those of them that are offered are taken.
    pub features: u64,
    /// The same of the protocol.
    pub protocol: u64,
    /// Virtqueues that are used.
    pub queues: u16,
    /// Descriptors of each.
    pub size: u16,
    /// Entries of an indirect table.
    pub indirect: u16,
    /// Requests at once in each virtqueue, at most.
    pub slots: usize,
    /// Bytes of the largest request, with its header and gaps.
    pub slot_bytes: usize,
    /// Regions that the memory is announced in; their borders are odd and lie among the requests.
    pub regions: u64,
    /// Of all chance.
    pub seed: u64,
}

impl Default for VmOptions {
    fn default() -> VmOptions {
        VmOptions {
            features: !(bits::PACKED | bits::LOG_ALL),
            protocol: u64::MAX,
            queues: 1,
            size: 128,
            indirect: 0,
            slots: 16,
            slot_bytes: 128 << 10,
            regions: 1,
            seed: 1,
        }
    }
}

/// Where a virtqueue goes on when the process behind it is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BaseRule {
    /// At the used index (QEMU).
    Used,
    /// At the avail index (Cloud Hypervisor): the inflight area says what is left.
    Avail,
    /// Where it began (QEMU with a packed one).
    Beginning,
}

/// The area that outlives the device.
#[derive(Debug)]
pub struct Inflight {
    /// Its file.
    pub fd: OwnedFd,
    /// Its reply and the next message's payload.
    pub payload: Vec<u8>,
}

/// A machine.
#[derive(Debug)]
pub struct Vm {
    /// Messages.
    pub front: FrontEnd,
    /// Memory.
    pub ram: GuestRam,
    /// Virtqueues.
    pub queues: Vec<Queue>,
    /// As it was asked for.
    pub options: VmOptions,
    /// Features that were agreed on.
    pub features: u64,
    /// If there is one.
    pub inflight: Option<Inflight>,
    /// Regions as they were announced.
    pub regions: Vec<[u64; 4]>,
}

/// Bytes of memory: sparse, so any number is cheap.
const RAM_BYTES: u64 = 1 << 28;

impl Vm {
    /// Starts a device: negotiates, announces memory, starts all virtqueues.
    ///
    /// Errors: the device refused something.
    pub fn start(front: FrontEnd, options: VmOptions) -> Result<Vm, Refused> {
        let ram = GuestRam::new(RAM_BYTES).expect("memory of a guest");
        Vm::start_in(ram, front, options)
    }

    /// As [`Vm::start`], in memory of the caller's choice.
    ///
    /// Errors: the device refused something.
    pub fn start_in(ram: GuestRam, front: FrontEnd, options: VmOptions) -> Result<Vm, Refused> {
        let queues = Vec::new();
        let regions = Vec::new();
        let mut vm = Vm { front, ram, queues, options, features: 0, inflight: None, regions };
        vm.negotiate()?;
        vm.make_queues();
        vm.announce()?;
        vm.take_inflight()?;
        (0..vm.queues.len()).try_for_each(|index| vm.start_queue(index, None))?;
        Ok(vm)
    }

    /// As [`Vm::start`], of a device that refuses nothing.
    #[must_use]
    pub fn started(front: FrontEnd, options: VmOptions) -> Vm {
        Vm::start(front, options).unwrap_or_else(|refused| panic!("the device: {refused:?}"))
    }

    /// Features and protocol features.
    ///
    /// Errors: the device refused something.
    pub fn negotiate(&mut self) -> Result<(), Refused> {
        let VmOptions { features, protocol, .. } = self.options;
        let front = &mut self.front;
        let offered = front.get(ask::GET_FEATURES)?;
        self.features = offered & features;
        if self.features & bits::PROTOCOL != 0 {
            let protocol = front.get(ask::GET_PROTOCOL_FEATURES)? & protocol;
            front.set(ask::SET_PROTOCOL_FEATURES, protocol)?;
            front.acks = protocol & bits::P_REPLY_ACK != 0;
        }
        front.tell(ask::SET_OWNER, &[], &[])?;
        front.set(ask::SET_FEATURES, self.features)
    }

    /// Whether a feature was agreed on.
    #[must_use]
    pub fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Lays new virtqueues into memory.
    pub fn make_queues(&mut self) {
        let VmOptions { queues, size, slots, slot_bytes, seed, .. } = self.options;
        let config = DriverConfig {
            layout: if self.has(bits::PACKED) { Layout::Packed } else { Layout::Split },
            size,
            event_idx: self.has(bits::EVENT_IDX),
            indirect: if self.has(bits::INDIRECT) { self.options.indirect } else { 0 },
        };
        let drivers: Vec<Driver> =
            (0..queues).map(|_| Driver::new(&mut self.ram, config).expect("room")).collect();
        self.queues.clear();
        for (index, driver) in (0..).zip(drivers) {
            let take = |_| self.ram.take(slot_bytes as u64, 64).expect("room for requests");
            let slots = (0..slots).map(take).collect();
            self.queues.push(Queue::new(driver, slots, slot_bytes, seed ^ index));
        }
    }

    /// Regions of memory: the first holds all rings, the others parts of requests.
    fn cut_memory(&mut self) {
        let end = self.ram.size();
        let count = self.options.regions.max(1);
        // The last virtqueue's requests lie at the end of what is taken.
        let taken = self.ram.taken();
        let bytes = (self.options.slots * self.options.slot_bytes) as u64;
        let first = taken - bytes;
        let mut borders: Vec<u64> =
            (1..count).map(|number| first + bytes / count * number + 13 * number).collect();
        borders.insert(0, 0);
        borders.push(end);
        self.regions = borders
            .windows(2)
            .map(|pair| [GUEST_BASE + pair[0], pair[1] - pair[0], USER_BASE + pair[0], pair[0]])
            .collect();
    }

    /// Announces memory.
    ///
    /// Errors: the device refused it.
    pub fn announce(&mut self) -> Result<(), Refused> {
        if self.regions.is_empty() {
            self.cut_memory();
        }
        if self.options.protocol & bits::P_MEM_SLOTS == 0 {
            let fds = vec![self.ram.fd(); self.regions.len()];
            return self.front.memory_table(&self.regions, &fds);
        }
        for region in &self.regions {
            self.front.add_region(*region, self.ram.fd())?;
        }
        Ok(())
    }

    /// Gets an inflight area, or gives the device the one that there is.
    ///
    /// Errors: the device refused it.
    pub fn take_inflight(&mut self) -> Result<(), Refused> {
        if self.options.protocol & bits::P_INFLIGHT == 0 {
            return Ok(());
        }
        if let Some(area) = &self.inflight {
            return self.front.tell(ask::SET_INFLIGHT_FD, &area.payload, &[area.fd.as_fd()]);
        }
        let mut payload = words(&[0, 0]);
        payload.extend(self.options.queues.to_ne_bytes());
        payload.extend(self.options.size.to_ne_bytes());
        payload.extend([0; 4]);
        let (payload, mut fds) = self.front.ask(ask::GET_INFLIGHT_FD, &payload, &[])?;
        let fd = fds.pop().expect("an inflight area");
        let area = Inflight { fd, payload };
        self.front.tell(ask::SET_INFLIGHT_FD, &area.payload, &[area.fd.as_fd()])?;
        self.inflight = Some(area);
        Ok(())
    }

    /// Starts a virtqueue.
    ///
    /// * `base`: `None`: at its beginning.
    ///
    /// Errors: the device refused it.
    pub fn start_queue(&mut self, index: usize, base: Option<u32>) -> Result<(), Refused> {
        let (queue, front) = (&mut self.queues[index], &mut self.front);
        let number = u32::try_from(index).expect("few");
        let config = queue.driver.config();
        let first = if config.layout == Layout::Packed { ringdisk_guest::PACKED_BASE } else { 0 };
        front.vring(ask::SET_VRING_NUM, number, u32::from(config.size))?;
        front.vring(ask::SET_VRING_BASE, number, base.unwrap_or(first))?;
        front.vring_addr(number, queue.driver.user_addresses(), None)?;
        front.vring_fd(ask::SET_VRING_CALL, index as u64, Some(queue.call.as_fd()))?;
        front.vring_fd(ask::SET_VRING_KICK, index as u64, Some(queue.kick.as_fd()))?;
        if self.features & bits::PROTOCOL != 0 {
            front.vring(ask::SET_VRING_ENABLE, number, 1)?;
        }
        Ok(())
    }

    /// Goes on with another process behind the device: all that was asked and not answered is still
    /// asked.
    ///
    /// Errors: it went away meanwhile.
    pub fn resume(&mut self, front: FrontEnd, rule: BaseRule) -> Result<(), Refused> {
        self.front = front;
        self.negotiate()?;
        self.take_inflight()?;
        self.announce()?;
        for index in 0..self.queues.len() {
            let driver = &self.queues[index].driver;
            let base = match rule {
                BaseRule::Used => Some(driver.base(false)),
                BaseRule::Avail => Some(driver.base(true)),
                BaseRule::Beginning => None,
            };
            self.start_queue(index, base)?;
        }
        Ok(())
    }

    /// Resets the device and starts it again with new virtqueues in other memory; what was in
    /// flight is forgotten.
    ///
    /// Errors: the device refused something.
    pub fn reset(&mut self) -> Result<(), Refused> {
        self.front.set(ask::SET_STATUS, 0)?;
        self.front.set(ask::SET_FEATURES, self.features)?;
        self.make_queues();
        (0..self.queues.len()).try_for_each(|index| self.start_queue(index, None))
    }

    /// Adds a request to a virtqueue and kicks. Gives the request back when there is no room.
    ///
    /// Errors: the queue is full.
    pub fn submit(&mut self, queue: usize, request: Request) -> Result<u16, Request> {
        let id = self.queues[queue].add(&self.ram, request)?;
        self.queues[queue].kick();
        Ok(id)
    }

    /// Does one request in a virtqueue where nothing is in flight.
    pub fn run(&mut self, queue: usize, request: Request) -> Done {
        self.queues[queue].run(&self.ram, request)
    }

    /// The status of a request that is done so.
    pub fn status(&mut self, queue: usize, request: Request) -> u8 {
        self.run(queue, request).status
    }

    /// Another call eventfd for a virtqueue.
    ///
    /// Errors: the device refused it.
    pub fn change_call(&mut self, index: usize) -> Result<(), Refused> {
        let call = event();
        self.front.vring_fd(ask::SET_VRING_CALL, index as u64, Some(call.as_fd()))?;
        self.queues[index].call = call;
        Ok(())
    }
}
