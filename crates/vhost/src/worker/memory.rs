//! Memory of a queue thread, moved to another NUMA node with it.
//!
//! Promises: what a thread touches for each request goes along: its stack, what its ring has for
//! operations and tasks, and its slots. Not what the kernel has made for the ring (move_pages(2)
//! does not find it), nor what was allocated for other things meanwhile: state of virtqueues that
//! run (some KiB each) and buffers that the disk keeps. What is allocated from now on comes from
//! the new node.

use ringdisk_ring::{Errno, NodePages, move_to_node, stack_of_thread};

use super::Worker;

impl Worker {
    /// Start address and bytes of what is used for every request. The thread itself.
    pub(crate) fn own_memory(&self) -> Vec<(usize, usize)> {
        let mut ranges = self.ring.own_memory();
        ranges.extend(stack_of_thread());
        ranges.push((std::ptr::from_ref(self).addr(), size_of_val(self)));
        for slot in self.all_slots.borrow().iter() {
            slot.own_memory(&mut ranges);
        }
        ranges
    }

    /// Moves it to a node. Gives where its pages are then; those that no thread has touched yet
    /// take no memory, and come from there.
    ///
    /// Errors: as [`move_to_node`]; it stays where it is, which is slower, and not wrong.
    pub(crate) fn move_to(&self, node: usize) -> Result<NodePages, Errno> {
        move_to_node(&self.own_memory(), node)
    }
}

#[cfg(test)]
mod tests;
