//! Frozen disks of one process on their way to one NBD address.
//!
//! Each disk has a control thread of its own; the one that has the listening sockets of a
//! checkpoint serves the disks of the others, too.
//!
//! Promises: a disk that waits here is taken once, by the checkpoint that it belongs to, or goes
//! when its own control thread gives the checkpoint up. Any thread.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ringdisk_nbd::NamedDisk;

/// Disks that wait, each with the number of its checkpoint.
static WAITING: Mutex<Vec<(String, NamedDisk)>> = Mutex::new(Vec::new());

/// A panic elsewhere leaves it valid, so poison is ignored.
fn waiting() -> MutexGuard<'static, Vec<(String, NamedDisk)>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A disk that waits; dropping this takes it away again.
#[derive(Debug)]
pub(super) struct Waits {
    id: String,
    export: String,
}

/// Lets a disk wait for the control thread that has the sockets of the checkpoint `id`.
pub(super) fn wait(id: &str, disk: NamedDisk) -> Waits {
    let export = disk.name.clone();
    waiting().push((id.to_owned(), disk));
    Waits { id: id.to_owned(), export }
}

impl Drop for Waits {
    fn drop(&mut self) {
        waiting().retain(|(id, disk)| *id != self.id || disk.name != self.export);
    }
}

/// Takes all disks that wait for the checkpoint `id`.
pub(super) fn take(id: &str) -> Vec<NamedDisk> {
    let mut waiting = waiting();
    waiting.extract_if(.., |(other, _)| other == id).map(|(_, disk)| disk).collect()
}
