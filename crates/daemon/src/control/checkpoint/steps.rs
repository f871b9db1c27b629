//! The server's end of the socket on which the steps of a checkpoint are said.
//!
//! Promises: nothing here blocks the ring's thread; a client that is gone, silent or says something
//! else is an error, and each wait has a limit.

use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::time::Duration;

use ringdisk_messages::{Wait, receive};
use ringdisk_ring::{Fd, Ring};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendFlags, send};

use super::words::Step;
use crate::control::lines::POLL_IN;
use crate::control::server::first;
use crate::failure::{Exit, Failure};

/// The server's end, and the verdict of the client.
#[derive(Debug)]
pub(super) struct Steps {
    socket: OwnedFd,
    /// An event that is signalled once the checkpoint is there on all disks.
    verdict: OwnedFd,
}

impl Steps {
    pub(super) fn new(socket: OwnedFd, verdict: OwnedFd) -> Steps {
        Steps { socket, verdict }
    }

    /// Says a step.
    ///
    /// Errors: the client is gone.
    pub(super) fn say(&self, step: Step) -> Result<(), Failure> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        send(self.socket.as_fd(), &[step.letter()], flags).map(|_| ()).map_err(|_| gone())
    }

    /// Waits until the client says this step.
    ///
    /// Errors: it is gone, says something else, or takes longer than `limit`.
    pub(super) async fn wait(
        &self,
        ring: &Ring,
        step: Step,
        limit: Duration,
    ) -> Result<(), Failure> {
        match ring.within(limit, self.next(ring)).await {
            Ok(Some(said)) if said == step => Ok(()),
            Ok(_) => Err(gone()),
            Err(_) => Err(Failure::new(
                Exit::Timeout,
                format!("the client did not go on with the checkpoint within {limit:?}"),
            )),
        }
    }

    /// The next step; `None`: the client is gone, or says what is none.
    async fn next(&self, ring: &Ring) -> Option<Step> {
        ring.poll(Fd::of(&self.socket), POLL_IN).await.ok()?;
        let mut letter = [0; 2];
        let message = receive(&self.socket, &mut letter, Wait::Never).ok()?;
        (message.len == 1).then(|| Step::read(letter[0])).flatten()
    }

    /// Waits for the verdict: until the client is gone, or `limit` is over. Whether the checkpoint
    /// stays.
    pub(super) async fn verdict(&self, ring: &Ring, limit: Duration) -> bool {
        let said = pin!(ring.poll(Fd::of(&self.verdict), POLL_IN));
        let left = pin!(ring.poll(Fd::of(&self.socket), POLL_IN));
        let _ = ring.within(limit, first(said, left)).await;
        self.stays()
    }

    /// Waits until the client is gone.
    pub(super) async fn until_gone(&self, ring: &Ring) {
        while self.next(ring).await.is_some() {}
    }

    /// Whether the client has said that the checkpoint stays.
    fn stays(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut event = [PollFd::new(&self.verdict, PollFlags::IN)];
        poll(&mut event, Some(&now)) == Ok(1)
    }
}

fn gone() -> Failure {
    Failure::new(Exit::General, "the client gave the checkpoint up")
}
