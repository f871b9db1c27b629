//! Which process goes on with something that is kept: the successor that takes it over
//! (`--upgrade`), or the next server of its helper process, when the server before was killed
//! meanwhile.
//!
//! Promises: one of the two does, whenever a process is killed. The right to go on is the count of
//! an eventfd that the helper process, the server and the successor have: the process that reads it
//! has the right, and no other one gets it after that. A helper process that has read it makes a
//! new one for the server that it starts. The helper process of a successor has one from the
//! beginning that nobody can claim; it counts as soon as the successor has claimed that of the
//! process before. Control path.

use std::fs;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use ringdisk_export::{HandOverState, wait_until};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use rustix::io::{ReadWriteFlags, preadv2};
use serde_json::Value;

use super::held::LATE;

/// The number of the eventfd among the descriptors of a disk that come and go; jobs have the
/// numbers above ([`super::jobs`]), and an export those from 1 on.
pub(super) const NUMBER: u64 = (1 << 48) - 1;

/// The offset for preadv2(2) on a file that has no offsets.
const CURRENT: u64 = u64::MAX;

/// Field of the state of an export that is handed over.
const KEY: &str = "succession";

/// A successor that has taken something over claims the right to it within this time, unless it was
/// killed.
const CLAIM_LIMIT: Duration = Duration::from_secs(1);
const CLAIM_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// What the kernel calls an eventfd (`fs/eventfd.c`).
const EVENTFD: &[u8] = b"anon_inode:[eventfd]";

/// The right to go on.
#[derive(Debug)]
pub struct Succession(OwnedFd);

impl Succession {
    /// A right for an export that is kept from now on.
    ///
    /// * `is_upgrade`: another process serves it until [`Succession::is_ours`].
    ///
    /// Errors: no descriptor is left.
    pub(super) fn of_start(is_upgrade: bool) -> io::Result<Succession> {
        if is_upgrade { Succession::of_a_successor() } else { Succession::make() }
    }

    /// A new right, which no process has claimed.
    ///
    /// Errors: no descriptor is left.
    pub(crate) fn make() -> io::Result<Succession> {
        Ok(Succession(eventfd(1, EventfdFlags::CLOEXEC)?))
    }

    /// A right that counts as claimed until [`Succession::is_ours`]: another process serves.
    ///
    /// Errors: no descriptor is left.
    pub(super) fn of_a_successor() -> io::Result<Succession> {
        Ok(Succession(eventfd(0, EventfdFlags::CLOEXEC)?))
    }

    /// This process owns what another one served. Called once, on a right that
    /// [`Succession::of_a_successor`] has made.
    pub fn is_ours(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// The right behind a descriptor that another process has sent, which an attacker may control.
    ///
    /// Errors: it is no eventfd.
    pub(crate) fn of(descriptor: OwnedFd) -> io::Result<Succession> {
        // The kernel answers this without the file system behind the descriptor.
        let name = fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))?;
        if name.as_os_str().as_encoded_bytes() != EVENTFD {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Succession(descriptor))
    }

    /// Claims the right. Returns whether this process has it; the answer is final for all
    /// processes.
    pub(crate) fn claim(&self) -> bool {
        let mut count = [0_u8; 8];
        let mut claim = || {
            // RWF_NOWAIT: does not wait, even where another process has cleared O_NONBLOCK.
            let (mut into, flags) = ([IoSliceMut::new(&mut count)], ReadWriteFlags::NOWAIT);
            preadv2(&self.0, &mut into, CURRENT, flags)
        };
        rustix::io::retry_on_intr(&mut claim).is_ok()
    }

    /// Whether a process has claimed the right.
    pub(crate) fn is_claimed(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready == 0)
    }

    /// Waits, for a second at most, until a process has claimed the right, as a successor does that
    /// was not killed. Returns whether one has.
    pub(super) fn is_claimed_soon(&self) -> bool {
        wait_until(CLAIM_LIMIT, CLAIM_POLL_INTERVAL, || self.is_claimed())
    }

    /// Another descriptor of the eventfd.
    ///
    /// Errors: no descriptor is left.
    pub(crate) fn try_clone(&self) -> io::Result<Succession> {
        Ok(Succession(self.0.try_clone()?))
    }
}

impl AsFd for Succession {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Succession> for OwnedFd {
    fn from(succession: Succession) -> OwnedFd {
        succession.0
    }
}

/// Adds the right to go on with an export to its state, as the last of its descriptors.
///
/// Errors: the state is no object; no descriptor is left.
pub(crate) fn pack(state: &mut HandOverState, right: &Succession) -> Result<(), String> {
    let mut value: Value =
        serde_json::from_str(&state.description).map_err(|error| error.to_string())?;
    let object = value.as_object_mut().ok_or("the state of the export is no object")?;
    state.fds.push(right.try_clone().map_err(|error| error.to_string())?.into());
    object.insert(KEY.to_owned(), Value::Bool(true));
    state.description = value.to_string();
    Ok(())
}

/// Takes the right out of the state again. `None`: the export is not kept.
///
/// Errors: the descriptor is missing, or another one.
pub(crate) fn unpack(state: &mut HandOverState) -> Result<Option<Succession>, String> {
    let Ok(mut value) = serde_json::from_str::<Value>(&state.description) else {
        // The reader of the state says so.
        return Ok(None);
    };
    if value.as_object_mut().and_then(|object| object.remove(KEY)).is_none() {
        return Ok(None);
    }
    state.description = value.to_string();
    let right = state.fds.pop().ok_or("the right to go on with it is missing")?;
    let other = |_| "the right to go on with it is another descriptor";
    Ok(Some(Succession::of(right).map_err(other)?))
}

/// The name under which the helper process stores the right of a disk.
pub(super) fn name_of(disk: usize) -> String {
    format!("{LATE}{disk}-{NUMBER}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_goes_on() {
        let ours = Succession::make().expect("a descriptor");
        let theirs = ours.try_clone().expect("a descriptor");
        let theirs = Succession::of(theirs.into()).expect("an eventfd");
        assert!(!ours.is_claimed() && !theirs.is_claimed());
        assert!(theirs.claim());
        assert!(ours.is_claimed());
        assert!(!ours.claim() && !theirs.claim());
    }

    #[test]
    fn that_of_a_successor_is_free_when_it_has_taken_over() {
        let right = Succession::of_a_successor().expect("a descriptor");
        assert!(right.is_claimed() && !right.claim());
        right.is_ours();
        assert!(!right.is_claimed() && right.claim() && !right.claim());
    }

    #[test]
    fn it_travels_as_the_last_descriptor_of_a_state() {
        let file = || OwnedFd::from(tempfile::tempfile().expect("a file"));
        let description = String::from("{\"version\":1}");
        let mut state = HandOverState { description: description.clone(), fds: vec![file()] };
        assert!(unpack(&mut state).expect("understood").is_none());
        let ours = Succession::make().expect("a descriptor");
        pack(&mut state, &ours).expect("packed");
        let theirs = unpack(&mut state).expect("understood").expect("it is there");
        assert_eq!((state.description.as_str(), state.fds.len()), (description.as_str(), 1));
        assert!(theirs.claim() && ours.is_claimed());
        pack(&mut state, &ours).expect("packed");
        *state.fds.last_mut().expect("there") = file();
        assert!(unpack(&mut state).is_err());
    }

    #[test]
    fn what_is_no_eventfd_is_refused() {
        let file: OwnedFd = tempfile::tempfile().expect("a file").into();
        let (pipe, _other) = rustix::pipe::pipe().expect("a pipe");
        assert!(Succession::of(file).is_err() && Succession::of(pipe).is_err());
    }
}
