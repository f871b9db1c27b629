//! The record of an export: its state, which the keeper has at every moment at which the process
//! may be killed.
//!
//! Promises: a message of the front end is recorded with its descriptors before it is taken out of
//! the socket, and its outcome before its reply is sent. So a successor carries out each message
//! once and sends each reply once. Control thread.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use super::backend::Control;
use super::reply_pipe::ReplyPipe;
use super::sockets::FrontEndSource;
use ringdisk_export::keep::Keeper;

use crate::hand_over_state::{
    Descriptors, InflightWords, KeptWords, Packing, PendingWords, Ran, Role, Words,
};
use crate::protocol::{HEADER_BYTES, Header, Reply, Request};
use crate::session::Session;
use crate::{Connection, Error, ErrorKind};

/// A descriptor that is parked.
#[derive(Clone, Copy, Debug)]
struct Parked {
    /// Its number here, while it is what it was when it was parked.
    fd: RawFd,
    number: u64,
}

/// The same place in a state: the role, and which one of several with that role; of a region of
/// memory, where it begins.
type Place = (Role, u64);

/// The export at one moment.
pub(super) struct Moment<'a> {
    pub(super) control: &'a Control,
    pub(super) source: &'a FrontEndSource,
    /// The session and its socket, if a front end is connected.
    pub(super) front_end: Option<(&'a Session, &'a Connection)>,
    /// Which of its virtqueues run when another process goes on.
    pub(super) ran: Ran,
    /// The disk is another process's, or about to be given to it.
    pub(super) is_inactive: bool,
}

/// What goes to the keeper.
#[derive(Debug)]
pub(super) struct Record {
    parking: Parking,
    pub(super) replies: ReplyPipe,
}

/// Descriptors that the keeper has.
#[derive(Debug)]
struct Parking {
    keeper: Box<dyn Keeper>,
    parked: HashMap<Place, Parked>,
    /// Places whose descriptor may be another one by now.
    stale: HashSet<Place>,
    /// Everything that is parked and that no state names any more.
    forgotten: Vec<u64>,
    next: u64,
}

/// A message of the front end that is being carried out.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) words: PendingWords,
    pub(super) fds: Vec<OwnedFd>,
}

impl Pending {
    pub(super) fn new(header: Header, payload: Vec<u8>, fds: Vec<OwnedFd>) -> Pending {
        let Header { request, flags, .. } = header;
        Pending { words: PendingWords { request, flags, payload }, fds }
    }

    /// Bytes in the socket.
    pub(super) fn len(&self) -> usize {
        HEADER_BYTES + self.words.payload.len()
    }

    pub(super) fn header(&self) -> Header {
        let size = u32::try_from(self.words.payload.len()).unwrap_or(u32::MAX);
        Header { request: self.words.request, flags: self.words.flags, size }
    }
}

/// Descriptors of one state; parks what is not parked yet.
struct Parks<'a> {
    parking: &'a mut Parking,
    numbers: Vec<u64>,
    counts: HashMap<Role, u64>,
    new: HashMap<Place, Parked>,
    /// What was parked for this state.
    fresh: Vec<u64>,
}

impl Parks<'_> {
    /// Names a descriptor in the state, and parks it if it is not parked yet.
    ///
    /// Errors: it is not kept.
    fn put(&mut self, place: Place, fd: BorrowedFd<'_>) -> Result<(), Error> {
        let raw = fd.as_raw_fd();
        let parking = &mut *self.parking;
        let is_transient = matches!(place.0, Role::Pending | Role::ReplyDescriptor);
        let same = parking.parked.get(&place).filter(|parked| parked.fd == raw);
        let same = same.filter(|_| !is_transient && !parking.stale.contains(&place)).copied();
        let parked = match same {
            Some(parked) => parked,
            None => {
                let number = parking.next;
                parking.keeper.park(number, fd).map_err(not_kept)?;
                parking.next += 1;
                self.fresh.push(number);
                Parked { fd: raw, number }
            }
        };
        self.numbers.push(parked.number);
        self.new.insert(place, parked);
        Ok(())
    }
}

/// A state that was not written names nothing: what was parked for it is released with the next
/// one.
impl Drop for Parks<'_> {
    fn drop(&mut self) {
        self.parking.forgotten.append(&mut self.fresh);
    }
}

