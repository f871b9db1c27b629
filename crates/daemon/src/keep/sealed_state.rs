//! What a mount was made with, in memory that no process can write any more.
//!
//! A server reads data that others wrote, and is confined because an attacker may take it over. The
//! helper process that keeps the mount and the successor are not confined when they read what the
//! server says of its mount. So only the state that the server wrote before it was confined counts:
//! where the mount is, what it was made with, whether ringdisk made the mountpoint.
//!
//! Promises: [`seal`] gives memory that cannot be written, cut or mapped for writing; [`open`]
//! takes no other. Control path.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};

/// Seals of memory that stays as it is.
const SEALS: SealFlags =
    SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::WRITE);
/// Longest text, bytes: paths of a mountpoint and of the directories of 200 images, each byte
/// escaped.
const TEXT_BYTES_MAX: u64 = 8 << 20;

/// Puts a text into memory of its own.
///
/// Errors: memory is short; a kernel without seals.
pub fn seal(text: &[u8]) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut memory = File::from(memfd_create(c"ringdisk-origin", flags)?);
    memory.write_all(text)?;
    fcntl_add_seals(&memory, SEALS)?;
    Ok(memory)
}

/// The text of sealed memory.
///
/// Errors: it could have been changed since; it is too long.
pub fn open(memory: &OwnedFd) -> io::Result<Vec<u8>> {
    if !fcntl_get_seals(memory).is_ok_and(|seals| seals.contains(SEALS)) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is not sealed"));
    }
    let memory = File::from(memory.try_clone()?);
    let len = memory.metadata()?.len();
    if len > TEXT_BYTES_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut text = vec![0; usize::try_from(len).map_err(|_| io::ErrorKind::FileTooLarge)?];
    memory.read_exact_at(&mut text, 0)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sealed_is_read_and_cannot_be_changed() {
        let memory = seal(b"text").expect("memory");
        assert!(memory.write_all_at(b"x", 0).is_err());
        assert!(memory.set_len(2).is_err() && memory.set_len(9).is_err());
        assert_eq!(open(&memory.into()).expect("sealed"), b"text");
    }

    #[test]
    fn memory_that_can_be_changed_and_what_is_no_memory_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let open_memory = |seals: SealFlags| {
            let memory = memfd_create(c"test", flags).expect("memory");
            File::from(memory.try_clone().expect("a copy")).write_all(b"text").expect("written");
            fcntl_add_seals(&memory, seals).expect("sealed");
            memory
        };
        let file = OwnedFd::from(tempfile::tempfile().expect("a file"));
        let (pipe, _) = rustix::pipe::pipe().expect("a pipe");
        let partly = open_memory(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
        for memory in [open_memory(SealFlags::empty()), partly, file, pipe] {
            assert!(open(&memory).is_err());
        }
    }
}
