//! A kept export of a virtual machine's disk: its state as the control thread wrote it, opened.
//!
//! Promises: what is kept is believed as little as what a front end says, since the process that
//! wrote it may have been taken over. Control path.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use ringdisk_export::HandOverState;
use ringdisk_export::keep::{Keeper, KeptState};

use crate::closing::Held;
use crate::hand_over_state::{Role, Unpacked, VERSIONS, Words};
use crate::{Error, ErrorKind};

/// Whether the disk of a kept export may be another process's, to which it was given in a
/// migration. It is to be opened inactive then, and is made ours before the first virtqueue runs.
#[must_use]
pub fn is_inactive(state: &KeptState) -> bool {
    let words = VERSIONS.from_text::<Words>(state.words.as_bytes());
    words.is_ok_and(|words| words.kept.is_some_and(|kept| kept.inactive))
}

/// A kept export ends before it has gone on: its front end is disconnected.
pub fn end(state: KeptState, mut keeper: Box<dyn Keeper>) {
    keeper.end();
    // The helper process may be slow to let go of its copies.
    let connection = open(state).ok().and_then(|mut state| state.one(Role::Connection));
    if let Some(connection) = connection.map(Held::from) {
        connection.end();
    }
}

/// Errors: it is of a version that is not known, or damaged; descriptors are missing.
pub(crate) fn open(state: KeptState) -> Result<Unpacked, Error> {
    let refused = |why: &str| {
        Error::new(
            ErrorKind::Refused,
            format!("what was kept of the disk is not understood: {why}"),
        )
    };
    let words: Words =
        VERSIONS.from_text(state.words.as_bytes()).map_err(|why| refused(&why.to_string()))?;
    let kept = words.kept.ok_or_else(|| refused("it is no kept state"))?;
    let mut parked: HashMap<u64, OwnedFd> = state.descriptors.into_iter().collect();
    let named = kept.numbers.iter().map(|number| parked.remove(number));
    let fds = named.collect::<Option<Vec<_>>>();
    let fds = fds.ok_or_else(|| refused("a descriptor is missing"))?;
    Unpacked::open(HandOverState { description: state.words, fds })
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
        let mut opened = open(state).expect("it is whole");
        assert!(opened.one(Role::Kick(0)).is_some() && opened.one(Role::Kick(1)).is_some());
    }

    #[test]
    fn what_does_not_hold_together_is_refused() {
        let file = tempfile::tempfile().expect("a file");
        let refused = |state: KeptState| open(state).expect_err("refused").to_string();
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
