//! What a session asks of the device behind it.
//!
//! Promises: all of it is called by the control thread, one call at a time, in the order in which
//! the front end sent its messages; a call has had its effect when it returns. A session never asks
//! for what makes no sense: indexes are in range, a ring that is started does not run, one that is
//! stopped does.

use std::fmt;
use std::os::fd::OwnedFd;

/// Why a back end does not do what it was asked for. The front end is told so, if it asked for an
/// answer; otherwise the connection ends, because it would believe that it was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(String);

impl Refusal {
    /// * `reason`: without the name of the message, without a full stop.
    #[must_use]
    pub fn new(reason: impl Into<String>) -> Refusal {
        Refusal(reason.into())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl From<String> for Refusal {
    fn from(reason: String) -> Refusal {
        Refusal(reason)
    }
}

impl From<&str> for Refusal {
    fn from(reason: &str) -> Refusal {
        Refusal(reason.to_owned())
    }
}

impl From<std::io::Error> for Refusal {
    fn from(error: std::io::Error) -> Refusal {
        Refusal(error.to_string())
    }
}

impl From<rustix::io::Errno> for Refusal {
    fn from(errno: rustix::io::Errno) -> Refusal {
        std::io::Error::from(errno).into()
    }
}

/// A piece of guest memory to map. Addresses do not wrap around, and no two regions overlap in the
/// guest; `size` and `mmap_offset` are not necessarily whole pages.
#[derive(Debug)]
pub struct RegionSetup {
    /// Guest-physical address of its first byte.
    pub guest_addr: u64,
    /// Bytes, at least 1.
    pub size: u64,
    /// Its address in the front end.
    pub user_addr: u64,
    /// Where in `fd` it begins, bytes.
    pub mmap_offset: u64,
    /// What to map.
    pub fd: OwnedFd,
}

/// A virtqueue that is to run. Addresses are those of the front end (`user_addr` of a region): not
/// null, aligned as virtio wants it, not yet translated.
#[derive(Debug)]
pub struct VringSetup {
    /// Entries; a power of two unless packed.
    pub size: u16,
    /// Packed or split.
    pub packed: bool,
    /// Descriptor table, or the packed ring.
    pub descriptor: u64,
    /// Avail ring, or driver event suppression.
    pub available: u64,
    /// Used ring, or device event suppression.
    pub used: u64,
    /// Where to begin. Split: the next index of the avail ring, at most 65535. Packed: avail in
    /// bits 0-14 with its wrap counter in bit 15, used in bits 16-30 with its wrap counter in
    /// bit 31. With a valid inflight area the split value does not count.
    pub base: u32,
    /// Guest-physical address of the used ring if the front end wants writes to it logged. Front
    /// ends that turn F_LOG_ALL on without this exist: log the ring then too, at the address that
    /// `used` translates to.
    pub log: Option<u64>,
    /// The eventfd that the driver kicks.
    pub kick: OwnedFd,
}

/// An area for requests in flight.
#[derive(Debug)]
pub struct InflightArea {
    /// Shared memory.
    pub fd: OwnedFd,
    /// Bytes.
    pub size: u64,
    /// Where in `fd` it begins, bytes.
    pub offset: u64,
}

/// Which way internal state goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateDirection {
    /// We write it.
    Save,
    /// We read it.
    Load,
}

/// Which kind of write to configuration space it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigWrite {
    /// The driver wrote to a field that it may write.
    Driver,
    /// A migration restores fields.
    Migration,
}

/// The device behind a session.
pub trait Backend {
    /// The features that the driver took, all of them offered. No ring runs, or nothing but
    /// F_LOG_ALL differs from before: then it counts from the next write to guest memory on.
    ///
    /// Errors: a combination that the device cannot do.
    fn set_features(&mut self, features: u64) -> Result<(), Refusal>;

    /// The device status, never 0 (that is [`Backend::reset`]).
    fn set_status(&mut self, status: u8);

    /// Whether the device is broken until it is reset.
    fn needs_reset(&self) -> bool;

    /// Back to the beginning: no features, status 0, not broken. All rings were stopped. Memory
    /// stays, so does the log, the area of requests in flight, call and error eventfds, **and
    /// `wce`**: QEMU resets at each stop of the guest and does not set it again.
    fn reset(&mut self);

    /// The connection is gone; all rings were stopped. Memory and descriptors are let go.
    fn disconnect(&mut self);

