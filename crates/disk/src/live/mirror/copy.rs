//! The copying task of a mirror: everything once, then what clients change.
//!
//! Promises: waits for the target, for a pause and for the speed limit while it keeps no client
//! waiting: it holds neither the graph nor a claim then (the target's own write excepted, for which
//! clients wait a fixed time at most).

use std::sync::Arc;
use std::time::Duration;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::Errno;

use super::super::copy::{COPY_BYTES, all_of, pieces};
use super::{MirrorEnd, MirrorSync, Run, refusal};
use crate::Error;
use crate::background::{Parts, unit_of};
use crate::chain::Chain;
use crate::graph::{Content, Copy, Graph};
use crate::progress::{OnError, Tries};
use crate::task_join::spawn;

/// The target counts as in step when no more than this is left, bytes.
const REST_BYTES: Bytes = Bytes(4 << 20);
/// Passes over what clients changed, one after the other, at most.
const PASSES_MAX: u32 = 16;
/// How long a mirror that is given up waits for a target that does not answer.
pub(crate) const GIVEN_UP_WAIT: Duration = Duration::from_secs(2);
/// How often a mirror that is ready looks for something to do.
const TICK: Duration = Duration::from_millis(50);

/// Which copy of a range it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    First,
    /// Of what clients changed.
    Again,
}

