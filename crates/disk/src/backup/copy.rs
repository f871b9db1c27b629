//! The copying task of a backup.
//!
//! Promises: it holds nothing that a client waits for while it waits for the target, for a pause or
//! for the speed limit. What was read is of the instant, or an error.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf};

use super::{Backup, refusal};
use crate::background::{Parts, unit_of};
use crate::checkpoint::CheckpointState;
use crate::graph::{Content, Target};
use crate::live::{Destination, GIVEN_UP_WAIT, all_of, buffer, data_bytes, pieces};
use crate::progress::Tries;
use crate::task_join::spawn;
use crate::{Disk, Error, ErrorKind, OnError, Progress};

/// How long a piece rests that the target refused, where errors are ignored.
const AGAIN: Duration = Duration::from_millis(100);
/// How often it is looked whether writes have ended.
const TICK: Duration = Duration::from_millis(5);

/// Whose error it was.
#[derive(Clone, Copy)]
enum Side {
    Disk,
    Target,
}

impl Side {
    fn doing(self) -> &'static str {
        match self {
            Side::Disk => "cannot read the disk for a backup",
            Side::Target => "cannot write the target of a backup",
        }
    }
}

impl Backup {
    /// Copies everything, unless the state of the instant is lost before.
    pub(super) async fn copy(&self, progress: &Progress) -> Result<(), Error> {
        let side = Cell::new(Side::Disk);
        let copied = {
            let mut copying = pin!(self.copy_all(progress, &side));
            let mut over = pin!(self.checkpoint.over());
            poll_fn(|context| {
                // First: an error of the copying may come from the end.
                if over.as_mut().poll(context).is_ready() {
                    return Poll::Ready(Err(Errno::IO));
                }
                copying.as_mut().poll(context)
            })
            .await
        };
        match (copied, self.checkpoint.state()) {
            (Ok(()), CheckpointState::Running) => Ok(()),
            (_, CheckpointState::Failed(why)) => {
                Err(Error::new(ErrorKind::Io, format!("the backup failed: {why}")))
            }
            (_, CheckpointState::Ended) => {
                Err(Error::new(ErrorKind::Cancelled, "the disk was closed during the backup"))
            }
            (Err(errno), CheckpointState::Running) => Err(ended(progress, side.get(), errno)),
        }
    }

    async fn copy_all(&self, progress: &Progress, side: &Cell<Side>) -> Result<(), Errno> {
        progress.set_total(self.ranges.iter().map(|range| Bytes(range.end - range.start)).sum());
        let mut ranges = self.ranges.iter();
        let mut rest = pieces(GuestOffset(0), GuestOffset(0));
        all_of(|| {
            let (offset, len) = loop {
                match rest.next() {
                    Some(piece) => break piece,
                    None => {
                        let range = ranges.next()?;
                        rest = pieces(GuestOffset(range.start), GuestOffset(range.end));
                    }
                }
            };
            Some(async move {
                self.copy_piece(progress, side, offset.0, len).await?;
                progress.add_done(len);
                Ok(())
            })
        })
        .await
    }

    /// Copies one piece, in turns beside the clients. After an error of the target it is tried
    /// again where the progress says so.
    async fn copy_piece(
        &self,
        progress: &Progress,
        side: &Cell<Side>,
        offset: u64,
        len: Bytes,
    ) -> Result<(), Errno> {
        let unit = unit_of(self.target.graph().top());
        let mut parts = Parts::new(GuestOffset(offset), len, unit);
        let mut tries = Tries::default();
        while !parts.is_over() {
            progress.pace_try(&self.ring, &tries).await?;
            // Not held: the read takes turns of its own, as each reader of a checkpoint does.
            let (at, len) = parts.next(&self.disk.turn(&self.ring).await);
            let runs = self.content(at.0, len).await.inspect_err(|_| side.set(Side::Disk))?;
            let turn = match data_bytes(&runs) {
                Bytes::ZERO => None,
                _ => Some(self.disk.turn(&self.ring).await),
            };
            let sent = self.send(progress, at.0, runs).await?;
            drop(turn);
            match sent {
                Ok(bytes) => {
                    progress.written(&mut tries);
                    parts.done(len, bytes);
                    // Counted afterwards, when it is known: this one waits for those before it.
                    if !bytes.is_zero() {
                        progress.pace(&self.ring, bytes).await?;
                    }
                }
                Err(errno) => self.failed(progress, side, &mut tries, errno).await?,
            }
        }
        Ok(())
    }

    /// The target failed. Errors: it ends the backup.
    async fn failed(
        &self,
        progress: &Progress,
        side: &Cell<Side>,
        tries: &mut Tries,
        errno: Errno,
    ) -> Result<(), Errno> {
        if progress.on_error() == OnError::Ignore {
            self.ring.sleep(AGAIN).await;
            return progress.check();
        }
        let again = progress.failed(&self.ring, tries, errno).await;
        again.inspect_err(|_| side.set(Side::Target))
    }

