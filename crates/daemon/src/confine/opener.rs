//! New overlays as the process inside asks for them: the other side of [`crate::helper::overlays`].
//!
//! Promises: the helper process is asked only for what the kernel has refused here, and told what
//! it may let go of.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringdisk_disk::names_note::Names;
use ringdisk_disk::probe::PROBE_LEN;
use ringdisk_disk::{Disk, Format, Layer};
use ringdisk_storage::{Kind, Lock, NbdEndpoint, OpenOptions, Opener, Storage};
use rustix::fs::fstat;
use rustix::io::Errno;

use super::{Confinement, Reach, by_descriptor, directory_of};
use crate::helper;
use crate::helper::answer::DONE;
use crate::helper::chain::Image;
use crate::helper::named::{Id, Named, named};
use crate::helper::overlays::{
    FORGET, HELD_MAX, LEAVE, LOWER, MADE_MAX, MAKE, NOTE, NOTE_BOTH, READ, REMOVE, SYNC, WRITE,
    is_component,
};
use crate::helper::tasks::CONNECT_NBD;

/// Asks the helper process. Inside.
#[derive(Debug)]
pub(crate) struct FromInside;

impl FromInside {
    /// Errors: those of the helper process; EACCES where there is none.
    fn ask(what: u8, id: Id, name: &[u8]) -> Result<Option<OwnedFd>, Errno> {
        let ours = helper::current::get().ok_or(Errno::ACCESS)?;
        let mut fields = format!("{}\0{}", id.0, id.1).into_bytes();
        if !name.is_empty() {
            fields.push(0);
            fields.extend_from_slice(name);
        }
        let answer = ours.ask(what, &fields).map_err(|error| {
            tracing::warn!("the helper process does not answer: {error}");
            Errno::IO
        })?;
        match answer.kind {
            DONE => Ok(answer.fd),
            _ => Err(answer.words.parse().map_or(Errno::ACCESS, Errno::from_raw_os_error)),
        }
    }

    /// Makes a file somewhere below a directory of `--allow-path`. `None`: it is below none.
    fn make_in_tree(path: &Path) -> Option<Result<Option<OwnedFd>, Errno>> {
        let path = std::path::absolute(path).ok()?;
        let above = path.parent()?.ancestors().skip(1);
        let mut tried = above.filter_map(|above| {
            let from_there = path.strip_prefix(above).ok()?;
            Some(Self::ask(MAKE, id_of(above).ok()?, from_there.as_os_str().as_bytes()))
        });
        tried.find(|made| !made.as_ref().is_err_and(|errno| *errno == Errno::ACCESS))
    }

    fn open(what: u8, id: Id, name: &[u8]) -> Result<OwnedFd, Errno> {
        Self::ask(what, id, name)?.ok_or(Errno::ACCESS)
    }
}

impl Opener for FromInside {
    fn make(&self, path: &Path) -> Result<OwnedFd, Errno> {
        let name = path.file_name().map(OsStr::as_bytes).unwrap_or_default();
        // A slash at the end would be lost.
        let is_whole = is_component(name) && path.as_os_str().as_bytes().ends_with(name);
        let directory = path.parent().filter(|_| is_whole).ok_or(Errno::ACCESS)?;
        let mut made = Self::ask(MAKE, id_of(directory)?, name);
        if made.as_ref().is_err_and(|errno| *errno == Errno::ACCESS) {
            made = Self::make_in_tree(path).unwrap_or(made);
        }
        match made {
            Ok(Some(made)) => Ok(made),
            // This process has no number for it, and lost it.
            Ok(None) => {
                let _ = id_of(path).map(|id| self.remove(id));
                Err(Errno::MFILE)
            }
            Err(errno) => {
                if errno == Errno::DQUOT {
                    tracing::warn!(
                        "no overlay is made where {HELD_MAX} are in use, or after {MADE_MAX} of \
                         one process: commit some, or start it anew"
                    );
                }
                Err(errno)
            }
        }
    }

    fn again(&self, file: BorrowedFd<'_>, read_only: bool) -> Result<OwnedFd, Errno> {
        let stat = fstat(file)?;
        Self::open(if read_only { READ } else { WRITE }, (stat.st_dev, stat.st_ino), b"")
    }

    fn note(&self, file: BorrowedFd<'_>, line: &[u8], is_done: bool) -> Result<(), Errno> {
        if helper::current::get().is_none() {
            return Err(Errno::NOSYS);
        }
        let stat = fstat(file)?;
        let what = if is_done { NOTE } else { NOTE_BOTH };
        Self::ask(what, (stat.st_dev, stat.st_ino), line).map(drop)
    }

    fn remove(&self, identity: Id) -> Result<(), Errno> {
        Self::ask(REMOVE, identity, b"").map(drop)
    }

    fn connect(&self, endpoint: &NbdEndpoint) -> Result<OwnedFd, Errno> {
        let ours = helper::current::get().ok_or(Errno::ACCESS)?;
        let answer = ours.ask(CONNECT_NBD, endpoint.to_string().as_bytes()).map_err(|error| {
            tracing::warn!("the helper process does not answer: {error}");
            Errno::IO
        })?;
        match answer.fd {
            Some(socket) => Ok(socket),
            None => Err(answer.words.parse().map_or(Errno::ACCESS, Errno::from_raw_os_error)),
        }
    }