impl Descriptors for Parks<'_> {
    fn add(&mut self, role: Role, fd: BorrowedFd<'_>) -> Result<(), Error> {
        let count = self.counts.entry(role).or_default();
        let place = (role, *count);
        *count += 1;
        self.put(place, fd)
    }

    fn add_region(&mut self, guest_addr: u64, fd: BorrowedFd<'_>) -> Result<(), Error> {
        self.put((Role::Region, guest_addr), fd)
    }
}

impl Parking {
    /// Descriptors of these roles may be others than those that are parked.
    fn may_differ(&mut self, is_other: impl Fn(Role) -> bool) {
        self.stale.extend(self.parked.keys().filter(|(role, _)| is_other(*role)));
    }

    /// A state was written that names these descriptors and no others.
    fn name(&mut self, new: HashMap<Place, Parked>) {
        let named: HashSet<u64> = new.values().map(|parked| parked.number).collect();
        let old = std::mem::replace(&mut self.parked, new);
        self.stale.clear();
        let gone = old.values().map(|parked| parked.number).chain(self.forgotten.drain(..));
        for number in gone.filter(|number| !named.contains(number)).collect::<HashSet<_>>() {
            self.keeper.release(number);
        }
    }
}

fn not_kept(error: std::io::Error) -> Error {
    Error::new(ErrorKind::System, "the state of the disk is not kept").source(error)
}

impl Record {
    /// * `replies`: of the process before, if there was one.
    /// * `next`: the first number that was never used.
    /// * `parked`: what is parked already.
    pub(super) fn new(
        keeper: Box<dyn Keeper>,
        replies: ReplyPipe,
        next: u64,
        parked: Vec<u64>,
    ) -> Record {
        let (known, stale) = (HashMap::new(), HashSet::new());
        let parking = Parking { keeper, parked: known, stale, forgotten: parked, next };
        Record { parking, replies }
    }

    /// Another front end, or none: nothing of the one before is the same.
    pub(super) fn forget_front_end(&mut self) {
        let ours = [Role::Listener, Role::ReplyRead, Role::ReplyWrite];
        self.parking.may_differ(|role| !ours.contains(&role));
    }

    /// Another area of our own.
    pub(super) fn area_changed(&mut self) {
        self.parking.may_differ(|role| role == Role::OwnArea);
    }

    /// Records how things are.
    ///
    /// * `pending`: the message that is to be carried out.
    /// * `reply`: one that goes with a descriptor, and is not sent yet.
    ///
    /// Errors: it is not kept.
    pub(super) fn write(
        &mut self,
        moment: &Moment<'_>,
        pending: Option<&Pending>,
        reply: Option<&Reply>,
    ) -> Result<(), Error> {
        let Record { parking, replies } = self;
        let fds = Parks {
            parking,
            numbers: Vec::new(),
            counts: HashMap::new(),
            new: HashMap::new(),
            fresh: Vec::new(),
        };
        let mut packing = Packing { words: Words::default(), fds };
        pack(&mut packing, replies, moment, pending, reply)?;
        let mut kept = KeptWords {
            retired: moment.control.retiring.clone(),
            own_area: moment.control.own_area.as_deref().map(InflightWords::of),
            pending: pending.map(|pending| pending.words.clone()),
            reply: reply.map(|reply| reply.bytes().to_vec()),
            inactive: moment.is_inactive,
            ..KeptWords::default()
        };
        kept.numbers = std::mem::take(&mut packing.fds.numbers);
        packing.words.kept = Some(kept);
        let text = packing.describe()?;
        packing.fds.parking.keeper.write(&text).map_err(not_kept)?;
        packing.fds.fresh.clear();
        let new = std::mem::take(&mut packing.fds.new);
        packing.fds.parking.name(new);
        Ok(())
    }

    /// Another process goes on with the export.
    pub(super) fn leave(mut self) {
        self.parking.keeper.leave();
    }

    /// The export has ended: no process goes on with it.
    pub(super) fn end(mut self) {
        self.parking.keeper.end();
    }

    /// The message has been carried out: descriptors of these places may be others.
    pub(super) fn carried_out(&mut self, header: &Header, payload: &[u8]) {
        use Request as R;
        let index = u16::from(payload.first().copied().unwrap_or(0));
        let is_other = |role: Role| match R::from_number(header.request) {
            // Other regions stay what they were when one comes or goes.
            Some(R::SetMemTable) => role == Role::Region,
            Some(R::SetVringKick) => role == Role::Kick(index),
            Some(R::SetVringCall) => role == Role::Call(index),
            Some(R::SetVringErr) => role == Role::Error(index),
            Some(R::SetLogBase) => role == Role::Log,
            Some(R::SetLogFd) => role == Role::LogEvent,
            Some(R::SetBackendReqFd) => role == Role::Channel,
            Some(R::GetInflightFd | R::SetInflightFd) => role == Role::Inflight,
            _ => false,
        };
        self.parking.may_differ(is_other);
    }

