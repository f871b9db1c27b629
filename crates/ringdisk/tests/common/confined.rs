//! What a process in a sandbox shows of itself.

use std::fs;
use std::path::Path;
use std::time::Duration;

use ringdisk_testkit::process::until;

/// `CAP_DAC_OVERRIDE`, `CAP_IPC_LOCK` and `CAP_SYS_RESOURCE`.
const KEPT: u64 = (1 << 1) | (1 << 14) | (1 << 24);

/// `PF_IO_WORKER` of a thread's flags, and `PF_EXITING`: it is on its way out, and the kernel gives
/// it no filter any more (linux/sched.h).
const IO_WORKER: u32 = 0x10;
const EXITING: u32 = 0x4;

/// The value of a line of /proc/PID/task/TID/status, of each thread. Not of the kernel's own
/// threads for a ring (`iou-wrk-…`): they run no code of the process, and each operation has the
/// powers of the thread that asked for it.
pub(crate) fn of_threads(pid: u32, name: &str) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let value = |path: &Path| {
        // One that has ended meanwhile.
        let status = fs::read_to_string(path.join("status")).ok()?;
        if runs_no_code(path)? {
            return None;
        }
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim_start_matches(':').trim().to_owned())
    };
    threads.flatten().filter_map(|entry| value(&entry.path())).collect()
}

/// Whether a thread is one of the kernel's for a ring, or ends. By its flags: before it runs for
/// the first time it has the name of the thread that made it. `None`: it has ended.
fn runs_no_code(task: &Path) -> Option<bool> {
    let stat = fs::read_to_string(task.join("stat")).ok()?;
    // After the name, which may hold anything: state, ppid, pgrp, session, tty, tpgid, flags.
    let flags = stat.rsplit(") ").next()?.split(' ').nth(6)?;
    Some(flags.parse::<u32>().expect("flags") & (IO_WORKER | EXITING) != 0)
}

/// Every thread has a filter, and no powers but the few; or none has.
#[track_caller]
pub(crate) fn assert_confined(pid: u32, is_confined: bool) {
    let (mode, no_new) = if is_confined { ("2", "1") } else { ("0", "0") };
    let is_said = |name, wanted| {
        let values = of_threads(pid, name);
        assert!(!values.is_empty() && values.iter().all(|value| value == wanted), "{values:?}");
    };
    is_said("Seccomp", mode);
    is_said("NoNewPrivs", no_new);
    for name in ["CapEff", "CapPrm", "CapBnd"] {
        for value in of_threads(pid, name) {
            let value = u64::from_str_radix(&value, 16).expect("hex");
            assert_eq!(value & !KEPT == 0, is_confined, "{name} {value:x}");
        }
    }
}

/// Children of a process.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("a process").flatten();
    let of = |path: &Path| fs::read_to_string(path.join("children")).unwrap_or_default();
    let text: String = tasks.map(|task| of(&task.path())).collect::<Vec<_>>().join(" ");
    text.split_whitespace().map(|pid| pid.parse().expect("a number")).collect()
}

/// Whether a process ends soon.
pub(crate) fn is_gone(pid: u32) -> bool {
    let gone = || (!Path::new(&format!("/proc/{pid}")).exists()).then_some(());
    until(Duration::from_secs(5), gone).is_some()
}
