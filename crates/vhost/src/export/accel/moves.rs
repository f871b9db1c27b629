//! Virtqueues go into the host kernel, and come back.
//!
//! Promises: a virtqueue is drained before it moves, in either direction, and nothing is waited for
//! but requests in flight. The disk is held from before the first one goes until after the last one
//! is back. What the kernel refuses leaves them on their threads. Control thread.

use std::os::fd::AsFd;
use std::sync::Arc;

use ringdisk_disk::Plain;
use ringdisk_export::Gone;
use ringdisk_vblk::{DiskSetup, Engine, RingSetup};

use crate::blk::SERIAL_BYTES;
use crate::blk::config::RANGES_MAX;
use crate::export::backend::Control;
use crate::export::kernel_device::{Obstacle, Occasion, claim, locked, refused};
use crate::session::Refusal;
use crate::worker::{Pending, Worker, areas};

impl Control {
    /// Moves a virtqueue from its thread into the kernel, if it may be there.
    ///
    /// Errors: it is on neither now.
    pub(in crate::export) fn move_to_kernel(&mut self, index: u16) -> Result<(), Refusal> {
        if self.accel.is_none() || self.is_in_kernel(index) {
            return Ok(());
        }
        let mut why = self.accel_obstacle();
        if why.is_none() {
            let base = self.take_off_thread(index)?;
            if let Err(obstacle) = self.enter_kernel(index, base) {
                self.take_back_all();
                self.put_on_thread(index, base)?;
                why = Some(obstacle);
            }
        } else {
            // All of them or none: what keeps one out keeps the disk out.
            self.take_back_all();
        }
        self.tell_accel(why);
        Ok(())
    }

    /// Waits for a queue thread while other virtqueues may be in the kernel, which holds the disk.
    /// A change of the disk may come now, for which the thread's requests wait, and which waits for
    /// the hold: then the others come back.
    pub(in crate::export) fn wait_and_give_way<T>(
        &mut self,
        pending: Pending<T>,
    ) -> Result<T, Gone> {
        let may_wait = self.may_wait();
        pending.wait(|| {
            if self.signals.take_recall() {
                self.take_back_all();
            }
            may_wait()
        })
    }

    fn enter_kernel(&mut self, index: u16, base: u32) -> Result<(), Obstacle> {
        self.prepare_kernel()?;
        self.bring_worker_home(index);
        let Some(accel) = &mut self.accel else { return Ok(()) };
        let mut vblk = locked(accel.vblk.as_ref().map_err(|why| Obstacle::Module(why.clone()))?);
        let ring = &self.rings[usize::from(index)];
        let trouble = |why: &dyn std::fmt::Display| Obstacle::Trouble(why.to_string());
        let setup = ring.setup.as_ref().ok_or_else(|| trouble(&"it was not set up"))?;
        let areas =
            areas(&self.memory, setup, self.device.features()).map_err(|error| trouble(&error))?;
        let ring = RingSetup {
            size: setup.size,
            base: u16::try_from(base & 0xffff).unwrap_or(0),
            areas,
            kick: setup.kick.as_fd(),
            call: ring.call.as_ref().map(AsFd::as_fd),
            // A ring that the kernel gives up is ours to look at (`look_at_kernel`).
            err: Some(self.signals.as_fd()),
        };
        if let Some(area) = &self.inflight {
            // Nothing is in flight at this moment, and what the kernel takes it completes, whatever
            // becomes of us: the next process begins at the used index.
            area.retire(index);
        }
        vblk.start(index, ring).map_err(|error| trouble(&error))?;
        accel.in_kernel[usize::from(index)] = true;
        Ok(())
    }

    /// Holds the disk and tells the module of it, of the features and of the memory.
    fn prepare_kernel(&mut self) -> Result<(), Obstacle> {
        if self.accel.as_ref().is_none_or(|accel| accel.is_prepared) {
            return Ok(());
        }
        // Not before: here they are made by a thread of the sandbox, and have its rights.
        self.make_workers().map_err(Obstacle::Trouble)?;
        let held = self.threads[0].ask_task_or(Worker::hold_disk, Worker::release_disk);
        let Ok(held) = held.wait(self.may_wait()) else {
            // The answer may have come at this moment. No thread waits for the queue thread now,
            // which may be stuck.
            drop(self.threads[0].ask(|worker| worker.release_disk()));
            return Err(Obstacle::Trouble(String::from("the queue thread does not answer")));
        };
        let plain = held.map_err(|error| Obstacle::Disk(error.to_string()))?;
        let claimed = if plain.is_block_device && !plain.read_only {
            claim(plain.fd.as_fd()).map(Some).map_err(Obstacle::InUse)
        } else {
            Ok(None)
        };
        let ready = claimed.and_then(|claim| {
            self.describe(&plain).map_err(Obstacle::Trouble)?;
            Ok(claim)
        });
        match (&mut self.accel, ready) {
            (Some(accel), Ok(claim)) => {
                (accel.is_prepared, accel.capacity, accel.claim) = (true, plain.size.0, claim);
                // As the module chooses, too (`kernel/vhost-blk/disk.c`).
                let engine = match accel.options.engine {
                    Engine::Default if plain.is_block_device => Engine::Bio,
                    Engine::Default => Engine::Kiocb,
                    asked => asked,
                };
                accel.status.set_engine(Some(engine));
                Ok(())
            }
            (_, Err(why)) => {
                self.let_disk_go();
                Err(why)
            }
            (None, Ok(_)) => Ok(()),
        }
    }

