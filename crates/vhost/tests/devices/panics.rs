//! A queue thread that ends by a defect: its export ends with a reason, and of a disk that is kept
//! the process ends, so that the next one goes on with what was recorded.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

use ringdisk_disk::{Bytes, Disk, NullOptions};
use ringdisk_export::keep::Keeper;
use ringdisk_testkit::model::{Request, Vm, VmOptions, bits};
use ringdisk_vhost::HaltReason;

use crate::common::{MIB, Served, serve};

/// What the child process does.
const CHILD: &str = "RINGDISK_TEST_CHILD";
const SIGABRT: i32 = 6;

/// Keeps nothing, and says that it does.
#[derive(Debug)]
struct Nothing;

impl Keeper for Nothing {
    fn park(&mut self, _number: u64, _descriptor: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn release(&mut self, _number: u64) {}

    fn write(&mut self, _state: &str) -> io::Result<()> {
        Ok(())
    }

    fn leave(&mut self) {}

    fn end(&mut self) {}
}

fn served(is_kept: bool) -> Served {
    let disk =
        Disk::null(&NullOptions { size: Bytes(MIB), read_zeroes: true, latency: Duration::ZERO });
    serve(disk, |options| {
        options.queues = 1;
        if is_kept {
            options.keep = Some(Box::new(Nothing));
        }
    })
}

fn machine(served: &Served) -> Vm {
    let options = VmOptions { features: !bits::LOG_ALL & !bits::PACKED, ..VmOptions::default() };
    let mut vm = served.vm(options);
    assert_eq!(vm.status(0, Request::flush()), 0);
    vm
}

#[test]
fn the_export_ends_with_the_reason() {
    for is_connected in [false, true] {
        let served = served(false);
        let _vm = is_connected.then(|| machine(&served));
        ringdisk_vhost::testing::panic(&served.export);
        assert_eq!(served.export.wait().expect_err("a defect"), HaltReason::Panicked);
    }
}

#[test]
fn the_process_ends_where_another_one_goes_on() {
    if let Ok(word) = std::env::var(CHILD) {
        let served = served(true);
        let _vm = (word == "connected").then(|| machine(&served));
        // Nobody else does: this process does not come to its end.
        std::fs::remove_dir_all(served.directory.path()).expect("removed");
        ringdisk_vhost::testing::panic(&served.export);
        let _ = served.export.wait();
        return;
    }
    let name = "panics::the_process_ends_where_another_one_goes_on";
    for word in ["alone", "connected"] {
        let mut child = Command::new(std::env::current_exe().expect("this program"));
        let output = child.args([name, "--exact", "--nocapture"]).env(CHILD, word).output();
        let output = output.expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(SIGABRT), "{word}: {said}");
        assert!(said.contains("asked to panic"), "{word}: {said}");
    }
}
