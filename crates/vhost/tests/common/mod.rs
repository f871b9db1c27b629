//! What the tests of whole devices share: disks, exports of this process, and machines for them.

// Each test program uses a part of this.
#![allow(dead_code)]

pub(crate) mod ledger;
pub(crate) mod racer;
pub(crate) mod raw;

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_disk::{Disk, Format, ImageOptions, Source};
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::model::{Discards, FrontEnd, LoadOptions, Vm, VmOptions};
use ringdisk_testkit::mount::scratch;
use ringdisk_testkit::sim::SimStorage;
use ringdisk_vhost::{CommonOptions, Export, ExportOptions, Listen};
use tempfile::TempDir;

/// One mebibyte.
pub(crate) const MIB: u64 = 1 << 20;

/// A disk in memory that does what the test says.
pub(crate) fn simulated(size: u64) -> (SimStorage, Arc<Disk>) {
    let sim = SimStorage::new(size, 42);
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    (sim, disk)
}

/// Opens an image.
pub(crate) fn open(path: &Path, format: Format) -> Arc<Disk> {
    let options = ImageOptions { format: Some(format), ..ImageOptions::default() };
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let source = Source::Path(path.to_owned());
    runtime.block_on(async { Disk::open(&ring, source, &options).await }).expect("open")
}

/// Closes an image that is served no more.
pub(crate) fn close(disk: &Disk) {
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    runtime.block_on(async { disk.close(&ring).await }).expect("close");
}

/// An export of this process, and where it listens.
pub(crate) struct Served {
    pub(crate) export: Export,
    pub(crate) path: PathBuf,
    pub(crate) directory: TempDir,
}

/// Serves a disk.
pub(crate) fn serve(disk: Arc<Disk>, change: impl FnOnce(&mut ExportOptions)) -> Served {
    let _ = tracing_subscriber::fmt().with_test_writer().try_init();
    let directory = scratch();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).expect("a socket");
    let mut options = ExportOptions {
        queues: 8,
        common: CommonOptions::with_threads(2),
        serial: String::from("model"),
        ..ExportOptions::new(Listen::Listener(listener.into()))
    };
    change(&mut options);
    let export = Export::start(disk, options).expect("an export");
    Served { export, path, directory }
}

impl Served {
    pub(crate) fn front(&self) -> FrontEnd {
        FrontEnd::connect(&self.path)
    }

    pub(crate) fn vm(&self, options: VmOptions) -> Vm {
        Vm::started(self.front(), options)
    }
}

/// A usual load on a disk of this size.
pub(crate) fn load(size: u64, seed: u64) -> LoadOptions {
    LoadOptions {
        size,
        block: 512,
        bytes_max: 64 << 10,
        segments: 12,
        depth: 8,
        discards: Discards::Zero,
        seed,
    }
}
