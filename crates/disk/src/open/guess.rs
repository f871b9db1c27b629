//! The format of the top image: as the user states it, or probed.
//!
//! Promises: data that a guest may have written never decides the format. The user must state that
//! a raw image which a guest writes is raw; a probe never takes a file that was written as raw
//! ([`crate::format_note`]), or a device, for anything but raw bytes.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use ringdisk_ring::{Errno, Fd};
use ringdisk_storage::{Kind, Storage};

use super::Opening;
use crate::name::printable;
use crate::probe::{PROBE_LEN, Probed, choose, probe};
use crate::{Error, ErrorKind, Format, format_note};

/// Block that is read for probing: larger than a sector for descriptors with `O_DIRECT`.
const PROBE_BLOCK: usize = 4096;

impl Opening<'_> {
    /// Probes the format of the top image, which the user did not state.
    ///
    /// Errors: it is not clear, or a guest that may write the image could make it another one.
    pub(super) fn guess(
        &self,
        fd: &OwnedFd,
        image: &str,
        read_only: bool,
    ) -> Result<Format, Error> {
        let probed = probe(&first_sector(fd, image)?);
        let is_noted = format_note::is_raw(fd);
        if probed == Probed::Raw && self.options.ask_for_raw && !read_only && !is_noted {
            return Err(raw_is_asked(image));
        }
        guessed(image, probed, is_noted, format_note::is_device(fd))
    }

    /// Whether the first sector of the top image, which is written, is protected in case it is raw.
    /// Stores the format that the user stated in the note.
    pub(super) fn is_guarded(&self, fd: &OwnedFd, image: &str) -> Result<bool, Error> {
        match self.options.format {
            // Other programs probe too, and do not know the note.
            None => Ok(true),
            _ if self.options.protect_raw => Ok(true),
            Some(Format::Raw) if self.options.raw_is_noted => Ok(false),
            Some(Format::Raw) => Ok(format_note::set_raw(fd).is_err()),
            Some(Format::Qcow2) => {
                if format_note::is_raw(fd) && probe(&first_sector(fd, image)?) == Probed::Qcow2 {
                    format_note::remove(fd);
                }
                Ok(false)
            }
        }
    }
}

/// Probes the format of an image that the user did not state.
///
/// * `head`: the first [`PROBE_LEN`] bytes, fewer if it is shorter.
///
/// Errors: `UnknownFormat` where it is not clear: a guest may have written these bytes.
pub fn guess(storage: &Storage, head: &[u8]) -> Result<Format, Error> {
    let is_noted = match storage.raw_fd() {
        Some(Fd::Raw(fd)) => format_note::is_raw_at(&PathBuf::from(format!("/proc/self/fd/{fd}"))),
        _ => false,
    };
    let is_device = storage.kind() == Kind::BlockDevice;
    guessed(&printable(storage.name().as_bytes()), probe(head), is_noted, is_device)
}

pub(super) fn guessed(
    image: &str,
    probed: Probed,
    is_noted: bool,
    is_device: bool,
) -> Result<Format, Error> {
    match probed {
        Probed::Raw => Ok(Format::Raw),
        looks_like if is_noted || is_device => Err(is_unclear(image, looks_like, is_noted)),
        looks_like => choose(image, looks_like),
    }
}

/// The error for a raw image that a guest will write, without a stated format.
pub(super) fn raw_is_asked(image: &str) -> Error {
    let text = format!(
        "'{image}' is not a qcow2 image, and nobody said that it is raw: its guest may write \
         anything into a raw disk, so that is not guessed; say `--format raw`"
    );
    Error::new(ErrorKind::UnknownFormat, text)
}

/// The error for an image whose first bytes its guest may have written.
fn is_unclear(image: &str, looks_like: Probed, is_noted: bool) -> Error {
    let looks = match looks_like {
        Probed::Raw => "raw",
        Probed::Qcow2 => "qcow2",
        Probed::Other(name) => name,
    };
    let why = if is_noted {
        "it was used as raw"
    } else {
        "a device or an export keeps no note of its format"
    };
    let text = format!(
        "'{image}' begins like an image of the format {looks}, but {why}, so its guest may have \
         written that; say `--format raw` for its bytes as they are, or `--format qcow2` if it was \
         made as such an image"
    );
    Error::new(ErrorKind::UnknownFormat, text)
}

/// The first sector of a file, as much as there is. Reads a whole aligned block, so it works on
/// descriptors with `O_DIRECT` too.
fn first_sector(fd: &OwnedFd, name: &str) -> Result<Vec<u8>, Error> {
    let mut memory = vec![0; 2 * PROBE_BLOCK];
    let start = memory.as_ptr().align_offset(PROBE_BLOCK).min(PROBE_BLOCK);
    let block = &mut memory[start..start + PROBE_BLOCK];
    let mut done = 0;
    while done < PROBE_LEN {
        match rustix::io::pread(fd, &mut block[done..], done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::os(format!("cannot read '{name}'"), errno)),
        }
    }
    Ok(block[..done.min(PROBE_LEN)].to_vec())
}
