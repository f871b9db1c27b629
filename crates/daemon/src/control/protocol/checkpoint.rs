//! What `ringdisk ctl` and a server say to one another for a checkpoint.
//!
//! A checkpoint of several disks, which several processes may serve, begins in steps. Each server
//! gets one request with descriptors; one of them is a socket on which the steps are said, one
//! letter each:
//!
//! ```text
//! server: prepared ──► client: hold ──► server: held ──► client: freeze ──► server: frozen
//! client: go (requests of the disk go on) ──► server: waiting ──► client: serve
//! server: ready (readers are served) ──► client: the verdict, for all servers at once
//! ```
//!
//! Promises: a server that does not hear the next step in time, or sees the client go, undoes what
//! it did: so either all disks have the checkpoint or none. The verdict is one event that all
//! servers share, so a client that dies says it to all or to none.

use std::time::Duration;

use ringdisk_disk::CheckpointEnd;
use serde::{Deserialize, Serialize};

/// A server lets a held disk go after so long, whatever the client does.
pub const HOLD_MAX: Duration = Duration::from_secs(3);
/// Requests in flight have so long to end before a hold is given up.
pub const DRAIN_MAX: Duration = Duration::from_secs(2);
/// A step in which no request waits may take so long: other disks are prepared meanwhile.
pub const STEP_MAX: Duration = Duration::from_secs(60);

/// Descriptors of the request before those of listening sockets: steps, verdict, fleecing file.
pub const GIVEN: usize = 3;
/// Most listening sockets of a request: addresses of one host name.
pub const LISTENERS_MAX: usize = 8;
/// Longest name of a checkpoint, bytes: it is part of the name of a socket.
pub const NAME_BYTES_MAX: usize = 48;
/// Most ranges in one answer to [`Dirty`]: 44 bytes each at most, so 2.9 MiB.
pub const RANGES_MAX: usize = 65_536;

/// Looks whether a text can be the name of a checkpoint: it is part of the name of a file, and of
/// lines for people.
///
/// Errors: it cannot.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(is_fine) {
        return Err(format!(
            "a checkpoint has a name of 1 to {NAME_BYTES_MAX} letters, digits, '-', '_', '.' and \
             ':'"
        ));
    }
    Ok(())
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The server can hold the disk: what takes time is done.
    Prepared,
    /// The client wants the disk to be held.
    Hold,
    /// No request is in flight, and none begins.
    Held,
    /// All disks are held.
    Freeze,
    /// The state is kept.
    Frozen,
    /// All states are kept: requests go on.
    Go,
    /// The disk waits for the control thread of its process that serves readers.
    Waiting,
    /// All disks wait: the threads that have sockets serve them.
    Serve,
    /// Readers are served.
    Ready,
}

impl Step {
    /// All of them with their letters.
    const LETTERS: [(Step, u8); 9] = [
        (Step::Prepared, b'p'),
        (Step::Hold, b'h'),
        (Step::Held, b'H'),
        (Step::Freeze, b'f'),
        (Step::Frozen, b'F'),
        (Step::Go, b'g'),
        (Step::Waiting, b'w'),
        (Step::Serve, b's'),
        (Step::Ready, b'r'),
    ];

    /// How it is said.
    #[must_use]
    pub fn letter(self) -> u8 {
        Step::LETTERS.iter().find(|(step, _)| *step == self).map_or(0, |(_, letter)| *letter)
    }

    /// `None`: no such step.
    #[must_use]
    pub fn read(letter: u8) -> Option<Step> {
        Step::LETTERS.iter().find(|(_, known)| *known == letter).map(|(step, _)| *step)
    }
}

/// Arguments of `checkpoint-begin`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Begin {
    /// Name of the checkpoint.
    pub name: String,
    /// A number that nobody else knows: of all disks of this checkpoint the same.
    pub id: String,
    /// Name of the NBD export.
    pub export: String,
    /// A bitmap that records from the instant on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
    /// A bitmap whose content readers get.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// Most bytes in the fleecing file.
    pub fleece_max: u64,
    /// All disks of the checkpoint, as absolute paths.
    pub targets: Vec<String>,
    /// Where readers find the disk.
    pub uri: String,
    /// The socket that the client has made, to be removed at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
    /// Listening sockets among the descriptors. 0: another disk of the process has them.
    pub listeners: usize,
    /// The checkpoint ends, and its bitmaps are merged, when the client goes.
    pub is_leased: bool,
}

/// What becomes of the bitmaps.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bitmaps {
    /// The backup was made: the new one goes on in place of the old one.
    #[default]
    Drop,
    /// The backup was made, and both go on.
    Keep,
    /// The backup failed: the old one goes on with what both recorded.
    Merge,
}

impl From<Bitmaps> for CheckpointEnd {
    fn from(bitmaps: Bitmaps) -> CheckpointEnd {
        match bitmaps {
            Bitmaps::Drop => CheckpointEnd::Drop,
            Bitmaps::Keep => CheckpointEnd::Keep,
            Bitmaps::Merge => CheckpointEnd::Merge,
        }
    }
}

/// Arguments of `checkpoint-end`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct End {
    /// Name of the checkpoint.
    pub name: String,
    /// Only if it has this id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// What becomes of its bitmaps.
    #[serde(default)]
    pub bitmaps: Bitmaps,
}

/// Arguments of `checkpoint-dirty`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Dirty {
    /// Name of the checkpoint.
    pub name: String,
    /// First range of the answer, counted from 0.
    #[serde(default)]
    pub first: usize,
}

/// A checkpoint in the answer to `checkpoint-list`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// See [`Begin::id`].
    pub id: String,
    /// Name of the NBD export.
    pub export: String,
    /// Where readers find the disk.
    pub uri: String,
    /// See [`Begin::socket`].
    pub socket: Option<String>,
    /// Bytes of the disk.
    pub size: u64,
    /// The bitmap that it has started.
    pub bitmap: Option<String>,
    /// The bitmap whose content readers get.
    pub since: Option<String>,
    /// Bytes that are in the fleecing file now.
    pub fleeced: u64,
    /// Most bytes there.
    pub fleece_max: u64,
    /// Why it cannot be read any more.
    pub failed: Option<String>,
    /// All disks of the checkpoint.
    pub targets: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_has_a_letter_of_its_own() {
        for (step, letter) in Step::LETTERS {
            assert_eq!((step.letter(), Step::read(letter)), (letter, Some(step)));
        }
        assert_eq!(Step::read(0), None);
    }
}