    fn sync(&self, directory: &Path) -> Result<(), Errno> {
        Self::ask(SYNC, id_of(directory)?, b"").map(drop)
    }
}

/// The numbers of what a name leads to.
fn id_of(path: &Path) -> Result<Id, Errno> {
    let path = if path == Path::new("") { Path::new(".") } else { path };
    let meta = fs::metadata(path).map_err(|error| errno_of(&error))?;
    Ok((meta.dev(), meta.ino()))
}

fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The directory in which a disk may get new overlays: that of the image on top. `None`: it gets
/// none.
///
/// * `trusted_within`: of a disk that another process handed over, a name counts only there.
pub fn directory_for(
    word: Confinement,
    disk: &Disk,
    trusted_within: Option<&Reach>,
) -> Option<Named> {
    if word == Confinement::Strict || disk.is_read_only() {
        return None;
    }
    let layers = disk.layers();
    let top = layers.first()?;
    let is_file = top.file().is_some_and(|file| file.kind() == Kind::Regular);
    let directory = directory_of(top.name()).filter(|_| is_file)?;
    if trusted_within.is_some_and(|reach| !reach.has(&directory)) {
        return None;
    }
    named(directory)
}

/// The directories of `--allow-path` in which a disk may get new overlays, at any depth.
pub fn trees_for(word: Confinement, disk: &Disk, allowed: &[PathBuf]) -> Vec<Named> {
    if word == Confinement::Strict || disk.is_read_only() {
        return Vec::new();
    }
    let directories = allowed.iter().filter_map(|path| fs::canonicalize(path).ok());
    directories.filter(|path| path.is_dir()).filter_map(named).collect()
}

/// Files of the chain of a disk.
fn files_of(disk: &Disk) -> Vec<Id> {
    let layers = disk.layers();
    let storages = layers.iter().flat_map(|layer| [layer.file(), layer.data_storage()]);
    storages.flatten().filter_map(|file| Storage::identity(file)).collect()
}

/// What the helper process holds open for one disk, as far as the server knows. The server says
/// what the helper process may close: an open file keeps its space when it has lost its name, and
/// its file system cannot be unmounted.
#[derive(Debug, Default)]
pub struct HeldForDisk {
    directories: Mutex<Vec<Id>>,
    files: Mutex<Vec<Id>>,
    /// Targets of mirrors and backups that are running.
    copies: Mutex<Vec<Id>>,
    /// Targets of commands that are under way, each as often as one has named it.
    named: Mutex<Vec<Id>>,
}

/// The target of a mirror or a backup that the helper process holds since a user has named it, as
/// long as the command is under way.
#[derive(Debug)]
pub struct NamedTarget {
    file: Id,
    held: Arc<HeldForDisk>,
}

impl NamedTarget {
    /// The command is over: the helper process lets go of the file, unless that is of the chain, or
    /// of another command, or of a mirror or a backup that is running.
    pub fn let_go(self, disk: &Disk) {
        let (file, held) = (self.file, Arc::clone(&self.held));
        drop(self);
        held.let_go(file, disk);
    }
}

impl Drop for NamedTarget {
    fn drop(&mut self) {
        let mut named = self.held.named_now();
        if let Some(at) = named.iter().position(|id| *id == self.file) {
            named.swap_remove(at);
        }
    }
}

impl HeldForDisk {
    /// The helper process was told of this directory, for this disk.
    pub fn has(&self, directory: &Named) {
        self.directories.lock().unwrap_or_else(PoisonError::into_inner).push(directory.1);
    }

    /// The helper process was told of this file by a user, in a command that begins.
    pub fn named(self: &Arc<HeldForDisk>, file: Id) -> NamedTarget {
        self.named_now().push(file);
        NamedTarget { file, held: Arc::clone(self) }
    }

    /// A panic elsewhere leaves it valid, so poison is ignored.
    fn named_now(&self) -> MutexGuard<'_, Vec<Id>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A mirror or a backup to a file begins that the helper process holds.
    pub fn begins_copy(&self, file: Id) {
        for files in [&self.files, &self.copies] {
            let mut files = files.lock().unwrap_or_else(PoisonError::into_inner);
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }

    /// It has ended. When the file is not of the chain at the next look, it is let go of.
    pub fn ends_copy(&self, file: Id) {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner).retain(|id| *id != file);
    }

    /// The files of the chain, and targets.
    fn needed(&self, disk: &Disk) -> Vec<Id> {
        let mut now = files_of(disk);
        now.extend_from_slice(&self.copies.lock().unwrap_or_else(PoisonError::into_inner));
        now.extend_from_slice(&self.named_now());
        now
    }

    /// Lets go of a target, unless it is needed.
    fn let_go(&self, file: Id, disk: &Disk) {
        if !self.needed(disk).contains(&file) {
            let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
            files.retain(|id| *id != file);
            let _ = FromInside::ask(FORGET, file, b"");
        }
    }

