//! The two slots for a state in memory that outlives the process.
//!
//! Promises: of two states the newest that was written whole is found, whenever the process was
//! killed, and whatever it left there: the memory is read, never mapped, so one that is cut
//! meanwhile is an error and no signal. Control path.
//!
//! Where the slots are is a matter of what the memory is for ([`Slots`]). Each slot: number,
//! checksum and length (u64 each, native byte order), then the text.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use ringdisk_fuse::kept::RECORD_BYTES;

/// Where the two slots are.
#[derive(Clone, Copy, Debug)]
pub struct Slots {
    /// Where the first one begins; the other one follows it.
    first: u64,
    /// Bytes of each.
    bytes: u64,
}

/// Those of images and mounts: two paths of 4096 bytes, each byte escaped, and the rest, behind the
/// record of the file.
pub const IMAGES: Slots = Slots { first: RECORD_BYTES, bytes: 64 << 10 };
/// Those of the front end of a disk: 509 regions of memory of 200 bytes, 64 virtqueues of 400, a
/// message of 4108, each byte as a number.
pub const FRONT_END: Slots = Slots { first: 0, bytes: 512 << 10 };

/// Number, checksum and length.
const HEAD_BYTES: usize = 24;

/// No process has written so many states. Others that follow must have numbers, too.
const NUMBER_MAX: u64 = 1 << 62;

impl Slots {
    /// Number and text of the newest state; `None`: there is none.
    pub fn newest(self, file: &File) -> Option<(u64, Vec<u8>)> {
        (0..2).filter_map(|slot| self.read(file, slot)).max_by_key(|found| found.0)
    }

    /// Writes a state with the number that follows the newest one's, in the slot of the one before
    /// that.
    ///
    /// Errors: it is too long; memory is short.
    pub fn put(self, file: &File, number: u64, text: &[u8]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + text.len());
        bytes.extend(number.to_ne_bytes());
        bytes.extend(checksum(number, text).to_ne_bytes());
        bytes.extend((text.len() as u64).to_ne_bytes());
        bytes.extend(text);
        if bytes.len() as u64 > self.bytes {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        file.write_all_at(&bytes, self.at(number % 2))
    }

    fn at(self, slot: u64) -> u64 {
        self.first + slot * self.bytes
    }

    /// Number and text of one of the slots, if it holds a whole state.
    fn read(self, file: &File, slot: u64) -> Option<(u64, Vec<u8>)> {
        let mut head = [0; HEAD_BYTES];
        file.read_exact_at(&mut head, self.at(slot)).ok()?;
        let word = |index: usize| {
            let bytes = head[index * 8..][..8].try_into().unwrap_or_default();
            u64::from_ne_bytes(bytes)
        };
        let (number, len) = (word(0), word(2));
        if number == 0 || number > NUMBER_MAX || len > self.bytes - HEAD_BYTES as u64 {
            return None;
        }
        let mut text = vec![0; usize::try_from(len).ok()?];
        file.read_exact_at(&mut text, self.at(slot) + HEAD_BYTES as u64).ok()?;
        (checksum(number, &text) == word(1)).then_some((number, text))
    }
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

    #[test]
    fn a_state_that_was_not_written_to_its_end_is_not_found() {
        let file = tempfile::tempfile().expect("file");
        assert_eq!(IMAGES.newest(&file), None);
        IMAGES.put(&file, 1, b"first").expect("room");
        IMAGES.put(&file, 2, b"second").expect("room");
        assert_eq!(IMAGES.newest(&file), Some((2, b"second".to_vec())));
        file.write_all_at(b"!", IMAGES.at(0) + HEAD_BYTES as u64 + 3).expect("tear");
        assert_eq!(IMAGES.newest(&file), Some((1, b"first".to_vec())));
        file.set_len(IMAGES.at(1) + 9).expect("cut");
        assert_eq!(IMAGES.newest(&file), None);
    }

    #[test]
    fn numbers_and_lengths_that_cannot_be_are_no_states() {
        let file = tempfile::tempfile().expect("file");
        IMAGES.put(&file, 3, b"sound").expect("room");
        IMAGES.put(&file, NUMBER_MAX, b"").expect("room");
        assert_eq!(IMAGES.newest(&file), Some((NUMBER_MAX, Vec::new())));
        let empty = |number: u64| [number, checksum(number, b""), 0];
        for head in [empty(u64::MAX), empty(NUMBER_MAX + 1), [9, 9, u64::MAX], empty(0)] {
            file.write_all_at(&head.map(u64::to_ne_bytes).concat(), IMAGES.at(0)).expect("write");
            assert_eq!(IMAGES.newest(&file), Some((3, b"sound".to_vec())));
        }
        let long = vec![0; 64 << 10];
        assert!(IMAGES.put(&file, 4, &long).is_err());
        assert_eq!(IMAGES.newest(&file), Some((3, b"sound".to_vec())));
    }
}
