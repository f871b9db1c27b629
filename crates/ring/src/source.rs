//! Work that comes through shared memory instead of the ring: virtqueues.
//!
//! Promises: the loop calls [`Source::arm`] before it sleeps, so no request is missed.

/// A queue in shared memory that the loop of a ring thread polls in each turn, and that is armed
/// before the thread sleeps. One for each ring
/// ([`crate::Ring::set_source`]).
///
/// All methods are called by the loop, on the ring's thread, between polls of tasks: they may wake
/// tasks and queue entries, and must neither block nor allocate.
pub trait Source {
    /// All ready tasks have run: shows the other side everything that they finished, at once.
    fn publish(&self);

    /// Takes the available requests and wakes the tasks that will serve them. Returns their number.
    /// Called in each turn and, while the thread polls, every few nanoseconds: reads shared memory
    /// only.
    fn look(&self) -> u32;

    /// Whether all taken requests are finished: only the other side can bring work now, so a short
    /// sleep delays nothing else.
    fn rests(&self) -> bool;

    /// The thread is about to sleep: asks the other side for a wake-up (that ends up as a
    /// completion of the ring), then looks once more. Returns whether work came meanwhile: the
    /// thread does not sleep then.
    fn arm(&self) -> bool;

    /// The thread is awake and will poll by itself.
    fn disarm(&self);
}
