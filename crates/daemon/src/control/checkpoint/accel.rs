//! The data path of a disk that the host kernel serves, while a checkpoint or a backup runs: it is
//! in this process, since the kernel copies nothing away before it overwrites.
//!
//! Promises: the kernel serves the disk again after the checkpoint, unless the queue threads have
//! to by then: acceleration was switched off meanwhile, or the disk has got limits.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use ringdisk_disk::Disk;
use ringdisk_ring::Ring;

use crate::control::serving::Serving;
use crate::failure::{Exit, Failure};

/// The kernel serves the disk again when this is dropped.
pub(in crate::control) struct Accel {
    serving: Arc<dyn Serving>,
    disk: Weak<Disk>,
    is_off: Arc<AtomicBool>,
}

impl fmt::Debug for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Accel")
    }
}

impl Accel {
    /// Brings the data path of a disk that the kernel serves back to userspace.
    ///
    /// * `is_off`: acceleration was switched off by a command.
    ///
    /// Errors: it stays in the kernel.
    pub(super) async fn take_back(
        ring: &Ring,
        disk: &Arc<Disk>,
        serving: &Arc<dyn Serving>,
        is_off: &Arc<AtomicBool>,
    ) -> Result<Option<Accel>, Failure> {
        if !serving.is_accelerated() {
            return Ok(None);
        }
        let asked = Arc::clone(serving);
        let switched = ring.offload(move || asked.switch_accel(false)).await;
        // Also where it is said to come later.
        let back = Accel {
            serving: Arc::clone(serving),
            disk: Arc::downgrade(disk),
            is_off: Arc::clone(is_off),
        };
        match switched {
            Ok(_) => {
                tracing::info!(
                    "the data path is in this process while the state of the disk is kept"
                );
                Ok(Some(back))
            }
            Err(why) => Err(Failure::new(Exit::Unsupported, why)
                .context("the data path does not return to this process")),
        }
    }
}

impl Drop for Accel {
    fn drop(&mut self) {
        let serving = Arc::clone(&self.serving);
        let (disk, is_off) = (self.disk.clone(), Arc::clone(&self.is_off));
        let is_wanted = move || {
            let has_limits = disk.upgrade().is_some_and(|disk| !disk.limits().are_none());
            !has_limits && !is_off.load(Ordering::Relaxed)
        };
        // It waits for virtqueues to move, and a control thread must not.
        let back = move || {
            if !is_wanted() {
                return;
            }
            let mut result = serving.switch_accel(true);
            // A command that came just then has found the queue threads serving.
            if !is_wanted() {
                result = serving.switch_accel(false);
            }
            if let Err(why) = result {
                tracing::warn!("the kernel does not serve the disk again: {why}");
            }
        };
        let thread = thread::Builder::new().name(String::from("accel-back"));
        if let Err(error) = thread.spawn(back) {
            tracing::warn!("the kernel does not serve the disk again: {error}");
        }
    }
}
