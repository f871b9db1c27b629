//! What the next process has to know of a mount, or of the images of a disk, in memory that
//! outlives the process.
//!
//! Promises: a successor reads the newest state that was written whole, at whatever moment the
//! server was killed, and refuses a state of another version in words. From the state of a confined
//! server it takes the images and the limits only ([`State::with_what_changes_of`]), and everything
//! else from the state that was sealed at the start ([`super::sealed_state`]). Control path.
//!
//! The memory is a memfd that is parked beside the descriptors of the mount. Its first page is the
//! [`FileRecord`]; two slots follow, which take turns ([`super::slots`]), for JSON.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_disk::{Format, Layer};
use ringdisk_fuse::kept::{FileRecord, Terms};
use ringdisk_fuse::negotiate::{Negotiated, Profile};
use ringdisk_messages::state::Versions;
use ringdisk_storage::Storage;
use ringdisk_throttle::Changed;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::{sealed_state, slots};
use crate::confine::{self, Reach};
use crate::control::jobs::keeper::KeptJob;
use crate::failure::{Exit, Failure, words};
use crate::helper::mark;

/// Of the state.
const VERSIONS: Versions = Versions::new(1, 1);

/// Everything that is not a descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// `None`: the images are no mount's.
    #[serde(flatten)]
    mount: Option<MountWords>,
    /// Device and inode number of the mountpoint, if we made it and have to remove it.
    pub made: Option<(u64, u64)>,
    /// Format of an image that `--create` made: what clients wrote to it does not decide.
    format: Option<String>,
    /// The image on top and its format, if a command has put another one there.
    top: Option<(Bytes, String)>,
    /// What the files of the chain are ([`files_of`]), so that another image that has the name of
    /// one by now is not taken for it. Empty: an older ringdisk did not say.
    #[serde(default)]
    files: Vec<(u64, u64)>,
    /// Those of the image on top at the start, which the mount may write; the others may lie below
    /// the disks of others, too. Empty: an older ringdisk did not say.
    #[serde(default)]
    tops: Vec<(u64, u64)>,
    /// The part of the disk that is served, if it is not all of it: first byte and length, bytes.
    /// The next process does not look for a partition again.
    #[serde(default)]
    pub window: Option<(u64, Option<u64>)>,
    /// The first sector of the raw image is protected, since its format was guessed. The next
    /// process may find it below an overlay, which states the format.
    #[serde(default)]
    pub protect_raw: bool,
    /// What the overlays of this mount are marked with ([`super::mark`]). Empty: they are not.
    #[serde(default)]
    pub mark: String,
    /// Its jobs. Another process goes on with them; what this says of them counts little.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<KeptJob>,
    /// Limits that a command has set, as words. An older ringdisk did not say.
    #[serde(default)]
    limits: Option<[String; 2]>,
    /// Copy-on-read, if a command has switched it. An older ringdisk did not say.
    #[serde(default)]
    pub copy_on_read: Option<bool>,
}

/// What a mount was made with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct MountWords {
    mountpoint: Bytes,
    connection: u32,
    queues: usize,
    /// Descriptors of the connection that are parked: as many as queues, or one that they share.
    devices: usize,
    page_bytes: u32,
    max_pages: u16,
    kernel_cache: bool,
    minor: u32,
    flags: u64,
    offered: u64,
    max_write: u32,
}

/// A path: one character for each byte, so that JSON can hold any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Bytes(String);

impl Bytes {
    fn of(path: &Path) -> Bytes {
        Bytes(path.as_os_str().as_bytes().iter().map(|&byte| char::from(byte)).collect())
    }

    fn path(&self) -> PathBuf {
        let bytes = self.0.chars().filter_map(|c| u8::try_from(u32::from(c)).ok()).collect();
        PathBuf::from(std::ffi::OsString::from_vec(bytes))
    }
}

impl State {
    /// The state of a mount that was just made.
    ///
    /// * `devices`: descriptors of the connection.
    /// * `made`: device and inode number of the mountpoint, if it was made.
    /// * `created`: format of the image, if it was made.
    pub fn new(
        terms: &Terms,
        devices: usize,
        made: Option<(u64, u64)>,
        created: Option<Format>,
    ) -> State {
        let mount = MountWords {
            mountpoint: Bytes::of(&terms.mountpoint),
            connection: terms.connection,
            queues: terms.queues,
            devices,
            page_bytes: terms.profile.page_bytes,
            max_pages: terms.profile.max_pages,
            kernel_cache: terms.profile.kernel_cache,
            minor: terms.negotiated.minor,
            flags: terms.negotiated.flags,
            offered: terms.negotiated.offered,
            max_write: terms.negotiated.max_write,
        };
        State { mount: Some(mount), made, ..State::of_images(created) }
    }

    /// The state of images that were just opened.
    ///
    /// * `created`: format of the image on top, if it was made.
    pub fn of_images(created: Option<Format>) -> State {
        State {
            mount: None,
            made: None,
            format: created.map(|format| format.name().to_owned()),
            top: None,
            files: Vec::new(),
            tops: Vec::new(),
            window: None,
            protect_raw: false,
            mark: String::new(),
            jobs: Vec::new(),
            limits: None,
            copy_on_read: None,
        }
    }

