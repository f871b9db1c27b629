//! An export whose process may be killed at any moment, and that goes on in another one.
//!
//! Promises: each step of the control thread is recorded ([`Record`]) in such an order that the
//! next process carries out every message of the front end and sends every reply exactly once. A
//! defect of a queue thread ends the process, since the next one goes on. Control thread.
//!
//! Of one message, in order: it is looked at; it is recorded, with its descriptors; it is taken out
//! of the socket; it is carried out; its reply is put into the pipe; what came of it is recorded;
//! its reply is moved from the pipe into the socket.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::hand_over::FrontEnd;
use super::host::{End, Host, Left, MESSAGE_TIMEOUT};
use super::record::{Moment, Pending, Record};
use super::reply_pipe::ReplyPipe;
use ringdisk_export::keep::Keeper;

use crate::closing::Held;
use crate::connection::unconsumed;
use crate::hand_over_state::{Ran, Role, Unpacked};
use crate::protocol::{Header, Reply, Request};
use crate::session::{Backend, Session};
use crate::{Connection, Error, ErrorKind};

/// A front end that has got the reply to `GET_INFLIGHT_FD` goes on within this time.
const ANSWERS: Duration = Duration::from_millis(500);

/// A record for this export.
///
/// * `state`: of the process before this one, with the numbers of all that it has parked.
///
/// Errors: no descriptor is left.
pub(super) fn record(
    keeper: Box<dyn Keeper>,
    state: Option<&mut Unpacked>,
    parked: Vec<u64>,
) -> Result<Record, Error> {
    let before =
        state.and_then(|state| state.one(Role::ReplyRead).zip(state.one(Role::ReplyWrite)));
    let replies = match before {
        Some((read, write)) => ReplyPipe::adopt(read, write)?,
        None => ReplyPipe::make()?,
    };
    let next = parked.iter().map(|number| number.saturating_add(1)).max().unwrap_or(0);
    Ok(Record::new(keeper, replies, next, parked))
}

impl Host {
    /// Records how things are, if they are kept.
    ///
    /// Errors: they are not kept.
    fn write_record(
        &mut self,
        front_end: Option<(&Session, &Connection)>,
        pending: Option<&Pending>,
        reply: Option<&Reply>,
    ) -> Result<(), Error> {
        // The last virtqueue that stops in a migration gives the disk away.
        let may_give = pending.is_some() && self.control.is_migrating();
        let is_inactive = may_give || !self.control.disk.is_active();
        self.write_as((front_end, Ran::ThoseThatRun), pending, reply, is_inactive)
    }

    /// * `front_end`: if one is connected; and which of its virtqueues run.
    /// * `is_inactive`: the disk is another process's, or about to be given to it.
    fn write_as(
        &mut self,
        (front_end, ran): (Option<(&Session, &Connection)>, Ran),
        pending: Option<&Pending>,
        reply: Option<&Reply>,
        is_inactive: bool,
    ) -> Result<(), Error> {
        let Some(record) = &mut self.record else { return Ok(()) };
        let moment =
            Moment { control: &self.control, source: &self.source, front_end, ran, is_inactive };
        record.write(&moment, pending, reply)
    }

    /// Gives the disk to the process that waits for it, if it may be given. The next process must
    /// not open a disk as its own that was given away, so this is recorded first.
    pub(super) fn give_disk_if_wanted(&mut self, front_end: Option<(&Session, &Connection)>) {
        if !self.control.may_give_disk_now() {
            return;
        }
        match self.write_as((front_end, Ran::ThoseThatRun), None, None, true) {
            Ok(()) => self.control.give_disk(),
            Err(error) => tracing::error!("{}: the disk stays ours: {error}", self.name),
        }
    }

    /// The export ends: no process goes on with it.
    pub(super) fn record_end(&mut self) {
        if let Some(record) = self.record.take() {
            record.end();
        }
    }

    /// Records an export that has just been made, or has come from another process.
    ///
    /// Errors: it is not kept.
    pub(super) fn record_start(&mut self) -> Result<(), Error> {
        match self.front_end.take() {
            Some(handed) if self.record.is_some() && matches!(self.left, Left::Nothing) => {
                self.record_handed(handed)
            }
            // What was recorded before this process counts.
            Some(found) => {
                self.front_end = Some(found);
                Ok(())
            }
            None => {
                if let Some(record) = &mut self.record {
                    // Of a front end that could not be gone on with: the next one gets no reply of
                    // its.
                    record.replies.drain();
                }
                self.write_record(None, None, None)
            }
        }
    }

