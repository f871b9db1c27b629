//! An export on its way to another process: words, and descriptors with their roles.
//!
//! Promises: a state of another version, or one whose words and descriptors do not belong together,
//! is refused as a whole: the other process is not trusted. A descriptor is looked at before it is
//! taken, and one of another kind than its role is refused. Control path; maps nothing.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringdisk_export::HandOverState;
use ringdisk_messages::state::{Versions, with_roles};
use serde::{Deserialize, Serialize};

use crate::closing::Held;
use crate::descriptor_check::vet;
use crate::protocol::VringAddress;
use crate::session::{SavedVring, Session, SessionState};
use crate::{Error, ErrorKind};

/// Of the description.
pub(crate) const VERSIONS: Versions = Versions::new(1, 1);
/// Descriptors of one export at most: memory, virtqueues (three each), images of a long chain.
const FDS_MAX: usize = 2048;

/// The description.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Words {
    pub(crate) write_cache: bool,
    pub(crate) broken: Option<String>,
    pub(crate) session: Option<SessionWords>,
    pub(crate) regions: Vec<RegionWords>,
    pub(crate) inflight: Option<InflightWords>,
    /// Size and offset, bytes.
    pub(crate) log: Option<(u64, u64)>,
    /// As [`ringdisk_disk::HandOver::description`].
    pub(crate) disk: String,
    /// That of a second export of the disk, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    beside: Option<String>,
    /// What each descriptor is.
    roles: Vec<Role>,
    /// Only in a kept state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kept: Option<KeptWords>,
}

/// What a kept state says besides: its export was not brought to a stand before.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct KeptWords {
    /// Under which number each descriptor is parked, in the order of the roles.
    pub(crate) numbers: Vec<u64>,
    /// The area of requests in flight of our own.
    pub(crate) own_area: Option<InflightWords>,
    /// Virtqueues whose parts of the areas are to be marked as unused.
    pub(crate) retired: Vec<u16>,
    /// The message that is being carried out.
    pub(crate) pending: Option<PendingWords>,
    /// A reply that goes with a descriptor ([`Role::ReplyDescriptor`]).
    pub(crate) reply: Option<Vec<u8>>,
    /// The disk may be another process's.
    #[serde(default)]
    pub(crate) inactive: bool,
}

/// A message of the front end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PendingWords {
    pub(crate) request: u32,
    pub(crate) flags: u32,
    pub(crate) payload: Vec<u8>,
}

