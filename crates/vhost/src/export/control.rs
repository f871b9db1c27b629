//! The control thread of an export: waits for front ends, and does what they ask for.
//!
//! Promises: front ends are served one after the other; a second one takes nothing from the first,
//! unless that one keeps it waiting and never says that the device is its own. Whatever a front end
//! sends, or does not send, the thread hears a stop and a hand-over. At the end the disk is
//! flushed, unless another process has it. Never on the path of a request.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ringdisk_export::HaltReason;
use rustix::event::epoll;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;

use super::hand_over::{self, Outcome};
use super::host::{End, Host, Left, MESSAGE_TIMEOUT};
use super::kernel_device::{KERNEL_POLL_INTERVAL, Occasion};
use super::options::Second;
use super::record::Pending;
use super::sockets::FrontEndSource;
use crate::closing::{Held, is_full};
use crate::device::Complaint;
use crate::protocol::Header;
use crate::session::{Answer, Session};
use crate::{Connection, Error, ErrorKind, Received};

/// First pause between two attempts to connect to a front end; each one is longer than the one
/// before, up to the last.
const CONNECT_FIRST: Duration = Duration::from_millis(100);
const CONNECT_LAST: Duration = Duration::from_secs(2);
/// A front end that keeps others waiting has so long until it says that the device is its own.
const CLAIM: Duration = Duration::from_secs(10);
/// How often to look whether another process waits for a disk that no guest uses. A guest that was
/// paused for its migration does not mind a second more, nor does a front end that comes behind a
/// silent one; an idle disk is to cost nothing that could be measured.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Why the waiting for a front end ended.
enum Next {
    FrontEnd(Held),
    Stopped,
    HandedOver,
}

impl Host {
    /// Serves front ends, one after the other, until the export is stopped.
    ///
    /// Errors: why it ended by itself.
    pub(super) fn run(mut self) -> Result<(), HaltReason> {
        let attended = self.signals.attended();
        let result = self.serve();
        // What follows may take long.
        drop(attended);
        if let Some(beside) = &self.beside {
            beside.end();
        }
        let was_given = matches!(result, Ok(End::HandedOver));
        let is_ours = !self.control.device.gives_up() && !was_given;
        if was_given && let Some(record) = self.record.take() {
            record.leave();
        }
        let mut flushed = Ok(());
        if is_ours {
            // The image is free as soon as it is closed, and may be another process's then.
            self.record_end();
            flushed = self.control.close().map_err(HaltReason::Flush);
        }
        self.control.stop_threads();
        result.map(|_| ()).and(flushed)
    }

    /// The front end of another process goes on here.
    fn go_on(&mut self) -> Option<End> {
        let (mut session, socket) = self.front_end.take()?;
        let resumed = session.resume(&mut self.control);
        if self.signals.has_panicked() {
            self.die_if_kept();
        }
        if let Err(error) = resumed {
            tracing::error!("{}: the front end that was taken over is let go: {error}", self.name);
            session.close(&mut self.control);
            socket.end();
            self.left = Left::Nothing;
            return Some(self.record_no_front_end());
        }
        if self.record.is_some() {
            // The size may be another one by now.
            self.control.config_changed();
        }
        Some(self.converse_as(session, socket))
    }