    /// Records a front end that another process hands over, before that one lets go of it. Its
    /// virtqueues stand still.
    fn record_handed(&mut self, (session, socket): FrontEnd) -> Result<(), Error> {
        let connection = Connection::of(socket);
        let recorded = self.write_handed(&session, &connection);
        // No part of a message has been read.
        self.front_end = connection.into_socket().ok().map(|socket| (session, socket.into()));
        recorded
    }

    fn write_handed(&mut self, session: &Session, connection: &Connection) -> Result<(), Error> {
        // The area for requests in flight has the layout that was negotiated.
        let set = self.control.set_features(session.features());
        set.map_err(|refusal| Error::new(ErrorKind::Refused, refusal.to_string()))?;
        if let Err(End::NotKept(error)) = self.fit_area() {
            return Err(error);
        }
        let is_inactive = !self.control.disk.is_active();
        let front_end = (Some((session, connection)), Ran::AllThatAreWanted);
        self.write_as(front_end, None, None, is_inactive)
    }

    /// The connection of a front end. What it brings is recorded from now on.
    ///
    /// Errors: it cannot be, and the connection has ended.
    pub(super) fn connection(
        &mut self,
        session: &Session,
        socket: Held,
    ) -> Result<Connection, End> {
        if self.record.is_none() {
            return Ok(Connection::of(socket));
        }
        let connection = Connection::kept(socket).map_err(End::NotKept)?;
        if matches!(self.left, Left::Nothing) {
            if let Some(record) = &mut self.record {
                record.forget_front_end();
            }
            self.fit_area()?;
            self.write_record(Some((session, &connection)), None, None).map_err(End::NotKept)?;
        }
        Ok(connection)
    }

    /// Makes an area for requests in flight, where one is missing.
    fn fit_area(&mut self) -> Result<(), End> {
        let Some(record) = &mut self.record else { return Ok(()) };
        match self.control.fit_own_area() {
            Ok(true) => record.area_changed(),
            Ok(false) => {}
            Err(refusal) => {
                let text = format!("no area for requests in flight: {refusal}");
                return Err(End::NotKept(Error::new(ErrorKind::System, text)));
            }
        }
        Ok(())
    }

    /// The front end has gone.
    pub(super) fn record_no_front_end(&mut self) -> End {
        if let Some(record) = &mut self.record {
            record.forget_front_end();
            record.replies.drain();
        }
        match self.write_record(None, None, None) {
            Ok(()) => End::Gone,
            Err(error) => End::NotKept(error),
        }
    }

    /// Records a message, and takes it out of the socket.
    ///
    /// Errors: it is not kept, or the socket has it no longer; the connection ends.
    pub(super) fn record_message(
        &mut self,
        session: &Session,
        connection: &Connection,
        message: &Pending,
    ) -> Result<(), End> {
        if self.record.is_none() {
            return Ok(());
        }
        self.write_record(Some((session, connection)), Some(message), None)
            .and_then(|()| connection.consume(message.len()))
            .map_err(|error| {
                self.ends(&error);
                End::Gone
            })
    }

    /// Records what came of a message, and sends its reply.
    ///
    /// Errors: it is not kept; the front end does not take the reply.
    pub(super) fn send_kept(
        &mut self,
        session: &Session,
        connection: &Connection,
        (header, payload): (&Header, &[u8]),
        reply: Option<Reply>,
    ) -> Result<(), Error> {
        self.note_base(session, header, payload);
        if let Err(End::NotKept(error)) = self.fit_area() {
            return Err(error);
        }
        let Some(record) = &mut self.record else { return Ok(()) };
        record.carried_out(header, payload);
        let (in_pipe, with_fds) = match reply {
            Some(reply) if reply.fds().is_empty() => (Some(reply), None),
            other => (None, other),
        };
        if let Some(reply) = &in_pipe {
            record.replies.fill(reply.bytes())?;
        }
        let front_end = Some((session, connection));
        self.write_record(front_end, None, with_fds.as_ref())?;
        self.control.retire();
        if in_pipe.is_some()
            && let Some(record) = &self.record
        {
            record.send(connection, MESSAGE_TIMEOUT)?;
        }
        let Some(reply) = with_fds else { return Ok(()) };
        connection.send(&reply, MESSAGE_TIMEOUT)?;
        self.write_record(front_end, None, None)
    }

