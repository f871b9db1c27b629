//! Slots: one for each operation in flight.
//!
//! Promises: a slot keeps the memory that the kernel may still touch (buffers, vectors, a time)
//! until the completion arrives, also when the future was dropped. A generation in the user data
//! distinguishes a late completion from the slot's next use. Memory for all slots is reserved at
//! start-up, and touched only when a slot is used for the first time.

use std::task::Waker;

use crate::IoBuf;

/// Pieces of a vectored operation.
pub(crate) const VECTOR_MAX: usize = 8;

/// Memory that the kernel may touch until the completion.
#[derive(Debug)]
pub(crate) enum Keep {
    Nothing,
    Buffer(IoBuf),
    /// The slot's `pieces`.
    Pieces,
}

/// The receiver of the completion.
#[derive(Debug)]
pub(crate) enum Waiter {
    None,
    /// A task of this ring's executor: no reference count is touched.
    Task(u32),
    /// A future that is polled with a waker of its own.
    Waker(Waker),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    InFlight,
    /// The kernel continues the operation, and there is a result to take.
    Event(i32),
    /// The future is gone; the slot is freed by the completion.
    Orphan,
    Done(i32),
}

impl State {
    fn is_with_kernel(self) -> bool {
        matches!(self, State::InFlight | State::Event(_) | State::Orphan)
    }
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    state: State,
    waiter: Waiter,
    keep: Keep,
    /// Buffers of a vectored operation; here so that `Keep` stays small.
    pieces: [Option<IoBuf>; VECTOR_MAX],
}

impl Slot {
    /// Drops the kept memory: the kernel no longer uses it.
    fn forget_kept(&mut self) {
        if matches!(std::mem::replace(&mut self.keep, Keep::Nothing), Keep::Pieces) {
            self.pieces.fill(None);
        }
    }
}

/// The effect of a completion on the executor.
#[derive(Debug)]
pub(crate) enum Completed {
    /// Wake this waiter.
    Wake(Waiter),
    /// No task waits any more, or the completion is stale.
    Nobody,
}

/// All slots of a ring.
#[derive(Debug)]
pub(crate) struct Slots {
    /// Those that have been in use. Has room for `count`, so it never moves.
    slots: Vec<Slot>,
    count: usize,
    /// Those of them that are free, the last one first: so the same few are used again and again.
    free: Vec<u32>,
    in_flight: usize,
}

impl Slots {
    pub(crate) fn new(count: u32) -> Slots {
        let count = count as usize;
        let (slots, free) = (Vec::with_capacity(count), Vec::with_capacity(count));
        Slots { slots, count, free, in_flight: 0 }
    }

    /// Adds where it lies, for [`crate::Ring::own_memory`].
    pub(crate) fn own_memory(&self, ranges: &mut Vec<(usize, usize)>) {
        ranges.push((self.slots.as_ptr().addr(), size_of_val(&self.slots[..])));
        ranges.push((self.free.as_ptr().addr(), self.free.capacity() * size_of::<u32>()));
    }

    /// A slot that has not been in use yet, if there is one.
    fn fresh(&mut self) -> Option<u32> {
        if self.slots.len() == self.count {
            return None;
        }
        self.slots.push(Slot {
            generation: 0,
            state: State::Free,
            waiter: Waiter::None,
            keep: Keep::Nothing,
            pieces: [const { None }; VECTOR_MAX],
        });
        u32::try_from(self.slots.len() - 1).ok()
    }

    /// Takes a free slot for an operation. Gives `keep` back when all are in use.
    pub(crate) fn take(&mut self, keep: Keep) -> Result<u32, Keep> {
        let Some(index) = self.free.pop().or_else(|| self.fresh()) else { return Err(keep) };
        let slot = &mut self.slots[index as usize];
        debug_assert_eq!(slot.state, State::Free);
        slot.generation = (slot.generation + 1) & GENERATION_MASK;
        if slot.generation == 0 {
            slot.generation = 1;
        }
        slot.state = State::InFlight;
        slot.keep = keep;
        self.in_flight += 1;
        Ok(index)
    }

