//! The buckets of a group: what a request looks at.
//!
//! Promises: no lock. Queue threads.

use std::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::bucket::Bucket;
use crate::{Kind, Limits};

/// A bucket without a burst holds a tenth of a second of its rate, as in QEMU.
const SHARE: f64 = 0.1;
/// Each of the six rates has a bucket for its average and one for a burst that lasts.
const BUCKETS: usize = 12;

/// The buckets, and how many requests wait.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    buckets: [Bucket; BUCKETS],
    /// The buckets that hold back reads, and those that hold back writes: a bit for each.
    held_by: [AtomicU16; 2],
    /// Requests in the queues: reads, writes.
    pub(crate) waiting: [AtomicUsize; 2],
    iops_size: AtomicU64,
}

impl Shared {
    /// Sets other rates; what was used before is forgotten.
    pub(crate) fn set(&self, limits: &Limits) {
        let mut held_by = [0_u16; 2];
        for (number, rate) in limits.rates().iter().enumerate() {
            if rate.average == 0 {
                continue;
            }
            let lasting = rate.burst_seconds.max(1) as f64;
            let size = match rate.burst {
                0 => rate.average as f64 * SHARE,
                burst => burst as f64 * lasting,
            };
            let mut bits = 1 << (2 * number);
            self.buckets[2 * number].set(rate.average, size);
            if rate.burst_seconds > 1 {
                let burst = &self.buckets[2 * number + 1];
                burst.set(rate.burst, rate.burst as f64 * SHARE);
                bits |= 2 << (2 * number);
            }
            for kind in [Kind::Read, Kind::Write] {
                if number % 3 == 0 || number % 3 == 1 + kind as usize {
                    held_by[kind as usize] |= bits;
                }
            }
        }
        self.iops_size.store(limits.iops_size, Ordering::Relaxed);
        for (place, bits) in self.held_by.iter().zip(held_by) {
            place.store(bits, Ordering::Release);
        }
    }

    /// Whether requests of a kind may have to wait.
    #[inline]
    pub(crate) fn holds(&self, kind: Kind) -> bool {
        self.held_by[kind as usize].load(Ordering::Relaxed) != 0
    }

    /// The buckets that hold back requests of a kind, with their numbers.
    #[inline]
    fn held_by(&self, kind: Kind) -> impl Iterator<Item = (usize, &Bucket)> {
        let mut bits = self.held_by[kind as usize].load(Ordering::Acquire);
        std::iter::from_fn(move || {
            let index = bits.trailing_zeros() as usize;
            // Without its lowest bit.
            bits &= bits.wrapping_sub(1);
            Some((index, self.buckets.get(index)?))
        })
    }

    /// Lets a request go on, or says how long it has to wait, nanoseconds.
    #[inline]
    pub(crate) fn take(&self, now: u64, kind: Kind, bytes: u64) -> Result<(), u64> {
        let wait = self.held_by(kind).map(|(_, bucket)| bucket.wait(now)).max().unwrap_or(0);
        if wait > 0 {
            return Err(wait);
        }
        self.count(now, kind, bytes);
        Ok(())
    }

    /// Counts a request that goes on.
    #[inline]
    pub(crate) fn count(&self, now: u64, kind: Kind, bytes: u64) {
        let size = self.iops_size.load(Ordering::Relaxed);
        let requests = if size > 0 && bytes > size { bytes as f64 / size as f64 } else { 1.0 };
        for (index, bucket) in self.held_by(kind) {
            // The first six are of requests.
            bucket.add(now, if index < BUCKETS / 2 { requests } else { bytes as f64 });
        }
    }
}

/// A panic of another holder leaves the content valid, so poison is ignored.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