    /// Where a virtqueue begins that does not run counts, although our own area of requests in
    /// flight, which the front end does not know of, says another place.
    fn note_base(&mut self, session: &Session, header: &Header, payload: &[u8]) {
        if header.request != Request::SetVringBase as u32 {
            return;
        }
        let index = payload.first_chunk::<4>().map(|bytes| u32::from_ne_bytes(*bytes));
        let Some(index) = index.and_then(|index| u16::try_from(index).ok()) else { return };
        if self.control.notes_in_own_area(index, session.size_of(index)) {
            self.control.retiring.push(index);
        }
    }

    /// Finishes what a process that was killed has begun. Gives the end of the connection, if it
    /// ends by that.
    pub(super) fn finish_what_was_left(
        &mut self,
        session: &mut Session,
        connection: &Connection,
    ) -> Option<End> {
        match std::mem::take(&mut self.left) {
            Left::Nothing => None,
            Left::Message(message) => self.carry_out_again(session, connection, message),
            Left::Reply(reply) => {
                let sent = self.send_again(session, connection, reply);
                let error = sent.err()?;
                self.ends(&error);
                Some(End::Gone)
            }
        }
    }

    fn carry_out_again(
        &mut self,
        session: &mut Session,
        connection: &Connection,
        message: Pending,
    ) -> Option<End> {
        if let Some(record) = &self.record {
            // Of a reply whose message does not count as carried out.
            record.replies.drain();
        }
        let left = unconsumed(connection.socket()).and_then(|left| match left > message.len() {
            true => Err(Error::new(ErrorKind::Protocol, "the socket has more than was recorded")),
            false => connection.consume(left),
        });
        if let Err(error) = left {
            self.ends(&error);
            return Some(End::Gone);
        }
        tracing::debug!("{}: request {} is carried out again", self.name, message.words.request);
        let header = message.header();
        let Pending { words, fds } = message;
        let answer = if header.request == Request::SetDeviceStateFd as u32 {
            // Half of the state may be in it already.
            drop(fds);
            session.refuse(&header, &words.payload, "the process was killed meanwhile")
        } else {
            session.handle(&mut self.control, &header, &words.payload, fds)
        };
        self.answer(session, connection, (&header, &words.payload), answer)
    }

    /// Sends a reply that is perhaps not sent.
    fn send_again(
        &mut self,
        session: &Session,
        connection: &Connection,
        reply: Option<Reply>,
    ) -> Result<(), Error> {
        if let Some(record) = &self.record {
            record.send(connection, MESSAGE_TIMEOUT)?;
        }
        let Some(reply) = reply else { return Ok(()) };
        // It goes with a descriptor, so it was not sent through the pipe. A front end that waits
        // for it says nothing.
        let mut says = [PollFd::new(connection, PollFlags::IN)];
        let until = Instant::now() + ANSWERS;
        let is_sent = loop {
            let left = until.saturating_duration_since(Instant::now());
            match poll(&mut says, Timespec::try_from(left).ok().as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                ready => break ready.is_ok_and(|ready| ready > 0),
            }
        };
        if !is_sent {
            connection.send(&reply, MESSAGE_TIMEOUT)?;
        }
        self.write_record(Some((session, connection)), None, None)
    }

    /// A defect ended a thread: the next process goes on, with what was recorded.
    pub(super) fn die_if_kept(&self) {
        if self.record.is_some() {
            tracing::error!("{}: a queue thread ended by a defect", self.name);
            std::process::abort();
        }
    }
}

/// Ends the process when the control thread panics, if another one goes on then.
#[derive(Debug)]
pub(super) struct DiesWithPanic(pub(super) bool);

impl Drop for DiesWithPanic {
    fn drop(&mut self) {
        if self.0 && std::thread::panicking() {
            std::process::abort();
        }
    }
}
