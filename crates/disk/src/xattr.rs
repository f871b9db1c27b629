//! Extended attributes of files: one attribute by its name and the longest value it may have.
//!
//! Promises: each call is one system call, and its error is given as it is; only "there is no such
//! attribute" (ENODATA) is no error. Nothing here decides what a file system without attributes, or
//! a sandbox without the calls (ENOSYS), means: the callers differ in that.
//!
//! Control path.

use std::os::fd::{AsFd, RawFd};
use std::path::{Path, PathBuf};

use ringdisk_ring::Errno;
use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr, getxattr, setxattr};

/// An attribute that files may have.
#[derive(Clone, Copy, Debug)]
pub struct Attribute {
    name: &'static str,
    value_bytes_max: usize,
}

impl Attribute {
    /// * `name`: with its namespace, such as `user.ringdisk.format`.
    /// * `value_bytes_max`: longest value that is read, bytes.
    pub const fn new(name: &'static str, value_bytes_max: usize) -> Attribute {
        Attribute { name, value_bytes_max }
    }

    /// The value at an open file; `None`: it has no such attribute.
    ///
    /// Errors: those of fgetxattr(2); ERANGE for a longer value; EBADF for an `O_PATH` descriptor
    /// (use [`link`] there).
    pub fn get(&self, file: impl AsFd) -> Result<Option<Vec<u8>>, Errno> {
        self.read(|value| fgetxattr(file, self.name, value))
    }

    /// The value at the file that a name leads to; `None`: it has no such attribute.
    ///
    /// Errors: those of getxattr(2); ERANGE for a longer value.
    pub fn get_at(&self, path: &Path) -> Result<Option<Vec<u8>>, Errno> {
        self.read(|value| getxattr(path, self.name, value))
    }

    fn read(
        &self,
        get: impl FnOnce(&mut [u8]) -> Result<usize, Errno>,
    ) -> Result<Option<Vec<u8>>, Errno> {
        let mut value = vec![0; self.value_bytes_max];
        match get(&mut value) {
            Ok(len) => {
                value.truncate(len);
                Ok(Some(value))
            }
            Err(Errno::NODATA) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Sets the value at an open file.
    ///
    /// Errors: those of fsetxattr(2).
    pub fn set(&self, file: impl AsFd, value: &[u8]) -> Result<(), Errno> {
        fsetxattr(file, self.name, value, XattrFlags::empty())
    }

    /// Sets the value at the file that a name leads to.
    ///
    /// Errors: those of setxattr(2).
    pub fn set_at(&self, path: &Path, value: &[u8]) -> Result<(), Errno> {
        setxattr(path, self.name, value, XattrFlags::empty())
    }

    /// Removes the attribute from an open file.
    ///
    /// Errors: those of fremovexattr(2).
    pub fn remove(&self, file: impl AsFd) -> Result<(), Errno> {
        fremovexattr(file, self.name)
    }
}

/// A path that leads to the file of an open descriptor of this process, also of one that was opened
/// with `O_PATH`.
pub fn link(fd: RawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{fd}"))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    const NOTE: Attribute = Attribute::new("user.ringdisk.test", 4);

    #[test]
    fn a_value_is_what_was_set_by_descriptor_and_by_name() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert_eq!(NOTE.get(&file), Ok(None));
        NOTE.set(&file, b"abc").expect("an attribute");
        assert_eq!(NOTE.get_at(file.path()), Ok(Some(b"abc".to_vec())));
        NOTE.set_at(&link(file.as_file().as_raw_fd()), b"").expect("an attribute");
        assert_eq!(NOTE.get(&file), Ok(Some(Vec::new())));
        NOTE.remove(&file).expect("it is there");
        assert_eq!(NOTE.get_at(file.path()), Ok(None));
    }

    #[test]
    fn a_longer_value_is_an_error() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        NOTE.set(&file, b"abcde").expect("an attribute");
        assert_eq!(NOTE.get(&file), Err(Errno::RANGE));
    }

    #[test]
    fn a_descriptor_that_is_a_place_only_is_reached_by_its_link() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        NOTE.set(&file, b"abc").expect("an attribute");
        let flags = rustix::fs::OFlags::PATH;
        let place = rustix::fs::open(file.path(), flags, rustix::fs::Mode::empty()).expect("open");
        assert_eq!(NOTE.get(&place), Err(Errno::BADF));
        assert_eq!(NOTE.get_at(&link(place.as_raw_fd())), Ok(Some(b"abc".to_vec())));
    }
}
