//! The helper's side of one confined process: its tasks, and its requests one after the other.
//!
//! Promises: tasks are taken before the first request and never after it; a message that is no
//! request of the list, or did not arrive whole, is refused. Blocks while a request is carried out;
//! ends when the confined process closes its end, or is gone.

use std::io;
use std::os::fd::AsFd;

use super::answer::{Answer, DONE};
use super::manager::Speaker;
use super::tasks::{HEAR, Held, MESSAGE_BYTES_MAX, SAY, Tasks};
use super::wire::{is_partial, receive, reply};

/// Carries out requests until the other end of the socket is closed.
///
/// * `server`: pid of the confined process.
/// * `speaker`: tells the service manager what that process says.
///
/// Errors: tasks that make no sense; those of the socket.
pub(crate) fn run(socket: impl AsFd, server: u32, speaker: &Speaker) -> io::Result<()> {
    let mut message = vec![0; MESSAGE_BYTES_MAX];
    let Some((tasks, held)) = take_tasks(&socket, &mut message)? else { return Ok(()) };
    loop {
        let (len, given) = match receive(&socket, &mut message) {
            Err(error) if is_partial(&error) => {
                reply(&socket, &Answer::refused())?;
                continue;
            }
            received => received?,
        };
        match &message[..len] {
            [] => return Ok(()),
            [SAY, text @ ..] => speaker.say(text),
            [HEAR] => reply(&socket, &held.hear(given, server))?,
            request => reply(&socket, &tasks.carry_out(request, &held))?,
        }
    }
}

/// Takes the tasks, and takes hold of what they name, before anything can become another's. `None`:
/// the socket was closed before the last one.
fn take_tasks(socket: impl AsFd, message: &mut [u8]) -> io::Result<Option<(Tasks, Held)>> {
    let mut tasks = Tasks::default();
    loop {
        let (len, _) = receive(&socket, message)?;
        if len == 0 {
            return Ok(None);
        }
        if tasks.take(&message[..len]).ok_or(io::ErrorKind::InvalidData)? {
            let held = tasks.hold();
            reply(&socket, &Answer::new(DONE, ""))?;
            return Ok(Some((tasks, held)));
        }
    }
}
