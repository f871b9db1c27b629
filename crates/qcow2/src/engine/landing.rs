//! Writes that are under way when their request is dropped.
//!
//! Promises: the kernel may carry out a write after the future that asked for it is gone, so the
//! clusters that it goes to must never become somebody else's: the grace of such a request never
//! ends, and what was to be freed stays allocated until the image is opened again.

use super::Qcow2;
use crate::concurrent::grace::Grace;
use crate::sync::Ordering;

/// A write of data that is under way.
pub(super) struct Landing<'a> {
    image: &'a Qcow2,
    grace: Option<Grace<'a>>,
}

impl Qcow2 {
    /// A write begins.
    ///
    /// * `grace`: taken before the look-up of the place that is written to, or under a claim of it.
    pub(super) fn landing<'a>(&'a self, grace: Grace<'a>) -> Landing<'a> {
        Landing { image: self, grace: Some(grace) }
    }
}

impl Landing<'_> {
    /// The write has ended, well or badly.
    pub(super) fn landed(mut self) {
        self.grace = None;
    }
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        let Some(grace) = self.grace.take() else { return };
        std::mem::forget(grace);
        if let Ok(engine) = self.image.engine() {
            engine.landings_lost.store(true, Ordering::Release);
        }
    }
}
