//! The layers that an export serves at this moment, and the gate between requests and changes of
//! them.
//!
//! Promises: a request holds its [`Pass`] from its first access to the graph until its last storage
//! operation has ended. A change ([`Drained`]) excludes all requests, and every later request sees
//! the graph that the change put in place. A graph is never changed in place.

mod drain;
pub(crate) mod fill;
mod fleece;
mod mirror;
#[cfg(test)]
#[allow(clippy::duplicate_mod)]
// The model builds `shards.rs` a second time, on simulated primitives.
mod model;
mod shards;
mod sync;
mod tracker;
mod window;

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ringdisk_qcow2::{Bytes, Grace, Qcow2};
use ringdisk_ring::Errno;
use ringdisk_storage::Storage;

use crate::chain::Chain;
use crate::commit_options::COMMITS_MAX;
use crate::layer::{Layer, Node, SectorGuard};
use crate::task_mutex::TaskMutex;
use crate::watch::{ChangeCallback, ChangeWatch};

pub(crate) use drain::Drained;
pub use fleece::CheckpointState;
pub(crate) use fleece::{Fleece, Known};
pub(crate) use mirror::{BOTH_MAX, Content, Copy, Mirror, Target};
pub(crate) use tracker::{Mark, Tracker};
pub(crate) use window::Window;

/// Copies of the graph's pointer; more threads than this share some, which costs time only.
const SHARDS: usize = 32;

/// Layers that may be writable at once: the top, and the layer that each commit writes to.
const WRITABLE_MAX: usize = 1 + COMMITS_MAX;

/// The layers of a disk and what belongs to the top one.
#[derive(Clone, Debug)]
pub(crate) struct Graph {
    /// Top first; never empty.
    pub(crate) layers: Vec<Arc<Layer>>,
    /// Guard of the first sector, when the top is a probed raw image.
    pub(crate) guard: Option<Arc<SectorGuard>>,
    /// Records which ranges are written, for a commit of the top layer, a stream or a mirror.
    pub(crate) tracker: Option<Arc<Tracker>>,
    /// Where each write goes too, for a mirror.
    pub(crate) mirror: Option<Arc<Mirror>>,
    /// Keeps what clients overwrite, for a checkpoint.
    pub(crate) fleece: Option<Arc<Fleece>>,
    /// Indexes of writable qcow2 layers: a reader holds a grace of each.
    writable: [Option<u16>; WRITABLE_MAX],
    pub(crate) state: State,
    /// The part of the disk that clients see.
    pub(crate) window: Window,
}

/// Whether requests may be served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    #[default]
    Active,
    /// Another process or host owns the images: nothing that is cached of them is valid, and no
    /// lock is held.
    Inactive,
    /// Everything is on stable storage and nothing that is cached is valid, but the locks are held:
    /// the disk was handed over.
    Quiet,
    /// A change failed half way, so the state of the images is unknown.
    Broken,
}

/// A request in flight, with the graph that it works on.
pub(crate) type Pass<'a> = shards::Pass<'a, Arc<Graph>>;

/// Held by a reader, so that clusters that it looked up are not reused meanwhile.
pub(crate) type Graces<'a> = [Option<Grace<'a>>; WRITABLE_MAX];

impl Graph {
    /// * `layers`: top first, at least one.
    pub(crate) fn new(layers: Vec<Arc<Layer>>) -> Graph {
        assert!(!layers.is_empty(), "a disk has at least one layer");
        let guard = match &layers[0].node {
            Node::Raw(raw) => raw.guard.clone(),
            Node::Qcow2(_) | Node::Null(_) | Node::Frozen(_) => None,
        };
        let mut graph = Graph {
            layers,
            guard,
            tracker: None,
            mirror: None,
            fleece: None,
            writable: [None; WRITABLE_MAX],
            state: State::Active,
            window: Window::default(),
        };
        graph.find_writable();
        graph
    }

    /// The same with other layers, for the same content: a checkpoint goes on. The records
    /// for a commit, a stream or a mirror are not kept.
    pub(crate) fn with_layers(&self, layers: Vec<Arc<Layer>>) -> Graph {
        let mut graph = Graph::new(layers);
        graph.state = self.state;
        graph.window = self.window;
        graph.fleece.clone_from(&self.fleece);
        graph
    }

    /// As [`Graph::with_layers`], in a commit: the records of a mirror that runs beside one of
    /// layers below the top are kept.
    ///
    /// * `top`: the uppermost layer that is merged.
    pub(crate) fn with_merged(&self, layers: Vec<Arc<Layer>>, top: usize) -> Graph {
        let mut graph = self.with_layers(layers);
        if top > 0 {
            graph.tracker.clone_from(&self.tracker);
            graph.mirror.clone_from(&self.mirror);
        }
        graph
    }

    fn find_writable(&mut self) {
        let mut places = self.writable.iter_mut();
        for (index, layer) in self.layers.iter().enumerate() {
            if layer.is_writable
                && layer.qcow2().is_some()
                && let (Some(place), Ok(index)) = (places.next(), u16::try_from(index))
            {
                *place = Some(index);
            }
        }
    }

    /// The top layer.
    pub(crate) fn top(&self) -> &Arc<Layer> {
        &self.layers[0]
    }

    /// Guard of the lowest layer, which is the only one that can have one.
    pub(crate) fn bottom_guard(&self) -> Option<&Arc<SectorGuard>> {
        match &self.layers.last()?.node {
            Node::Raw(raw) => raw.guard.as_ref(),
            Node::Qcow2(_) | Node::Null(_) | Node::Frozen(_) => None,
        }
    }

