//! Images that the process inside may only read, and what their headers may name.
//!
//! A base may be below the disks of many, so a process that serves one of them has no right to
//! write it. A `ringdisk ctl commit` writes it all the same: then the helper process opens it again
//! for that, on the word of the user who asks, not on that of the process
//! ([`crate::helper::approval`]). And a command that changes what a header names has the note of
//! the names changed here ([`ringdisk_disk::names_note`]), which no call inside can change.
//!
//! Promises: only files that were in the chain when the process was confined, and that carry a note
//! of their own names by then, are opened to be written; only while the client that asked for it
//! waits for the answer. What a note names is one of these files, or an overlay that was made here.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ringdisk_disk::names_note::{Names, change_note, note_of, set_note};
use ringdisk_disk::xattr::link;
use ringdisk_disk::{Format, LAYERS_MAX};
use ringdisk_sandbox::User;
use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat};
use rustix::io::Errno;

use super::named::{Id, Named, pin};
use crate::helper::approval::{self, Allows};
use crate::helper::mark;

/// Files that are held at a time: those of 256 images, and what commands have added since.
const IMAGES_MAX: usize = 1024;
/// Words of users that are held at a time: as many as there are clients of a control socket, for
/// some disks.
const WORDS_MAX: usize = 64;
/// Mirrors that are begun while the process serves.
const HEARD_MAX: usize = 1 << 16;

/// A file of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The file.
    pub named: Named,
    /// What it is opened as; a data file is raw.
    pub format: Format,
    /// What its header names, as [`Names::line`] has it.
    pub names: String,
    /// Where relative names in it start.
    pub directory: PathBuf,
}

/// What is held of the chains. Outside.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    images: Vec<Held>,
    /// Of users who wait for an answer.
    words: Vec<(OwnedFd, Allows)>,
    /// Numbers of the sockets of words about targets of mirrors that were heard.
    heard: Vec<u64>,
}

#[derive(Debug)]
struct Held {
    image: Image,
    /// `O_PATH`: while it is open no other file gets its numbers.
    file: OwnedFd,
    /// It was opened to be written, and may be again until the process says that it needs it no
    /// more.
    is_granted: bool,
}

impl Held {
    fn id(&self) -> Id {
        self.image.named.1
    }
}

impl Chain {
    /// Takes hold of files. One whose name leads elsewhere by now is none.
    pub(crate) fn hold(images: &[Image]) -> Chain {
        let held = images.iter().filter_map(|image| {
            let file = pin(&image.named.0, image.named.1)?;
            Some(Held { image: image.clone(), file, is_granted: false })
        });
        Chain { images: held.collect(), ..Chain::default() }
    }

    /// A user's word, as the process passes it on: it counts while the user waits. One about the
    /// target of a mirror or a backup is given back: it counts at once.
    ///
    /// Errors: EACCES: it is none; the user does not wait any more.
    pub(crate) fn hear(
        &mut self,
        word: Option<OwnedFd>,
        server: u32,
    ) -> Result<Option<Allows>, Errno> {
        let word = word.ok_or(Errno::ACCESS)?;
        let allows = approval::given(&word, server).ok_or(Errno::ACCESS)?;
        if matches!(allows, Allows::Target(..) | Allows::Copy(..) | Allows::Servers(_)) {
            let number = fstat(&word)?.st_ino;
            // The process may have kept it for later.
            if !approval::lasts(&word) || self.heard.contains(&number) {
                return Err(Errno::ACCESS);
            }
            if self.heard.len() >= HEARD_MAX {
                return Err(Errno::DQUOT);
            }
            self.heard.push(number);
            return Ok(Some(allows));
        }
        self.words.retain(|(word, _)| approval::lasts(word));
        if self.words.len() >= WORDS_MAX {
            return Err(Errno::DQUOT);
        }
        self.words.push((word, allows));
        Ok(None)
    }

    /// Forgets the words of users who do not wait any more.
    fn forget_words(&mut self) {
        self.words.retain(|(word, _)| approval::lasts(word));
    }

    /// Whether a user who waits for an answer names this file in the command, as this format.
    pub(crate) fn is_named_by_user(&self, id: Id, format: Format) -> bool {
        let wanted = Allows::Notes(Some((id, format)));
        self.words.iter().any(|(word, allows)| *allows == wanted && approval::lasts(word))
    }