impl Run<'_> {
    /// Copies and stays in step until the mirror is complete.
    pub(super) async fn until_complete(&self) -> Result<MirrorEnd, Error> {
        self.control.check()?;
        self.first_copy().await.map_err(refusal)?;
        // Clients who write faster than the target takes it wait for it until it is in step:
        // otherwise it never would be.
        let mut is_behind = false;
        loop {
            let wanted = self.control.wanted();
            let blocks = self.options.write_blocking || wanted.is_some() || is_behind;
            self.mirror.set_in_step(blocks);
            let is_small = self.catch_up().await.map_err(refusal)?;
            is_behind = !is_small;
            if is_small {
                self.control.set_ready();
            }
            let may_end = is_small && (wanted != Some(true) || self.may_switch());
            if let Some(pivot) = wanted.filter(|_| may_end)
                && let Some(end) = self.finish(pivot).await?
            {
                return Ok(end);
            }
            self.progress.pace(self.ring, Bytes::ZERO).await.map_err(refusal)?;
            if wanted.is_some() {
                self.ring.sleep(TICK).await;
            } else {
                let _ = self.ring.within(TICK, self.control.until_wanted()).await;
            }
        }
    }

    /// Copies everything that is to be copied at the beginning.
    async fn first_copy(&self) -> Result<(), Errno> {
        let size = self.disk.graph().size();
        let left = self.first.bytes();
        if left == Bytes::ZERO {
            return Ok(());
        }
        let total = match self.options.sync {
            MirrorSync::Bitmap(_) => left.min(size),
            MirrorSync::Full | MirrorSync::Top | MirrorSync::None => size,
        };
        self.progress.set_total(total);
        self.progress.set_done(total.saturating_sub(left));
        let mut at = GuestOffset(0);
        all_of(|| {
            let (offset, len) = self.first.next(at, COPY_BYTES)?;
            at = offset + len;
            Some(async move {
                for (offset, len) in pieces(offset, (offset + len).min(GuestOffset::after(size))) {
                    self.copy(offset, len, Pass::First).await?;
                    self.progress.add_done(len);
                }
                self.first.clear(offset, len);
                Ok(())
            })
        })
        .await
    }

    /// Copies what clients changed until little is left. Returns whether it is.
    pub(super) async fn catch_up(&self) -> Result<bool, Errno> {
        let mut before = Bytes::MAX;
        for _ in 0..PASSES_MAX {
            let left = self.tracker.bytes();
            if left == Bytes::ZERO {
                return Ok(true);
            }
            if left > before / 2 {
                // Clients change as much as is copied. The next time they wait for the target.
                break;
            }
            before = left;
            self.progress.add_total(left);
            let mut at = GuestOffset(0);
            all_of(|| {
                let (offset, len) = self.tracker.next(at, COPY_BYTES)?;
                at = offset + len;
                Some(async move {
                    self.copy(offset, len, Pass::Again).await?;
                    self.progress.add_done(len);
                    Ok(())
                })
            })
            .await?;
            if self.tracker.bytes() <= REST_BYTES {
                break;
            }
        }
        Ok(self.tracker.bytes() <= REST_BYTES)
    }

    /// Copies one range, in turns beside the clients. After an error of the target it is tried
    /// again where the progress says so.
    async fn copy(&self, offset: GuestOffset, len: Bytes, pass: Pass) -> Result<(), Errno> {
        let unit = self.tracker.granule().max(unit_of(self.target.graph().top()));
        let mut parts = Parts::new(offset, len, unit);
        let mut tries = Tries::default();
        while !parts.is_over() {
            self.progress.pace_try(self.ring, &tries).await?;
            let turn = self.disk.turn(self.ring).await;
            let (offset, len) = parts.next(&turn);
            let claim = self.mirror.claim(self.tracker.widened(offset, len));
            let claim = self.or_given_up(claim).await?;
            let read = {
                // Waiting for a change of the graph here would keep clients waiting, for which the
                // change waits.
                let Some(view) = self.disk.gateway().try_enter() else {
                    drop((claim, turn));
                    drop(self.disk.enter_beside_clients().await);
                    continue;
                };
                let was_recorded = self.tracker.clear(offset, len);
                self.read(&view, offset, len, pass, was_recorded).await
            };
            let copy = Copy::new(&self.tracker, offset, len, Arc::new(claim));
            // A task of its own, since what has begun cannot be taken back when the mirror is given
            // up.
            let (runs, ring) = (read?, self.ring.clone());
            let sent = spawn(self.ring, async move {
                copy.send(&ring, &runs).await.map(|()| data_bytes(&runs))
            });
            let sent = self.or_given_up(sent).await?.unwrap_or(Err(Errno::IO));
            drop(turn);
            match sent {
                Ok(bytes) => {
                    self.progress.written(&mut tries);
                    parts.done(len, bytes);
                    // Counted afterwards, when it is known: this one waits for those before it.
                    if !bytes.is_zero() {
                        self.progress.pace(self.ring, bytes).await?;
                    }
                }
                // It is recorded, so it is tried again with what clients change.
                Err(_) if self.progress.on_error() == OnError::Ignore => parts.done(len, len),
                Err(errno) => self.progress.failed(self.ring, &mut tries, errno).await?,
            }
        }
        Ok(())
    }

    /// Waits for the target, but not for long where the mirror is given up.
    ///
    /// Errors: `ECANCELED`.
    pub(super) async fn or_given_up<T>(
        &self,
        awaited: impl Future<Output = T>,
    ) -> Result<T, Errno> {
        let done = self.progress.or_given_up(self.ring, GIVEN_UP_WAIT, awaited).await;
        if done.is_none() {
            self.hangs.set(true);
        }
        done.ok_or(Errno::CANCELED)
    }

    /// What is to be sent of a range.
    async fn read(
        &self,
        graph: &Graph,
        offset: GuestOffset,
        len: Bytes,
        pass: Pass,
        was_recorded: bool,
    ) -> Result<Vec<Content>, Errno> {
        // What a client has changed may have uncovered the layers below.
        let is_again = pass == Pass::Again || was_recorded;
        if self.options.sync == MirrorSync::Top && !is_again {
            let top = Chain(&graph.layers[..1]);
            return graph.content_of(self.ring, top, offset, len).await;
        }
        let mut runs = graph.content(self.ring, offset, len).await?;
        if self.is_new && !is_again {
            for run in &mut runs {
                if let Content::Zero(len) = *run {
                    *run = Content::Keep(len);
                }
            }
        }
        Ok(runs)
    }
}

/// Bytes that go over the wire.
pub(crate) fn data_bytes(runs: &[Content]) -> Bytes {
    runs.iter().filter(|run| matches!(run, Content::Data(_))).map(Content::len).sum()
}
