//! A device that is slow to take a write: the write of the dead process lands before anything is
//! carried out again.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use ringdisk_disk::{Disk, ImageOptions};
use ringdisk_fuse::{CommonOptions, Export, ExportOptions, Transport};
use ringdisk_testkit::images::pattern;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{STOP, scratch, text};
use ringdisk_testkit::process::{Process, command, until};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};
use rustix::process::Signal;

use crate::common::{Aligned, BLOCK, MIB, open_direct};
use crate::keep::kept::Kept;

pub(crate) const AT: u64 = 64 << 10;

/// The storage of the test, as a file: what a killed process has begun to write to it stays in the
/// kernel until the test lets it go.
pub(crate) struct Device {
    sim: SimStorage,
    export: Option<Export>,
    directory: tempfile::TempDir,
}

impl Device {
    pub(crate) fn new() -> Device {
        let sim = SimStorage::new(MIB, 1);
        let directory = scratch();
        let path = directory.path().join("device");
        std::fs::write(&path, "").expect("a mountpoint");
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        let options = ExportOptions {
            common: CommonOptions::with_threads(1),
            transport: Transport::Dev,
            ..ExportOptions::new(path)
        };
        let export = Export::start(disk, options).expect("an export of the test itself");
        Device { sim, export: Some(export), directory }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("device")
    }

    /// The next write to the place of interest does not land.
    pub(crate) fn hold_next_write(&self) {
        self.sim.on(When::kind(OpKind::Write).at(AT..AT + 1).once(), Fault::Hold);
    }

    /// Waits until a write is held; gives its number.
    pub(crate) fn wait_for_held(&self) -> u64 {
        let held = until(Duration::from_secs(5), || self.sim.held().first().map(|op| op.number));
        held.expect("the write is with the device")
    }

    /// Numbers of the writes to the place of interest.
    fn writes(&self) -> Vec<u64> {
        let log = self.sim.log();
        let here = log.iter().filter(|op| op.kind == OpKind::Write && op.offset == AT);
        here.map(|op| op.number).collect()
    }

    fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK];
        self.sim.peek(AT, &mut bytes);
        bytes
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.sim.clear_rules();
        self.sim.release_all();
        if let Some(export) = self.export.take() {
            export.stop_handle().stop();
            let _ = export.wait();
        }
    }
}

#[test]
fn the_write_of_a_dead_process_lands_before_it_is_carried_out_again() {
    if !needs_root() {
        return;
    }
    let device = Device::new();
    let disk = Kept::raw(&device.path(), &["--direct", "--threads", "1"]);
    device.hold_next_write();
    let path = disk.path();
    let first = pattern(1, AT, BLOCK);
    let client = std::thread::spawn({
        let bytes = first.clone();
        move || {
            let file = open_direct(&path);
            file.write_all_at(Aligned::of(&bytes).bytes(), AT)
                .expect("the write that was under way");
            file
        }
    });
    let held = device.wait_for_held();

    disk.kill_server();
    let said = || disk.0.output().contains("waiting until the writes").then_some(());
    assert_eq!(until(Duration::from_secs(10), said), Some(()), "{}", disk.0.output());
    std::thread::sleep(Duration::from_millis(500));
    assert!(!client.is_finished(), "answered while the device still holds the write");
    assert_eq!(device.writes(), [held], "carried out again before the first has landed");

    device.sim.release_all();
    let file = client.join().expect("the client sees no error");
    let writes = device.writes();
    assert_eq!((writes.len(), writes[0]), (2, held), "{writes:?}");
    assert!(device.content() == first);
    // And what is written next stays.
    let second = pattern(2, AT, BLOCK);
    file.write_all_at(Aligned::of(&second).bytes(), AT).expect("the next write");
    drop(file);
    disk.stop();
    assert!(device.content() == second);
}

#[test]
fn a_stop_waits_a_moment_for_the_write_of_a_dead_process() {
    if !needs_root() {
        return;
    }
    for (lands, code) in [(true, 0), (false, 5)] {
        let device = Device::new();
        let disk = Kept::raw(&device.path(), &["--direct", "--threads", "1"]);
        device.hold_next_write();
        // A process, whose file no process that another test starts has for a moment.
        let (output, seek) = (format!("of={}", text(&disk.path())), format!("seek={}", AT / 4096));
        let words = ["dd", "if=/dev/zero", &output, "bs=4k", "count=1", &seek];
        let mut client =
            Process::spawn(command(&words).args(["oflag=direct", "conv=notrunc,nocreat"]));
        device.wait_for_held();
        disk.kill_server();
        let said = || disk.0.output().contains("waiting until the writes").then_some(());
        assert_eq!(until(STOP, said), Some(()), "{}", disk.0.output());
        let mut mounted = disk.0;
        mounted.process().signal(Signal::TERM);
        std::thread::sleep(Duration::from_millis(300));
        if lands {
            device.sim.release_all();
        }
        let finished = mounted.finish();
        assert_eq!(finished.code(), Some(code), "{}", finished.output());
        // Its close may come after the end of the mount.
        assert!(client.wait(STOP).is_some(), "the client hangs");
        assert_eq!(client.output().contains("error writing"), !lands, "{}", client.output());
    }
}
