//! The hand-over of the disk of a virtual machine to a successor process, on the control thread of
//! its export.
//!
//! Promises: a disk that is handed over stands still: its virtqueues and a second export have no
//! request in flight. It goes on in the successor or, when that fails, here, with the front end
//! and all clients that it had.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringdisk_disk::{Disk, HandOver, ImageOptions};
use ringdisk_export::{HandOverState, HandOverSteps, SecondExport, carry_out};
use ringdisk_guest::inflight::InflightArea;
use ringdisk_guest::{Layout, Log, Memory, Region};
use ringdisk_ring::Ring;

use super::backend::Control;
use super::sockets::FrontEndSource;
use crate::closing::Held;
use crate::hand_over_state::{
    Copies, Descriptors, InflightWords, Packing, Ran, RegionWords, Role, Unpacked,
};
use crate::session::Session;
use crate::signals::Request;
use crate::{BackChannel, Connection, Error, ErrorKind};

/// What came of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The other process has the export.
    Taken,
    /// The export goes on here.
    GoesOn,
    /// It does, but not for the front end that was connected.
    LetGo,
}

/// Carries a request out, on the control thread.
///
/// * `beside`: a second export of the disk, which stands still first: the guest waits for nothing
///   that its clients keep from ending.
/// * `front_end`: the session and its socket, between two messages, if one is connected.
pub(super) fn serve(
    request: Request,
    control: &mut Control,
    (source, beside): (&FrontEndSource, Option<&dyn SecondExport>),
    front_end: Option<(&mut Session, &Connection)>,
) -> Outcome {
    let (beside_stands, suspended, went_on) = (false, false, true);
    let mut export =
        VmHandOver { control, source, beside, front_end, beside_stands, suspended, went_on };
    match carry_out(request, &mut export) {
        true => {
            let beside = beside.filter(|_| export.beside_stands);
            beside.iter().for_each(|beside| beside.moved());
            Outcome::Taken
        }
        false if export.went_on => Outcome::GoesOn,
        false => Outcome::LetGo,
    }
}

/// The disk of a virtual machine, while it is handed over.
struct VmHandOver<'a> {
    control: &'a mut Control,
    source: &'a FrontEndSource,
    beside: Option<&'a dyn SecondExport>,
    front_end: Option<(&'a mut Session, &'a Connection)>,
    /// The second export stands still.
    beside_stands: bool,
    /// The virtqueues stand still.
    suspended: bool,
    /// The virtqueues of the front end have gone on.
    went_on: bool,
}

impl HandOverSteps for VmHandOver<'_> {
    type State = HandOverState;

    fn disks(&self) -> Vec<Arc<Disk>> {
        vec![Arc::clone(&self.control.disk)]
    }

    fn refusal(&mut self) -> Option<Error> {
        let why = "the guest is being migrated; try again after that";
        self.control.is_migrating().then(|| Error::new(ErrorKind::Refused, why))
    }

    fn flush(&mut self, _is_awaited: &dyn Fn() -> bool) {
        // A change of the disk may come, for which a flush waits, and which waits for what is in
        // the kernel.
        self.control.take_back_all();
        let _ = self.control.flush();
    }

    fn stand_still(&mut self) -> Result<HandOverState, Error> {
        // First: the guest waits for nothing that NBD clients keep from ending.
        let clients = self.beside.map(SecondExport::stand_still).transpose()?.flatten();
        (self.beside_stands, self.suspended) = (clients.is_some(), true);
        if let Some((session, _)) = &mut self.front_end {
            session.suspend(self.control);
        }
        pack_still(self.control, (self.source, clients), &mut self.front_end)
    }

    fn go_on(&mut self) {
        // A second export that does not stand still in time goes on by itself.
        if self.suspended {
            self.went_on = go_on(self.control, &mut self.front_end);
        }
        if let Some(beside) = self.beside.filter(|_| self.beside_stands) {
            beside.go_on();
        }
    }
}

/// * `clients`: those of a second export.
fn pack_still(
    control: &Control,
    (source, clients): (&FrontEndSource, Option<HandOverState>),
    front_end: &mut Option<(&mut Session, &Connection)>,
) -> Result<HandOverState, Error> {
    let mut packing = Packing::<Copies>::default();
    if let FrontEndSource::Listens(listener) = source {
        packing.add(Role::Listener, &listener.socket)?;
    }
    if let Some((session, connection)) = front_end {
        packing.add(Role::Connection, connection)?;
        packing.add_session(session, Ran::AllThatAreWanted)?;
    }
    control.pack(&mut packing)?;
    let handed = control.threads[0].ask_task(|worker| async move {
        worker.disk.hand_over(&worker.ring).await.map_err(|error| error.to_string())
    });
    let handed = handed.wait(control.may_wait());
    let handed = handed.map_err(|_| String::from("the queue thread does not answer")).flatten();
    let HandOver { description, fds } = handed.map_err(|why| {
        Error::new(ErrorKind::Refused, format!("the disk cannot be handed over: {why}"))
    })?;
    packing.words.disk = description;
    for fd in fds {
        packing.give(Role::Image, fd);
    }
    if let Some(clients) = clients {
        packing.give_beside(clients);
    }
    packing.finish()
}