    /// All layers, to look things up.
    pub(crate) fn chain(&self) -> Chain<'_> {
        Chain(&self.layers)
    }

    /// The layers below a layer.
    pub(crate) fn below(&self, depth: usize) -> Chain<'_> {
        Chain(self.layers.get(depth + 1..).unwrap_or_default())
    }

    /// Size of the disk that the layers make up, bytes. Clients may see less:
    /// [`Graph::visible_size`].
    pub(crate) fn size(&self) -> Bytes {
        self.top().size()
    }

    /// Refuses requests that cannot be served. Errors: EIO where a change left the graph broken;
    /// EBUSY while the disk is not active.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), Errno> {
        match self.state {
            State::Active => Ok(()),
            State::Inactive | State::Quiet => Err(Errno::BUSY),
            State::Broken => Err(Errno::IO),
        }
    }

    /// To be held by a reader from before its look-up until its last I/O has ended.
    pub(crate) fn graces(&self) -> Graces<'_> {
        self.writable.map(|index| {
            let layer = self.layers.get(usize::from(index?))?;
            match &layer.node {
                Node::Qcow2(image) => Some(image.enter()),
                Node::Raw(_) | Node::Null(_) | Node::Frozen(_) => None,
            }
        })
    }

    /// To be held while layers from `top` on, above `base`, are read and copied to it: the graces
    /// of what is read. Not of the base, so that a write to it can reuse clusters freed there; nor
    /// of a layer above `top`, which may be the base of another commit: its writes could wait for
    /// these graces, and ours for its.
    pub(crate) fn graces_of_copy(&self, top: usize, base: usize) -> Graces<'_> {
        let mut graces = self.graces();
        for (grace, index) in graces.iter_mut().zip(self.writable) {
            if index.is_some_and(|index| usize::from(index) < top || usize::from(index) == base) {
                *grace = None;
            }
        }
        graces
    }

    /// All files, from the top down.
    pub(crate) fn storages(&self) -> Vec<Arc<Storage>> {
        self.layers.iter().flat_map(|layer| layer.storages()).cloned().collect()
    }

    /// The qcow2 image on top.
    pub(crate) fn top_image(&self) -> Option<&Arc<Qcow2>> {
        match &self.top().node {
            Node::Qcow2(image) => Some(image),
            Node::Raw(_) | Node::Null(_) | Node::Frozen(_) => None,
        }
    }

    /// The record of a checkpoint that is running.
    pub(crate) fn running_fleece(&self) -> Option<&Arc<Fleece>> {
        self.fleece.as_ref().filter(|fleece| fleece.is_running())
    }
}

/// The graph of a disk, and its gate.
pub(crate) struct Gateway {
    shards: shards::Shards<Arc<Graph>>,
    /// The graph in place, for the control path, which need not wait for a change.
    current: Mutex<Arc<Graph>>,
    change_watch: ChangeWatch,
    write_backs: TaskMutex,
}

impl Gateway {
    pub(crate) fn new(graph: Graph) -> Gateway {
        let graph = Arc::new(graph);
        Gateway {
            shards: shards::Shards::new(Arc::clone(&graph), SHARDS),
            current: Mutex::new(graph),
            change_watch: ChangeWatch::default(),
            write_backs: TaskMutex::default(),
        }
    }

    /// Held by a write-back of metadata from before it enters until it has left, and by a change.
    pub(crate) fn write_backs(&self) -> &TaskMutex {
        &self.write_backs
    }

    /// Lets a request of a client in; see [`shards::Shards::enter`].
    #[inline]
    pub(crate) async fn enter(&self) -> Pass<'_> {
        let shard = own_shard();
        self.shards.count(shard);
        match self.shards.try_enter(shard) {
            Some(pass) => pass,
            None => self.shards.enter(shard).await,
        }
    }

    /// As [`Gateway::enter`], for work of the disk itself, which does not count as a client's.
    pub(crate) async fn enter_beside_clients(&self) -> Pass<'_> {
        self.shards.enter(own_shard()).await
    }

    /// A number that changes when clients had requests ([`Gateway::enter`]). Any thread.
    pub(crate) fn entered(&self) -> u64 {
        self.shards.entered()
    }

    /// As [`Gateway::enter`]; `None` while a change is under way.
    pub(crate) fn try_enter(&self) -> Option<Pass<'_>> {
        self.shards.try_enter(own_shard())
    }

    /// Whether a change has begun to work, and no request is in flight.
    pub(crate) fn is_closed_alone(&self) -> bool {
        self.shards.is_closed_alone()
    }

    /// Calls `callback` for changes from now on; only the first call of this counts.
    pub(crate) fn watch(&self, callback: ChangeCallback) {
        self.change_watch.set(callback);
    }

    /// The graph in place. Control path: takes a lock for a moment, and the images may be closed by
    /// a change meanwhile, so it is for names and numbers only.
    pub(crate) fn current(&self) -> Arc<Graph> {
        Arc::clone(&sync::lock(&self.current))
    }
}

/// The copy of this thread: threads take turns, so the first [`SHARDS`] have one each.
fn own_shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    OWN.with(|own| {
        if own.get() == usize::MAX {
            own.set(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS);
        }
        own.get()
    })
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shards.fmt(f)
    }
}
