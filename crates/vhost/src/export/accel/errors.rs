//! The log of I/O errors that the host kernel gives a guest.
//!
//! Promises: what the module counts is said in the log, at most once in some seconds. Control
//! thread.

use std::time::Instant;

use crate::export::backend::Control;
use crate::export::kernel_device::{Occasion, locked};

impl Control {
    /// Says how many requests of the guest have failed in the kernel.
    pub(in crate::export) fn tell_kernel_errors(&mut self, occasion: Occasion) {
        let now = Instant::now();
        let Some(accel) = &mut self.accel else { return };
        let may_have_news = accel.is_used() || accel.errors.is_behind;
        if occasion == Occasion::Regular && (!may_have_news || !accel.errors.is_due(now)) {
            return;
        }
        let Ok(vblk) = &accel.vblk else { return };
        let counted = {
            let vblk = locked(vblk);
            let of_queue = |index| vblk.stats(index).map_or(0, |stats| stats.errors);
            (0..vblk.queues()).map(of_queue).sum()
        };
        let new = accel.errors.news(counted, occasion, now);
        if new > 0 {
            let name = &self.device.name;
            tracing::error!(
                "{name}: {new} requests failed for the guest with I/O errors in the host kernel, \
                 whose log may say where and why"
            );
        }
    }
}
