//! Which overlays belong to a kept mount.
//!
//! The process that serves says which image is on top, and may have been taken over. Beside its own overlays lie images of others, and the next
//! process, which is not confined yet, would open one of those to write. So the warden, which the serving process cannot reach into, marks
//! what it makes for the mount: an extended attribute with the mount's own word, which was sealed at the start. Inside no call sets
//! attributes, and no other image can be opened.
//!
//! Promises: nothing of the file's bytes is touched; a file system without such attributes has no marks.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{XattrFlags, fsetxattr, getxattr};

/// Name of the attribute.
const NAME: &str = "user.ringdisk.mount";
/// Length of a word, bytes: 128 bits, in hexadecimal digits.
const LEN: usize = 32;

/// A word that no other mount has, and nobody guesses.
///
/// Errors: no source of random bytes.
pub(crate) fn new() -> io::Result<String> {
    let mut bytes = [0; LEN / 2];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Marks a file.
///
/// Errors: the file system keeps no such attributes.
pub(crate) fn set(file: impl AsFd, mark: &str) -> io::Result<()> {
    Ok(fsetxattr(file, NAME, mark.as_bytes(), XattrFlags::empty())?)
}

/// Whether the file that a name leads to has this mark.
pub(crate) fn is_on(path: &Path, mark: &str) -> bool {
    let mut value = [0; LEN + 1];
    mark.len() == LEN
        && getxattr(path, NAME, &mut value[..]).is_ok_and(|len| &value[..len] == mark.as_bytes())
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
        // A mount of before, which has none.
        set(file.as_file(), "").expect("an attribute");
        assert!(!is_on(file.path(), ""));
    }
}
