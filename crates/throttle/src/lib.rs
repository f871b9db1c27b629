//! Limits of I/O: requests and bytes per second, with bursts, for one disk or a group of disks.
//!
//! Promises:
//! - Over a long time a group gets its rates, and no more than one burst above them; what the
//!   fields mean is what they mean in a throttle group of QEMU.
//! - A request that need not wait takes no lock and allocates nothing; where no limit is set it
//!   costs one load of a word that nobody writes.
//! - Requests that wait block no thread. The members of a group are served in turn, however many
//!   requests each of them has.
//! - [`Member::lift`] lets all requests of a member go on at once: a stop never waits for a limit.
//!
//! ```
//! use ringdisk_ring::{Config, Runtime};
//! use ringdisk_throttle::{Group, Kind, Limits, Member};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limits: Limits = "iops=100,bps-write=10M".parse()?;
//! let group = Group::new(&limits);
//! let member = Member::of(&group);
//! let mut runtime = Runtime::new(Config::default())?;
//! let ring = runtime.ring().clone();
//! // Ten requests are a tenth of a second: none of them waits.
//! runtime.block_on(async {
//!     for _ in 0..10 {
//!         member.pass(&ring, Kind::Read, 4096).await;
//!     }
//! });
//! assert_eq!(member.waits().requests, 0);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod bucket;
mod buckets;
mod changed_limits;
mod group;
mod limits;
mod member;
mod queue;
#[cfg(test)]
mod tests;
mod wait;

pub use changed_limits::Changed;
pub use group::{Group, Watch};
pub use limits::{Limits, LimitsError, Rate, Rates};
pub use member::{Lifted, Member, Waits};

/// What a request does; a discard and a write of zeroes are writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It reads.
    Read,
    /// It writes, writes zeroes, or discards.
    Write,
}
