//! The old process: waits for a successor, and gives it the disk.

use std::io::{self, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use ringdisk_disk::Disk;
use ringdisk_vhost::export::HandOverHandle;

use super::link::{self, Refusal};
use super::{ASK, GO, READY, STEP, Shown, is_trusted};
use crate::control::registry::{self, Listening};
use crate::helper;

/// After a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// The socket for the successor of one disk; dropping it removes its name.
#[derive(Debug)]
pub struct SuccessorSocket {
    listening: Listening,
    was_given: Arc<AtomicBool>,
    /// Gives the stream to the process that has the disk.
    thread: Option<JoinHandle<Option<UnixStream>>>,
}

impl SuccessorSocket {
    /// Waits for a successor from now on.
    ///
    /// * `path`: of the vhost-user socket, as [`registry::real_path`] gives it.
    /// * `shown`: what the guest has been shown of the disk.
    ///
    /// Errors: no socket, no thread.
    pub fn start(
        path: &Path,
        handle: HandOverHandle,
        shown: Shown,
        disk: &Arc<Disk>,
    ) -> io::Result<SuccessorSocket> {
        let listening = registry::listen(&registry::name_for_successor(path))?;
        let listener = listening.listener.try_clone()?;
        listener.set_nonblocking(false)?;
        let was_given = Arc::new(AtomicBool::new(false));
        let given = Arc::clone(&was_given);
        let ours = Ours { handle, shown, disk: Arc::downgrade(disk) };
        let thread = std::thread::Builder::new()
            .name(String::from("upgrade"))
            .spawn(move || wait(&listener, &ours, &given))?;
        Ok(SuccessorSocket { listening, was_given, thread: Some(thread) })
    }

    /// Its name, with device and inode number.
    pub fn named(&self) -> helper::Named {
        self.listening.named()
    }

    /// Says whether another process serves the disk now.
    pub fn was_given(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.was_given)
    }

    /// Ends: no successor finds this disk here any more. Gives what tells the one that has taken
    /// it, when it is closed, that no name of the disk is in use here any longer; `None`: nobody
    /// has taken it.
    pub fn end(mut self) -> Option<UnixStream> {
        self.join()
    }

    fn join(&mut self) -> Option<UnixStream> {
        // Ends the thread's waiting.
        let _ = rustix::net::shutdown(&self.listening.listener, rustix::net::Shutdown::Both);
        // The end of the process must not come before the word that the other one waits for: nobody
        // would have the disk.
        let thread = self.thread.take().filter(|_| self.was_given.load(Ordering::Acquire))?;
        thread.join().ok().flatten()
    }
}

impl Drop for SuccessorSocket {
    fn drop(&mut self) {
        let _ = self.join();
    }
}

/// What there is to give.
struct Ours {
    handle: HandOverHandle,
    shown: Shown,
    /// Weak: its image is let go of as soon as it is served no longer.
    disk: Weak<Disk>,
}

/// Waits for a successor that takes the disk. Gives the stream to it; `None`: the waiting was
/// ended.
fn wait(listener: &UnixListener, ours: &Ours, given: &AtomicBool) -> Option<UnixStream> {
    while let Some(stream) = next(listener) {
        if !is_trusted(&stream) {
            tracing::debug!("a stranger wanted the disk and was sent away");
            continue;
        }
        match give(&stream, ours, given) {
            Ok(true) => return Some(stream),
            Ok(false) => {}
            Err(error) => tracing::warn!("the disk was not handed over: {error}"),
        }
    }
    None
}

/// The next process that asks; `None`: the waiting was ended.
fn next(listener: &UnixListener) -> Option<UnixStream> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => return Some(stream),
            // What shutdown(2) makes of it.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return None,
            // It went again, or there is no descriptor left at the moment.
            Err(error) => {
                tracing::debug!("whoever asks for the disk cannot be heard: {error}");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// Gives the disk to a process. Returns whether it has it.
fn give(mut stream: &UnixStream, ours: &Ours, given: &AtomicBool) -> io::Result<bool> {
    stream.set_read_timeout(Some(STEP))?;
    stream.set_write_timeout(Some(STEP))?;
    match link::receive_word(stream)? {
        None => return Ok(false),
        Some(ASK) => {}
        Some(_) => return Err(io::ErrorKind::InvalidData.into()),
    }
    let wanted = link::receive_shown(stream)?;
    if let Some(disk) = ours.disk.upgrade()
        && let Err(why) = ours.shown.check(&wanted, &disk)
    {
        tracing::warn!("the disk is not handed over: the guest would find another one: {why}");
        link::send_refusal(stream, &Refusal::Unlike(why))?;
        return Ok(false);
    }
    let (state, still) = match ours.handle.hand_over() {
        Ok(packed) => packed,
        Err(error) => {
            tracing::warn!("the disk is not handed over: {error}");
            link::send_refusal(stream, &Refusal::Now(error.to_string()))?;
            return Ok(false);
        }
    };
    link::send(stream, &state)?;
    drop(state);
    if link::receive_word(stream)? != Some(READY) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    given.store(true, Ordering::Release);
    if !still.commit() {
        given.store(false, Ordering::Release);
        return Err(io::Error::other("it took too long"));
    }
    // From here on the other process serves, whether it hears this or not.
    let _ = stream.write_all(&[GO]);
    Ok(true)
}
