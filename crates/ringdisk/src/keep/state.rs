//! What the next process has to know of a mount, in memory that outlives the process.
//!
//! Promises: the newest state that was written whole is read, whenever a process was killed; a state of another version of ringdisk
//! is refused in words. Control path.
//!
//! The memory is a memfd that is parked beside the descriptors of the mount. Its first page is the
//! [`FileRecord`]; two places follow, which take turns: number, checksum and length (u64 each), then JSON.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_disk::{Format, Layer};
use ringdisk_fuse::kept::{FileRecord, RECORD_BYTES, Terms};
use ringdisk_fuse::negotiate::{Negotiated, Profile};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use crate::report::{Exit, Failure, words};

/// Changes when a field changes its meaning.
const VERSION: u32 = 1;
/// Bytes of each of the two places: two paths of 4096 bytes, each byte escaped, and the rest.
const PLACE_BYTES: u64 = 64 << 10;
/// Number, checksum and length.
const HEAD_BYTES: usize = 24;

/// Everything that is not a descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    version: u32,
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
    /// Device and inode number of the mountpoint, if we made it and have to remove it.
    pub(crate) made: Option<(u64, u64)>,
    /// Format of an image that `--create` made: what clients wrote to it does not decide.
    format: Option<String>,
    /// The image on top and its format, if a command has put another one there.
    top: Option<(Bytes, String)>,
    /// What the files of the chain are ([`files_of`]), so that another image that has the name of one by now is not taken for it. Empty: an
    /// older ringdisk did not say.
    #[serde(default)]
    files: Vec<(u64, u64)>,
    /// The part of the disk that is served, if it is not all of it: first byte and length, bytes. The next process does not look for a
    /// partition again.
    #[serde(default)]
    pub(crate) window: Option<(u64, Option<u64>)>,
    /// The first sector of the raw image is protected, since its format was guessed. The next process may find it below an overlay, which
    /// states the format.
    #[serde(default)]
    pub(crate) protect_raw: bool,
}

/// A path: one character for each byte, so that JSON can hold any.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    pub(crate) fn new(
        terms: &Terms,
        devices: usize,
        made: Option<(u64, u64)>,
        created: Option<Format>,
    ) -> State {
        State {
            version: VERSION,
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
            made,
            format: created.map(|format| format.name().to_owned()),
            top: None,
            files: Vec::new(),
            window: None,
            protect_raw: false,
        }
    }

    /// With the images of this chain.
    pub(crate) fn on(self, chain: &[Arc<Layer>]) -> State {
        State { files: files_of(chain), ..self }
    }

    /// One of these images that was not in the chain. (It may have become shorter a moment before the end.)
    pub(crate) fn other<'a>(&self, chain: &'a [Arc<Layer>]) -> Option<&'a Layer> {
        let is_other = |layer: &&Arc<Layer>| {
            let files = files_of(std::slice::from_ref(*layer));
            !files.iter().all(|file| self.files.contains(file))
        };
        chain.iter().find(is_other).map(|layer| &**layer).filter(|_| !self.files.is_empty())
    }

    /// What the mount was made with.
    pub(crate) fn terms(&self) -> Terms {
        Terms {
            mountpoint: self.mountpoint.path(),
            connection: self.connection,
            profile: Profile {
                page_bytes: self.page_bytes,
                max_pages: self.max_pages,
                kernel_cache: self.kernel_cache,
                over_io_uring: false,
                passthrough: false,
            },
            negotiated: Negotiated {
                minor: self.minor,
                flags: self.flags,
                offered: self.offered,
                max_write: self.max_write,
            },
            queues: self.queues,
        }
    }

    /// Descriptors of the connection that belong to it.
    pub(crate) fn devices(&self) -> usize {
        self.devices
    }

    /// Format of the image that `--create` made.
    pub(crate) fn format(&self) -> Option<Format> {
        self.format.as_deref().and_then(|name| name.parse().ok())
    }

    /// The image that is on top now, if it is not the one of the command line.
    pub(crate) fn top(&self) -> Option<(PathBuf, Format)> {
        let (path, format) = self.top.as_ref()?;
        Some((path.path(), format.parse().ok()?))
    }
}