/// Goes on here. Returns whether the front end's virtqueues do.
fn go_on(control: &mut Control, front_end: &mut Option<(&mut Session, &Connection)>) -> bool {
    let resumed = control.threads[0].ask_task(|worker| async move {
        worker.disk.resume(&worker.ring).await.map_err(|error| error.to_string())
    });
    let resumed = resumed.wait(control.may_wait());
    let resumed = resumed.map_err(|_| String::from("the queue thread does not answer")).flatten();
    let name = control.device.name.clone();
    if let Err(why) = resumed {
        tracing::error!("{name}: the disk cannot go on after a hand-over that failed: {why}");
    }
    let Some((session, _)) = front_end else { return true };
    let went_on = session.resume(control);
    if let Err(error) = &went_on {
        tracing::error!("{name}: virtqueues cannot go on after a hand-over that failed: {error}");
    }
    went_on.is_ok()
}

impl Control {
    /// Adds what the device has. Its virtqueues stand still.
    pub(super) fn pack<D: Descriptors>(&self, packing: &mut Packing<D>) -> Result<(), Error> {
        packing.words.write_cache = self.device.write_cache();
        packing.words.broken = self.device.broken_reason();
        for region in self.memory.regions() {
            packing.words.regions.push(RegionWords {
                guest_addr: region.guest_addr(),
                user_addr: region.user_addr(),
                size: region.size(),
                mmap_offset: region.mmap_offset(),
            });
            packing.add_region(region.guest_addr(), region.fd())?;
        }
        for (index, ring) in (0..).zip(&self.rings) {
            if let Some(call) = &ring.call {
                packing.add(Role::Call(index), call)?;
            }
            if let Some(error) = &ring.error {
                packing.add(Role::Error(index), error)?;
            }
        }
        if let Some(area) = &self.inflight {
            packing.words.inflight = Some(InflightWords::of(area));
            packing.add(Role::Inflight, area.fd())?;
        }
        if let Some(log) = &self.log {
            packing.words.log = Some((log.size(), log.offset()));
            packing.add(Role::Log, log.fd())?;
        }
        if let Some(event) = &self.log_event {
            packing.add(Role::LogEvent, event)?;
        }
        if let Some(socket) = self.channel.as_ref().and_then(BackChannel::socket) {
            packing.add(Role::Channel, socket)?;
        }
        Ok(())
    }

    /// Takes what the device of another process had; its virtqueues are started by the session.
    ///
    /// Errors: memory cannot be mapped; the state does not hold together.
    pub(super) fn unpack(&mut self, state: &mut Unpacked) -> Result<(), Error> {
        // Perhaps; it was not counted.
        self.had_front_end = true;
        self.device.set_write_cache(state.words.write_cache);
        let lent = match Lent::map(state) {
            Ok(lent) => lent,
            // No virtqueue could run on it. It is the front end's doing, for which other disks of
            // its process do not pay.
            Err(error @ ringdisk_guest::Error::FileTooShort { .. }) => {
                let name = &self.device.name;
                tracing::warn!("{name}: the front end is let go: its memory is gone: {error}");
                state.forget_front_end();
                return Ok(());
            }
            Err(error) => {
                let text = "the hand-over cannot be taken";
                return Err(Error::new(ErrorKind::Refused, text).source(error));
            }
        };
        if let Some(reason) = state.words.broken.take() {
            self.device.set_broken(reason);
        }
        self.memory = Arc::new(lent.memory);
        self.show_memory(&self.memory).map_err(|refusal| {
            Error::new(ErrorKind::Refused, format!("the memory cannot be taken: {refusal}"))
        })?;
        for (index, ring) in (0..).zip(&mut self.rings) {
            ring.call = state.one(Role::Call(index));
            ring.error = state.one(Role::Error(index));
        }
        self.inflight = lent.inflight.map(Arc::new);
        self.own_area = lent.own_area.map(Arc::new);
        if let Some(kept) = &mut state.words.kept {
            self.retiring = std::mem::take(&mut kept.retired);
            self.retire();
        }
        self.log = lent.log;
        self.log_event = state.one(Role::LogEvent);
        self.show_log_event().map_err(|refusal| {
            Error::new(ErrorKind::Refused, format!("the log cannot be taken: {refusal}"))
        })?;
        self.channel = state.one(Role::Channel).map(BackChannel::new);
        Ok(())
    }
}

