//! A mount, as the helper process that keeps it knows it.
//!
//! Promises: what the serving process says of the mount counts only for the place where the mount
//! was asked for: that process reads what others wrote, and is in a sandbox, which the helper
//! process is not.

use std::fs::File;
use std::path::{Path, PathBuf};

use ringdisk_fuse::kept::{Parked, is_over};
use ringdisk_fuse::mount::{self, Mount, Unmount, mountpoint};

use super::held::Held;
use super::link::Named;
use super::{ALIVE, DEVICE, ORIGIN, STATE, State};
use crate::mount_lock;
use crate::mountpoint::MountpointState;
use crate::new_file::NewFile;

/// Descriptors of jobs at most: a mount has one job at a time, with two, and the next process gives
/// them anew before it takes the old ones back.
const LATE_MAX: usize = 16;

/// A mount that is held.
#[derive(Debug)]
pub struct HeldMount {
    /// Where it was asked for.
    mountpoint: Option<PathBuf>,
    /// What was there at first.
    before: MountpointState,
}

impl HeldMount {
    /// * `mountpoint`: where it is to be.
    pub fn at(mountpoint: &Path) -> HeldMount {
        HeldMount {
            mountpoint: mountpoint::place(mountpoint).ok(),
            before: MountpointState::of(mountpoint),
        }
    }
}

impl Held for HeldMount {
    fn noun(&self) -> &'static str {
        "mount"
    }

    fn option(&self) -> &'static str {
        "--keep-mount"
    }

    fn disks(&self) -> usize {
        1
    }

    fn late_max(&self) -> usize {
        LATE_MAX
    }

    fn loss(&self) -> &'static str {
        "its clients get errors"
    }

    fn remedy(&self) -> &'static str {
        "look at what it said before it died, then mount the image again"
    }

    fn undo(&mut self) {
        self.before.restore();
    }

    /// Takes the mount away if it is still there: its clients get errors. Then everything that was
    /// kept goes.
    ///
    /// * `is_removed`: the serving process has done so; its place and its number may be those of
    ///   another mount by now.
    fn end(&mut self, parked: Named, is_removed: bool) {
        let (mut first, mut alive, mut devices) = (None, None, Vec::new());
        for (name, descriptor) in parked {
            match name.as_str() {
                ORIGIN => first = State::sealed(&descriptor).ok(),
                STATE => {}
                ALIVE => alive = Some(File::from(descriptor)),
                // Of jobs, and the right to go on.
                name if !name.starts_with(DEVICE) => {}
                _ => devices.push(descriptor),
            }
        }
        let parked = first.map(|first| (first.made, Parked { terms: first.terms(), devices }));
        let is_asked_for =
            |place: &Path| self.mountpoint.as_deref().is_none_or(|asked| asked == place);
        if let Some((made, Parked { terms, mut devices })) = parked
            .filter(|(_, parked)| is_asked_for(&parked.terms.mountpoint))
            .filter(|(_, parked)| !(is_removed && is_over(parked)))
            && let Some(device) = devices.pop()
        {
            // On kernels that do not say whose a descriptor is, the number that the process has
            // told at the start: another mount may have it by now.
            let is_known = mount::knows_its_connection(&device)
                || mount::abort_of(&terms.mountpoint, terms.connection).is_some();
            let mount = Mount::adopt(device, terms.mountpoint.clone(), terms.connection);
            let mut mount = if is_known { mount.take_over() } else { mount };
            if let Err(error) = mount.unmount(Unmount::Force) {
                tracing::warn!("{}", error.with_hint());
            }
            drop(devices);
            drop(mount);
            // What the serving process says of the file that was there before does not count.
            let made = made.filter(|_| !self.before.was_there());
            drop(made.map(|id| NewFile::adopt(&terms.mountpoint, id)));
        }
        if let Some(alive) = alive {
            mount_lock::release(&alive);
        }
    }
}
