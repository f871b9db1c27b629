//! The predecessor: waits for a successor, and hands its export over.
//!
//! Promises: the predecessor sends a process of another user away. It compares what the successor
//! would show to clients before the export stands still. The export goes on here until the
//! successor has said that it has everything. One thread for each export.

use std::io::{self, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::link::{self, Refusal};
use super::{ASK, ClientView, FORCE, GO, HandsOver, READY, STEP, STOP, is_trusted};
use crate::control::jobs::{Jobs, Moving, handed_job};
use crate::control::registry::{self, Listening};
use crate::helper;
use crate::keep::succession::{self, Succession};
use crate::stopping::Stop;
use ringdisk_disk::Disk;
use ringdisk_export::{HandOverState, HandedOver};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;

/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// The socket for the successor of one export; dropping it removes its name.
#[derive(Debug)]
pub struct SuccessorSocket {
    listening: Listening,
    was_given: Arc<AtomicBool>,
    /// Returns the stream to the successor.
    thread: Option<JoinHandle<Option<UnixStream>>>,
}

impl SuccessorSocket {
    /// Waits for a successor from now on.
    ///
    /// * `name`: of the socket, as [`registry::name_for_successor`] and
    ///   [`registry::name_for_successor_of_mount`] give it.
    /// * `disks`: those of the export, in their order.
    /// * `right`: to go on with the export, where a helper process starts another server when this
    ///   one is killed.
    ///
    /// Errors: no socket, no thread.
    pub fn start(
        name: &str,
        export: impl HandsOver,
        disks: Vec<DiskToHandOver>,
        right: Option<Succession>,
    ) -> io::Result<SuccessorSocket> {
        let listening = registry::listen(name)?;
        let listener = listening.listener.try_clone()?;
        listener.set_nonblocking(false)?;
        let was_given = Arc::new(AtomicBool::new(false));
        let given = Arc::clone(&was_given);
        let ours = Ours { export: Box::new(export), disks, right };
        let thread = std::thread::Builder::new()
            .name(String::from("upgrade"))
            .spawn(move || wait(&listener, &ours, &given))?;
        Ok(SuccessorSocket { listening, was_given, thread: Some(thread) })
    }

    /// Its name, with device and inode number.
    pub fn named(&self) -> helper::Named {
        self.listening.named()
    }

    /// Says whether the successor serves the disk now.
    pub fn was_given(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.was_given)
    }

    /// Ends the waiting for a successor. Returns the stream to the successor, whose end tells the
    /// successor that this process uses no name of the disk any longer; `None`: there is no
    /// successor.
    pub fn end(mut self) -> Option<UnixStream> {
        self.join()
    }

    /// The same when a stop was asked for since the export was handed over: the successor is told.
    pub fn end_with_stop(mut self, stop: Stop) -> Option<UnixStream> {
        let stream = self.join()?;
        let words: &[u8] = match stop {
            Stop::Clean => &[STOP],
            Stop::AtOnce => &[STOP, FORCE],
        };
        let _ = (&stream).write_all(words);
        Some(stream)
    }

    fn join(&mut self) -> Option<UnixStream> {
        // Ends the thread's waiting.
        let _ = rustix::net::shutdown(&self.listening.listener, rustix::net::Shutdown::Both);
        // This process must not end before it has sent the word that the successor waits for:
        // neither of them would have the disk.
        let thread = self.thread.take().filter(|_| self.was_given.load(Ordering::Acquire))?;
        thread.join().ok().flatten()
    }
}

impl Drop for SuccessorSocket {
    fn drop(&mut self) {
        let _ = self.join();
    }
}

/// A disk that goes to a successor.
#[derive(Debug)]
pub struct DiskToHandOver {
    view: ClientView,
    /// Weak: the export closes the image as soon as it serves the disk no longer.
    disk: Weak<Disk>,
    jobs: Arc<Jobs>,
}

impl DiskToHandOver {
    /// * `view`: what clients see of the disk.
    /// * `jobs`: of the disk; they go along.
    pub fn new(view: ClientView, disk: &Arc<Disk>, jobs: &Arc<Jobs>) -> DiskToHandOver {
        DiskToHandOver { view, disk: Arc::downgrade(disk), jobs: Arc::clone(jobs) }
    }
}

/// The disks of an export that goes to a successor.
struct Ours {
    export: Box<dyn HandsOver>,
    disks: Vec<DiskToHandOver>,
    right: Option<Succession>,
}

impl Ours {
    /// Errors: what clients would see change with a successor that was given other words.
    fn check(&self, wanted: &ClientView) -> Result<(), String> {
        let (here, there) = (self.disks.len(), wanted.each().count());
        if here != there {
            return Err(format!("{here} disks are served there, {there} here"));
        }
        for (given, wanted) in self.disks.iter().zip(wanted.each()) {
            if let Some(disk) = given.disk.upgrade() {
                given.view.check(wanted, &disk)?;
            }
        }
        Ok(())
    }
}

/// Waits for a successor that takes the disk. Gives the stream to it; `None`: the waiting was
/// ended.
fn wait(listener: &UnixListener, ours: &Ours, given: &AtomicBool) -> Option<UnixStream> {
    let noun = ours.export.kind().noun();
    while let Some(stream) = next(listener) {
        if !is_trusted(&stream) {
            tracing::debug!("a process of another user wanted the {noun} and was sent away");
            continue;
        }
        match give(&stream, ours, given) {
            Ok(true) => return Some(stream),
            Ok(false) => {}
            Err(error) => tracing::warn!("the {noun} was not handed over: {error}"),
        }
    }
    None
}