    fn describe(&self, plain: &Plain) -> Result<(), String> {
        let Some(accel) = &self.accel else { return Ok(()) };
        let mut vblk = locked(accel.vblk.as_ref()?);
        let features = self.device.features() & vblk.info().features;
        vblk.set_features(features).map_err(refused)?;
        vblk.set_memory(Arc::clone(&self.memory)).map_err(refused)?;
        let mut id = [0; SERIAL_BYTES];
        id.copy_from_slice(&self.device.serial);
        let disk = DiskSetup {
            fd: plain.fd.as_fd(),
            engine: accel.options.engine,
            read_only: self.device.read_only,
            write_through: plain.write_through || self.device.is_write_through(),
            block_bytes: self.device.logical_block,
            memory_align: plain.memory_align,
            ranges_max: RANGES_MAX.min(vblk.info().ranges_max),
            range_sectors_max: self.config.longest_range_sectors(),
            capacity: plain.size.0,
            id,
        };
        vblk.set_disk(Some(&disk)).map_err(refused)
    }

    /// Nothing of ours is in the kernel any more: changes of the disk may go on.
    fn let_disk_go(&mut self) {
        let Some(accel) = &mut self.accel else { return };
        accel.is_prepared = false;
        accel.status.set_engine(None);
        if let Ok(vblk) = &accel.vblk {
            let mut vblk = locked(vblk);
            // The memory of a guest that has gone goes, too.
            if let Err(error) = vblk.set_disk(None).and_then(|()| vblk.forget_memory()) {
                let name = &self.device.name;
                tracing::warn!("{name}: the kernel keeps the image and the memory: {error}");
            }
        }
        accel.claim = None;
        let released = self.threads[0].ask(|worker| worker.release_disk());
        let _ = released.wait(self.may_wait());
    }

    /// Drains a virtqueue that is in the kernel and takes it off. Gives its base.
    ///
    /// Errors: the kernel does not give it back (this process is being killed). It stays there,
    /// with its memory and the disk.
    pub(in crate::export) fn stop_in_kernel(&mut self, index: u16) -> Result<u32, Refusal> {
        let Some(accel) = &mut self.accel else { return Err("it is not in the kernel".into()) };
        let stopped = {
            let mut vblk = locked(accel.vblk.as_ref().map_err(Clone::clone)?);
            let stopped = vblk.stop(index);
            accel.in_kernel[usize::from(index)] = vblk.is_started(index);
            stopped
        };
        if !accel.is_used() {
            accel.status.set(false, None);
            self.tell_kernel_errors(Occasion::Stopped);
            self.let_disk_go();
        }
        stopped.map(u32::from).map_err(|error| {
            let text = format!("virtqueue {index} does not come back from the kernel: {error}");
            self.device.set_broken(text.clone());
            Refusal::new(text)
        })
    }

    /// Takes all virtqueues back; they go on, on their threads. What the kernel does not give back
    /// (this process is being killed) stays there, with its memory and the disk; the next process
    /// finds what is in flight in the ring.
    pub(in crate::export) fn take_back_all(&mut self) {
        let Some(accel) = &mut self.accel else { return };
        let Ok(vblk) = &accel.vblk else { return };
        let mut bases = Vec::new();
        if accel.is_used() {
            let mut vblk = locked(vblk);
            match vblk.stop_all() {
                Ok(stopped) => bases = stopped,
                Err(error) => {
                    let text = format!("the kernel does not give virtqueues back: {error}");
                    self.device.set_broken(text);
                }
            }
            for (index, is_there) in (0..).zip(&mut accel.in_kernel) {
                let was_there = std::mem::replace(is_there, vblk.is_started(index));
                // The others go on; the driver resets the device.
                if was_there && !*is_there && bases.iter().all(|(other, _)| *other != index) {
                    let text =
                        format!("virtqueue {index}: the kernel does not say where it stands");
                    self.device.set_broken(text);
                }
            }
        }
        if accel.is_used() {
            return;
        }
        accel.status.set(false, None);
        if accel.is_prepared {
            self.tell_kernel_errors(Occasion::Stopped);
            self.let_disk_go();
        }
        for (index, base) in bases {
            if let Err(refusal) = self.put_on_thread(index, u32::from(base)) {
                self.device.set_broken(format!("virtqueue {index} does not go on here: {refusal}"));
            }
        }
    }

    /// Moves all virtqueues that run into the kernel, if they may be there.
    pub(super) fn consider_kernel(&mut self) {
        let running: Vec<u16> = (0..self.config.queues).filter(|i| self.runs(*i)).collect();
        for index in running {
            if let Err(refusal) = self.move_to_kernel(index) {
                self.device.set_broken(format!("virtqueue {index} does not go on: {refusal}"));
                return;
            }
        }
    }
}
