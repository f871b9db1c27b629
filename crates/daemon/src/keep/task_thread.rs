//! The thread on which a helper process that keeps a mount or disks carries out the tasks of a
//! server.
//!
//! Promises: each server has a thread of its own, with tasks of its own, until that server has
//! ended, however it ends. What hangs there (an unmount that waits for a server, `fusermount3`)
//! holds up neither the next server nor, for long, the end of this process. The thread knows
//! nothing of what is kept, and nothing of other servers.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::net::SocketType;

use crate::helper::manager::Speaker;
use crate::helper::session;

/// Time that the thread has to finish its last task, once its server has ended.
const LAST_TASK: Duration = Duration::from_secs(1);

/// The socket for tasks whose other end is for a server.
#[derive(Debug)]
pub(super) struct Line(OwnedFd);

/// The thread for the tasks of one server.
#[derive(Debug)]
pub(super) struct TaskThread {
    /// Closed by the end of the thread.
    ended: Receiver<Infallible>,
}

impl Line {
    /// Gives the server's end, too.
    ///
    /// Errors: no socket.
    pub(super) fn new() -> io::Result<(Line, OwnedFd)> {
        let (ours, theirs) = ringdisk_messages::pair(SocketType::SEQPACKET)?;
        Ok((Line(ours), theirs))
    }

    /// Starts the thread that carries out the tasks of the server with the other end.
    ///
    /// * `server`: its pid.
    ///
    /// Errors: no thread; the line is closed then.
    pub(super) fn help(self, server: u32) -> io::Result<TaskThread> {
        let (sender, ended) = channel::<Infallible>();
        let work = move || {
            let _ends_with_this = sender;
            if let Err(error) = session::run(&self.0, server, &Speaker::silent()) {
                tracing::debug!("the helper of {server}: {error}");
            }
        };
        std::thread::Builder::new().name(String::from("helping")).spawn(work)?;
        Ok(TaskThread { ended })
    }
}

impl TaskThread {
    /// Waits for the end of the thread, once the server has ended: it may be at its last task.
    pub(super) fn finish(&self) {
        let _ = self.ended.recv_timeout(LAST_TASK);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::helper::Tasks;

    #[test]
    fn a_line_that_a_server_leaves_ends_its_helper_in_the_middle_of_the_tasks_too() {
        for messages in [0, 1] {
            let (line, server) = Line::new().expect("sockets");
            let tasks = line.help(1).expect("a thread");
            for message in Tasks::default().messages().iter().take(messages) {
                rustix::net::send(&server, message, rustix::net::SendFlags::NOSIGNAL)
                    .expect("it listens");
            }
            let begun = Instant::now();
            tasks.finish();
            assert!(begun.elapsed() >= LAST_TASK, "it ends before its server");
            drop(server);
            let begun = Instant::now();
            tasks.finish();
            assert!(begun.elapsed() < LAST_TASK, "it outlives its server");
        }
    }
}