/// The next process that connects; `None`: the waiting was ended.
fn next(listener: &UnixListener) -> Option<UnixStream> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => return Some(stream),
            // accept(2) fails so after shutdown(2) of the socket.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return None,
            // The process has closed its end, or no descriptor is left at the moment.
            Err(error) => {
                tracing::debug!("a process that asks for the export cannot be heard: {error}");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// Hands the disks over to a process. Returns whether it has them.
fn give(stream: &UnixStream, ours: &Ours, given: &AtomicBool) -> io::Result<bool> {
    let Some(wanted) = wanted(stream)? else { return Ok(false) };
    let prepared = match begin(ours, &wanted).and_then(|moving| prepare(ours, moving)) {
        Ok(prepared) => prepared,
        Err(refusal) => {
            link::send_refusal(stream, &refusal)?;
            return Ok(false);
        }
    };
    prepared.give(stream, given).map(|()| true)
}

/// What a process asks for; `None`: it has left without a word.
///
/// Errors: it says something else, or nothing in time.
fn wanted(stream: &UnixStream) -> io::Result<Option<ClientView>> {
    stream.set_read_timeout(Some(STEP))?;
    stream.set_write_timeout(Some(STEP))?;
    match link::receive_word(stream)? {
        None => Ok(None),
        Some(ASK) => link::receive_view(stream).map(Some),
        Some(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Has the jobs and the other changes of the disks make ready for a hand-over. The jobs go on here
/// when the value is dropped.
///
/// Errors: why the successor that wants this gets nothing.
fn begin<'a>(ours: &'a Ours, wanted: &ClientView) -> Result<Vec<Moving<'a>>, Refusal> {
    let kind = ours.export.kind();
    ours.check(wanted).map_err(|why| {
        let (noun, who) = (kind.noun(), kind.clients());
        tracing::warn!("the {noun} is not handed over: {who} would find another one: {why}");
        Refusal::Unlike(why)
    })?;
    let moving: Result<Vec<Moving<'_>>, _> =
        ours.disks.iter().map(|given| given.jobs.begin_move()).collect();
    let moving = moving.map_err(|failure| {
        Refusal::Now(format!("{}; try it again in a moment", failure.message()))
    })?;
    let jobs: Vec<_> = moving.iter().map(Moving::progresses).collect();
    if !jobs.iter().all(Vec::is_empty) && !wanted.takes_jobs() {
        let why = "a job is under way, and the other version does not go on with it; wait until it \
                   is done, or cancel it";
        return Err(Refusal::Now(String::from(why)));
    }
    for (given, jobs) in ours.disks.iter().zip(jobs) {
        if let Some(disk) = given.disk.upgrade() {
            disk.suspend_for_hand_over(jobs);
        }
    }
    Ok(moving)
}

/// Has the export and its jobs stand still, and packs their state.
///
/// Errors: why the successor does not get it.
fn prepare<'a>(ours: &Ours, moving: Vec<Moving<'a>>) -> Result<Prepared<'a>, Refusal> {
    let noun = ours.export.kind().noun();
    let (mut state, still) = ours.export.hand_over().map_err(|error| {
        tracing::warn!("the {noun} is not handed over: {error}");
        Refusal::of(&error)
    })?;
    let mut each = moving.iter().enumerate();
    let packed = each.try_for_each(|(disk, moving)| {
        moving.stand_still().and_then(|jobs| handed_job::pack(&mut state, disk, jobs))
    });
    let packed = packed.and_then(|()| {
        let right = ours.right.as_ref();
        right.map_or(Ok(()), |right| succession::pack(&mut state, right))
    });
    packed.map_err(|why| {
        tracing::warn!("the {noun} is not handed over: {why}");
        Refusal::Now(why)
    })?;
    Ok(Prepared { moving, still, state })
}

/// An export that stands still. When this is dropped before the successor has it, the export goes
/// on here, and then its jobs do.
struct Prepared<'a> {
    still: HandedOver,
    moving: Vec<Moving<'a>>,
    state: HandOverState,
}

impl Prepared<'_> {
    /// Sends the state to the successor, and ends here once that one is ready.
    ///
    /// Errors: the successor is not ready, or has given up waiting; the export stood still for too
    /// long.
    fn give(self, mut stream: &UnixStream, given: &AtomicBool) -> io::Result<()> {
        let Prepared { moving, still, state } = self;
        link::send(stream, &state)?;
        drop(state);
        if link::receive_word(stream)? != Some(READY) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // One that has given up waiting (this process may have been stopped for a while) serves
        // nothing.
        if has_left(stream) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        given.store(true, Ordering::Release);
        if !still.commit() {
            given.store(false, Ordering::Release);
            return Err(io::Error::other("it took too long"));
        }
        moving.into_iter().for_each(|moving| moving.have_moved(peer(stream)));
        // From here on the other process serves, whether it hears this or not.
        let _ = stream.write_all(&[GO]);
        Ok(())
    }
}

/// The pid of the other process; 0: the system does not tell.
fn peer(stream: &UnixStream) -> i32 {
    socket_peercred(stream).map_or(0, |peer| peer.pid.as_raw_nonzero().get())
}

/// Whether the other process sends no more.
fn has_left(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}
