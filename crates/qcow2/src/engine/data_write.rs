//! Data writes that are in flight when their request is dropped.
//!
//! Promises: the kernel may carry out a write after the future that asked for it is gone, so the
//! clusters that it goes to are never used for anything else: the grace of such a request never
//! ends, and what was to be freed stays allocated until the image is opened again.

use super::Qcow2;
use crate::concurrent::grace::Grace;
use crate::sync::Ordering;

/// A write of data that is in flight.
pub(super) struct DataWrite<'a> {
    image: &'a Qcow2,
    grace: Option<Grace<'a>>,
}

impl Qcow2 {
    /// A write begins.
    ///
    /// * `grace`: taken before the look-up of the place that is written to, or under a claim of it.
    pub(super) fn begin_data_write<'a>(&'a self, grace: Grace<'a>) -> DataWrite<'a> {
        DataWrite { image: self, grace: Some(grace) }
    }
}

impl DataWrite<'_> {
    /// The write has ended, with success or an error.
    pub(super) fn end(mut self) {
        self.grace = None;
    }
}

impl Drop for DataWrite<'_> {
    fn drop(&mut self) {
        let Some(grace) = self.grace.take() else { return };
        std::mem::forget(grace);
        if let Ok(engine) = self.image.engine() {
            engine.write_abandoned.store(true, Ordering::Release);
        }
    }
}
