//! The server's end of the socket on which the steps of a checkpoint are said.
//!
//! Promises: nothing here blocks the ring's thread; a client that is gone, silent or says something
//! else is an error, and each wait has a limit.

use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_disk::Progress;
use ringdisk_messages::{Wait, receive};
use ringdisk_ring::{Fd, POLL_IN, Ring};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendFlags, send};

use crate::control::protocol::checkpoint::Step;
use crate::control::server::first;
use crate::failure::{Exit, Failure};

/// How often a server that ends, or a client that has gone, is looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The server's end, and the verdict of the client.
#[derive(Debug)]
pub(super) struct Steps {
    socket: OwnedFd,
    /// An event that is signalled once the checkpoint is there on all disks.
    verdict: OwnedFd,
    /// Cancelled when the client is gone or the server ends.
    progress: Arc<Progress>,
}

impl Steps {
    pub(super) fn new(socket: OwnedFd, verdict: OwnedFd, progress: &Arc<Progress>) -> Steps {
        Steps { socket, verdict, progress: Arc::clone(progress) }
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
    /// * `limit`: for that.
    ///
    /// Errors: it is gone, says something else, or takes longer; the server ends.
    pub(super) async fn wait(
        &self,
        ring: &Ring,
        step: Step,
        limit: Duration,
    ) -> Result<(), Failure> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match ring.within(left.min(POLL_INTERVAL), self.next(ring)).await {
                Ok(Some(said)) if said == step => return Ok(()),
                Ok(_) => return Err(gone()),
                Err(_) if self.progress.is_cancelled() => return Err(gone()),
                Err(_) if left.is_zero() => {
                    return Err(Failure::new(
                        Exit::Timeout,
                        format!("the client did not go on with the checkpoint within {limit:?}"),
                    ));
                }
                Err(_) => {}
            }
        }
    }

    /// The next step; `None`: the client is gone, or says what is none.
    async fn next(&self, ring: &Ring) -> Option<Step> {
        ring.poll(Fd::of(&self.socket), POLL_IN).await.ok()?;
        let mut letter = [0; 2];
        let message = receive(&self.socket, &mut letter, Wait::Never).ok()?;
        (message.len == 1).then(|| Step::read(letter[0])).flatten()
    }

    /// Waits for the verdict: until the client is gone, `limit` is over, or the server ends.
    /// Whether the checkpoint stays.
    pub(super) async fn verdict(&self, ring: &Ring, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline && !self.progress.is_cancelled() {
            let said = pin!(ring.poll(Fd::of(&self.verdict), POLL_IN));
            let left = pin!(ring.poll(Fd::of(&self.socket), POLL_IN));
            if ring.within(POLL_INTERVAL, first(said, left)).await.is_ok() {
                break;
            }
        }
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
