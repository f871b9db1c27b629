//! The last step of a mirror.
//!
//! Promises: while no request is in flight the rest is read and sent, for a fixed time at most.
//! Only when the target has everything, and all that a client has flushed on stable storage, do
//! clients go on with it, or is the mirror over; otherwise the disk and its record are as before.
//!
//! A flush takes long on some storage, so clients wait for one only where it is needed: where one
//! of them has flushed the disk after the target was flushed for the last time.

use std::sync::Arc;
use std::time::Duration;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::Errno;

use super::super::close_layer;
use super::super::copy::COPY_BYTES;
use super::{MirrorEnd, Run, refusal};
use crate::graph::{Content, Drained, Graph, State};
use crate::layer::Layer;
use crate::progress::{OnError, Tries};
use crate::task_join::spawn;
use crate::{Error, ErrorKind, NullOptions, lost_names};

/// The most that is sent in the last step, bytes: it takes some ten milliseconds.
const LAST_BYTES: Bytes = Bytes(4 << 20);
/// The longest that clients wait for the target in the last step.
const LAST_WAIT: Duration = Duration::from_millis(500);

impl Run<'_> {
    /// Whether a switch-over is possible at this moment.
    pub(super) fn may_switch(&self) -> bool {
        let is_merged = self.disk.long.has_commit_below();
        !is_merged && self.disk.graph().running_fleece().is_none()
    }

    /// Sends the rest while no request is in flight, and ends the mirror. `None`: it was not
    /// possible yet, and clients go on.
    ///
    /// * `pivot`: the disk switches over to the target.
    pub(super) async fn finish(&self, pivot: bool) -> Result<Option<MirrorEnd>, Error> {
        // While clients still work, so that the last step need not flush, or has little to.
        let all_sent = self.mirror.forget_flushes() && self.tracker.bytes() == Bytes::ZERO;
        let mut tries = Tries::default();
        while let Err(errno) = self.flush_target().await.map_err(refusal)? {
            self.failed(&mut tries, errno).await?;
            if !tries.look_for_space() {
                return Ok(None);
            }
        }
        self.progress.written(&mut tries);
        let turn = self.disk.changes().lock().await;
        let mut drained = self.disk.gateway().drain(self.ring, turn).await;
        if pivot && !self.may_switch() {
            return Ok(None);
        }
        // Copies for which a client no longer waits.
        if !self.mirror.is_idle() {
            // Clients that are in step would have copies on their way all the time.
            self.mirror.set_in_step(false);
            drop(drained);
            self.or_given_up(self.mirror.idle()).await.map_err(refusal)?;
            return Ok(None);
        }
        let Some(rest) = self.rest(drained.graph()).await? else { return Ok(None) };
        // Nobody else sees the copy of a mirror that is left, so all of it is made durable.
        let is_alike = self.disk.cache() == self.target.cache();
        let is_durable = pivot && all_sent && is_alike && !self.mirror.was_flushed();
        match self.send(rest, !is_durable).await {
            Ok(true) => {}
            unsent => {
                self.mirror.set_in_step(false);
                drop(drained);
                self.or_given_up(self.mirror.idle()).await.map_err(refusal)?;
                if let Err(errno) = unsent {
                    self.failed(&mut tries, errno).await?;
                    // The next copy of the rest finds out whether there is space.
                    self.progress.written(&mut tries);
                }
                return Ok(None);
            }
        }
        self.progress.check().map_err(refusal)?;
        if !pivot {
            self.forget(&mut drained);
            drop(self.busy.take());
            return Ok(Some(MirrorEnd::Copied));
        }
        let old = Arc::clone(drained.graph());
        if !self.switch_over(&mut drained).await? {
            return Ok(None);
        }
        drop(self.busy.take());
        drop(drained);
        self.close_former(&old).await;
        Ok(Some(MirrorEnd::Pivoted))
    }

    /// Makes durable what the target has.
    ///
    /// Errors (inside): those of the target. (Outside): `ECANCELED`.
    async fn flush_target(&self) -> Result<Result<(), Errno>, Errno> {
        let (target, ring) = (Arc::clone(self.target), self.ring.clone());
        let flushed = spawn(self.ring, async move { target.flush(&ring).await });
        Ok(self.or_given_up(flushed).await?.unwrap_or(Err(Errno::IO)))
    }

    /// The target failed. Errors: it ends the mirror.
    async fn failed(&self, tries: &mut Tries, errno: Errno) -> Result<(), Error> {
        if self.progress.on_error() == OnError::Ignore {
            return self.progress.check().map_err(refusal);
        }
        self.progress.failed(self.ring, tries, errno).await.map_err(refusal)
    }

    /// Reads what the target does not have. `None`: too much for one step.
    ///
    /// Errors: those of the disk's storage.
    async fn rest(&self, graph: &Graph) -> Result<Option<Vec<(GuestOffset, Vec<Content>)>>, Error> {
        if self.tracker.bytes() > LAST_BYTES {
            return Ok(None);
        }
        let mut rest = Vec::new();
        let mut at = GuestOffset(0);
        while let Some((offset, len)) = self.tracker.next(at, COPY_BYTES) {
            rest.push((offset, graph.content(self.ring, offset, len).await.map_err(refusal)?));
            at = offset + len;
        }
        Ok(Some(rest))
    }

    /// Sends the rest. It stays recorded.
    ///
    /// * `flushes`: makes all of the target durable.
    ///
    /// Returns whether it is done; if not, the target takes too long, and the ranges stay claimed
    /// until it has answered.
    ///
    /// Errors: those of the target.
    async fn send(
        &self,
        rest: Vec<(GuestOffset, Vec<Content>)>,
        flushes: bool,
    ) -> Result<bool, Errno> {
        let mut claims = Vec::with_capacity(rest.len() + 1);
        // Past every disk: so that the flush is waited for, also where nothing is left to send.
        claims.push(self.mirror.claim((u64::MAX - 1, u64::MAX)).await);
        for (offset, runs) in &rest {
            let len = runs.iter().map(Content::len).sum();
            claims.push(self.mirror.claim(self.tracker.widened(*offset, len)).await);
        }
        let (mirror, target) = (Arc::clone(&self.mirror), Arc::clone(self.target));
        let ring = self.ring.clone();
        // A task of its own, since what has begun cannot be taken back.
        let sent = spawn(self.ring, async move {
            let _claims = claims;
            for (offset, runs) in &rest {
                mirror.target().write(&ring, *offset, runs).await?;
            }
            if flushes { target.flush(&ring).await } else { Ok(()) }
        });
        match self.ring.within(LAST_WAIT, sent).await {
            Ok(Some(result)) => result.map(|()| true),
            Ok(None) => Err(Errno::IO),
            Err(_) => {
                tracing::warn!(
                    "the target of a mirror did not take the rest within {} ms; clients go on, and \
                     it is tried again",
                    LAST_WAIT.as_millis()
                );
                Ok(false)
            }
        }
    }

    /// The disk has the layers of the target from now on. No request is in flight. False: requests
    /// to the target did not end in time, and nothing has changed.
    ///
    /// Errors: `NotFound` where an image of the target has lost its name; `Unsupported` where the
    /// next process of a kept mount would not find it.
    async fn switch_over(&self, drained: &mut Drained<'_>) -> Result<bool, Error> {
        let layers = self.target.graph().layers.clone();
        lost_names::check("switch over to the target", layers.iter().map(|layer| &**layer))?;
        self.disk.chain_watch().check(&layers[0]).map_err(|why| {
            Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the target would be the image on top, which the next process of a kept mount \
                     opens by its name, and {why}; complete the mirror without a switch-over"
                ),
            )
        })?;
        let emptied = async {
            let turn = self.target.changes().lock().await;
            let mut target = self.target.gateway().drain(self.ring, turn).await;
            let mut empty = Graph::new(vec![Arc::new(Layer::null(&NullOptions::default()))]);
            empty.state = State::Quiet;
            target.replace(empty);
        };
        if self.ring.within(LAST_WAIT, emptied).await.is_err() {
            return Ok(false);
        }
        let graph = drained.graph().with_layers(layers);
        self.disk.put(drained, graph, false);
        Ok(true)
    }

    /// Closes the former images, and looks after the new one.
    async fn close_former(&self, old: &Graph) {
        for layer in old.layers.iter().filter(|layer| layer.is_writable) {
            // Everything is in the target too.
            if let Err(error) = close_layer(self.ring, layer).await {
                tracing::warn!("after a switch-over: {error}");
            }
        }
        warn_of_bitmaps(old.top());
        // A write-back that was due on the target has found it empty.
        let _alone = self.disk.gateway().write_backs().lock().await;
        let pass = self.disk.enter_beside_clients().await;
        if let Some(image) = pass.top_image() {
            image.write_back(self.ring).await;
            self.disk.look_after(self.ring, image);
        }
    }

    /// Takes the records out of the graph.
    pub(super) fn forget(&self, drained: &mut Drained<'_>) {
        let mut graph = Graph::clone(drained.graph());
        graph.tracker = None;
        graph.mirror = None;
        drained.replace(graph);
    }
}

/// Logs which bitmaps no longer record writes: they stay valid for their image, which no longer
/// changes.
fn warn_of_bitmaps(old: &Layer) {
    let Some(image) = old.qcow2() else { return };
    for bitmap in image.bitmaps().iter().filter(|bitmap| bitmap.auto && !bitmap.in_use) {
        tracing::warn!(
            "the bitmap '{}' stays in '{}' and does not record what is written from now on: the \
             next backup has to be a full one",
            bitmap.name.escape_debug(),
            crate::name::printable_path(old.name())
        );
    }
}
