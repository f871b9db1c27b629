//! Which overlays belong to a kept mount.
//!
//! The process that serves says which image is on top, and may have been taken over. Beside its own
//! overlays lie images of others, and the next process, which is not confined yet, would open one
//! of those to write. So the helper process, which the serving process cannot reach into, marks
//! what it makes for the mount: an extended attribute with the mount's own word, which was sealed
//! at the start. Inside no call sets attributes, and no other image can be opened.
//!
//! Promises: nothing of the file's bytes is touched; a file system without such attributes has no
//! marks.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use ringdisk_disk::xattr::Attribute;
use rustix::fs::fstat;
use rustix::io::Errno;

/// Length of a word, bytes: 128 bits, in hexadecimal digits.
const LEN: usize = 32;
/// The attribute. Its longest value: the word and two numbers of 64 bits.
const ATTRIBUTE: Attribute = Attribute::new("user.ringdisk.mount", LEN + 42);

/// A word that no other mount has, and nobody guesses.
///
/// Errors: no source of random bytes.
pub fn new() -> io::Result<String> {
    let mut bytes = [0; LEN / 2];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Marks a file. A copy of it, with its attributes, does not have the mark.
///
/// Errors: the file system keeps no such attributes.
pub fn set(file: impl AsFd, mark: &str) -> io::Result<()> {
    let stat = fstat(&file)?;
    let value = value(mark, stat.st_dev, stat.st_ino);
    Ok(ATTRIBUTE.set(file, value.as_bytes())?)
}

/// Whether the file that a name leads to has this mark.
pub fn is_on(path: &Path, mark: &str) -> bool {
    let Ok(meta) = std::fs::metadata(path) else { return false };
    let wanted = value(mark, meta.dev(), meta.ino());
    mark.len() == LEN
        && ATTRIBUTE.get_at(path).is_ok_and(|found| found.as_deref() == Some(wanted.as_bytes()))
}

/// Whether files of a mount with this mark have it, where this name leads: the mount has one, it is
/// a regular file, and the file system keeps such attributes.
pub fn is_kept(path: &Path, mark: &str) -> bool {
    let is_file = std::fs::metadata(path).is_ok_and(|meta| meta.is_file());
    is_file && mark.len() == LEN && ATTRIBUTE.get_at(path) != Err(Errno::OPNOTSUPP)
}

fn value(mark: &str, device: u64, inode: u64) -> String {
    format!("{mark}:{device}:{inode}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_mark_that_was_set_and_no_other() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let [mark, other] = [new(), new()].map(|mark| mark.expect("random bytes"));
        assert!(mark != other && mark.len() == LEN);
        assert!(!is_on(file.path(), &mark));
        set(file.as_file(), &mark).expect("an attribute");
        assert!(is_on(file.path(), &mark) && !is_on(file.path(), &other));
        let copy = tempfile::NamedTempFile::new().expect("a file");
        let value = ATTRIBUTE.get(file.as_file()).expect("a value").expect("the mark");
        ATTRIBUTE.set(copy.as_file(), &value).expect("a copy of it");
        assert!(!is_on(copy.path(), &mark), "a copy");
        // A mount of before, which has none.
        set(file.as_file(), "").expect("an attribute");
        assert!(!is_on(file.path(), ""));
    }
}
