//! The sandbox of a process that serves images.
//!
//! Promises: what is served goes on as without it, through every command of `ringdisk ctl` and to
//! the end; what was made is removed by its helper process ([`crate::helper`]). What is in force is
//! told.
//!
//! [`images`] is what any server of images needs; a command adds its own and calls [`enter`] when
//! all that takes more has been done.

mod opener;
mod reach;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use opener::{
    HeldForDisk, NamedTarget, directory_for, images_allowed, images_of, is_held, pass_on,
    servers_of, trees_for,
};
pub use reach::Reach;
use reach::is_whole_system;
use ringdisk_disk::Disk;
use ringdisk_ring::Fd;
use ringdisk_sandbox::{InForce, Plan};
use ringdisk_storage::{Opener, Storage};

use crate::failure::{Exit, Failure};
pub use crate::helper::named::{Named, pin};
pub use crate::helper::tasks::Tasks;
use crate::terminal;

/// How far a serving process is confined (`--sandbox`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Confinement {
    /// For root, as far as the kernel can.
    #[default]
    Auto,
    /// Wholly, or not at all.
    On,
    /// As on, and no new files.
    Strict,
    /// Not.
    Off,
}

/// Whether a process with this option is confined. For users who are not root it costs
/// `fusermount3`, which needs to become root: they ask.
pub fn is_wanted(word: Confinement) -> bool {
    match word {
        Confinement::Auto => rustix::process::geteuid().is_root(),
        Confinement::On | Confinement::Strict => true,
        Confinement::Off => false,
    }
}

/// What every process needs.
pub fn plan(word: Confinement) -> Plan {
    let plan = Plan::new().insist(matches!(word, Confinement::On | Confinement::Strict));
    surroundings(plan)
}

/// What serving a disk takes: its images, and what the command line names besides. Nothing else of
/// their directories: overlays of a `ringdisk ctl snapshot` are made by the helper process
/// ([`directory_for`]).
///
/// * `more`: names of files and directories that the command line allows images to lead to, which
///   are read. Overlays there are made by the helper process, too ([`trees_for`]).
/// * `trusted_within`: of a disk that another process handed over, files count only there.
pub fn images(
    mut plan: Plan,
    disk: &Disk,
    more: &[PathBuf],
    trusted_within: Option<&Reach>,
) -> Plan {
    let writes = !disk.is_read_only();
    for (depth, layer) in disk.layers().iter().enumerate() {
        for storage in [layer.file(), layer.data_storage()].into_iter().flatten() {
            // That it is open says nothing: the process before may have opened anything of the
            // system to read.
            let is_had = |file: &PathBuf| trusted_within.is_none_or(|reach| reach.has_open(file));
            if let Some(file) = by_descriptor(storage).filter(is_had) {
                // What lies below may lie below the disks of others, too: a commit writes there on
                // a user's word ([`below`]).
                let writes = writes && depth == 0 && storage.is_open_for_writing();
                plan = if writes { plan.read_write(file) } else { plan.read(file) };
            }
        }
    }
    for path in more {
        plan = if path.is_dir() { plan.read_below(path) } else { plan.read(path) };
    }
    plan
}

/// Who opens files that this process may not open itself.
pub fn opener() -> Arc<dyn Opener> {
    Arc::new(opener::FromInside)
}

/// A name of the file that a storage has open, whatever has become of the one it was opened by.
pub fn by_descriptor(storage: &Storage) -> Option<PathBuf> {
    match storage.raw_fd()? {
        Fd::Raw(fd) => Some(PathBuf::from(format!("/proc/self/fd/{fd}"))),
        Fd::Fixed(_) => None,
    }
}

/// The directory of an image; `None` for one that must not be opened as a whole.
pub fn directory_of(image: &Path) -> Option<PathBuf> {
    let image = fs::canonicalize(image).ok()?;
    let directory = image.parent()?;
    (!is_whole_system(directory)).then(|| directory.to_owned())
}

/// The programs that a backtrace names.
fn surroundings(plan: Plan) -> Plan {
    match std::env::current_exe() {
        Ok(program) => plan.read(program),
        Err(_) => plan,
    }
}

/// Looks whether a process with this option can be confined, before something is done that cannot
/// be undone.
///
/// Errors: something is missing that is insisted on.
pub fn check(word: Confinement) -> Result<(), Failure> {
    if is_wanted(word) { plan(word).check().map_err(cannot) } else { Ok(()) }
}

/// Whether a process with this option has been confined in its files, so that what it says may be
/// an attacker's word. `false` where this machine cannot confine files: the commands of such a
/// process could put images anywhere, and users relied on that.
pub fn confines_files(word: Confinement) -> bool {
    is_wanted(word) && plan(word).insist(true).check().is_ok()
}

/// Enters, with all threads, and says so. Gives what is in force, in words. All rings are
/// restricted by then.
///
/// Errors: something is missing that was insisted on; a thread could not be confined.
pub fn enter(plan: Plan) -> Result<String, Failure> {
    let in_force = plan.enter().map_err(cannot)?;
    for why in &in_force.missing {
        terminal::warn(format_args!("the sandbox is not complete: {why}"));
    }
    Ok(log_in_force(&in_force))
}

/// As [`enter`], for a process that must go on: what is missing, and was insisted on, is an error
/// on the terminal and nothing more. Gives what is in force, in words.
pub fn enter_as_far_as_possible(plan: Plan, word: Confinement) -> String {
    let complain = |why: &dyn fmt::Display| {
        let text =
            format!("the sandbox is not complete, and disks in use are served all the same: {why}");
        terminal::complain(&Failure::new(Exit::Unsupported, text).hint(
            "`ringdisk ctl SOCKET stats` says what is in force; another --upgrade tries again",
        ));
    };
    match plan.insist(false).enter() {
        Ok(in_force) => {
            for why in &in_force.missing {
                match word {
                    Confinement::On | Confinement::Strict => complain(why),
                    Confinement::Auto | Confinement::Off => {
                        terminal::warn(format_args!("the sandbox is not complete: {why}"));
                    }
                }
            }
            log_in_force(&in_force)
        }
        Err(error) => {
            complain(&error);
            format!("not complete: {error}")
        }
    }
}

/// Logs which parts of the sandbox are in force, and returns the text.
fn log_in_force(in_force: &InForce) -> String {
    let in_force = format!("{in_force}, rings restricted");
    tracing::info!("sandbox: {in_force}");
    in_force
}

#[allow(clippy::needless_pass_by_value)] // For map_err.
fn cannot(error: ringdisk_sandbox::Failure) -> Failure {
    Failure::new(Exit::Unsupported, format!("the process cannot be confined: {error}"))
        .hint("--sandbox off serves without a sandbox")
}

#[cfg(test)]
mod tests;
