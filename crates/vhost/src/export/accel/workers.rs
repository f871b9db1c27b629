//! Threads of the kernel that serve virtqueues: how many, and where they run.
//!
//! Promises: worker `i` of `n` serves the virtqueues `i`, `i + n`, …, and runs where the queue
//! thread of virtqueue `i` does, in whose place it works. Control thread.

use crate::export::backend::Control;
use crate::export::kernel_device::{locked, refused};

impl Control {
    /// Makes the threads of the kernel and gives each its virtqueues. Does nothing when they are
    /// made.
    pub(super) fn make_workers(&mut self) -> Result<(), String> {
        let Some(accel) = &mut self.accel else { return Ok(()) };
        if accel.has_workers {
            return Ok(());
        }
        let queues = self.config.queues;
        let count = accel.options.workers.unwrap_or(queues).clamp(1, queues);
        let mut vblk = locked(accel.vblk.as_ref()?);
        for index in 0..count {
            let cpus = self.ring_nodes.cpus_of(index);
            let cpus = (!cpus.is_empty()).then_some(&cpus);
            let worker = vblk.new_worker(cpus).map_err(refused)?;
            if let Some(errno) = worker.unbound {
                let name = &self.device.name;
                tracing::warn!("{name}: a thread of the kernel runs unbound: {errno}");
            }
            for queue in (index..queues).step_by(usize::from(count)) {
                vblk.attach(queue, worker.id).map_err(refused)?;
            }
        }
        // Those that each device begins with, and that an attempt before this one has left, serve
        // nothing any more.
        let made = vblk.workers().len() - usize::from(count);
        let idle: Vec<u32> = vblk.workers()[..made].iter().map(|worker| worker.id).collect();
        for worker in idle {
            vblk.free_worker(worker).map_err(refused)?;
        }
        accel.has_workers = true;
        Ok(())
    }

    /// The process may be in a sandbox from now on. Threads that the kernel made before, for a
    /// guest that was taken over, have the rights of then, and nothing takes these from them:
    /// others take their place.
    pub(in crate::export) fn renew_workers(&mut self) {
        if self.accel.as_ref().is_none_or(|accel| !accel.has_workers) {
            return;
        }
        self.take_back_all();
        if let Some(accel) = &mut self.accel {
            accel.has_workers = false;
        }
        self.reconsider_kernel();
    }

    /// A virtqueue is about to run in the kernel: its worker goes where its queue thread is, which
    /// knows the node of its rings.
    pub(super) fn bring_worker_home(&self, index: u16) {
        let Some(accel) = &self.accel else { return };
        let Ok(vblk) = &accel.vblk else { return };
        let mut vblk = locked(vblk);
        // Of several virtqueues the first one decides, as when workers are made.
        if usize::from(index) >= vblk.workers().len() {
            return;
        }
        let cpus = self.ring_nodes.cpus_of(index);
        let moved = vblk.worker_of(index).and_then(|worker| vblk.place_worker(worker, &cpus));
        if let Err(error) = moved {
            let name = &self.device.name;
            tracing::warn!("{name}: the kernel's thread of virtqueue {index} stays: {error}");
        }
    }
}
