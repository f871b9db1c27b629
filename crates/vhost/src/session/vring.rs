//! What a session knows about one virtqueue.
//!
//! Promises: plain values and checks of them; control thread. A back end gets a [`VringSetup`] only
//! of a virtqueue of which size, addresses and kick were sent, with the alignments of the
//! specification; whether the addresses lie in the guest's memory is for the back end. Nothing is
//! mapped or read here.

use std::os::fd::OwnedFd;

use super::backend::VringSetup;
use crate::protocol::VringAddress;

/// Alignment of a descriptor table, split or packed, bytes (virtio 1.3, 2.7 and 2.8).
const DESCRIPTOR_ALIGN: u64 = 16;
/// Alignment of a split avail ring.
const AVAILABLE_ALIGN: u64 = 2;
/// Alignment of a used ring, and of packed event suppression.
const USED_ALIGN: u64 = 4;

/// Bytes of the largest used ring: flags, index, 32768 elements of 8 bytes, event (virtio 1.3,
/// 2.7).
const USED_BYTES_MAX: u64 = 6 + 8 * 32768;

/// One virtqueue.
#[derive(Debug, Default)]
pub(super) struct Vring {
    pub(super) size: Option<u16>,
    pub(super) address: Option<VringAddress>,
    pub(super) base: u32,
    /// Where it stood when a reset stopped it, until SET_VRING_BASE or GET_VRING_BASE.
    pub(super) base_at_reset: Option<u32>,
    /// There is one: it was started, and GET_VRING_BASE has not come since.
    pub(super) kick: Option<OwnedFd>,
    /// What SET_VRING_ENABLE said, if it came.
    pub(super) enabled: Option<bool>,
    pub(super) running: bool,
    /// It did not run in a process that was killed, although the front end wanted it to: its start
    /// was refused.
    pub(super) rests: bool,
}

impl Vring {
    /// Whether it should run.
    ///
    /// * `at_once`: rings run without having been enabled, because protocol features were not
    ///   negotiated.
    pub(super) fn wanted(&self, at_once: bool) -> bool {
        self.kick.is_some() && self.enabled.unwrap_or(at_once)
    }

    /// What the back end needs to run it.
    ///
    /// Errors: something that it needs was not sent, or cannot be.
    pub(super) fn setup(&self, packed: bool) -> Result<VringSetup, String> {
        let size = self.size.ok_or("started without SET_VRING_NUM")?;
        let address = self.address.ok_or("started without SET_VRING_ADDR")?;
        let kick = self.kick.as_ref().ok_or("started without SET_VRING_KICK")?;
        if !packed {
            if !size.is_power_of_two() {
                return Err(format!("size {size}, a split ring has a power of two"));
            }
            if self.base > u32::from(u16::MAX) {
                return Err(format!("base {:#x}, a split ring has 16 bits", self.base));
            }
        } else if !address.available.is_multiple_of(USED_ALIGN) {
            return Err(format!("event suppression at {:#x} is not aligned", address.available));
        }
        let kick = kick.try_clone().map_err(|error| format!("its kick eventfd: {error}"))?;
        Ok(VringSetup {
            size,
            packed,
            descriptor: address.descriptor,
            available: address.available,
            used: address.used,
            base: self.base,
            log: log(&address),
            kick,
        })
    }

    /// After a reset: size, address, base, kick and enabled are forgotten. GET_VRING_BASE may still
    /// ask where it stood: QEMU up to 8.1 sets the status to 0 whenever it stops rings, also of a
    /// guest that goes on later or elsewhere, and only then asks.
    pub(super) fn reset(&mut self) {
        let stood = self.base_at_reset.unwrap_or(self.base);
        *self = Vring { base_at_reset: Some(stood), ..Vring::default() };
    }
}

/// Where writes to the used ring are logged, if they are.
pub(super) fn log(address: &VringAddress) -> Option<u64> {
    (address.flags & VringAddress::LOG != 0).then_some(address.log)
}

/// Whether two addresses differ in more than the log.
pub(super) fn moved(before: &VringAddress, after: &VringAddress) -> bool {
    (before.descriptor, before.available, before.used)
        != (after.descriptor, after.available, after.used)
}

/// Checks what can be checked without knowing the guest's memory.
pub(super) fn check(address: &VringAddress) -> Result<(), String> {
    if address.flags & !VringAddress::LOG != 0 {
        return Err(format!("unknown flags {:#x}", address.flags));
    }
    for (what, at, align) in [
        ("descriptors", address.descriptor, DESCRIPTOR_ALIGN),
        ("avail ring", address.available, AVAILABLE_ALIGN),
        ("used ring", address.used, USED_ALIGN),
    ] {
        if at == 0 {
            return Err(format!("{what} at address 0"));
        }
        if !at.is_multiple_of(align) {
            return Err(format!("{what} at {at:#x}, not aligned to {align}"));
        }
    }
    if let Some(at) = log(address)
        && at.checked_add(USED_BYTES_MAX).is_none()
    {
        return Err(format!(
            "the log of a used ring at {at:#x} runs over the end of the addresses"
        ));
    }
    Ok(())
}