    /// Replaces all of the guest's memory; rings may run meanwhile and go on if they are still in
    /// it.
    ///
    /// Errors: cannot be mapped; a ring that runs is not in it. What there was stays.
    fn set_memory(&mut self, regions: Vec<RegionSetup>) -> Result<(), Refusal>;

    /// One more region, rings may run meanwhile.
    ///
    /// Errors: cannot be mapped.
    fn add_region(&mut self, region: RegionSetup) -> Result<(), Refusal>;

    /// One region less, one that was added exactly so. When it returns nothing of it is used any
    /// more. Rings in it wait until it is added again or they are stopped.
    ///
    /// Errors: cannot be taken away; it stays then.
    fn remove_region(&mut self, guest_addr: u64, size: u64, user_addr: u64) -> Result<(), Refusal>;

    /// Runs a virtqueue that does not run. Its call and error eventfds, if any, were or will be
    /// given separately. What is in the avail ring is looked at without a kick.
    ///
    /// Errors: it is not in the guest's memory, or cannot be run; it does not run then.
    fn start_vring(&mut self, index: u16, setup: VringSetup) -> Result<(), Refusal>;

    /// As [`Backend::start_vring`], for one that ran in another process, or here before a hand-over
    /// that failed. If its memory was taken away before that, it waits as after
    /// [`Backend::remove_region`].
    ///
    /// Errors: as there.
    fn resume_vring(&mut self, index: u16, setup: VringSetup) -> Result<(), Refusal>;

    /// Stops a virtqueue that runs: no chain is popped any more, those that were are completed.
    /// Returns where to begin next time, as in [`VringSetup::base`]; for one that is broken, as
    /// well as is known. It does not run afterwards, come what may.
    ///
    /// Errors: requests could not be completed.
    fn stop_vring(&mut self, index: u16) -> Result<u32, Refusal>;

    /// The front end knows where a virtqueue that does not run goes on, or begins it anew.
    fn retire_vring(&mut self, index: u16);

    /// What to signal when there are used entries; `None`: nothing, the driver polls. Counts at
    /// once for a ring that runs, and is kept when it stops.
    fn set_vring_call(&mut self, index: u16, call: Option<OwnedFd>) -> Result<(), Refusal>;

    /// What to signal when the ring is broken. Kept when it stops.
    fn set_vring_err(&mut self, index: u16, err: Option<OwnedFd>) -> Result<(), Refusal>;

    /// The log flag of a ring that runs was changed; as [`VringSetup::log`].
    fn set_vring_log(&mut self, index: u16, log: Option<u64>) -> Result<(), Refusal>;

    /// A new, zeroed area for requests in flight, for rings as the features say.
    fn get_inflight(&mut self, queues: u16, queue_size: u16) -> Result<InflightArea, Refusal>;

    /// The area to use from the next start of a ring on. May be one of an earlier connection, or of
    /// an earlier process.
    ///
    /// Errors: cannot be mapped, or too small.
    fn set_inflight(
        &mut self,
        area: InflightArea,
        queues: u16,
        queue_size: u16,
    ) -> Result<(), Refusal>;

    /// The dirty log, one bit for 4096 bytes of guest-physical memory. Replaces the one before,
    /// also while rings run.
    fn set_log(&mut self, fd: OwnedFd, size: u64, offset: u64) -> Result<(), Refusal>;

    /// What to signal when something was logged: once for all requests that become visible at once.
    fn set_log_event(&mut self, event: OwnedFd) -> Result<(), Refusal>;

    /// Configuration space from `offset` on; what lies beyond its end is left as it is (zero).
    fn get_config(&mut self, offset: u32, bytes: &mut [u8]) -> Result<(), Refusal>;

    /// A write to configuration space. A refusal is told to a front end that asks, and is no reason
    /// to end the connection.
    fn set_config(&mut self, offset: u32, bytes: &[u8], write: ConfigWrite) -> Result<(), Refusal>;

    /// A socket on which the front end takes [`crate::BackChannel`]'s messages; replaces the one
    /// before.
    fn set_backend_channel(&mut self, socket: OwnedFd) -> Result<(), Refusal>;

    /// Where internal state is to be written to, or read from, while no ring runs. Returns another
    /// descriptor if that one is not used.
    fn set_device_state_fd(
        &mut self,
        direction: StateDirection,
        fd: OwnedFd,
    ) -> Result<Option<OwnedFd>, Refusal>;

    /// Whether all of the internal state was moved.
    fn check_device_state(&mut self) -> Result<(), Refusal>;
}