/// The memory. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct StateFile {
    file: Arc<File>,
    /// The state and its number.
    now: Arc<Mutex<(u64, Option<State>)>>,
}

impl StateFile {
    /// New memory, with nothing in it.
    ///
    /// Errors: those of memfd_create(2).
    pub(crate) fn make() -> io::Result<StateFile> {
        let file = File::from(memfd_create(c"ringdisk-state", MemfdFlags::CLOEXEC)?);
        Ok(StateFile { file: Arc::new(file), now: Arc::new(Mutex::new((0, None))) })
    }

    /// Takes parked memory up.
    ///
    /// Errors: it holds no state, or one of another version.
    pub(crate) fn open(memory: OwnedFd) -> Result<StateFile, Failure> {
        let file = File::from(memory);
        let newest = (0..2).filter_map(|place| read(&file, place)).max_by_key(|found| found.0);
        let refuse = |why: String| {
            Failure::new(
                Exit::Unsupported,
                format!("the mount that was kept cannot be taken over: {why}"),
            )
            .hint("stop the service (or the process that keeps the mount), then start it anew")
        };
        let (number, json) =
            newest.ok_or_else(|| refuse(String::from("its state is not there")))?;
        let version = serde_json::from_slice::<serde_json::Value>(&json)
            .ok()
            .and_then(|value| value["version"].as_u64());
        if version != Some(VERSION.into()) {
            return Err(refuse(String::from("another version of ringdisk made it")));
        }
        let state: State = serde_json::from_slice(&json)
            .map_err(|error| refuse(format!("its state cannot be read ({error})")))?;
        Ok(StateFile { file: Arc::new(file), now: Arc::new(Mutex::new((number, Some(state)))) })
    }

    /// The state, if one was written.
    pub(crate) fn state(&self) -> Option<State> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }

    /// Writes a state.
    ///
    /// Errors: memory is short.
    pub(crate) fn write(&self, state: State) -> Result<(), Failure> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let cannot = |error: &io::Error| {
            Failure::new(
                Exit::Limit,
                format!("the state of the mount cannot be kept: {}", words(error)),
            )
        };
        let json = serde_json::to_vec(&state).map_err(|error| cannot(&error.into()))?;
        let number = now.0 + 1;
        let mut bytes = Vec::with_capacity(HEAD_BYTES + json.len());
        bytes.extend(number.to_ne_bytes());
        bytes.extend(checksum(number, &json).to_ne_bytes());
        bytes.extend((json.len() as u64).to_ne_bytes());
        bytes.extend(json);
        if bytes.len() as u64 > PLACE_BYTES {
            return Err(cannot(&io::Error::from(io::ErrorKind::FileTooLarge)));
        }
        self.file.write_all_at(&bytes, place_at(number % 2)).map_err(|error| cannot(&error))?;
        *now = (number, Some(state));
        Ok(())
    }

    /// The chain is another one from now on.
    ///
    /// * `is_new_top`: with another image on top.
    pub(crate) fn set_chain(&self, chain: &[Arc<Layer>], is_new_top: bool) {
        let Some(state) = self.state() else { return };
        let state = state.on(chain);
        match chain.first().filter(|_| is_new_top) {
            // Only a qcow2 overlay, or the image below one, becomes the top one.
            Some(top) => self.set_top_of(state, top.name(), top.format().unwrap_or(Format::Raw)),
            None => self.change(state),
        }
    }

    fn set_top_of(&self, state: State, path: &Path, format: Format) {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let top = Some((Bytes::of(&path), format.name().to_owned()));
        self.change(State { top, ..state });
    }

    fn change(&self, state: State) {
        if let Err(failure) = self.write(state) {
            tracing::error!(
                "{}; after a crash the next process would open the former image",
                failure.message()
            );
        }
    }

    /// The part that the export writes.
    ///
    /// Errors: no descriptor.
    pub(crate) fn record(&self) -> io::Result<FileRecord> {
        FileRecord::new(self.file.try_clone()?)
    }

    /// For whoever keeps it.
    pub(crate) fn descriptor(&self) -> &File {
        &self.file
    }
}

