//! Who keeps an export while the process that serves it is killed and another one goes on.
//!
//! Promises: plain values and one trait; what is kept is believed by the next process as little as
//! what a front end says, since the process that wrote it may have been taken over.
//!
//! Descriptors are parked under numbers, each number once; the state names those that count. A
//! descriptor is parked before the state that names it is written, and released after a state that
//! does not: so at every moment the newest state names descriptors that are there.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use ringdisk_export::HandOverState;

use crate::closing::Held;
use crate::hand_over_state::{Role, Unpacked, Words};
use crate::{Error, ErrorKind};

/// Keeps the state of one export, outside of the process that serves it.
///
/// Called by the control thread of the export. When a call returns, the process may be killed and
/// nothing of it is lost.
pub trait Keeper: fmt::Debug + Send {
    /// Keeps a copy of a descriptor.
    ///
    /// * `number`: never used before.
    ///
    /// Errors: it is not kept.
    fn park(&mut self, number: u64, descriptor: BorrowedFd<'_>) -> io::Result<()>;

    /// The descriptor with this number is kept no longer.
    fn release(&mut self, number: u64);

    /// Keeps a state in place of the one before.
    ///
    /// * `state`: text of [`KeptState::words`].
    ///
    /// Errors: it is not kept; the one before is.
    fn write(&mut self, state: &str) -> io::Result<()>;

    /// The export has ended: nothing of it is kept any longer, and no process goes on with it.
    fn end(&mut self);
}

/// What was kept of an export whose process was killed.
#[derive(Debug)]
pub struct KeptState {
    /// The newest state.
    pub words: String,
    /// Parked descriptors with their numbers. Those that the state does not name are of no use.
    pub descriptors: Vec<(u64, OwnedFd)>,
}

impl KeptState {
    /// Whether the disk may be another process's, to which it was given in a migration. It is to be
    /// opened inactive then, and is made ours before the first virtqueue runs.
    #[must_use]
    pub fn is_inactive(&self) -> bool {
        let words = serde_json::from_str::<Words>(&self.words);
        words.is_ok_and(|words| words.kept.is_some_and(|kept| kept.inactive))
    }

    /// The export ends before it has gone on: its front end is disconnected.
    pub fn end(self, mut keeper: Box<dyn Keeper>) {
        keeper.end();
        // The holder may be slow to let go of its copies.
        let connection = self.open().ok().and_then(|mut state| state.one(Role::Connection));
        if let Some(connection) = connection.map(Held::from) {
            connection.end();
        }
    }

    /// Numbers of all that is parked.
    pub(crate) fn numbers(&self) -> Vec<u64> {
        self.descriptors.iter().map(|(number, _)| *number).collect()
    }

    /// Errors: it is of another version, or damaged; descriptors are missing.
    pub(crate) fn open(self) -> Result<Unpacked, Error> {
        let refused = |why: &str| {
            Error::new(
                ErrorKind::Refused,
                format!("what was kept of the disk is not understood: {why}"),
            )
        };
        let words: Words =
            serde_json::from_str(&self.words).map_err(|error| refused(&error.to_string()))?;
        let kept = words.kept.ok_or_else(|| refused("it is no kept state"))?;
        let mut parked: HashMap<u64, OwnedFd> = self.descriptors.into_iter().collect();
        let named = kept.numbers.iter().map(|number| parked.remove(number));
        let fds = named.collect::<Option<Vec<_>>>();
        let fds = fds.ok_or_else(|| refused("a descriptor is missing"))?;
        Unpacked::open(HandOverState { description: self.words, fds })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::hand_over_state::{Copies, KeptWords, Packing};

    /// A state that names these numbers, in this order, as kick eventfds.
    fn state(numbers: &[u64], parked: &[u64], fd: impl AsFd) -> KeptState {
        let mut packing = Packing::<Copies>::default();
        for (index, _) in (0..).zip(numbers) {
            packing.add(Role::Kick(index), &fd).expect("a descriptor");
        }
        packing.words.disk = String::from("{}");
        let numbers = numbers.to_vec();
        packing.words.kept = Some(KeptWords { numbers, ..KeptWords::default() });
        let copy = || fd.as_fd().try_clone_to_owned().expect("a descriptor");
        KeptState {
            words: packing.finish().expect("words").description,
            descriptors: parked.iter().map(|number| (*number, copy())).collect(),
        }
    }

    #[test]
    fn the_descriptors_that_a_state_names_are_found_among_those_that_are_parked() {
        let file = tempfile::tempfile().expect("a file");
        let state = state(&[7, 3], &[1, 3, 7], &file);
        assert_eq!(state.numbers(), [1, 3, 7]);
        let mut open = state.open().expect("it is whole");
        assert!(open.one(Role::Kick(0)).is_some() && open.one(Role::Kick(1)).is_some());
    }

    #[test]
    fn what_does_not_hold_together_is_refused() {
        let file = tempfile::tempfile().expect("a file");
        let refused = |state: KeptState| state.open().expect_err("refused").to_string();
        assert!(refused(state(&[7], &[1], &file)).contains("missing"));
        assert!(refused(state(&[7, 7], &[7], &file)).contains("missing"), "named twice");
        let network = std::net::TcpListener::bind("127.0.0.1:0").expect("a socket");
        assert!(refused(state(&[7], &[7], &network)).contains("is a network socket"));
        let whole = || state(&[7], &[7], &file);
        for (from, to, why) in [
            ("\"version\":1", "\"version\":2", "its version is 2"),
            ("\"kept\":{", "\"other\":{", "no kept state"),
            ("\"numbers\":[7]", "\"numbers\":[]", "it names 1"),
            ("{", "", "not understood"),
        ] {
            let words = whole().words.replacen(from, to, 1);
            let error = refused(KeptState { words, ..whole() });
            assert!(error.contains(why), "{why}: {error}");
        }
    }
}
