//! Names the processes that may hold a lock on a file, for error messages.
//!
//! Promises: never fails, never touches the files themselves (which may be on a file system that
//! hangs). The kernel names no owner for OFD locks (`l_pid` is -1), but `/proc/PID/fdinfo/FD` lists
//! the locks of each open file. Only processes that this user may inspect are found, so the answer
//! is a hint. Control path, after a refusal only.

use std::fs;
use std::os::fd::BorrowedFd;

/// Processes named in a message; more are counted only.
const NAMED_MAX: usize = 3;
/// Processes looked at: about 0.2 s of /proc on a slow machine.
const SCANNED_MAX: usize = 20_000;

/// "process 4711 (qemu-system-x86)", several of them, or "another process".
///
/// * `fd`: the file that is locked.
/// * `byte`: the locked byte; any OFD lock of the file when `None`.
pub(crate) fn describe(fd: BorrowedFd<'_>, byte: Option<u32>) -> String {
    let Ok(stat) = rustix::fs::fstat(fd) else { return "another process".into() };
    let own_fd = {
        use std::os::fd::AsRawFd;
        fd.as_raw_fd().to_string()
    };
    let own_pid = std::process::id();
    let mut found = Vec::new();
    let others = fs::read_dir("/proc").into_iter().flatten().flatten().take(SCANNED_MAX);
    let others = others.filter_map(|other| other.file_name().to_str()?.parse::<u32>().ok());
    // In a sandbox no other process is visible.
    for pid in others.filter(|pid| *pid != own_pid).chain([own_pid]) {
        let files = fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
        let holds = files
            .filter(|file| pid != own_pid || file.file_name().to_str() != Some(own_fd.as_str()))
            .filter_map(|file| fs::read_to_string(file.path()).ok())
            .any(|info| info.lines().any(|line| is_lock_on(line, stat.st_ino, byte)));
        if holds {
            found.push(pid);
        }
    }
    sentence(&found, own_pid)
}

fn sentence(found: &[u32], own_pid: u32) -> String {
    let mut names: Vec<String> = found
        .iter()
        .take(NAMED_MAX)
        .map(|&pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            let name = name.trim();
            if pid == own_pid {
                format!("this process ({pid}) itself")
            } else if name.is_empty() {
                format!("process {pid}")
            } else {
                format!("process {pid} ({name})")
            }
        })
        .collect();
    if found.len() > NAMED_MAX {
        names.push(format!("{} more", found.len() - NAMED_MAX));
    }
    match names.len() {
        0 => "another process (of another user or container, or on another host)".into(),
        _ => names.join(" and "),
    }
}

/// Whether a line of fdinfo is an OFD lock on the byte of the inode. Its form (fs/locks.c):
/// `lock:\t1: OFDLCK ADVISORY READ -1 fe:00:1234 100 100`, the last two being first and last byte
/// or `EOF`. The device is not compared: some file systems show another one to stat(2).
fn is_lock_on(line: &str, inode: u64, byte: Option<u32>) -> bool {
    let Some(rest) = line.strip_prefix("lock:") else { return false };
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let Some(place) = fields.iter().position(|&field| field == "OFDLCK") else { return false };
    let [_, _, _, _, file, first, last, ..] = fields[place..] else { return false };
    let same_inode = file.rsplit(':').next().and_then(|number| number.parse().ok()) == Some(inode);
    let first: u64 = first.parse().unwrap_or(0);
    let last: u64 = last.parse().unwrap_or(u64::MAX);
    same_inode && byte.is_none_or(|byte| (first..=last).contains(&u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::is_lock_on;

    const LINE: &str = "lock:\t1: OFDLCK  ADVISORY  READ -1 fe:00:1234 100 103";

    #[test]
    fn lock_line_matches_inode_and_byte() {
        assert!(is_lock_on(LINE, 1234, Some(100)));
        assert!(is_lock_on(LINE, 1234, Some(103)));
        assert!(is_lock_on(LINE, 1234, None));
        assert!(is_lock_on("lock:\t1: OFDLCK ADVISORY WRITE -1 00:1f:7 0 EOF", 7, Some(201)));
    }

    #[test]
    fn other_lines_do_not_match() {
        assert!(!is_lock_on(LINE, 1235, Some(100)));
        assert!(!is_lock_on(LINE, 1234, Some(104)));
        assert!(!is_lock_on("lock:\t1: POSIX ADVISORY READ 77 fe:00:1234 100 103", 1234, None));
        assert!(!is_lock_on("lock:\t1: OFDLCK ADVISORY", 1234, None));
        assert!(!is_lock_on("flags:\t0100002", 1234, None));
    }
}
