//! The virtqueues of a device: put on their threads, taken off, and moved with the guest's memory.
//!
//! Promises: control thread; a virtqueue is on one thread at most, and is held, with no request in
//! flight, while its memory changes. One whose rings are not in the new memory is suspended, not
//! broken, and goes on when they are there again.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringdisk_export::Gone;
use ringdisk_guest::{Areas, Memory};
use ringdisk_ring::{Errno, pin_to_cpus};

use super::backend::Control;
use crate::device::Complaint;
use crate::session::Refusal;
use crate::worker::{RingStart, areas, layout};

impl Control {
    /// Holds all virtqueues still, puts another memory in place, and lets them go on.
    pub(super) fn change_memory(&mut self, memory: Memory) -> Result<(), Refusal> {
        self.take_back_all();
        let memory = Arc::new(memory);
        let held: Vec<_> = self
            .threads
            .iter()
            .map(|t| t.ask_task(|worker| async move { worker.hold_all().await }))
            .collect();
        // All of them are asked by now, so all are let go, whatever becomes of one.
        let ends: Vec<_> = held.into_iter().map(|pending| pending.wait(self.may_wait())).collect();
        let still: Result<(), Gone> = ends.into_iter().collect();
        let shown = match still {
            Ok(()) => self.show_memory_to_rings(&memory),
            Err(gone) => Err(gone.into()),
        };
        let released = self.release_rings();
        shown?;
        released?;
        self.memory = memory;
        self.wake_suspended();
        self.reconsider_kernel();
        Ok(())
    }

    /// Lets virtqueues go on that were held.
    ///
    /// Errors: a thread does not answer; those of others go on.
    fn release_rings(&self) -> Result<(), Refusal> {
        let released: Vec<_> =
            self.threads.iter().map(|thread| thread.ask(|worker| worker.release_all())).collect();
        let ends: Vec<_> =
            released.into_iter().map(|pending| pending.wait(self.may_wait())).collect();
        Ok(ends.into_iter().collect::<Result<(), Gone>>()?)
    }

    /// Moves virtqueues that are held to another memory; those that are not in it are taken off
    /// their threads.
    fn show_memory_to_rings(&mut self, memory: &Arc<Memory>) -> Result<(), Refusal> {
        let running: Vec<u16> = (0..self.config.queues).filter(|i| self.runs(*i)).collect();
        for index in running {
            if !self.move_ring(memory, index)? {
                let base = self.take_off_thread(index)?;
                self.rings[usize::from(index)].suspended_at = Some(base);
            }
        }
        self.show_memory(memory)
    }

    pub(super) fn runs(&self, index: u16) -> bool {
        let ring = &self.rings[usize::from(index)];
        ring.setup.is_some() && ring.suspended_at.is_none()
    }

    /// Lets a virtqueue that is held use this memory: the file behind its addresses may be another
    /// one. `false`: it is not in it.
    fn move_ring(&self, memory: &Memory, index: u16) -> Result<bool, Refusal> {
        let Some(setup) = &self.rings[usize::from(index)].setup else { return Ok(false) };
        let Ok(areas) = areas(memory, setup, self.device.features()) else { return Ok(false) };
        let log = setup.log;
        let moved = self.thread(index).ask(move |worker| worker.set_areas(index, areas, log));
        Ok(moved.wait(self.may_wait())?.is_ok())
    }

    /// Whether all areas of a virtqueue lie in a memory.
    pub(super) fn is_in(&self, memory: &Memory, index: u16) -> bool {
        let setup = self.rings[usize::from(index)].setup.as_ref();
        setup.is_some_and(|setup| areas(memory, setup, self.device.features()).is_ok())
    }

    /// Lets virtqueues go on whose memory is there again.
    pub(super) fn wake_suspended(&mut self) {
        for index in 0..self.config.queues {
            let ring = &self.rings[usize::from(index)];
            let Some(base) = ring.suspended_at else { continue };
            if !self.is_in(&self.memory, index) {
                continue;
            }
            match self.put_on(index, base) {
                Ok(()) => self.rings[usize::from(index)].suspended_at = None,
                Err(refusal) => {
                    self.device.complain(
                        Complaint::Suspended,
                        format_args!("virtqueue {index} stays suspended: {refusal}"),
                    );
                }
            }
        }
    }

