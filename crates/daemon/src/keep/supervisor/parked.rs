//! Descriptors that the server gives to the helper process, and rights to go on with its disks.
//!
//! Promises: after the start of a server the helper process takes and closes only descriptors that
//! are named exactly as [`LATE`] says, at most [`Held::late_max`] of each disk. The thread of the
//! supervisor; it never waits for the process that made a descriptor.
//!
//! [`Held::late_max`]: crate::keep::held::Held::late_max

use std::os::fd::OwnedFd;

use super::Supervisor;
use crate::keep::held::LATE;
use crate::keep::succession::{self, Succession};

/// Longest name of a descriptor that comes after the start, bytes.
const LATE_NAME_BYTES_MAX: usize = 48;

/// The number of the disk in the name of a descriptor that comes after the start. The check is
/// strict, since the server chooses the name, which goes into a list of names for the next server.
fn disk_of(name: &str) -> Option<usize> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (disk, number) = name.strip_prefix(LATE)?.split_once('-')?;
    let is_ours = name.len() <= LATE_NAME_BYTES_MAX && is_number(disk) && is_number(number);
    disk.parse().ok().filter(|_| is_ours)
}

/// The number of the disk whose right to go on has this name.
pub(super) fn right_of(name: &str) -> Option<usize> {
    disk_of(name).filter(|disk| succession::name_of(*disk) == name)
}

impl Supervisor<'_> {
    /// Stores descriptors that the server has sent.
    pub(super) fn park(&mut self, name: &str, descriptors: Vec<OwnedFd>) {
        let closer = disk_of(name).and_then(|disk| Some((disk, self.closers.get(disk)?)));
        let is_full = closer.is_some_and(|(disk, closer)| {
            let parked = self.parked.iter().filter(|(name, _)| disk_of(name) == Some(disk));
            // Descriptors that are not closed yet count, too.
            parked.count() + closer.waiting() + descriptors.len() > self.held.late_max()
        });
        // The right to go on came at the start, or this process has made it.
        let is_late = closer.is_none() || right_of(name).is_some();
        if self.is_parked && is_late || is_full {
            let closer = closer.map_or(&self.closer, |(_, closer)| closer);
            descriptors.into_iter().for_each(|descriptor| closer.close(descriptor));
            self.refuse(if is_full { "too many descriptors" } else { "descriptors" });
            return;
        }
        self.let_go(name);
        self.parked.extend(descriptors.into_iter().map(|fd| (name.to_owned(), fd)));
    }

    /// Warns once that descriptors are not kept: an attacker in the server can send any number.
    pub(super) fn refuse(&mut self, what: &str) {
        if !std::mem::replace(&mut self.has_refused, true) {
            tracing::warn!(
                "the serving process gives {what} after its start; they are not kept, and those \
                 that follow are refused without a word"
            );
        }
    }

    /// Closes descriptors that came after the start.
    pub(super) fn let_go(&mut self, name: &str) {
        let closer = disk_of(name).and_then(|disk| self.closers.get(disk));
        if self.is_parked && (closer.is_none() || right_of(name).is_some()) {
            return;
        }
        let closer = closer.unwrap_or(&self.closer);
        while let Some(place) = self.parked.iter().position(|(parked, _)| parked == name) {
            closer.close(self.parked.swap_remove(place).1);
        }
    }

    /// Claims the right to go on with each disk, after a server was killed. Returns whether any is
    /// left to this process: a successor may have claimed all. Makes a new right for the next
    /// server, so that never both go on with the same disk.
    pub(super) fn goes_on(&mut self) -> bool {
        let mut left = 0;
        for disk in &self.rights {
            let name = succession::name_of(*disk);
            let right = self.parked.iter_mut().find(|(parked, _)| *parked == name);
            // An eventfd that cannot be read is from an attacker in the server: it gets no other.
            let claimed = right.and_then(|(_, place)| {
                let right = place.try_clone().and_then(Succession::of);
                right.is_ok_and(|right| right.claim()).then_some(place)
            });
            let Some(place) = claimed else { continue };
            match Succession::make() {
                Ok(new) => {
                    *place = new.into();
                    left += 1;
                }
                Err(error) => tracing::warn!("disk {disk} cannot be gone on with: {error}"),
            }
        }
        self.rights.is_empty() || left > 0
    }

    /// Whether a successor has claimed all, or does so within moments.
    pub(super) fn is_claimed_soon(&self) -> bool {
        let mut rights = self.parked.iter().filter(|(name, _)| right_of(name).is_some());
        rights.all(|(_, right)| {
            let right = right.try_clone().and_then(Succession::of);
            right.is_ok_and(|right| right.is_claimed_soon())
        })
    }
}