impl InflightWords {
    pub(super) fn of(area: &InflightArea) -> InflightWords {
        InflightWords {
            size: area.mmap_size(),
            offset: area.mmap_offset(),
            queues: area.queues(),
            queue_size: area.size(),
            packed: area.layout() == Layout::Packed,
        }
    }

    fn map(self, fd: OwnedFd) -> Result<InflightArea, ringdisk_guest::Error> {
        let InflightWords { size, offset, queues, queue_size, packed } = self;
        let layout = if packed { Layout::Packed } else { Layout::Split };
        InflightArea::from_fd(fd, size, offset, queues, queue_size, layout)
    }
}

/// Files of a front end, mapped.
struct Lent {
    memory: Memory,
    inflight: Option<InflightArea>,
    own_area: Option<InflightArea>,
    log: Option<Arc<Log>>,
}

impl Lent {
    /// Errors: they cannot be mapped; they do not hold together.
    fn map(state: &mut Unpacked) -> Result<Lent, ringdisk_guest::Error> {
        let fds = state.all(Role::Region);
        let words = std::mem::take(&mut state.words.regions);
        let regions = words
            .into_iter()
            .zip(fds)
            .map(|(w, fd)| Region::map(fd, w.guest_addr, w.user_addr, w.size, w.mmap_offset));
        let memory = Memory::new(regions.collect::<Result<Vec<_>, _>>()?)?;
        let area = state.words.inflight.take().zip(state.one(Role::Inflight));
        let inflight = area.map(|(words, fd)| words.map(fd));
        let kept = state.words.kept.as_mut();
        let own = kept.and_then(|kept| kept.own_area.take()).zip(state.one(Role::OwnArea));
        let own_area = own.map(|(words, fd)| words.map(fd));
        let log = state.words.log.zip(state.one(Role::Log));
        let log = log.map(|((size, offset), fd)| Log::map(fd, size, offset));
        Ok(Lent {
            memory,
            inflight: inflight.transpose()?,
            own_area: own_area.transpose()?,
            log: log.transpose()?,
        })
    }
}

/// The disk of a state.
///
/// Errors: those of opening it.
pub(super) async fn open_disk(
    ring: &Ring,
    state: &mut Unpacked,
    options: &ImageOptions,
) -> Result<Arc<Disk>, ringdisk_disk::Error> {
    let description = std::mem::take(&mut state.words.disk);
    let fds = state.all(Role::Image);
    Disk::open_handed(ring, HandOver { description, fds }, options).await
}

/// The socket of the front end that was connected, and what it had said.
pub(super) type FrontEnd = (Session, Held);

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use ringdisk_export::ask_hand_over;

    use super::*;
    use crate::signals::Signals;

    fn signals() -> Arc<Signals> {
        Arc::new(Signals::new(false).expect("an eventfd"))
    }

    fn ask(signals: &Signals) -> Error {
        let asked = ask_hand_over(|request| signals.request(request));
        asked.expect_err("nothing is handed over")
    }

    /// A control thread that does this with the first request.
    fn asked_while(serve: impl FnOnce(Request) + Send + 'static) -> Error {
        let signals = signals();
        let theirs = Arc::clone(&signals);
        let attended = signals.attended();
        let control = std::thread::spawn(move || {
            let _attended = attended;
            let request = std::iter::repeat_with(|| theirs.take_request()).flatten().next();
            serve(request.expect("one comes"));
        });
        let begun = Instant::now();
        let error = ask(&signals);
        assert!(begun.elapsed() < Duration::from_secs(5));
        let _ = control.join();
        assert_eq!(ask(&signals).kind(), ErrorKind::Halted);
        assert!(signals.take_request().is_none());
        error
    }

    #[test]
    fn who_asks_at_the_end_or_after_it_is_told_so_at_once() {
        assert_eq!(asked_while(drop).kind(), ErrorKind::Halted);
        let panics = |_request| panic!("a defect");
        assert_eq!(asked_while(panics).kind(), ErrorKind::Halted);
        // One that the control thread has not seen.
        let signals = signals();
        let attended = signals.attended();
        let theirs = Arc::clone(&signals);
        let asks = std::thread::spawn(move || ask(&theirs));
        std::thread::sleep(Duration::from_millis(5));
        drop(attended);
        assert_eq!(asks.join().expect("it asked").kind(), ErrorKind::Halted);
    }
}