    /// With the images of this chain, which is the one of the start.
    pub fn begun_on(self, chain: &[Arc<Layer>]) -> State {
        State { tops: files_of(chain.get(..1).unwrap_or_default()), ..self.on(chain) }
    }

    /// What was sealed at the start, with the images, limits and jobs that a state names which was
    /// written later.
    fn with_what_changes_of(self, later: State) -> State {
        let State { top, files, limits, copy_on_read, jobs, .. } = later;
        State { top, files, limits, copy_on_read, jobs, ..self }
    }

    /// With another image on top than that of the start.
    fn with_top(self, path: &Path, format: Format) -> State {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        State { top: Some((Bytes::of(&path), format.name().to_owned())), ..self }
    }

    /// Limits that a command has set. `None`: none has, or they make no sense.
    pub fn limits(&self) -> Option<Changed> {
        Changed::read(self.limits.as_ref()?).ok()
    }

    /// The text to be sealed.
    ///
    /// Errors: memory is short.
    pub(crate) fn seal(&self) -> io::Result<File> {
        sealed_state::seal(VERSIONS.to_text(self)?.as_bytes())
    }

    /// What was sealed.
    ///
    /// Errors: the mount was made by another version; memory that is not sealed.
    pub(crate) fn sealed(memory: &OwnedFd) -> Result<State, Failure> {
        let text = sealed_state::open(memory).map_err(|error| {
            refuse(format!("what it was made with cannot be read ({})", words(&error)))
        })?;
        parse(&text)
    }

    /// The first of these images that the predecessor could not have opened: an image that was not
    /// in the chain at the start (this state), and that the helper process has neither made nor
    /// opened for writing.
    ///
    /// * `allowed`: what `--allow-path` names.
    pub fn foreign_image<'a>(&self, allowed: &Reach, chain: &'a [Arc<Layer>]) -> Option<&'a Layer> {
        let is_known = |storage: &Storage| {
            let was_there = match storage.is_read_only() {
                true => &self.files,
                false => self.tops(),
            };
            storage.identity().is_some_and(|id| was_there.contains(&id))
                || confine::by_descriptor(storage).is_none_or(|open| {
                    // What is only allowed is only read.
                    let is_enough = storage.is_read_only() || self.takes_as_top(&open);
                    is_enough && allowed.has_open(&open) || mark::is_on(&open, &self.mark)
                })
        };
        let is_foreign = |layer: &&Arc<Layer>| {
            let storages = [layer.file(), layer.data_storage()];
            !storages.into_iter().flatten().all(|storage| is_known(storage))
        };
        chain.iter().find(is_foreign).map(|layer| &**layer)
    }

    /// Whether a file or device with this name may be written: it was on top at the start, which
    /// this is, or was made for this mount, or a user had it written by a command.
    pub fn has_or_made(&self, path: &Path) -> bool {
        let meta = fs::metadata(path).map(|meta| Storage::identity_of(&meta));
        meta.is_ok_and(|id| self.tops().contains(&id)) || mark::is_on(path, &self.mark)
    }

    /// Whether a file in a directory of `--allow-path` may be written, and so be on top: one that
    /// may be written anyway, or one where no mark can be.
    pub fn takes_as_top(&self, path: &Path) -> bool {
        self.has_or_made(path) || !mark::is_kept(path, &self.mark)
    }

    /// What may be written of what was there at the start.
    fn tops(&self) -> &[(u64, u64)] {
        if self.tops.is_empty() { &self.files } else { &self.tops }
    }

    /// With the images of this chain.
    pub fn on(self, chain: &[Arc<Layer>]) -> State {
        State { files: files_of(chain), ..self }
    }

    /// One of these images that was not in the chain. (It may have become shorter a moment before
    /// the end.)
    pub fn other<'a>(&self, chain: &'a [Arc<Layer>]) -> Option<&'a Layer> {
        let is_other = |layer: &&Arc<Layer>| {
            let files = files_of(std::slice::from_ref(*layer));
            !files.iter().all(|file| self.files.contains(file))
        };
        chain.iter().find(is_other).map(|layer| &**layer).filter(|_| !self.files.is_empty())
    }

    /// What the mount was made with.
    pub fn terms(&self) -> Terms {
        let mount = self.mount.clone().unwrap_or_default();
        Terms {
            mountpoint: mount.mountpoint.path(),
            connection: mount.connection,
            profile: Profile {
                page_bytes: mount.page_bytes,
                max_pages: mount.max_pages,
                kernel_cache: mount.kernel_cache,
                over_io_uring: false,
                passthrough: false,
            },
            negotiated: Negotiated {
                minor: mount.minor,
                flags: mount.flags,
                offered: mount.offered,
                max_write: mount.max_write,
            },
            queues: mount.queues,
        }
    }

    /// Descriptors of the connection that belong to it.
    pub fn devices(&self) -> usize {
        self.mount.as_ref().map_or(0, |mount| mount.devices)
    }

    /// Format of the image that `--create` made.
    pub fn format(&self) -> Option<Format> {
        self.format.as_deref().and_then(|name| name.parse().ok())
    }

    /// The image that is on top now, if it is not the one of the command line.
    pub fn top(&self) -> Option<(PathBuf, Format)> {
        let (path, format) = self.top.as_ref()?;
        Some((path.path(), format.parse().ok()?))
    }
}