/// Identities of all image and data files, as [`ringdisk_storage::Storage::identity`] says them.
fn files_of(chain: &[Arc<Layer>]) -> Vec<(u64, u64)> {
    let storages = chain.iter().flat_map(|layer| [layer.file(), layer.data_storage()]);
    storages.flatten().filter_map(|storage| storage.identity()).collect()
}

fn place_at(place: u64) -> u64 {
    RECORD_BYTES + place * PLACE_BYTES
}

/// Number and JSON of one of the places, if it holds a whole state.
fn read(file: &File, place: u64) -> Option<(u64, Vec<u8>)> {
    let mut head = [0; HEAD_BYTES];
    file.read_exact_at(&mut head, place_at(place)).ok()?;
    let word = |index: usize| {
        let bytes = head[index * 8..][..8].try_into().unwrap_or_default();
        u64::from_ne_bytes(bytes)
    };
    let (number, len) = (word(0), word(2));
    if number == 0 || len > PLACE_BYTES {
        return None;
    }
    let mut json = vec![0; usize::try_from(len).ok()?];
    file.read_exact_at(&mut json, place_at(place) + HEAD_BYTES as u64).ok()?;
    (checksum(number, &json) == word(1)).then_some((number, json))
}

/// FNV-1a: enough to tell a half-written state from a whole one.
fn checksum(number: u64, bytes: &[u8]) -> u64 {
    let number = number.to_ne_bytes();
    let all = number.iter().chain(bytes);
    all.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms() -> Terms {
        Terms {
            mountpoint: PathBuf::from(std::ffi::OsString::from_vec(b"/tmp/\xff\"\nd".to_vec())),
            connection: 77,
            profile: Profile::new(4096, Some(256), true),
            negotiated: Negotiated {
                minor: 45,
                flags: 1 << 40,
                offered: u64::MAX,
                max_write: 1 << 20,
            },
            queues: 3,
        }
    }

    fn again(file: &StateFile) -> Result<StateFile, Failure> {
        StateFile::open(file.file.try_clone().expect("clone").into())
    }

    #[test]
    fn what_was_written_last_is_read() {
        let file = StateFile::make().expect("memory");
        let state = State::new(&terms(), 3, Some((1, 2)), Some(Format::Raw));
        let state = State { window: Some((512, Some(4096))), ..state };
        file.write(state.clone()).expect("room");
        let found = again(&file).expect("a state").state().expect("written");
        assert_eq!((&found, found.terms(), found.format()), (&state, terms(), Some(Format::Raw)));
        assert_eq!(found.top(), None);
        file.set_top_of(file.state().expect("a state"), Path::new("/a/b.qcow2"), Format::Qcow2);
        let found = again(&file).expect("a state").state().expect("written");
        assert_eq!(found.top(), Some((PathBuf::from("/a/b.qcow2"), Format::Qcow2)));
        assert_eq!(found.terms(), terms());
    }

    #[test]
    fn a_state_that_was_not_written_to_its_end_is_not_read() {
        let file = StateFile::make().expect("memory");
        file.write(State::new(&terms(), 3, None, None)).expect("room");
        file.set_top_of(file.state().expect("a state"), Path::new("/new"), Format::Qcow2);
        // The second state lies in the first place.
        file.file.write_all_at(b"!", place_at(0) + HEAD_BYTES as u64 + 20).expect("tear");
        assert_eq!(again(&file).expect("the one before").state().expect("written").top(), None);
    }

    #[test]
    fn another_version_and_nothing_are_refused_in_words() {
        let file = StateFile::make().expect("memory");
        assert!(again(&file).expect_err("empty").message().contains("not there"));
        let state = State { version: VERSION + 1, ..State::new(&terms(), 3, None, None) };
        file.write(state).expect("room");
        assert!(again(&file).expect_err("newer").message().contains("another version"));
    }
}