    /// Before and after a command that changes the chain.
    pub fn settle(&self, disk: &Disk) {
        self.are_now(self.needed(disk));
        if helper::current::get().is_none() {
            return;
        }
        // A command is over: what lies below is read only.
        for layer in disk.layers().iter().skip(1) {
            let files = [layer.file(), layer.data_storage()].into_iter().flatten();
            for file in files.filter(|file| file.is_read_only()) {
                let id = by_descriptor(file).and_then(|open| id_of(&open).ok());
                let _ = id.map(|id| FromInside::ask(LOWER, id, b""));
            }
        }
    }

    /// The disk is served no longer.
    pub fn end(&self) {
        self.are_now(Vec::new());
        let mut directories = self.directories.lock().unwrap_or_else(PoisonError::into_inner);
        for directory in directories.drain(..) {
            let _ = FromInside::ask(LEAVE, directory, b"");
        }
    }

    fn are_now(&self, now: Vec<Id>) {
        if helper::current::get().is_none() {
            return;
        }
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        for gone in files.iter().filter(|id| !now.contains(id)) {
            let _ = FromInside::ask(FORGET, *gone, b"");
        }
        *files = now;
    }
}

/// The files of a disk, as they are now.
///
/// * `trusted_within`: of a disk that another process handed over, files count only there.
pub fn images_of(disk: &Disk, trusted_within: Option<&Reach>) -> Vec<Image> {
    let layers = disk.layers();
    let with_files = layers.iter().flat_map(|layer| {
        let data = layer.external_data().map(|data| (data, Format::Raw, Names::default()));
        let file = layer.file().and_then(|file| Some((file, layer.format()?)));
        // The process before may have written the header.
        let file = file.map(|(file, format)| (file, format, Names::of_layer(layer).as_noted(file)));
        file.into_iter().chain(data).map(|file| (&**layer, file))
    });
    with_files
        .filter_map(|(layer, (file, format, names))| {
            image_of(layer, (file, format, names), trusted_within)
        })
        .collect()
}

/// Servers of the NBD exports of a disk: connections that are lost are made again by the helper
/// process.
pub fn servers_of(disk: &Disk) -> Vec<NbdEndpoint> {
    let layers = disk.layers();
    let files = layers.iter().filter_map(|layer| layer.file());
    files.flat_map(|file| file.nbd_endpoints().to_vec()).collect()
}

/// Files that `--allow-path` names: a command may have an image name one of them. Their notes say
/// what they name; they were made before that, when the disk was opened.
///
/// * `paths`: of `--allow-path`.
pub fn images_allowed(paths: &[PathBuf]) -> Vec<Image> {
    paths.iter().filter_map(|path| image_allowed(path)).collect()
}

fn image_allowed(path: &Path) -> Option<Image> {
    let real = fs::canonicalize(path).ok().filter(|real| real.is_file())?;
    let options = OpenOptions { read_only: true, lock: Lock::ForceShare, ..OpenOptions::default() };
    let storage = Storage::open(&real, &options).ok()?;
    let mut head = [0; PROBE_LEN];
    let len = File::open(&real).and_then(|file| file.read_at(&mut head, 0)).ok()?;
    // One whose format is not clear is named by the user only.
    let format = ringdisk_disk::guess(&storage, &head[..len]).ok()?;
    // One that has no note was not looked at when the disk was opened.
    if Names::default().ask_at(&real).is_absent {
        return None;
    }
    let names = Names::noted_at(&real).unwrap_or_default().line();
    let directory = std::path::absolute(path).ok()?.parent()?.to_owned();
    Some(Image { named: named(real)?, format, names, directory })
}

fn image_of(
    layer: &Layer,
    (file, format, names): (&Storage, Format, Names),
    trusted_within: Option<&Reach>,
) -> Option<Image> {
    let open = by_descriptor(file)?;
    let meta = fs::metadata(&open).ok()?;
    let named = (fs::read_link(&open).ok()?, (meta.dev(), meta.ino()));
    let said = std::path::absolute(layer.name()).ok()?;
    let is_its = || fs::metadata(&said).is_ok_and(|it| (it.dev(), it.ino()) == named.1);
    // The name that a process before this one says counts where it leads to the file.
    let of = if trusted_within.is_none() || is_its() { &said } else { &named.0 };
    let directory = of.parent()?.to_owned();
    let is_had = trusted_within.is_none_or(|reach| reach.has_open(&open));
    is_had.then_some(Image { named, format, names: names.line(), directory })
}

/// Whether the helper process has a file that was made for a disk, or that a user has named. Where
/// there is none nothing is confined.
///
/// * `id`: device and inode number.
pub fn is_held(id: Id) -> bool {
    helper::current::get().is_none() || FromInside::ask(READ, id, b"").is_ok()
}

/// Passes a user's word on to the helper process. Gives the file that it holds from now on: the
/// target of a mirror or a backup. Inside.
pub fn pass_on(word: &OwnedFd) -> Option<Id> {
    let held = helper::current::get()?.pass_on(word).map_err(|error| {
        tracing::debug!("the helper process does not take the word of a user: {error}");
    });
    held.ok().flatten()
}