    /// Waits until front ends may be taken. Gives the end, if that comes first.
    ///
    /// Errors: those of the system.
    fn hold(&self) -> Result<Option<End>, Error> {
        loop {
            self.signals.clear();
            if self.signals.is_stopped() {
                return Ok(Some(End::Stopped));
            }
            if !self.signals.is_held() {
                return Ok(None);
            }
            let wake = PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN);
            match poll(&mut [wake], None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    return Err(Error::new(ErrorKind::System, "waiting for the start").errno(errno));
                }
            }
        }
    }

    fn serve(&mut self) -> Result<End, HaltReason> {
        if let Some(end) = self.hold()? {
            return Ok(end);
        }
        loop {
            let end = match self.go_on() {
                Some(end) => end,
                None => match self.next_front_end()? {
                    Next::Stopped => return Ok(End::Stopped),
                    Next::HandedOver => return Ok(End::HandedOver),
                    Next::FrontEnd(socket) => self.converse_as(Session::new(self.session), socket),
                },
            };
            match end {
                End::Gone if matches!(self.source, FrontEndSource::One(_)) => return Ok(End::Gone),
                End::Gone => {}
                End::Stopped | End::HandedOver => return Ok(end),
                End::Panicked => return Err(HaltReason::Panicked),
                End::NotKept(error) => return Err(error.into()),
                End::GaveUp => return Err(HaltReason::GaveUp),
            }
        }
    }

    /// Waits for a front end.
    fn next_front_end(&mut self) -> Result<Next, HaltReason> {
        let mut pause = CONNECT_FIRST;
        loop {
            self.signals.clear();
            if self.signals.is_stopped() {
                return Ok(Next::Stopped);
            }
            if let Some(request) = self.signals.take_request() {
                let places = (&self.source, self.beside.as_deref());
                match hand_over::serve(request, &mut self.control, places, None) {
                    Outcome::Taken => return Ok(Next::HandedOver),
                    Outcome::GoesOn | Outcome::LetGo => continue,
                }
            }
            if self.signals.has_panicked() {
                self.die_if_kept();
                return Err(HaltReason::Panicked);
            }
            self.look_after_kernel();
            if let Some(socket) = self.source.next()? {
                return Ok(Next::FrontEnd(socket));
            }
            self.give_disk_if_wanted(None);
            let look = self.control.may_give_disk().then_some(POLL_INTERVAL);
            let closed = self.source.closed_for();
            let timeout = closed.or(look).and_then(|time| Timespec::try_from(time).ok());
            let wake = PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN);
            let waited = match &self.source {
                FrontEndSource::Listens(_) if closed.is_some() => {
                    poll(&mut [wake], timeout.as_ref())
                }
                FrontEndSource::Listens(listener) => {
                    let comes = PollFd::from_borrowed_fd(listener.socket.as_fd(), PollFlags::IN);
                    poll(&mut [wake, comes], timeout.as_ref())
                }
                _ => {
                    let waited = poll(&mut [wake], Timespec::try_from(pause).ok().as_ref());
                    pause = (pause * 3 / 2).min(CONNECT_LAST);
                    waited
                }
            };
            match waited {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    let waiting = Error::new(ErrorKind::System, "waiting for a front end");
                    return Err(waiting.errno(errno).into());
                }
            }
        }
    }

    /// Serves one front end until it goes.
    fn converse_as(&mut self, mut session: Session, socket: Held) -> End {
        let wake = match self.wake() {
            Ok(wake) => wake,
            Err(errno) => {
                tracing::error!("{}: the front end is not served: {errno}", self.name);
                return End::Gone;
            }
        };
        self.control.had_front_end = true;
        self.control.device.front_end_came(pid_of(&socket));
        self.beside.iter().for_each(|beside| beside.client_came());
        let end = self.converse_on(&mut session, socket, wake.as_fd());
        self.beside.iter().for_each(|beside| beside.client_gone());
        self.control.device.front_end_gone();
        end
    }

    /// As [`Host::converse_as`].
    ///
    /// * `wake`: what ends the waiting for a message.
    fn converse_on(&mut self, session: &mut Session, socket: Held, wake: BorrowedFd<'_>) -> End {
        let mut connection = match self.connection(session, socket) {
            Ok(connection) => connection,
            Err(end) => return end,
        };
        let end = match self.finish_what_was_left(session, &connection) {
            Some(end) => end,
            None => self.messages(session, &mut connection, wake),
        };
        let is_last = !matches!(end, End::Gone) || matches!(self.source, FrontEndSource::One(_));
        if !matches!(end, End::HandedOver) {
            session.close(&mut self.control);
            if is_last {
                // The front end may end when its connection does, and another one use the image.
                self.record_end();
            }
            connection.end();
        }
        self.control.tell_kernel_errors(Occasion::Last);
        match is_last {
            true => end,
            false => self.record_no_front_end(),
        }
    }

    /// What ends the waiting for a message: our own signals, and a second front end that is to be
    /// sent away.
    fn wake(&mut self) -> rustix::io::Result<OwnedFd> {
        let wake = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN;
        epoll::add(&wake, self.signals.as_fd(), epoll::EventData::new_u64(0), flags)?;
        // Where second ones wait they do so in the backlog, unseen.
        self.is_deaf =
            self.second == Second::Refuse && matches!(self.source, FrontEndSource::Listens(_));
        Ok(wake)
    }

    /// Whether a second front end wakes us now: it is to be sent away, which takes that it can be
    /// accepted.
    fn listens(&self) -> bool {
        let refuses =
            matches!((&self.source, self.second), (FrontEndSource::Listens(_), Second::Refuse));
        refuses && self.source.closed_for().is_none()
    }

    /// Lets second front ends wake us.
    fn watch(&mut self, wake: BorrowedFd<'_>) -> rustix::io::Result<()> {
        self.is_deaf = false;
        let FrontEndSource::Listens(listener) = &self.source else { return Ok(()) };
        let (data, flags) = (epoll::EventData::new_u64(1), epoll::EventFlags::IN);
        epoll::add(wake, &listener.socket, data, flags)
    }

    /// Ends [`Host::watch`] for a while.
    fn look_away(&mut self, wake: BorrowedFd<'_>) {
        self.is_deaf = true;
        if let FrontEndSource::Listens(listener) = &self.source {
            let _ = epoll::delete(wake, &listener.socket);
        }
    }

    fn messages(
        &mut self,
        session: &mut Session,
        connection: &mut Connection,
        wake: BorrowedFd<'_>,
    ) -> End {
        let late = Instant::now() + CLAIM;
        loop {
            if self.is_in_the_way(session, late) {
                return End::Gone;
            }
            // A message that is half here comes to its end first, or its connection does; and none
            // is read before this.
            while connection.is_between_messages()
                && let Some(request) = self.signals.take_request()
            {
                let front_end = Some((&mut *session, &*connection));
                let places = (&self.source, self.beside.as_deref());
                match hand_over::serve(request, &mut self.control, places, front_end) {
                    Outcome::Taken => return End::HandedOver,
                    // It would wait for ever.
                    Outcome::LetGo => return End::Gone,
                    Outcome::GoesOn => {}
                }
            }
            if self.is_deaf
                && self.listens()
                && let Err(errno) = self.watch(wake)
            {
                tracing::warn!("{}: second front ends have to wait: {errno}", self.name);
            }
            self.control.tell_kernel_errors(Occasion::Regular);
            let looks = self.is_deaf || !session.is_claimed() || self.control.may_give_disk();
            let look = match looks {
                true => Some(POLL_INTERVAL),
                false => self.control.uses_kernel().then_some(KERNEL_POLL_INTERVAL),
            };
            match connection.receive(wake, MESSAGE_TIMEOUT, look) {
                Ok(Received::Silence) => {
                    self.give_disk_if_wanted(Some((&*session, &*connection)));
                }
                // Before the second one is sent away.
                Ok(Received::Woken) if self.is_in_the_way(session, late) => return End::Gone,
                Ok(Received::Woken) => {
                    if let Some(end) = self.woken(wake) {
                        return end;
                    }
                }
                Ok(Received::Closed) => return End::Gone,
                Ok(Received::Message { header, payload, fds }) => {
                    let message = Pending::new(header, payload, fds);
                    if let Some(end) = self.message(session, connection, message) {
                        return end;
                    }
                }
                Err(error) => {
                    self.ends(&error);
                    return End::Gone;
                }
            }
        }
    }

    /// Does what a message asks for. Gives the end of the connection, if it ends.
    fn message(
        &mut self,
        session: &mut Session,
        connection: &Connection,
        message: Pending,
    ) -> Option<End> {
        // What becomes of them, none is the last one of its socket before this is dropped.
        let sockets = match Held::sockets_of(&message.fds) {
            Ok(sockets) if sockets.is_empty() || !is_full() => sockets,
            refused => {
                message.fds.into_iter().map(Held::from).for_each(drop);
                self.refuse_sockets(refused.err());
                return Some(End::Gone);
            }
        };
        if let Err(end) = self.record_message(session, connection, &message) {
            return Some(end);
        }
        let header = message.header();
        let Pending { words, fds } = message;
        let answer = session.handle(&mut self.control, &header, &words.payload, fds);
        drop(sockets);
        self.answer(session, connection, (&header, &words.payload), answer)
    }

    /// Answers a message.
    pub(super) fn answer(
        &mut self,
        session: &Session,
        connection: &Connection,
        message: (&Header, &[u8]),
        answer: Result<Answer, Error>,
    ) -> Option<End> {
        if self.signals.has_panicked() {
            // What the queue thread did not answer is no refusal of the message.
            self.die_if_kept();
        }
        let sent = answer.and_then(|answer| {
            if let Some(refused) = &answer.refused {
                self.complain(Complaint::Refused, format_args!("{refused}"));
            }
            match self.record {
                Some(_) => self.send_kept(session, connection, message, answer.reply),
                None => {
                    answer.reply.map_or(Ok(()), |reply| connection.send(&reply, MESSAGE_TIMEOUT))
                }
            }
        });
        let error = sent.err()?;
        self.ends(&error);
        Some(End::Gone)
    }

    /// A connection ends because of sockets that it brings.
    fn refuse_sockets(&self, errno: Option<rustix::io::Errno>) {
        let text = "its sockets are not taken: those of earlier ones are not closed yet";
        let error = errno.map_or_else(
            || Error::new(ErrorKind::Refused, text),
            |errno| Error::new(ErrorKind::System, "keeping a socket").errno(errno),
        );
        self.ends(&error);
    }

    /// A front end can be wrong as often as it likes, and a guest make it so (`SET_CONFIG`): not
    /// all of it is told.
    fn complain(&self, kind: Complaint, what: fmt::Arguments<'_>) {
        self.control.device.complain(kind, what);
    }

    pub(super) fn ends(&self, error: &Error) {
        self.complain(
            Complaint::Connection,
            format_args!("the connection ends: {}", error.with_hint()),
        );
    }

    /// Whether a front end has done nothing with its connection while another one waits. Alone it
    /// may be as silent as it likes: a user who plugs a disk in by hand connects long before.
    ///
    /// * `late`: when it should have claimed the device.
    fn is_in_the_way(&self, session: &Session, late: Instant) -> bool {
        if session.is_claimed() || Instant::now() < late || !self.source.has_next() {
            return false;
        }
        tracing::warn!(
            "{}: the connection ends: no SET_OWNER for {} s, and another front end waits",
            self.name,
            CLAIM.as_secs()
        );
        true
    }

    /// Virtqueues come back from the host kernel, and go there.
    fn look_after_kernel(&mut self) {
        if self.signals.take_recall() {
            self.control.take_back_all();
        }
        self.control.look_at_kernel();
        if self.signals.take_released() {
            self.control.renew_workers();
        }
        if self.signals.take_reconsider() {
            self.control.reconsider_kernel();
        }
        while let Some(switch) = self.signals.take_switch() {
            let _ = switch.answer.send(self.control.switch_accel(switch.on));
        }
    }

    /// Looks what woke us.
    fn woken(&mut self, wake: BorrowedFd<'_>) -> Option<End> {
        self.signals.clear();
        if self.signals.has_panicked() {
            self.die_if_kept();
            return Some(End::Panicked);
        }
        if self.signals.is_stopped() {
            return Some(End::Stopped);
        }
        if self.control.device.gives_up() {
            return Some(End::GaveUp);
        }
        if self.signals.take_changed() {
            self.control.config_changed();
            self.control.follow_size_in_kernel();
        }
        self.look_after_kernel();
        if self.listens() {
            if let Ok(Some(second)) = self.source.next() {
                self.complain(Complaint::Second, format_args!("a second front end was sent away"));
                second.end();
            }
            if self.source.closed_for().is_some() {
                self.look_away(wake);
            }
        }
        None
    }
}

/// The process of a front end, as seen from here; 0: it is not known.
fn pid_of(socket: &Held) -> u32 {
    let peer = socket_peercred(socket.as_fd()).ok();
    peer.and_then(|peer| u32::try_from(peer.pid.as_raw_nonzero().get()).ok()).unwrap_or(0)
}
