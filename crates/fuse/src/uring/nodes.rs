//! The memory of queues and the nodes that it is on.
//!
//! Promises: control path; a refusal of the system is for the caller to log: memory elsewhere is
//! slower, not wrong.

use std::ops::Range;

use ringdisk_ring::{Errno, SharedMemory};

use super::rings::Rings;

impl Rings {
    /// Binds the memory of each queue to its node, before anything touches it: rings that register
    /// a pool take all of its pages.
    ///
    /// Errors: the last refusal; that memory comes from where it is touched.
    pub(crate) fn bind_memory(&self) -> Result<(), Errno> {
        let mut result = Ok(());
        let mut bind = |queue: u16, memory: &SharedMemory, range: Range<usize>| {
            if let Some(node) = self.plan.0[usize::from(queue)].node
                && let Err(errno) = memory.prefer_node(range, node)
            {
                result = Err(errno);
            }
        };
        for entry in self.entries.iter().filter(|entry| entry.number == 0) {
            let [headers, payloads] = entry.memory.of_whole_queue();
            bind(entry.queue, headers, 0..headers.len());
            if self.pool().is_none() {
                bind(entry.queue, payloads, 0..payloads.len());
            }
        }
        if let Some(pool) = self.pool() {
            for (queue, region) in (0..).zip(&pool.regions) {
                bind(queue, &pool.memory, region.clone());
            }
        }
        result
    }

    /// Addresses and bytes of the memory of a thread's queues; each buffer for itself.
    pub(crate) fn memory_of(&self, thread: usize) -> Vec<(usize, usize)> {
        let is_own = |queue: usize| self.plan.0[queue].thread == thread;
        let mut ranges = Vec::new();
        for entry in self.entries.iter().filter(|entry| is_own(usize::from(entry.queue))) {
            let [headers, payloads] = entry.memory.of_whole_queue();
            let payload = entry.memory.payload();
            ranges.extend((entry.number == 0).then(|| (headers.address(), headers.len())));
            let own = (payloads.address() + payload.start, payload.len());
            ranges.extend(self.pool().is_none().then_some(own));
        }
        if let Some(pool) = self.pool() {
            for (_, region) in pool.regions.iter().enumerate().filter(|(queue, _)| is_own(*queue)) {
                let buffers = region.clone().step_by(pool.buffer_bytes);
                ranges.extend(buffers.map(|at| (pool.memory.address() + at, pool.buffer_bytes)));
            }
        }
        ranges
    }

    /// What the memory of all queues takes once every byte of it was used, bytes.
    pub(crate) fn memory_bytes_max(&self, payload_bytes: usize) -> usize {
        match self.pool() {
            None => self.plan.memory_bytes_max(payload_bytes),
            Some(pool) => {
                let headers =
                    |queue: &super::plan::QueuePlan| super::plan::header_bytes(queue.entries);
                pool.memory.len() + self.plan.0.iter().map(headers).sum::<usize>()
            }
        }
    }
}

#[cfg(test)]
mod tests;