    /// Whether a file of the chains is opened as this format.
    pub(crate) fn has(&self, id: Id, format: Format) -> bool {
        self.images.iter().any(|held| held.id() == id && held.image.format == format)
    }

    /// Opens a file to write it.
    ///
    /// * `maker`: who must be allowed to; `None`: this process.
    /// * `mark`: it may become the image on top, which the next process of a kept mount opens to
    ///   write; empty: there is none.
    ///
    /// Errors: EACCES: it is none of the chain; EKEYREJECTED: no user asks for that; those of
    /// open(2); those of setxattr(2), but where the file system has no attributes.
    pub(crate) fn write(
        &mut self,
        id: Id,
        maker: Option<User>,
        mark: &str,
    ) -> Result<OwnedFd, Errno> {
        self.forget_words();
        let has_word = self.words.iter().any(|(_, allows)| *allows == Allows::Writing);
        let held = self.images.iter_mut().find(|held| held.id() == id).ok_or(Errno::ACCESS)?;
        if !has_word && !held.is_granted {
            return Err(Errno::KEYREJECTED);
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let open = || openat(CWD, link(held.file.as_raw_fd()), flags, Mode::empty());
        let open = match maker {
            Some(user) => user.look(open)??,
            None => open()?,
        };
        // From here on its header may say anything. A device keeps no notes.
        if is_file(open.as_fd()) {
            match note_of(&open) {
                Ok(Some(_)) | Err(Errno::OPNOTSUPP) => {}
                Ok(None) => set_note(&open, &held.image.names)?,
                Err(errno) => return Err(errno),
            }
        }
        if !mark.is_empty() {
            let _ = mark::set(&open, mark);
        }
        held.is_granted = true;
        Ok(open)
    }

    /// A file is written no more.
    pub(crate) fn lower(&mut self, id: Id) {
        if let Some(held) = self.images.iter_mut().find(|held| held.id() == id) {
            held.is_granted = false;
        }
    }

    pub(crate) fn forget(&mut self, id: Id) {
        self.images.retain(|held| held.id() != id);
    }

    /// Changes the note of a file whose header names another backing file, or is about to.
    ///
    /// * `is_known`: whether a file was made here, or named as the target of a mirror, as this
    ///   format.
    ///
    /// Errors: EACCES: it is none of the chain; EPERM: it names what is none; EKEYREJECTED: no user
    /// asks for that; those of setxattr(2).
    pub(crate) fn note(
        &mut self,
        id: Id,
        line: &[u8],
        is_done: bool,
        is_known: impl Fn(Id, Format) -> bool,
    ) -> Result<(), Errno> {
        self.forget_words();
        let held = self.images.iter().find(|held| held.id() == id).ok_or(Errno::ACCESS)?;
        if self.words.is_empty() {
            return Err(Errno::KEYREJECTED);
        }
        let before = Names::parse(&held.image.names).unwrap_or_default();
        let names = checked(line, &before, &held.image.directory, |id, format| {
            is_known(id, format) || self.has(id, format) || self.is_named_by_user(id, format)
        })?;
        match change_note(&held.file, &names, is_done) {
            // There are no notes, so there is none that would refuse the name.
            Err(Errno::OPNOTSUPP) => {}
            changed => changed?,
        }
        if is_done && let Some(held) = self.images.iter_mut().find(|held| held.id() == id) {
            let named = Names::parse(&names).and_then(|names| names.backing());
            let below = named.map(|(path, format)| (held.image.directory.join(path), format));
            held.image.names = names;
            if let Some((path, format)) = below {
                self.add(path, format);
            }
        }
        Ok(())
    }

    /// An image names a file that a user has named in a command: it is of the chain now, with what
    /// its note and the notes below say, and may be written for a commit.
    pub(crate) fn add(&mut self, path: PathBuf, format: Format) {
        let Some(id) = id_of(&path) else { return };
        if !self.is_named_by_user(id, format) {
            return;
        }
        let mut next = Some((path, format));
        for _ in 0..LAYERS_MAX {
            let Some((path, format)) = next else { return };
            let Ok(path) = fs::canonicalize(path) else { return };
            // `ringdisk ctl` has noted it, where it had no note.
            let names = Names::noted_at(&path).unwrap_or_default();
            let directory = path.parent().map(Path::to_path_buf).unwrap_or_default();
            next = names.backing().map(|(below, format)| (directory.join(below), format));
            let data = names.data_path().map(|data| directory.join(data));
            self.hold_one(path, format, names.line());
            if let Some(data) = data.and_then(|data| fs::canonicalize(data).ok()) {
                self.hold_one(data, Format::Raw, Names::default().line());
            }
        }
    }

    /// Takes hold of one file more, if it is none of these.
    fn hold_one(&mut self, path: PathBuf, format: Format, names: String) {
        let Some(id) = id_of(&path) else { return };
        let is_there = self.images.iter().any(|held| held.id() == id);
        if is_there || self.images.len() >= IMAGES_MAX {
            return;
        }
        let directory = path.parent().map(Path::to_path_buf).unwrap_or_default();
        let image = Image { named: (path, id), format, names, directory };
        if let Some(file) = pin(&image.named.0, id) {
            self.images.push(Held { image, file, is_granted: false });
        }
    }
}

/// Device and inode of what a name leads to.
fn id_of(path: &Path) -> Option<Id> {
    fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

fn is_file(file: BorrowedFd<'_>) -> bool {
    fstat(file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}

/// What a header is said to name, if it is files that are known, as what they are known: a guest or
/// the process may have written anything into a raw one, the header of an image too.
///
/// * `before`: what it named; its data file stays.
/// * `directory`: where relative names start.
///
/// Errors: EPERM.
pub(crate) fn checked(
    line: &[u8],
    before: &Names,
    directory: &Path,
    is_known: impl Fn(Id, Format) -> bool,
) -> Result<String, Errno> {
    let line = std::str::from_utf8(line).map_err(|_| Errno::PERM)?;
    let names = Names::parse(line).filter(|_| !line.contains('\n')).ok_or(Errno::PERM)?;
    if names.has_data() && !names.has_same_data(before) {
        return Err(Errno::PERM);
    }
    if names.has_backing() {
        let (path, format) = names.backing().ok_or(Errno::PERM)?;
        let meta = fs::metadata(directory.join(path)).map_err(|_| Errno::PERM)?;
        if !is_known((meta.dev(), meta.ino()), format) {
            return Err(Errno::PERM);
        }
    }
    Ok(names.with_data_of(before).line())
}

#[cfg(test)]
mod tests {
    use ringdisk_testkit::limits::needs;

    use super::super::named::named;
    use super::*;

    #[test]
    fn a_word_for_notes_writes_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("base");
        fs::write(&path, "bytes").expect("write");
        let named = named(path.clone()).expect("it is there");
        let directory = directory.path().to_owned();
        let names = String::from(";");
        let image = Image { named: named.clone(), format: Format::Raw, names, directory };
        for (allows, is_written) in [(Allows::Notes(None), false), (Allows::Writing, true)] {
            let mut chain = Chain::hold(std::slice::from_ref(&image));
            let (kept, given) = approval::give(&allows).expect("sockets");
            chain.words.push((given, allows.clone()));
            assert_eq!(chain.note(named.1, b";", true, |_, _| false), Ok(()), "{allows:?}");
            assert_eq!(chain.write(named.1, None, "").is_ok(), is_written, "{allows:?}");
            drop(kept);
            let later = chain.note(named.1, b";", true, |_, _| false);
            assert_eq!(later, Err(Errno::KEYREJECTED), "{allows:?}");
        }
    }

    #[test]
    fn a_base_whose_names_cannot_be_noted_is_not_opened_to_be_written() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("base");
        fs::write(&path, "bytes").expect("write");
        let named = named(path.clone()).expect("it is there");
        // Longer than what ext4 keeps beside a file.
        let names = format!("{}:raw;", "n".repeat(5000));
        let directory = directory.path().to_owned();
        let image = Image { named: named.clone(), format: Format::Qcow2, names, directory };
        let mut chain = Chain::hold(&[image]);
        let write = |chain: &mut Chain| chain.write(named.1, None, "").map(drop);
        assert_eq!(write(&mut chain), Err(Errno::KEYREJECTED));
        chain.images[0].is_granted = true;
        let refused = write(&mut chain);
        if !needs("a file system that keeps few attributes", refused.is_err()) {
            return;
        }
        assert_eq!(note_of(&chain.images[0].file), Ok(None));
        chain.images[0].image.names = String::from(";");
        assert_eq!(write(&mut chain), Ok(()));
        assert_eq!(note_of(&chain.images[0].file), Ok(Some(String::from(";"))));
    }
}
