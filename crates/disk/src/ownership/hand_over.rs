//! Hand-over of a disk to a successor process on the same host, the predecessor's side.
//!
//! Promises: the images are locked at every moment. The locks belong to the open file descriptions,
//! which both processes share then. Only one of the two may unlock: the predecessor until the
//! hand-over, the successor from [`Disk::take_charge`] on.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringdisk_ring::Ring;

use super::state::{DiskState, Kind, LayerState};
use super::{handed_over, quieten};
use crate::graph::{Graph, State};
use crate::layer::{Layer, Node};
use crate::live::broken;
use crate::name::printable_path;
use crate::{Disk, Error, ErrorKind};

/// The state of a disk for its successor: sent unchanged, the descriptors by `SCM_RIGHTS` in this
/// order (at most 253 fit in one message).
#[derive(Debug)]
pub struct HandOver {
    /// Everything but the descriptors, as JSON in a form of its own.
    pub description: String,
    /// The files of the chain, from the top down; none for a null disk.
    pub fds: Vec<OwnedFd>,
}

impl Disk {
    /// Prepares the disk for [`Disk::open_handed`] in another process: waits for the requests in
    /// flight and puts everything on stable storage, so that this process writes nothing later. The
    /// locks are kept. From now on requests fail with EBUSY, and dropping this disk does not
    /// unlock; [`Disk::resume`] undoes both. A disk that is not active is handed over as it is.
    /// Long changes stop where [`Disk::suspend_for_hand_over`] says so.
    ///
    /// Errors: as [`Disk::deactivate`] (but a temporary overlay can be handed over), and those of
    /// dup(2): the disk is as it was then.
    pub async fn hand_over(&self, ring: &Ring) -> Result<HandOver, Error> {
        let change = |disk: Arc<Disk>, ring: Ring| async move {
            disk.suspend_changes(&ring).await;
            disk.hand_over_now(&ring).await
        };
        self.detached(ring, change).await
    }

    async fn hand_over_now(&self, ring: &Ring) -> Result<HandOver, Error> {
        let turn = self.changes().lock().await;
        let graph = self.graph();
        match graph.state {
            State::Broken => return Err(broken()),
            State::Quiet => return Err(handed_over()),
            State::Active | State::Inactive => self.check_own()?,
        }
        if self.options().internal_snapshot.is_some() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a disk that shows an internal snapshot cannot be handed over: stop it, and serve \
                 the snapshot anew",
            ));
        }
        // Before anything changes, since this can fail.
        let handed =
            HandOver { description: self.state_of(&graph)?.to_text(), fds: duplicates(&graph)? };
        if graph.state == State::Active {
            let mut drained = self.gateway().drain(ring, turn).await;
            quieten(ring, &mut drained, State::Quiet).await?;
        }
        for storage in graph.storages() {
            storage.share_locks(true);
        }
        Ok(handed)
    }

    /// After [`Disk::open_handed`], when the predecessor must end (and will never resume): from now
    /// on dropping this disk unlocks its images.
    pub fn take_charge(&self) {
        for storage in self.graph().storages() {
            storage.share_locks(false);
        }
    }

    fn state_of(&self, graph: &Graph) -> Result<DiskState, Error> {
        Ok(DiskState {
            active: graph.state == State::Active,
            read_only: self.is_read_only(),
            read_only_reason: self.read_only_reason().map(str::to_owned),
            guarded: graph.bottom_guard().is_some(),
            window: graph.window,
            limits: self.changed_limits(),
            copy_on_read: self.copy_on_read.changed(),
            layers: graph
                .layers
                .iter()
                .map(|layer| layer_state(layer))
                .collect::<Result<_, _>>()?,
        })
    }
}

fn layer_state(layer: &Layer) -> Result<LayerState, Error> {
    let kind = match &layer.node {
        Node::Null(null) => {
            let options = null.options(layer.size());
            Kind::Null {
                size: options.size.0,
                read_zeroes: options.read_zeroes,
                latency_ns: u64::try_from(options.latency.as_nanos()).unwrap_or(u64::MAX),
            }
        }
        Node::Raw(raw) => {
            let fixed_size = raw.fixed_size.then(|| layer.size().0);
            Kind::Raw { offset: raw.offset.0, fixed_size }
        }
        Node::Qcow2(_) => Kind::Qcow2,
        Node::Frozen(_) => return Err(no_file(layer)),
    };
    let files = layer.storages().map(|storage| {
        let identity = storage.identity().ok_or_else(|| no_file(layer))?;
        Ok((identity, storage.is_read_only()))
    });
    Ok(LayerState {
        kind,
        name: layer.name.clone(),
        directory: layer.directory.clone(),
        data_name: layer.data_name.clone(),
        full_backing_name: layer.full_backing_name.clone(),
        without_backing: layer.without_backing,
        writable: layer.is_writable,
        files: files.collect::<Result<_, Error>>()?,
    })
}

fn duplicates(graph: &Graph) -> Result<Vec<OwnedFd>, Error> {
    let mut fds = Vec::new();
    for layer in &graph.layers {
        for storage in layer.storages() {
            let fd = storage
                .duplicate()
                .map_err(|errno| Error::os("cannot duplicate the descriptor of an image", errno))?;
            fds.push(fd.ok_or_else(|| no_file(layer))?);
        }
    }
    Ok(fds)
}

fn no_file(layer: &Layer) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("'{}' is no file that could be handed over", printable_path(layer.name())),
    )
}