    /// Sends a reply that was put into the pipe.
    pub(super) fn send(&self, connection: &Connection, timeout: Duration) -> Result<(), Error> {
        self.replies.send(connection.as_fd(), timeout)
    }
}

fn pack(
    packing: &mut Packing<Parks<'_>>,
    replies: &ReplyPipe,
    moment: &Moment<'_>,
    pending: Option<&Pending>,
    reply: Option<&Reply>,
) -> Result<(), Error> {
    if let FrontEndSource::Listens(listener) = moment.source {
        packing.add(Role::Listener, &listener.socket)?;
    }
    packing.add(Role::ReplyRead, &replies.read)?;
    packing.add(Role::ReplyWrite, &replies.write)?;
    if let Some((session, connection)) = moment.front_end {
        packing.add(Role::Connection, connection)?;
        packing.add_session(session, moment.ran)?;
    }
    moment.control.pack(packing)?;
    if let Some(area) = &moment.control.own_area {
        packing.add(Role::OwnArea, area.fd())?;
    }
    for fd in pending.into_iter().flat_map(|pending| &pending.fds) {
        packing.add(Role::Pending, fd)?;
    }
    for fd in reply.into_iter().flat_map(Reply::fds) {
        packing.add(Role::ReplyDescriptor, fd)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Numbers that are parked; none that is 99 or more is taken.
    #[derive(Clone, Debug, Default)]
    struct Numbers(Arc<Mutex<Vec<u64>>>);

    impl Numbers {
        fn now(&self) -> Vec<u64> {
            self.0.lock().expect("no panic").clone()
        }
    }

    impl Keeper for Numbers {
        fn park(&mut self, number: u64, _descriptor: BorrowedFd<'_>) -> io::Result<()> {
            if number >= 99 {
                return Err(io::ErrorKind::QuotaExceeded.into());
            }
            self.0.lock().expect("no panic").push(number);
            Ok(())
        }

        fn release(&mut self, number: u64) {
            self.0.lock().expect("no panic").retain(|parked| *parked != number);
        }

        fn write(&mut self, _state: &str) -> io::Result<()> {
            Ok(())
        }

        fn leave(&mut self) {}

        fn end(&mut self) {}
    }

    /// Names these regions in a state, each at an address.
    fn name(parking: &mut Parking, regions: &[(u64, &OwnedFd)]) -> Result<(), Error> {
        let (numbers, counts, new, fresh) = Default::default();
        let mut parks = Parks { parking, numbers, counts, new, fresh };
        for (guest_addr, fd) in regions {
            parks.add_region(*guest_addr, fd.as_fd())?;
        }
        parks.fresh.clear();
        let new = std::mem::take(&mut parks.new);
        parks.parking.name(new);
        Ok(())
    }

    fn parking(keeper: &Numbers, next: u64) -> Parking {
        let (parked, stale, forgotten) = Default::default();
        Parking { keeper: Box::new(keeper.clone()), parked, stale, forgotten, next }
    }

    fn files() -> [OwnedFd; 3] {
        std::array::from_fn(|_| tempfile::tempfile().expect("a file").into())
    }

    #[test]
    fn a_region_that_comes_or_goes_leaves_the_others_parked() {
        let (keeper, [first, second, third]) = (Numbers::default(), files());
        let mut parking = parking(&keeper, 0);
        name(&mut parking, &[(0, &first), (2, &third)]).expect("room");
        name(&mut parking, &[(0, &first), (1, &second), (2, &third)]).expect("room");
        assert_eq!(keeper.now(), [0, 1, 2]);
        name(&mut parking, &[(1, &second), (2, &third)]).expect("room");
        assert_eq!(keeper.now(), [1, 2]);
    }

    #[test]
    fn what_was_parked_for_a_state_that_is_not_written_is_released_with_the_next_one() {
        let (keeper, [first, second, third]) = (Numbers::default(), files());
        let mut parking = parking(&keeper, 96);
        name(&mut parking, &[(0, &first)]).expect("room");
        let all = [(0, &first), (1, &second), (2, &third), (3, &third)];
        assert!(name(&mut parking, &all).is_err());
        assert_eq!(keeper.now(), [96, 97, 98]);
        name(&mut parking, &[(0, &first)]).expect("room");
        assert_eq!(keeper.now(), [96]);
    }
}
