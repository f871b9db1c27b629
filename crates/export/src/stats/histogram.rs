//! Latencies, counted by their size.
//!
//! Promises: a percentile is at most 1/16 too high; a latency of 2^40 ns (18 minutes) and more
//! counts as that. The queue thread adds to [`LatencyCells`]; any thread reads a [`Histogram`].

use std::time::Duration;

use super::cell::Cell;

/// Linear steps inside each power of two: a percentile is at most 1/16 too high.
const STEPS: usize = 16;
/// Powers of two, in nanoseconds: up to 2^40 ns, about 18 minutes.
const POWERS: usize = 40;
const BUCKETS: usize = STEPS * POWERS;

/// Log-linear histogram of latencies.
#[derive(Clone, Debug)]
pub struct Histogram(Vec<u64>);

/// Place of a latency in the histogram.
fn bucket(nanos: u64) -> usize {
    let steps = STEPS as u64;
    if nanos < steps {
        return usize::try_from(nanos).unwrap_or(0);
    }
    let power = nanos.ilog2();
    // The top bit is implied; the next four choose the step.
    let step = (nanos >> (power - 4)) & (steps - 1);
    let index = u64::from(power - 3) * steps + step;
    usize::try_from(index).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// Smallest latency that lies above a bucket.
fn upper(index: usize) -> u64 {
    if index < STEPS {
        return index as u64 + 1;
    }
    let power = index / STEPS + 3;
    let step = (index % STEPS) as u64;
    (STEPS as u64 + step + 1) << (power - 4)
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram(vec![0; BUCKETS])
    }
}

impl Histogram {
    /// Number of latencies.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The latency that `fraction` (0.0 ..= 1.0) of all requests did not exceed; zero when there
    /// are none.
    #[must_use]
    pub fn percentile(&self, fraction: f64) -> Duration {
        let count = self.count();
        if count == 0 {
            return Duration::ZERO;
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a rank between 1 and the count"
        )]
        let rank = ((count as f64 * fraction.clamp(0.0, 1.0)).ceil() as u64).clamp(1, count);
        let mut seen = 0;
        for (index, n) in self.0.iter().enumerate() {
            seen += n;
            if seen >= rank {
                return Duration::from_nanos(upper(index));
            }
        }
        Duration::from_nanos(upper(BUCKETS - 1))
    }

    /// Number of latencies below a power of two.
    ///
    /// * `power`: 4 to 40: 2^`power` ns.
    #[must_use]
    pub fn below(&self, power: u32) -> u64 {
        let end = usize::try_from(power.saturating_sub(3)).unwrap_or(POWERS) * STEPS;
        self.0.iter().take(end.min(BUCKETS)).sum()
    }

    /// The sum of all latencies, at most 1/16 too high.
    #[must_use]
    pub fn sum(&self) -> Duration {
        let of_bucket = |(index, n): (usize, &u64)| upper(index).saturating_mul(*n);
        let nanos = self.0.iter().enumerate().map(of_bucket).fold(0, u64::saturating_add);
        Duration::from_nanos(nanos)
    }

    /// Adds another histogram to this one.
    pub fn add(&mut self, other: &Histogram) {
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine += theirs;
        }
    }
}

/// The histogram while its queue thread writes it.
#[derive(Debug)]
pub(super) struct LatencyCells(Box<[Cell]>);

impl Default for LatencyCells {
    fn default() -> Self {
        LatencyCells((0..BUCKETS).map(|_| Cell::default()).collect())
    }
}

impl LatencyCells {
    /// Counts one latency. The queue thread only.
    pub(super) fn add(&self, nanos: u64) {
        self.0[bucket(nanos)].add(1);
    }

    /// What was counted until now. Any thread.
    pub(super) fn snapshot(&self) -> Histogram {
        Histogram(self.0.iter().map(Cell::get).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_latency_lies_below_the_upper_end_of_its_bucket_by_at_most_a_sixteenth() {
        for nanos in (0..2000u64).chain([4095, 4096, 123_456, 999_999_999, 1 << 39]) {
            let top = upper(bucket(nanos));
            assert!(top > nanos && top - nanos <= nanos / 16 + 1, "{nanos} in bucket below {top}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn latencies_below_a_power_of_two_are_counted_exactly() {
        let cells = LatencyCells::default();
        for nanos in [0, 15, 16, 4095, 4096, 4097, 1 << 30, u64::MAX] {
            cells.add(nanos);
        }
        let histogram = cells.snapshot();
        let below = |power| histogram.below(power);
        assert_eq!(
            [below(4), below(5), below(12), below(13), below(30), below(31)],
            [2, 3, 4, 6, 6, 7]
        );
        let few = LatencyCells::default();
        few.add(1000);
        few.add(1_000_000);
        let sum = few.snapshot().sum().as_nanos();
        assert!((1_001_000..=1_001_000 * 17 / 16).contains(&sum), "{sum}");
    }

    #[test]
    fn percentiles_of_nothing_are_zero() {
        assert_eq!(Histogram::default().percentile(0.99), Duration::ZERO);
    }
}