/// What a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Role {
    Listener,
    Connection,
    Region,
    Kick(u16),
    Call(u16),
    Error(u16),
    Inflight,
    Log,
    LogEvent,
    Channel,
    Image,
    /// An area of requests in flight that the front end does not know of.
    OwnArea,
    /// Came with the message that is being carried out.
    Pending,
    /// Goes with a reply.
    ReplyDescriptor,
    /// The end of the pipe of replies that is read.
    ReplyRead,
    /// The end that is written to.
    ReplyWrite,
    /// Of a second export of the disk, in its order.
    Beside,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RegionWords {
    pub(crate) guest_addr: u64,
    pub(crate) user_addr: u64,
    pub(crate) size: u64,
    pub(crate) mmap_offset: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct InflightWords {
    pub(crate) size: u64,
    pub(crate) offset: u64,
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    pub(crate) packed: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SessionWords {
    features: u64,
    protocol_features: u64,
    status: u8,
    regions: Vec<(u64, u64, u64)>,
    vrings: Vec<VringWords>,
}

#[derive(Debug, Serialize, Deserialize)]
struct VringWords {
    size: Option<u16>,
    /// Flags, descriptors, used, available, log.
    address: Option<[u64; 5]>,
    base: u32,
    /// Earlier versions do not say it.
    #[serde(default)]
    base_at_reset: Option<u32>,
    enabled: Option<bool>,
    /// Whether it is to run again; earlier versions do not say it.
    #[serde(default = "yes")]
    resumes: bool,
}

fn yes() -> bool {
    true
}

/// Where the descriptors of a state go.
pub(crate) trait Descriptors {
    /// Takes one.
    ///
    /// Errors: there is no room.
    fn add(&mut self, role: Role, fd: BorrowedFd<'_>) -> Result<(), Error>;

    /// Takes that of a region of memory.
    ///
    /// * `guest_addr`: where it begins; no other one does there.
    ///
    /// Errors: there is no room.
    fn add_region(&mut self, _guest_addr: u64, fd: BorrowedFd<'_>) -> Result<(), Error> {
        self.add(Role::Region, fd)
    }
}

/// Copies, for another process.
#[derive(Debug, Default)]
pub(crate) struct Copies(Vec<OwnedFd>);

impl Descriptors for Copies {
    fn add(&mut self, _role: Role, fd: BorrowedFd<'_>) -> Result<(), Error> {
        self.0.push(fd.try_clone_to_owned().map_err(|error| {
            Error::new(ErrorKind::System, "no descriptors for the hand-over").source(error)
        })?);
        Ok(())
    }
}

/// A state that is being packed.
#[derive(Debug, Default)]
pub(crate) struct Packing<D> {
    pub(crate) words: Words,
    pub(crate) fds: D,
}

impl<D: Descriptors> Packing<D> {
    /// Adds a descriptor.
    ///
    /// Errors: there is no room.
    pub(crate) fn add(&mut self, role: Role, fd: impl AsFd) -> Result<(), Error> {
        self.fds.add(role, fd.as_fd())?;
        self.words.roles.push(role);
        Ok(())
    }

    /// Adds that of a region of memory, as [`Descriptors::add_region`] has it.
    ///
    /// Errors: there is no room.
    pub(crate) fn add_region(&mut self, guest_addr: u64, fd: impl AsFd) -> Result<(), Error> {
        self.fds.add_region(guest_addr, fd.as_fd())?;
        self.words.roles.push(Role::Region);
        Ok(())
    }

    /// Adds what a session knows, with its descriptors.
    ///
    /// Errors: there is no room.
    pub(crate) fn add_session(&mut self, session: &Session, ran: Ran) -> Result<(), Error> {
        for (index, kick) in session.kicks() {
            self.add(Role::Kick(index), kick)?;
        }
        let state = session.state();
        let mut vrings = Vec::with_capacity(state.vrings.len());
        for vring in state.vrings {
            let SavedVring { size, address, base, base_at_reset, enabled, resumes, .. } = vring;
            let address =
                address.map(|a| [u64::from(a.flags), a.descriptor, a.used, a.available, a.log]);
            let resumes = resumes || ran == Ran::AllThatAreWanted;
            vrings.push(VringWords { size, address, base, base_at_reset, enabled, resumes });
        }
        let SessionState { features, protocol_features, status, regions, .. } = state;
        self.words.session =
            Some(SessionWords { features, protocol_features, status, regions, vrings });
        Ok(())
    }

    /// The words.
    ///
    /// Errors: they cannot be written.
    pub(crate) fn describe(&self) -> Result<String, Error> {
        VERSIONS.to_text(&self.words).map_err(|error| {
            Error::new(ErrorKind::System, "the export cannot be described").source(error)
        })
    }
}

/// Which virtqueues run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ran {
    /// All of them have been stopped: those that the front end wants to run.
    AllThatAreWanted,
    /// Those that run now.
    ThoseThatRun,
}

impl Packing<Copies> {
    /// Adds a descriptor that is given away.
    pub(crate) fn give(&mut self, role: Role, fd: OwnedFd) {
        self.words.roles.push(role);
        self.fds.0.push(fd);
    }

    /// Adds the state of a second export of the disk.
    pub(crate) fn give_beside(&mut self, state: HandOverState) {
        self.words.beside = Some(state.description);
        state.fds.into_iter().for_each(|fd| self.give(Role::Beside, fd));
    }

    pub(crate) fn finish(self) -> Result<HandOverState, Error> {
        let description = self.describe()?;
        Ok(HandOverState { description, fds: self.fds.0 })
    }
}

/// A state that was opened.
#[derive(Debug)]
pub(crate) struct Unpacked {
    pub(crate) words: Words,
    fds: Vec<(Role, OwnedFd)>,
}

impl Unpacked {
    /// Errors: the state is of another version, or damaged.
    pub(crate) fn open(state: HandOverState) -> Result<Unpacked, Error> {
        let refuse = |what: String| {
            Err(Error::new(ErrorKind::Refused, format!("the hand-over is not understood: {what}")))
        };
        let read = VERSIONS.from_text::<Words>(state.description.as_bytes());
        let named = read.and_then(|words| Ok((with_roles(words.roles.clone(), state.fds)?, words)));
        let own = |words: &Words| words.roles.iter().filter(|role| **role != Role::Beside).count();
        let (named, words) = match named {
            Ok((_, words)) if own(&words) > FDS_MAX => {
                return refuse(format!("{} descriptors are too many", own(&words)));
            }
            Ok(named) => named,
            Err(why) => return refuse(why.into()),
        };
        let mut all = Vec::with_capacity(named.len());
        for (role, fd) in named {
            // An image is judged as one, and what a second export has by that export; all else is
            // of a kind that this process may touch without waiting, whatever the sender says.
            let fd = match role {
                Role::Image | Role::Beside => Ok(fd),
                _ => vet(fd),
            };
            match fd {
                Ok(fd) => all.push((role, fd)),
                Err(what) => return refuse(format!("the descriptor of {role:?} is {what}")),
            }
        }
        Ok(Unpacked { words, fds: all })
    }
}

impl Unpacked {
    /// All descriptors of a role, in their order.
    pub(crate) fn all(&mut self, role: Role) -> Vec<OwnedFd> {
        let (taken, left) =
            std::mem::take(&mut self.fds).into_iter().partition(|(r, _)| *r == role);
        self.fds = left;
        let taken: Vec<(Role, OwnedFd)> = taken;
        taken.into_iter().map(|(_, fd)| fd).collect()
    }

    /// The descriptor of a role.
    pub(crate) fn one(&mut self, role: Role) -> Option<OwnedFd> {
        self.all(role).pop()
    }

    /// The state of a second export of the disk.
    pub(crate) fn beside(&mut self) -> Option<HandOverState> {
        let description = self.words.beside.take()?;
        Some(HandOverState { description, fds: self.all(Role::Beside) })
    }

    /// Lets go of all that a front end has lent, and of its connection.
    pub(crate) fn forget_front_end(&mut self) {
        self.words.session = None;
        let is_ours = |role: &Role| {
            use Role::{Image, Listener, ReplyRead, ReplyWrite};
            matches!(role, Listener | Image | ReplyRead | ReplyWrite)
        };
        let (kept, gone) = std::mem::take(&mut self.fds).into_iter().partition(|(r, _)| is_ours(r));
        self.fds = kept;
        let gone: Vec<(Role, OwnedFd)> = gone;
        gone.into_iter().for_each(|(_, fd)| drop(Held::from(fd)));
    }

    /// The session, if a front end was connected.
    pub(crate) fn session(&mut self) -> Option<SessionState> {
        let words = self.words.session.take()?;
        let SessionWords { features, protocol_features, status, regions, vrings } = words;
        let mut saved = Vec::with_capacity(vrings.len());
        for (index, vring) in (0..).zip(vrings) {
            let VringWords { size, address, base, base_at_reset, enabled, resumes } = vring;
            let address = address.map(|[flags, descriptor, used, available, log]| VringAddress {
                index: u32::from(index),
                flags: u32::try_from(flags).unwrap_or(u32::MAX),
                descriptor,
                used,
                available,
                log,
            });
            let kick = self.one(Role::Kick(index));
            let vring = SavedVring { size, address, base, base_at_reset, enabled, kick, resumes };
            saved.push(vring);
        }
        Some(SessionState { features, protocol_features, status, regions, vrings: saved })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_is_found_again_and_anything_else_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let mut packing = Packing::<Copies>::default();
        packing.words.disk = String::from("{}");
        packing.words.log = Some((1, u64::MAX));
        packing.add(Role::Call(3), &file).unwrap();
        packing.add(Role::Image, &file).unwrap();
        packing.add(Role::Image, &file).unwrap();
        let state = packing.finish().unwrap();
        let words = state.description.clone();
        let mut open = Unpacked::open(state).unwrap();
        assert_eq!(open.words.log, Some((1, u64::MAX)));
        assert_eq!((open.all(Role::Image).len(), open.all(Role::Image).len()), (2, 0));
        assert!(open.one(Role::Call(2)).is_none() && open.one(Role::Call(3)).is_some());
        for description in
            [words.clone(), words.replace("\"version\":1", "\"version\":2"), String::from("{}")]
        {
            assert!(Unpacked::open(HandOverState { description, fds: Vec::new() }).is_err());
        }
    }

    #[test]
    fn the_state_of_a_second_export_comes_as_it_was_and_is_not_judged_here() {
        let network = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let description = String::from("words of its own");
        let beside = HandOverState { description, fds: vec![network.into()] };
        let mut packing = Packing::<Copies>::default();
        packing.give_beside(beside);
        let mut open = Unpacked::open(packing.finish().unwrap()).unwrap();
        let beside = open.beside().unwrap();
        assert_eq!((&beside.description[..], beside.fds.len()), ("words of its own", 1));
        assert!(open.beside().is_none());
    }

    #[test]
    fn what_waits_for_others_is_refused_as_it_is_from_a_front_end() {
        let roles = [
            Role::Listener,
            Role::Connection,
            Role::Region,
            Role::Kick(0),
            Role::Call(1),
            Role::Log,
        ];
        for role in roles {
            let mut packing = Packing::<Copies>::default();
            let network = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            packing.add(role, &network).unwrap();
            let error = Unpacked::open(packing.finish().unwrap()).expect_err("refused");
            assert!(error.to_string().contains("is a network socket"), "{error}");
        }
    }
}
