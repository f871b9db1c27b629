//! The null disk: any size, stores nothing; for measurements of everything but storage.
//!
//! Promises: reads leave the buffer as it is, or fill it with zeroes; writes are dropped. Never
//! allocates, locks or blocks.

use ringdisk_qcow2::Bytes;
use std::time::Duration;

use ringdisk_ring::Ring;

use crate::NullOptions;

/// A null node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Null {
    read_zeroes: bool,
    latency: Option<Duration>,
}

impl Null {
    pub(crate) fn new(options: &NullOptions) -> Null {
        Null {
            read_zeroes: options.read_zeroes,
            latency: (!options.latency.is_zero()).then_some(options.latency),
        }
    }

    /// The options that it was made with; the size is the layer's.
    pub(crate) fn options(&self, size: Bytes) -> NullOptions {
        let latency = self.latency.unwrap_or_default();
        NullOptions { size, read_zeroes: self.read_zeroes, latency }
    }

    /// Whether reads return zeroes rather than leave the buffer alone.
    pub(crate) fn read_zeroes(&self) -> bool {
        self.read_zeroes
    }

    /// Waits for as long as a request takes.
    pub(crate) async fn delay(&self, ring: &Ring) {
        if let Some(latency) = self.latency {
            ring.sleep(latency).await;
        }
    }
}
