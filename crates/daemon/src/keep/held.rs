//! What the helper process holds for the next server: a mount, or disks.
//!
//! Promises: plain values and one trait; [`super::supervisor`] holds the descriptors.

use super::link::Named;

/// What the names of descriptors begin with that come and go after the start. The number of a disk
/// and the number of a descriptor follow, as in `ringdisk-late-0-8`.
pub(super) const LATE: &str = "ringdisk-late-";

/// What is held.
pub trait Held {
    /// What it is, for people.
    fn noun(&self) -> &'static str;

    /// The option that asks for it.
    fn option(&self) -> &'static str;

    /// Disks of which descriptors may come and go after the start.
    fn disks(&self) -> usize;

    /// So many of each disk, at most.
    fn late_max(&self) -> usize;

    /// What its users see when it is given up.
    fn loss(&self) -> &'static str;

    /// What to do then.
    fn remedy(&self) -> &'static str;

    /// It has ended: its users get errors, if any are left.
    ///
    /// * `is_removed`: the serving process has ended it; what it had may be another's by now.
    fn end(&mut self, parked: Named, is_removed: bool);

    /// It was given up before it was ready.
    fn undo(&mut self);
}