    /// Makes a slot taken with [`Keep::Pieces`] keep these buffers; at most [`VECTOR_MAX`].
    pub(crate) fn keep_pieces(&mut self, index: u32, bufs: &[IoBuf]) {
        for (place, buf) in self.slots[index as usize].pieces.iter_mut().zip(bufs) {
            *place = Some(buf.clone());
        }
    }

    /// The buffer of an operation in flight.
    pub(crate) fn buffer(&self, index: u32) -> Option<&IoBuf> {
        match &self.slots[index as usize].keep {
            Keep::Buffer(buf) => Some(buf),
            Keep::Nothing | Keep::Pieces => None,
        }
    }

    /// The user data that leads a completion back here.
    pub(crate) fn user_data(&self, index: u32) -> u64 {
        u64::from(self.slots[index as usize].generation) << 32 | u64::from(index)
    }

    /// Sets who is woken, unless the result is there already: then returns it and frees the slot.
    pub(crate) fn poll(&mut self, index: u32, waiter: impl FnOnce() -> Waiter) -> Option<i32> {
        let slot = &mut self.slots[index as usize];
        if let State::Done(result) = slot.state {
            self.release(index);
            return Some(result);
        }
        slot.waiter = waiter();
        None
    }

    /// Takes the results so far of an operation that continues.
    pub(crate) fn take_event(&mut self, index: u32) -> Option<i32> {
        let slot = &mut self.slots[index as usize];
        let State::Event(result) = slot.state else { return None };
        slot.state = State::InFlight;
        Some(result)
    }

    /// The future of the operation is dropped. Returns whether the kernel still has it.
    pub(crate) fn abandon(&mut self, index: u32) -> bool {
        let slot = &mut self.slots[index as usize];
        slot.waiter = Waiter::None;
        if matches!(slot.state, State::InFlight | State::Event(_)) {
            slot.state = State::Orphan;
            return true;
        }
        self.release(index);
        false
    }

    /// A completion arrived. Sets of events of an operation that continues (`more`) add up until
    /// they are taken.
    pub(crate) fn complete(&mut self, user_data: u64, result: i32, more: bool) -> Completed {
        let index = u32::try_from(user_data & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        let Some(slot) = self.slots.get_mut(index as usize) else { return Completed::Nobody };
        if u64::from(slot.generation) != user_data >> 32 {
            return Completed::Nobody;
        }
        let before = match slot.state {
            State::Event(events) => events,
            _ => 0,
        };
        match slot.state {
            State::InFlight | State::Event(_) if more => {
                slot.state = State::Event(before | result);
                Completed::Wake(std::mem::replace(&mut slot.waiter, Waiter::None))
            }
            State::Orphan if more => Completed::Nobody,
            State::InFlight | State::Event(_) => {
                // Its events matter more than its end, which the next operation gives again.
                let ended = if result < 0 && before > 0 { before } else { before | result };
                slot.state = State::Done(ended);
                // The kernel is done with the memory: give it back before the future looks.
                slot.forget_kept();
                Completed::Wake(std::mem::replace(&mut slot.waiter, Waiter::None))
            }
            State::Orphan => {
                self.release(index);
                Completed::Nobody
            }
            State::Free | State::Done(_) => Completed::Nobody,
        }
    }

    fn release(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.state = State::Free;
        slot.forget_kept();
        slot.waiter = Waiter::None;
        self.free.push(index);
        self.in_flight -= 1;
    }

    /// Operations that the kernel has or whose result was not taken.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// User data of every operation that the kernel still has.
    pub(crate) fn pending(&self) -> impl Iterator<Item = u64> + '_ {
        self.slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.state.is_with_kernel())
            .map(|(index, slot)| u64::from(slot.generation) << 32 | index as u64)
    }

    /// Forgets all memory that the kernel may still touch, so that nothing frees it.
    pub(crate) fn leak_pending(&mut self) {
        for slot in &mut self.slots {
            if slot.state.is_with_kernel() {
                std::mem::forget(std::mem::replace(&mut slot.keep, Keep::Nothing));
                std::mem::forget(std::mem::replace(&mut slot.pieces, [const { None }; VECTOR_MAX]));
            }
        }
    }
}

/// Generations use 30 bits: the two above mark other kinds of user data.
pub(crate) const GENERATION_MASK: u32 = (1 << 30) - 1;

#[cfg(test)]
mod tests;
