//! Whether the kernel's own I/O may depend on this process (PR_SET_IO_FLUSHER, prctl(2)).
//!
//! Promises: allocations of a process that is one never wait for memory to be written to its own
//! export. A refusal is never an error. Called by the main thread before those are started that
//! serve, so that they inherit it.

use std::os::fd::AsFd;

use ringdisk_disk::Disk;
use ringdisk_storage::Kind;
use rustix::fs::{FileType, fstat};

/// Tells the kernel.
///
/// * `is_needed`: what is served can be below a block device, or is one: the file of a mount may
///   become a loop device at any time; a disk for virtual machines is in nobody's way here, unless
///   it is a block device of this machine.
///
/// Needs CAP_SYS_RESOURCE; an unprivileged process cannot be used for a loop mount by others than
/// root anyway.
pub fn become_one_if(is_needed: bool) {
    if !is_needed {
        return;
    }
    match rustix::process::configure_io_flusher_behavior(true) {
        Ok(()) => tracing::debug!("PR_SET_IO_FLUSHER is set"),
        Err(errno) => tracing::debug!(
            "PR_SET_IO_FLUSHER was refused ({errno}); under memory pressure block devices that \
             depend on this process could stall"
        ),
    }
}

/// Whether a disk lies, in whole or in part, on a block device.
pub fn is_on_a_device(disk: &Disk) -> bool {
    disk.layers().iter().any(|layer| {
        let storages = [layer.file(), layer.data_storage()];
        storages.into_iter().flatten().any(|storage| storage.kind() == Kind::BlockDevice)
    })
}

/// Whether a descriptor is one of a block device.
pub fn is_device(fd: impl AsFd) -> bool {
    fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice)
}

#[cfg(test)]
mod tests {
    use ringdisk_disk::NullOptions;

    use super::*;

    #[test]
    fn neither_a_null_disk_nor_a_file_is_a_device() {
        assert!(!is_on_a_device(&Disk::null(&NullOptions::default())));
        assert!(!is_device(tempfile::tempfile().expect("a file")));
    }

    #[test]
    fn a_thread_is_one_when_it_is_needed_and_passes_it_on() {
        let is_one = || rustix::process::is_io_flusher().unwrap_or(false);
        // Flags belong to threads: this one ends with the test.
        let inherited = std::thread::spawn(move || {
            become_one_if(false);
            let before = is_one();
            become_one_if(true);
            (before, is_one(), std::thread::spawn(is_one).join().expect("a thread"))
        });
        let (before, after, inherited) = inherited.join().expect("a thread");
        assert!(!before);
        assert_eq!(after, inherited);
    }
}
