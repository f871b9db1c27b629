//! What happens to the connection and to the process: another one, a kill, a hand-over.

use super::*;

impl World {
    /// The same front end with another connection, perhaps to another process. What was stopped
    /// stays so for now.
    pub(super) fn connect(&mut self, front: ringdisk_testkit::model::FrontEnd) {
        self.vm.front = front;
        self.vm.negotiate().expect("features");
        self.take_area();
        self.vm.announce().expect("memory");
        (self.has_memory, self.logs, self.log) = (true, false, None);
        let rule = [BaseRule::Used, BaseRule::Avail, BaseRule::Beginning][self.below(3)];
        for index in 0..self.states.len() {
            let driver = &self.vm.queues[index].driver;
            let base = match self.states[index] {
                // The front end was told, and the area says nothing any more.
                State::Stopped(_) => continue,
                _ if rule == BaseRule::Used => Some(driver.base(false)),
                _ if rule == BaseRule::Avail => Some(driver.base(true)),
                _ => None,
            };
            self.states[index] = State::Stopped(base);
            self.start(index);
            // What the process before had taken may not all be taken again.
            if self.prng.coin() {
                self.stop(index);
            }
        }
    }

    pub(super) fn reconnect(&mut self) {
        let front = self.served().front();
        self.connect(front);
    }

    /// The process is killed: what it has taken is never answered, and it takes nothing more.
    /// Another one goes on.
    pub(super) fn kill(&mut self) {
        let Backing::Ledger(ledger) = &self.backing else { return };
        let ledger = ledger.clone();
        ledger.freeze();
        // More than can be taken, now and then.
        let most = [3, SLOTS][self.below(2)];
        for index in 0..self.states.len() {
            self.add(index, most);
        }
        self.settle(&ledger);
        if self.has_memory {
            self.poison();
            self.settle(&ledger);
        }
        self.reap();
        let seed = self.prng.below(u64::MAX);
        let new = Ledger::of_counts(DISK, seed);
        let served = start(new.disk(), self.threads);
        let front = served.front();
        let old = self.served.replace(served).expect("it was served");
        self.backing = Backing::Ledger(new);
        self.dead.push((old, ledger));
        self.connect(front);
    }

    /// Waits until all that was taken stands still.
    pub(super) fn settle(&self, ledger: &Ledger) {
        let stats = self.served().export.stats_reader();
        let flying = || stats().queues.iter().map(|queue| queue.in_flight).sum::<u64>();
        let still = || {
            let first = (flying(), ledger.frozen());
            std::thread::sleep(Duration::from_millis(1));
            (first.0 == first.1 && (flying(), ledger.frozen()) == first).then_some(())
        };
        assert!(until(TIMEOUT, still).is_some(), "{} in flight: {}", flying(), self.told());
    }

    /// Breaks the device of a process that is to be dead: no virtqueue of it takes a request from
    /// now on.
    pub(super) fn poison(&mut self) {
        let config = self.vm.queues[0].driver.config();
        let mut driver = Driver::new(&mut self.vm.ram, config).expect("room for a virtqueue");
        let kick = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let front = &mut self.vm.front;
        let first = if self.packed { ringdisk_guest::PACKED_BASE } else { 0 };
        front.vring(ask::SET_VRING_NUM, SPARE, u32::from(config.size)).expect("a size");
        front.vring(ask::SET_VRING_BASE, SPARE, first).expect("a base");
        front.vring_addr(SPARE, driver.user_addresses(), None).expect("places");
        driver.add(&[Segment { addr: 0, len: 16 }], 1).expect("room");
        driver.publish();
        let kicked = front.vring_fd(ask::SET_VRING_KICK, u64::from(SPARE), Some(kick.as_fd()));
        kicked.expect("a kick");
        front.vring(ask::SET_VRING_ENABLE, SPARE, 1).expect("it starts");
        let export = &self.served().export;
        let broken = until(TIMEOUT, || export.broken_reason());
        assert!(broken.is_some(), "{}", self.told());
    }

    /// A hand-over that comes to nothing: of storage that only a test has there is no other end.
    pub(super) fn hand_over(&mut self) {
        let Backing::File(disk) = &mut self.backing else {
            let handed = self.served().export.hand_over_handle().hand_over();
            assert!(handed.is_err());
            return;
        };
        if self.logs {
            return;
        }
        let served = self.served.take().expect("it is served");
        let (state, still) = served.export.hand_over_handle().hand_over().expect("a state");
        if self.prng.coin() {
            drop((state, still));
            self.served = Some(served);
            return;
        }
        let options = ExportOptions {
            queues: 8,
            common: CommonOptions::with_threads(self.threads.into()),
            serial: String::from("model"),
            ..ExportOptions::new(Listen::Connect(served.path.clone()))
        };
        let image = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
        let mut runtime = Runtime::new(Config::default()).expect("io_uring");
        let ring = runtime.ring().clone();
        let prepared = runtime.block_on(Export::take_over(&ring, state, &image, options));
        let prepared = prepared.expect("it fits");
        assert!(still.commit());
        *disk = prepared.disk().clone();
        let export = prepared.go();
        let Served { export: before, path, directory } = served;
        let stats = before.wait().expect("it was handed over");
        self.before += stats.queues.iter().map(|queue| queue.writes).sum::<u64>();
        self.served = Some(Served { export, path, directory });
    }
}
