//! The sandbox of a process that serves images.
//!
//! Promises: what is served goes on as without it, through every command of `ringdisk ctl` and to
//! the end; what was made is removed by whoever is outside ([`warden`]). What is in force is told.
//!
//! [`images`] is what any server of images needs; a command adds its own and calls [`enter`] when
//! all that takes more has been done.

mod below;
mod duties;
#[cfg(test)]
mod model;
mod notify;
mod opener;
mod overlays;
mod reach;
pub(crate) mod warden;

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use ringdisk_disk::Disk;
use ringdisk_ring::Fd;
use ringdisk_sandbox::{InForce, Plan};
use ringdisk_storage::{Opener, Storage};

use crate::cli::SandboxWord;
use crate::notify::Word;
use crate::report::{Exit, Failure};
use crate::terminal;
use crate::users::Users;
pub(crate) use duties::{Duties, Named, pin};
pub(crate) use opener::{HeldForDisk, directory_for, images_of, named, pass_on};
pub(crate) use reach::Reach;
use reach::is_whole_system;
use warden::Warden;

/// The process that does what this one may not.
static WARDEN: OnceLock<Warden> = OnceLock::new();

/// Whether a process with this option is confined. For users who are not root it costs
/// `fusermount3`, which needs to become root: they ask.
pub(crate) fn is_wanted(word: SandboxWord) -> bool {
    match word {
        SandboxWord::Auto => rustix::process::geteuid().is_root(),
        SandboxWord::On | SandboxWord::Strict => true,
        SandboxWord::Off => false,
    }
}

/// What every process needs.
pub(crate) fn plan(word: SandboxWord) -> Plan {
    let plan = Plan::new().insist(matches!(word, SandboxWord::On | SandboxWord::Strict));
    surroundings(plan)
}

/// What serving a disk takes: its images, and what the command line names besides. Nothing else of
/// their directories: overlays of a `ringdisk ctl snapshot` are made by the warden
/// ([`directory_for`]).
///
/// * `more`: names of files and directories that the command line allows images to lead to.
/// * `told_within`: of a disk that another process handed over, files count only there.
pub(crate) fn images(
    mut plan: Plan,
    word: SandboxWord,
    disk: &Disk,
    more: &[PathBuf],
    told_within: Option<&Reach>,
) -> Plan {
    let writes = !disk.is_read_only();
    for (depth, layer) in disk.layers().iter().enumerate() {
        for storage in [layer.file(), layer.data_storage()].into_iter().flatten() {
            // That it is open says nothing: the process before may have opened anything of the
            // system to read.
            let is_had = |file: &PathBuf| told_within.is_none_or(|reach| reach.has_open(file));
            if let Some(file) = by_descriptor(storage).filter(is_had) {
                // What lies below may lie below the disks of others, too: a commit writes there on
                // a user's word ([`below`]).
                let writes = writes && depth == 0 && storage.is_open_for_writing();
                plan = if writes { plan.read_write(file) } else { plan.read(file) };
            }
        }
    }
    for path in more {
        let is_directory = path.is_dir();
        plan = match (is_directory, writes && word != SandboxWord::Strict) {
            (true, true) => plan.write_below(path),
            (true, false) => plan.read_below(path),
            (false, true) => plan.read_write(path),
            (false, false) => plan.read(path),
        };
    }
    plan
}

/// Who opens files that this process may not open itself.
pub(crate) fn opener() -> Arc<dyn Opener> {
    Arc::new(opener::FromInside)
}

/// A name of the file that a storage has open, whatever has become of the one it was opened by.
pub(crate) fn by_descriptor(storage: &Storage) -> Option<PathBuf> {
    match storage.raw_fd()? {
        Fd::Raw(fd) => Some(PathBuf::from(format!("/proc/self/fd/{fd}"))),
        Fd::Fixed(_) => None,
    }
}

