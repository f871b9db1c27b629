//! Work that comes through shared memory instead of the ring: virtqueues.

/// Something that the loop of a ring thread looks at in shared memory, in each turn and while it
/// polls, and that must be told before the thread sleeps. One for each ring
/// ([`crate::Ring::set_source`]).
///
/// All methods are called by the loop, on the ring's thread, between polls of tasks: they may wake
/// tasks and queue entries, and must neither block nor allocate.
pub trait Source {
    /// All ready tasks have run: what they finished is made visible to the other side now, once for
    /// all of it.
    fn publish(&self);

    /// Takes the work that is there and wakes the tasks that will do it. Returns how much it is:
    /// requests, 0 for none. Called in each turn and, while the thread polls, every few
    /// nanoseconds: reads shared memory only.
    fn look(&self) -> u32;

    /// Whether nothing that was taken is unfinished: only the other side can bring work now, so a
    /// short sleep keeps nothing waiting but that.
    fn rests(&self) -> bool;

    /// The thread is about to sleep: asks the other side for a wake-up (that ends up as a
    /// completion of the ring), then looks once more. Returns whether work came meanwhile: the
    /// thread does not sleep then.
    fn arm(&self) -> bool;

    /// The thread is awake and will look by itself.
    fn disarm(&self);
}
