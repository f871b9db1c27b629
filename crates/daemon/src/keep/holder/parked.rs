//! Descriptors that the serving process gives to the holder, and rights to go on with its disks.
//!
//! Promises: after the start of a server, the holder takes and closes only descriptors that are
//! named exactly as [`LATE`] says, at most [`Held::late_max`] of each disk. The thread of the
//! holder; it never waits for the process that made a descriptor.
//!
//! [`Held::late_max`]: super::Held::late_max

use std::os::fd::OwnedFd;

use super::super::held::LATE;
use super::super::succession::{self, Succession};
use super::Holder;

/// Longest name of a descriptor that may come after the start, bytes.
const LATE_NAME_BYTES_MAX: usize = 48;

/// The disk of a descriptor whose name says that it may come and go after the start. The serving
/// process chooses the name, and the next one gets it in a list with others, from which nothing
/// else may come out.
fn disk_of(name: &str) -> Option<usize> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (disk, number) = name.strip_prefix(LATE)?.split_once('-')?;
    let is_ours = name.len() <= LATE_NAME_BYTES_MAX && is_number(disk) && is_number(number);
    disk.parse().ok().filter(|_| is_ours)
}

/// The disk of the right to go on that has this name.
pub(super) fn right_of(name: &str) -> Option<usize> {
    disk_of(name).filter(|disk| succession::name_of(*disk) == name)
}

impl Holder<'_> {
    /// Takes descriptors of the serving process.
    pub(super) fn park(&mut self, name: &str, descriptors: Vec<OwnedFd>) {
        let closer = disk_of(name).and_then(|disk| Some((disk, self.closers.get(disk)?)));
        let is_full = closer.is_some_and(|(disk, closer)| {
            let parked = self.parked.iter().filter(|(name, _)| disk_of(name) == Some(disk));
            // What is not closed yet takes room as well.
            parked.count() + closer.waiting() + descriptors.len() > self.held.late_max()
        });
        // The right to go on is that of the start, or one that this process has made.
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

    /// Says once that descriptors are not kept: a process that was taken over can give any number.
    pub(super) fn refuse(&mut self, what: &str) {
        if !std::mem::replace(&mut self.has_refused, true) {
            tracing::warn!(
                "the serving process gives {what} after its start; they are not kept, and those \
                 that follow are refused without a word"
            );
        }
    }

    /// Lets go of descriptors, unless they are of the start.
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

    /// Whether what is held is still ours: not where a successor has claimed all. Called when a
    /// server was killed, and makes a new right for the next one, so that none goes on with what a
    /// successor serves, and the other way round.
    pub(super) fn goes_on(&mut self) -> bool {
        let mut left = 0;
        for disk in &self.rights {
            let name = succession::name_of(*disk);
            let right = self.parked.iter_mut().find(|(parked, _)| *parked == name);
            // One that cannot be read is of a server that was taken over: it gets no other.
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
