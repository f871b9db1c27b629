//! Clients of a walk, which know what they must read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ringdisk_testkit::model::{FrontEnd, Load, Vm};
use ringdisk_testkit::mount::{Mounted, text};
use ringdisk_testkit::sim::Prng;
use rustix::fs::{FallocateFlags, fallocate};

use super::How;
use super::fio::Fio;
use crate::common::serving::{SIZE, load, meanwhile, options};
use crate::common::{open, program};

/// Longest request of a client of a file, bytes.
const REQUEST_MAX: u64 = 128 << 10;
/// The byte of the configuration that has the state of the write cache.
const WRITEBACK: u32 = 32;

/// Who works on the disk.
pub(super) enum Client {
    None,
    File(Box<FileClient>),
    Machine(Box<(Vm, Load)>),
    Fio(Box<Fio>),
}

/// One that writes, zeroes and reads a file.
pub(super) struct FileClient {
    file: Option<File>,
    bytes: Vec<u8>,
    prng: Prng,
    /// Of an export: what the client sees it through.
    mount: Option<Mounted>,
}

impl Client {
    pub(super) fn of(how: How, target: &Path, seed: u64) -> Client {
        match how {
            How::Mount | How::KeptMount => Client::File(Box::new(FileClient::on(target, seed))),
            How::Nbd => {
                let uri = format!("nbd+unix:///?socket={}", text(target));
                let mount = Mounted::start(&program(), &["--format", "raw", &uri]);
                let mut client = FileClient::on(mount.path(), seed);
                client.mount = Some(mount);
                Client::File(Box::new(client))
            }
            How::Machine | How::KeptMachine => {
                let packed = seed.is_multiple_of(3);
                let mut vm = Vm::started(FrontEnd::connect(target), options(packed));
                // So that what was answered survives a kill.
                if how == How::KeptMachine {
                    vm.front.set_config(WRITEBACK, &[0]).expect("CONFIG_WCE was agreed on");
                }
                Client::Machine(Box::new((vm, load(seed))))
            }
        }
    }

    /// Works while something is done, and a little longer.
    pub(super) fn beside<T: Send>(&mut self, what: impl FnOnce() -> T + Send) -> T {
        match self {
            Client::None => what(),
            Client::Machine(machine) => meanwhile(&mut machine.0, &mut machine.1, what),
            Client::File(client) => until_done(what, || client.some(10)),
            Client::Fio(fio) => until_done(what, || fio.pass()),
        }
    }

    /// Has everything on stable storage.
    pub(super) fn flush(&mut self) {
        match self {
            Client::None => {}
            Client::Machine(machine) => {
                machine.1.run(&mut machine.0, 50);
                machine.1.drain(&mut machine.0);
            }
            Client::File(client) => client.file().sync_all().expect("flush"),
            Client::Fio(fio) => fio.pass(),
        }
    }

    /// Something that is done while the client has nothing in flight that it could lose: a kill.
    pub(super) fn around(&mut self, what: impl FnOnce()) {
        match self {
            Client::None => what(),
            // With requests in flight, which the next process answers.
            Client::Machine(machine) => {
                let (vm, load) = &mut **machine;
                (0..2).for_each(|queue| {
                    load.fill(vm, queue);
                });
                what();
                load.run(vm, 50);
                load.drain(vm);
            }
            Client::File(client) => {
                client.file().sync_all().expect("flush");
                what();
                client.some(10);
            }
            // Its passes end with a flush.
            Client::Fio(_) => what(),
        }
    }

    /// All that the disk shows is what is known.
    pub(super) fn look(&mut self) {
        match self {
            Client::None => {}
            Client::Machine(machine) => machine.1.read_all(&mut machine.0),
            Client::File(client) => {
                let mut bytes = vec![0; client.bytes.len()];
                client.file().read_exact_at(&mut bytes, 0).expect("read");
                client.assert_same(&bytes);
            }
            Client::Fio(fio) => fio.look(),
        }
    }

    /// Lets go of the disk.
    pub(super) fn leave(&mut self) {
        match self {
            Client::None => {}
            Client::Machine(machine) => machine.1.drain(&mut machine.0),
            Client::File(client) => {
                client.file().sync_all().expect("flush");
                client.file = None;
                if let Some(mount) = client.mount.take() {
                    assert_eq!(mount.stop().code(), Some(0));
                }
            }
            Client::Fio(fio) => fio.leave(),
        }
    }

    /// The same of an image that nobody serves any more.
    pub(super) fn judge(&mut self, bytes: &[u8]) {
        match self {
            Client::None => {}
            Client::Machine(machine) => machine.1.judge(bytes),
            Client::File(client) => client.assert_same(bytes),
            Client::Fio(fio) => fio.judge(bytes),
        }
    }
}

/// Does something in a thread of its own, and `meanwhile` at least once, again until it is done.
fn until_done<T: Send>(what: impl FnOnce() -> T + Send, mut meanwhile: impl FnMut()) -> T {
    std::thread::scope(|scope| {
        let doing = scope.spawn(what);
        loop {
            meanwhile();
            if doing.is_finished() {
                return doing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
        }
    })
}

impl FileClient {
    fn on(path: &Path, seed: u64) -> FileClient {
        let bytes = vec![0; usize::try_from(SIZE).expect("small")];
        FileClient { file: Some(open(path)), bytes, prng: Prng::new(seed + 1000), mount: None }
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("it is open")
    }

    fn assert_same(&self, bytes: &[u8]) {
        let differs = bytes.iter().zip(&self.bytes).position(|(a, b)| a != b);
        assert_eq!(differs, None, "first byte that differs");
    }

    /// Makes some requests.
    fn some(&mut self, requests: u32) {
        for _ in 0..requests {
            let at = self.prng.below(SIZE);
            let len = (1 + self.prng.below(REQUEST_MAX)).min(SIZE - at);
            let range =
                usize::try_from(at).expect("small")..usize::try_from(at + len).expect("small");
            match self.prng.below(10) {
                0..5 => {
                    let byte = u8::try_from(1 + self.prng.below(255)).expect("a byte");
                    self.bytes[range.clone()].fill(byte);
                    self.file().write_all_at(&self.bytes[range], at).expect("write");
                }
                5 | 6 => {
                    let flags = match self.prng.coin() {
                        true => FallocateFlags::PUNCH_HOLE,
                        false => FallocateFlags::ZERO_RANGE,
                    };
                    self.bytes[range].fill(0);
                    let flags = flags | FallocateFlags::KEEP_SIZE;
                    fallocate(self.file(), flags, at, len).expect("zero");
                }
                7 => self.file().sync_data().expect("flush"),
                _ => {
                    let mut read = vec![0; range.len()];
                    self.file().read_exact_at(&mut read, at).expect("read");
                    assert!(read == self.bytes[range], "{len} bytes at {at}");
                }
            }
        }
    }
}