    /// Starts a virtqueue: in the host kernel if it may be there, or on its thread.
    pub(super) fn put_on(&mut self, index: u16, base: u32) -> Result<(), Refusal> {
        if self.is_in_kernel(index) {
            return Err("the kernel has not given it back".into());
        }
        if self.memory.is_lost() {
            // There are zeroes of our own now: writes of the guest would put them on the disk.
            return Err(
                "memory of the guest is gone, its file was truncated: it has to be announced anew"
                    .into(),
            );
        }
        self.check_required()?;
        // In any case on its thread first, which knows where it goes on, and carries out what a
        // process before us had taken.
        self.put_on_thread(index, base)?;
        self.move_to_kernel(index)?;
        // What the kernel was asked, and refused.
        if let Err(refusal) = self.check_required() {
            self.take_off(index)?;
            return Err(refusal);
        }
        Ok(())
    }

    /// Starts a virtqueue on its thread.
    pub(super) fn put_on_thread(&mut self, index: u16, base: u32) -> Result<(), Refusal> {
        let ring = &self.rings[usize::from(index)];
        let setup = ring.setup.as_ref().ok_or("it was not set up")?;
        let areas = areas(&self.memory, setup, self.device.features())?;
        let lies = areas.clone();
        let duplicate = |fd: Option<&OwnedFd>| fd.map(OwnedFd::try_clone).transpose();
        let start = RingStart {
            index,
            layout: layout(setup),
            size: setup.size,
            base,
            areas,
            features: self.device.features(),
            inflight: self.area_for(index, setup.size),
            log: self.log_in_force(),
            used_log: setup.log,
            kick: setup.kick.try_clone()?,
            call: duplicate(ring.call.as_ref())?,
            error: duplicate(ring.error.as_ref())?,
        };
        let started = self.thread(index).ask(move |worker| worker.start(start));
        started.wait(self.may_wait())?.map_err(|error| Refusal::new(error.to_string()))?;
        self.bring_home(index, &lies)
    }

    /// Moves the thread of a virtqueue to the node where its rings are, with the memory that it
    /// uses for every request.
    fn bring_home(&mut self, index: u16, areas: &Areas) -> Result<(), Refusal> {
        let moves = self.ring_nodes.started(index, areas).map(|(node, cpus)| (node, Some(cpus)));
        // The top of its stack was written by the thread that made it, on whatever node that was.
        let stays = || self.ring_nodes.shared(index).map(|node| (node, None));
        let Some((node, cpus)) = moves.or_else(stays) else { return Ok(()) };
        let there = cpus.clone();
        let moved = self.thread(index).ask(move |worker| {
            there.as_ref().map_or(Ok(()), pin_to_cpus)?;
            Ok::<_, Errno>(worker.move_to(node))
        });
        match moved.wait(self.may_wait())? {
            Ok(memory) => {
                if let Some(cpus) = cpus {
                    self.ring_nodes.moved(index, cpus);
                }
                match memory {
                    Ok(pages) => {
                        tracing::debug!("the thread of virtqueue {index} has {:?}", pages.by_node);
                    }
                    Err(errno) => tracing::debug!(
                        "memory of the thread of virtqueue {index} stays where it is: {errno}"
                    ),
                }
            }
            Err(errno) => {
                let name = &self.device.name;
                tracing::warn!(
                    "{name}: the thread of virtqueue {index} stays far from it: {errno}"
                );
            }
        }
        Ok(())
    }

    /// Drains a virtqueue and takes it off, wherever it is. Gives its base.
    pub(super) fn take_off(&mut self, index: u16) -> Result<u32, Refusal> {
        if self.is_in_kernel(index) {
            self.stop_in_kernel(index)
        } else {
            self.take_off_thread(index)
        }
    }

    /// Drains a virtqueue and takes it off its thread. Gives its base.
    pub(super) fn take_off_thread(&mut self, index: u16) -> Result<u32, Refusal> {
        let stopped =
            self.thread(index).ask_task(move |worker| async move { worker.stop(index).await });
        Ok(self.wait_and_give_way(stopped)?)
    }
}

#[cfg(test)]
mod tests;
