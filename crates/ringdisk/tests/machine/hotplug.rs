//! CPUs that come and go under a mount. Changes the machine for all its users, and takes the CPU
//! affinity of their threads away: only with `RINGDISK_HOTPLUG=1`, as root, where a CPU can be
//! taken offline.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ringdisk_ring::{CpuList, Topology};
use ringdisk_testkit::images::{pattern, piece};
use ringdisk_testkit::limits::{Alone, UringParameter, alone, needs, needs_root};
use ringdisk_testkit::mount::Mounted;
use ringdisk_testkit::process::{Process, command};
use serde_json::{Value, json};

use crate::common::tools::ringdisk;
use crate::common::{MIB, serve_raw};

/// The last CPU of the machine; comes back when this is dropped.
struct Switched {
    cpu: usize,
    file: PathBuf,
    // Dropped last: the turn of the next test.
    _alone: Alone,
}

impl Switched {
    /// `None`, with a word about it, where no CPU may be switched.
    fn last() -> Option<Switched> {
        let wanted = std::env::var("RINGDISK_HOTPLUG").is_ok_and(|value| value == "1");
        if !needs("leave to switch CPUs off (RINGDISK_HOTPLUG=1)", wanted) || !needs_root() {
            return None;
        }
        let alone = alone();
        let cpu = Topology::read().allowed.iter().max()?;
        let file = PathBuf::from(format!("/sys/devices/system/cpu/cpu{cpu}/online"));
        let switched = std::fs::write(&file, "1").is_ok();
        needs("CPU that can be switched off", switched).then_some(Switched {
            cpu,
            file,
            _alone: alone,
        })
    }

    fn set(&self, online: bool) {
        std::fs::write(&self.file, if online { "1" } else { "0" }).expect("a switch of a CPU");
    }
}

impl Drop for Switched {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.file, "1");
    }
}

/// Reads on one CPU, past the page cache; `false`: it did not end in time.
fn reads_on(cpu: usize, disk: &Mounted) -> bool {
    let input = format!("if={}", disk.text());
    let cpu = cpu.to_string();
    let words = ["-c", &cpu, "dd", &input, "of=/dev/null", "bs=64k", "count=64", "iflag=direct"];
    let mut reader = Process::spawn(command(&["taskset"]).args(words));
    reader.wait(Duration::from_secs(10)).is_some_and(|status| status.success())
}

fn topology(disk: &Mounted) -> Value {
    ringdisk(Path::new("/"), &["topology", "--json", disk.text()]).ok().json()
}

/// Two entries wait in the queue of a CPU that is offline.
const WAITING: u64 = 2;

#[test]
fn a_cpu_that_comes_online_after_the_mount_is_served() {
    let Some(cpu) = Switched::last() else { return };
    let Some(_switch) = UringParameter::set(true) else { return };
    let node = Topology::read().node_of(cpu.cpu);
    for transport in ["uring", "dev"] {
        cpu.set(false);
        let disk = serve_raw(4 * MIB, &["-v", "--transport", transport]);
        let before = topology(&disk.mounted);
        assert_eq!(before["machine"]["online"].as_array().map(Vec::len), Some(cpu.cpu));
        cpu.set(true);
        assert!(reads_on(cpu.cpu, &disk.mounted), "{transport}: {before}");
        assert!(reads_on(0, &disk.mounted), "{transport}");
        assert_eq!(piece(disk.mounted.path(), 5, 100_000), pattern(1, 5, 100_000));
        if transport == "uring" {
            let queue = &before["mount"]["queues"][cpu.cpu];
            assert_eq!(queue["online-at-start"], json!(false));
            assert_eq!(queue["entries"], json!(WAITING));
            let thread = usize::try_from(queue["thread"].as_u64().expect("a number"));
            let thread = &before["mount"]["threads"][thread.expect("small")];
            assert_eq!(thread["node"], json!(node), "{before}");
        }
        let finished = disk.mounted.stop();
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        let line = format!("CPU {} is offline", cpu.cpu);
        assert_eq!(finished.stderr.contains(&line), transport == "uring", "{}", finished.stderr);
    }
}

#[test]
fn a_thread_whose_cpu_goes_offline_serves_on_elsewhere() {
    let Some(cpu) = Switched::last() else { return };
    let Some(_switch) = UringParameter::set(true) else { return };
    for transport in ["uring", "dev"] {
        let disk = serve_raw(4 * MIB, &["--transport", transport]);
        let threads = topology(&disk.mounted)["mount"]["threads"].clone();
        let mine = |thread: &Value| thread["cpus"] == json!([cpu.cpu]);
        assert!(threads.as_array().is_some_and(|all| all.iter().any(mine)), "{threads}");
        for _ in 0..3 {
            cpu.set(false);
            assert!(reads_on(0, &disk.mounted), "{transport}: offline");
            let after = topology(&disk.mounted);
            let thread =
                after["mount"]["threads"].as_array().expect("threads").iter().find(|t| mine(t));
            let allowed = thread.expect("the same thread")["cpus-allowed"].clone();
            let allowed: CpuList = allowed
                .as_array()
                .expect("a list")
                .iter()
                .filter_map(|cpu| cpu.as_u64().and_then(|cpu| cpu.try_into().ok()))
                .collect();
            assert!(!allowed.is_empty(), "{after}");
            cpu.set(true);
            assert!(reads_on(cpu.cpu, &disk.mounted), "{transport}: online again");
        }
        assert_eq!(piece(disk.mounted.path(), 5, 100_000), pattern(1, 5, 100_000));
        assert_eq!(disk.mounted.stop().code(), Some(0));
    }
}