/// The directory of an image; `None` for one that must not be opened as a whole.
pub(crate) fn directory_of(image: &Path) -> Option<PathBuf> {
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
pub(crate) fn check(word: SandboxWord) -> Result<(), Failure> {
    if is_wanted(word) { plan(word).check().map_err(cannot) } else { Ok(()) }
}

/// Whether a process with this option has been confined in its files, so that what it says may be
/// somebody else's word. Not where this machine cannot do that: then its commands could put images
/// anywhere, and did as they were told.
pub(crate) fn confines_files(word: SandboxWord) -> bool {
    is_wanted(word) && plan(word).insist(true).check().is_ok()
}

/// Enters, with all threads, and says so. Gives what is in force, in words. All rings are
/// restricted by then.
///
/// Errors: something is missing that was insisted on; a thread could not be confined.
pub(crate) fn enter(plan: Plan) -> Result<String, Failure> {
    let in_force = plan.enter().map_err(cannot)?;
    for why in &in_force.missing {
        terminal::warn(format_args!("the sandbox is not complete: {why}"));
    }
    Ok(told(&in_force))
}

/// As [`enter`], for a process that must go on: what is missing, and was insisted on, is an error
/// on the terminal and nothing more. Gives what is in force, in words.
pub(crate) fn enter_as_far_as_possible(plan: Plan, word: SandboxWord) -> String {
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
                    SandboxWord::On | SandboxWord::Strict => complain(why),
                    SandboxWord::Auto | SandboxWord::Off => {
                        terminal::warn(format_args!("the sandbox is not complete: {why}"));
                    }
                }
            }
            told(&in_force)
        }
        Err(error) => {
            complain(&error);
            format!("not complete: {error}")
        }
    }
}

/// What is in force, in words; they are logged, too.
fn told(in_force: &InForce) -> String {
    let in_force = format!("{in_force}, rings restricted");
    tracing::info!("sandbox: {in_force}");
    in_force
}

#[allow(clippy::needless_pass_by_value)] // For map_err.
fn cannot(error: ringdisk_sandbox::Failure) -> Failure {
    Failure::new(Exit::Unsupported, format!("the process cannot be confined: {error}"))
        .hint("--sandbox off serves without a sandbox")
}

/// Sets a process to do what this one will not be able to.
///
/// Errors: it cannot be started.
pub(crate) fn set_warden(duties: &Duties) -> io::Result<Arc<dyn ringdisk_fuse::mount::Remover>> {
    let warden = Warden::start(duties)?;
    let remover = warden.remover();
    // A process is confined once.
    let _ = WARDEN.set(warden);
    Ok(remover)
}

/// As [`std::fs::remove_file`]; inside a sandbox the warden does it, if it was told of the file.
///
/// Errors: those of unlink(2).
pub(crate) fn remove_file(path: &Path) -> io::Result<()> {
    match (fs::remove_file(path), WARDEN.get()) {
        (Err(error), Some(warden)) if error.kind() == io::ErrorKind::PermissionDenied => {
            if warden.unlink(path) { Ok(()) } else { Err(error) }
        }
        (result, _) => result,
    }
}

/// Whether a name still leads to a file of ours. Where a process that is not root's any more may
/// not look, the warden does, before it removes it.
pub(crate) fn may_be(path: &Path, id: (u64, u64)) -> bool {
    match fs::symlink_metadata(path) {
        Ok(meta) => (meta.dev(), meta.ino()) == id,
        Err(error) => error.kind() == io::ErrorKind::PermissionDenied && WARDEN.get().is_some(),
    }
}

/// Connects to a front end that listens; inside a sandbox, where no socket can be made, the warden
/// does it, if it was told of the name.
///
/// Errors: nobody listens there.
pub(crate) fn connect(path: &Path) -> io::Result<OwnedFd> {
    match WARDEN.get().filter(|_| is_for_warden(path)) {
        Some(warden) => warden.connect(path),
        None => UnixStream::connect(path).map(OwnedFd::from),
    }
}

/// Whether the warden, which has another directory, can use a name.
pub(crate) fn is_for_warden(path: &Path) -> bool {
    path.is_absolute()
}

/// Who uses the mount, as the warden sees it: inside a sandbox other processes cannot be looked at.
/// `None`: there is no warden.
pub(crate) fn users() -> Option<Users> {
    WARDEN.get()?.users()
}

/// Lets the warden tell the service manager something.
pub(crate) fn say(word: Word, text: &str) {
    if let Some(warden) = WARDEN.get() {
        warden.say(word, text);
    }
}

/// The process ends: the warden does, too.
pub(crate) fn leave() {
    if let Some(warden) = WARDEN.get() {
        warden.end();
    }
}

#[cfg(test)]
mod tests;