/// The memory. Clones share it.
#[derive(Clone, Debug)]
pub struct StateFile {
    file: Arc<File>,
    /// The state and its number.
    now: Arc<Mutex<(u64, Option<State>)>>,
}

impl StateFile {
    /// New memory, with nothing in it.
    ///
    /// Errors: those of memfd_create(2).
    pub fn make() -> io::Result<StateFile> {
        let file = File::from(memfd_create(c"ringdisk-state", MemfdFlags::CLOEXEC)?);
        Ok(StateFile { file: Arc::new(file), now: Arc::new(Mutex::new((0, None))) })
    }

    /// Takes parked memory up.
    ///
    /// * `first`: what was sealed when the mount was made.
    ///
    /// Errors: it holds no state, or one of another version.
    pub fn open(memory: OwnedFd, first: State) -> Result<StateFile, Failure> {
        let file = File::from(memory);
        let (number, json) = slots::IMAGES
            .newest(&file)
            .ok_or_else(|| refuse(String::from("its state is not there")))?;
        let state = first.with_what_changes_of(parse(&json)?);
        Ok(StateFile { file: Arc::new(file), now: Arc::new(Mutex::new((number, Some(state)))) })
    }

    /// The state, if one was written.
    pub fn state(&self) -> Option<State> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }

    /// Writes a state.
    ///
    /// Errors: memory is short.
    pub fn write(&self, state: State) -> Result<(), Failure> {
        self.update(|_| Some(state))
    }

    /// Writes what `change` makes of the state.
    ///
    /// Errors: memory is short.
    fn update(&self, change: impl FnOnce(Option<State>) -> Option<State>) -> Result<(), Failure> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(state) = change(now.1.clone()) else { return Ok(()) };
        let cannot = |error: &io::Error| {
            Failure::new(
                Exit::Limit,
                format!("the state of the images cannot be kept: {}", words(error)),
            )
        };
        let json = VERSIONS.to_text(&state).map_err(|error| cannot(&error))?;
        let number = now.0 + 1;
        slots::IMAGES.put(&self.file, number, json.as_bytes()).map_err(|error| cannot(&error))?;
        *now = (number, Some(state));
        Ok(())
    }

    /// The chain is another one from now on.
    ///
    /// * `is_new_top`: with another image on top.
    pub fn set_chain(&self, chain: &[Arc<Layer>], is_new_top: bool) {
        self.change("image", |state| match chain.first().filter(|_| is_new_top) {
            // Only a qcow2 overlay, or the image below one, becomes the top one.
            Some(top) => state.on(chain).with_top(top.name(), top.format().unwrap_or(Format::Raw)),
            None => state.on(chain),
        });
    }

    /// The limits are those that a command has set from now on; `None`: those of the start.
    pub fn set_limits(&self, limits: Option<Changed>) {
        let limits = limits.map(|limits| limits.words());
        self.change("limits", |state| State { limits, ..state });
    }

    /// A command has switched copy-on-read.
    pub fn set_copy_on_read(&self, is_on: bool) {
        let copy_on_read = Some(is_on);
        self.change("copy-on-read", |state| State { copy_on_read, ..state });
    }

    fn change(&self, what: &str, change: impl FnOnce(State) -> State) {
        if let Err(failure) = self.update(|state| state.map(change)) {
            tracing::error!(
                "{}; after a crash the next process would go on with the former {what}",
                failure.message()
            );
        }
    }

    /// The part that the export writes.
    ///
    /// Errors: no descriptor.
    pub fn record(&self) -> io::Result<FileRecord> {
        FileRecord::new(self.file.try_clone()?)
    }

    /// For the process that keeps it.
    pub fn descriptor(&self) -> &File {
        &self.file
    }
}

fn refuse(why: String) -> Failure {
    Failure::new(Exit::Unsupported, format!("what was kept cannot be taken over: {why}"))
        .hint("stop the service (or the process that was started), then start it anew")
}

/// Errors: a state of a version that is not known, or none.
fn parse(json: &[u8]) -> Result<State, Failure> {
    VERSIONS.from_text(json).map_err(|why| refuse(why.into()))
}

/// Identities of all image and data files, as [`ringdisk_storage::Storage::identity`] says them.
fn files_of(chain: &[Arc<Layer>]) -> Vec<(u64, u64)> {
    let storages = chain.iter().flat_map(|layer| [layer.file(), layer.data_storage()]);
    storages.flatten().filter_map(|storage| storage.identity()).collect()
}

#[cfg(test)]
mod tests;