    /// Writes to the target. Gives the bytes of data.
    ///
    /// Errors (inside): those of the target. (Outside): `ECANCELED`.
    async fn send(
        &self,
        progress: &Progress,
        offset: u64,
        runs: Vec<Content>,
    ) -> Result<Result<Bytes, Errno>, Errno> {
        self.at_target(progress, async move |target, ring| {
            let written = Destination(target).write(&ring, GuestOffset(offset), &runs).await;
            written.map(|()| data_bytes(&runs))
        })
        .await
    }

    /// Does something with the target, in a task of its own: what has begun cannot be taken back
    /// when the backup is given up.
    ///
    /// Errors: as [`Backup::send`].
    async fn at_target<T: 'static>(
        &self,
        progress: &Progress,
        work: impl AsyncFnOnce(Arc<Disk>, ringdisk_ring::Ring) -> Result<T, Errno> + 'static,
    ) -> Result<Result<T, Errno>, Errno> {
        let (target, ring) = (Arc::clone(&self.target), self.ring.clone());
        let in_flight = Rc::clone(&self.in_flight);
        let done = spawn(&self.ring, async move {
            let _in_flight = in_flight;
            work(target, ring).await
        });
        let done = progress.or_given_up(&self.ring, GIVEN_UP_WAIT, done).await;
        Ok(done.ok_or(Errno::CANCELED)?.unwrap_or(Err(Errno::IO)))
    }

    /// What the disk held in a piece.
    ///
    /// Errors: those of its storage; EIO once the state is not kept any more.
    async fn content(&self, offset: u64, len: Bytes) -> Result<Vec<Content>, Errno> {
        let (frozen, end) = (self.checkpoint.disk(), offset + len.0);
        let mut runs: Vec<Content> = Vec::new();
        let mut at = offset;
        while at < end {
            let status = frozen.block_status(&self.ring, at, Bytes(end - at)).await?;
            if status.len == Bytes::ZERO {
                return Err(Errno::IO);
            }
            let of_top = status.present && status.depth == 0;
            if self.is_top && !of_top || status.zero && self.is_new {
                runs.push(Content::Keep(status.len));
            } else if status.zero {
                runs.push(Content::Zero(status.len));
            } else {
                let buf: IoBuf = buffer(status.len);
                let mut done = 0;
                while done < buf.len() {
                    let part = buf.slice(done..buf.len());
                    match frozen.read(&self.ring, at + done as u64, &part).await? {
                        0 => return Err(Errno::IO),
                        count => done += count,
                    }
                }
                runs.push(Content::Data(buf));
            }
            at += status.len.0;
        }
        Ok(runs)
    }

    /// Makes the target durable and closes it. The state of the instant is needed no longer.
    pub(super) async fn close(&self, progress: &Progress) -> Result<(), Error> {
        let side = Cell::new(Side::Target);
        let mut tries = Tries::default();
        loop {
            let closed = self.at_target(progress, async |target, ring| {
                target.flush(&ring).await?;
                target.close(&ring).await
            });
            let failed = match closed.await {
                Ok(Ok(())) => {
                    progress.written(&mut tries);
                    return Ok(());
                }
                Ok(Err(errno)) => self.failed(progress, &side, &mut tries, errno).await,
                Err(errno) => Err(errno),
            };
            if let Err(errno) = failed {
                return Err(ended(progress, Side::Target, errno));
            }
        }
    }

    /// Closes a target that is incomplete, as far as it answers.
    pub(super) async fn let_go(&self) {
        let closed = async {
            while Rc::strong_count(&self.in_flight) > 1 {
                self.ring.sleep(TICK).await;
            }
            let (target, ring) = (Arc::clone(&self.target), self.ring.clone());
            let closed = spawn(&self.ring, async move { target.close(&ring).await });
            closed.await
        };
        match self.ring.within(GIVEN_UP_WAIT, closed).await {
            Ok(Some(Ok(()))) => {}
            Ok(_) => tracing::warn!("the incomplete target of a backup could not be closed"),
            Err(_) => tracing::warn!(
                "the target of a backup that was given up does not answer: what is on its way to \
                 it may still come there"
            ),
        }
    }
}

/// Why the copying ended early.
fn ended(progress: &Progress, side: Side, errno: Errno) -> Error {
    if errno == Errno::CANCELED && progress.is_suspended() && !progress.is_cancelled() {
        return Error::new(
            ErrorKind::Busy,
            "the disk goes to another process, and the point in time of the backup was lost with \
             this one; begin a new backup",
        )
        .with_errno(Some(errno));
    }
    refusal(side.doing(), errno)
}
