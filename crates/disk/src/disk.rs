//! What an export serves.
//!
//! Promises: a [`Disk`] is shared by all queue threads. A request enters the graph (`graph/`),
//! which costs it no lock that it could wait for, and then works on layers that do not change while
//! it runs; a request whose mapping is cached allocates nothing and touches no reference count that
//! another thread touches.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use ringdisk_storage::Storage;

use crate::gate::Gate;
use crate::graph::{Gateway, Graph, Pass, State};
use crate::guard::SectorGuard;
use crate::layer::{Layer, Node, Raw};
use crate::options::{DetectZeroes, Discard};
use crate::watch::{ChainWatch, SizeWatch, Watchers};
use crate::window::Window;
use crate::write::resizable;
use crate::write_back::WriteBacks;
use crate::{Cache, ImageOptions, NullOptions};

/// Transfer size that a null disk reports, bytes.
const NULL_TRANSFER: u32 = 4096;

/// A disk: a top layer and the backing chain below it.
#[derive(Debug)]
pub struct Disk {
    gateway: Gateway,
    /// That of the graph in place, for callers that hold no pass. Bytes.
    size: AtomicU64,
    policy: Policy,
    read_only_reason: Option<String>,
    /// What it was opened with, for files that are opened later.
    options: ImageOptions,
    /// Changes of the graph take turns.
    turns: Gate,
    /// A long change (a commit, the comparison of backing files) is under way; others are refused.
    pub(crate) is_busy: AtomicBool,
    /// The kernel has a descriptor of the image.
    pub(crate) is_lent: AtomicBool,
    /// A duplicate of the descriptor that the kernel has, for its locks.
    pub(crate) lent: std::sync::Mutex<Option<std::os::fd::OwnedFd>>,
    /// Device number of the file system that shows the disk as a file; 0: none.
    pub(crate) shown_on: AtomicU64,
    /// Held while the length of a lent file is asked and noted.
    pub(crate) following: Gate,
    watchers: Arc<Watchers>,
    chain_watch: ChainWatch,
    pub(crate) write_backs: WriteBacks,
    this: Weak<Disk>,
}

/// How requests are treated.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Policy {
    pub(crate) read_only: bool,
    pub(crate) cache: Cache,
    pub(crate) discard: Discard,
    pub(crate) detect_zeroes: DetectZeroes,
    pub(crate) outlives_process: bool,
}

/// What [`Disk::build`] needs beside the layers.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) policy: Policy,
    pub(crate) read_only_reason: Option<String>,
    pub(crate) options: ImageOptions,
    pub(crate) state: State,
    pub(crate) window: Window,
}

impl Policy {
    pub(crate) fn new(options: &ImageOptions) -> Policy {
        Policy {
            read_only: options.read_only,
            cache: options.cache,
            discard: options.discard,
            detect_zeroes: options.detect_zeroes,
            outlives_process: options.outlives_process,
        }
    }
}

impl Parts {
    pub(crate) fn new(options: &ImageOptions) -> Parts {
        let state = if options.inactive { State::Inactive } else { State::Active };
        // Whatever is opened later is opened for use.
        let kept = ImageOptions { inactive: false, wait_for_locks: None, ..options.clone() };
        Parts { policy: Policy::new(options), options: kept, state, ..Parts::default() }
    }
}

impl Disk {
    /// A disk that keeps nothing; writable, of fixed size.
    pub fn null(options: &NullOptions) -> Arc<Disk> {
        Disk::build(vec![Layer::null(options)], Parts::default())
    }

    /// A raw disk over any storage. The format counts as given, so no sector is protected.
    ///
    /// * `options`: `read_only`, `cache` (flushes only), `discard`, `detect_zeroes`,
    ///   `window_offset` and `window_size` (cut to what the storage has).
    pub fn from_storage(storage: Arc<Storage>, options: &ImageOptions) -> Arc<Disk> {
        let size = storage.len();
        let read_only = options.read_only || storage.is_read_only();
        let name = PathBuf::from(storage.name());
        let raw = Raw::new(storage);
        let mut layer = Layer::new(Node::Raw(raw), size);
        layer.name = name;
        layer.is_writable = !read_only;
        let mut parts = Parts::new(options);
        parts.policy.read_only = read_only;
        parts.window = Window::new(options.window_offset, options.window_size);
        Disk::build(vec![layer], parts)
    }

    /// * `layers`: top first, at least one.
    pub(crate) fn build(layers: Vec<Layer>, parts: Parts) -> Arc<Disk> {
        let mut graph = Graph::new(layers.into_iter().map(Arc::new).collect());
        graph.state = parts.state;
        graph.window = parts.window;
        Arc::new_cyclic(|this| Disk {
            size: AtomicU64::new(graph.visible_size()),
            gateway: Gateway::new(graph),
            policy: parts.policy,
            read_only_reason: parts.read_only_reason,
            options: parts.options,
            turns: Gate::default(),
            is_busy: AtomicBool::new(false),
            is_lent: AtomicBool::new(false),
            lent: std::sync::Mutex::default(),
            shown_on: AtomicU64::new(0),
            following: Gate::default(),
            watchers: Arc::default(),
            chain_watch: ChainWatch::default(),
            write_backs: WriteBacks::default(),
            this: Weak::clone(this),
        })
    }

    /// Size, bytes; any number, also 0.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Whether writes are refused with EROFS.
    pub fn is_read_only(&self) -> bool {
        self.policy.read_only
    }

    /// Why the disk is read-only although that was not asked for
    /// ([`ImageOptions::auto_read_only`]); to be logged once.
    pub fn read_only_reason(&self) -> Option<&str> {
        self.read_only_reason.as_deref()
    }

    /// Why some writes to the first sector are refused with EPERM, when the image is a probed raw
    /// one; to be logged once.
    pub fn protection_reason(&self) -> Option<String> {
        let graph = self.graph();
        let is_in_sight = SectorGuard::covers(graph.window.start);
        graph.guard.as_ref().filter(|_| is_in_sight).map(|guard| guard.reason())
    }

    /// Whether the first sector of the raw image at the bottom is protected:
    /// [`ImageOptions::protect_raw`] of whoever goes on with the disk by its names.
    pub fn protects_raw(&self) -> bool {
        self.graph().bottom_guard().is_some()
    }

    /// Why a writable image takes no more writes since some moment: its metadata was found damaged,
    /// or could not be written. `None`: all is well.
    pub fn fault(&self) -> Option<String> {
        let graph = self.graph();
        if graph.state == State::Broken {
            return Some("a change of the disk ended half way".to_owned());
        }
        graph
            .layers
            .iter()
            .filter(|layer| layer.is_writable)
            .find_map(|layer| layer.qcow2().and_then(|image| image.fault()))
    }

    /// Whether [`Disk::resize`] can work.
    pub fn can_resize(&self) -> bool {
        let graph = self.graph();
        if graph.window.is_fixed() {
            return false;
        }
        match &graph.top().node {
            Node::Raw(raw) => !self.is_read_only() && resizable(raw),
            Node::Qcow2(_) => !self.is_read_only(),
            Node::Null(_) => false,
        }
    }

    /// Alignment that requests need, bytes. Always 1: storage copies where it has to.
    pub fn request_align(&self) -> u32 {
        1
    }

    /// Bytes that the top image takes on its storage, external data file included; 0 for null. Of a
    /// window of an image: not more than its size, since nobody counts which of the image's bytes
    /// are there for it.
    pub fn allocated_bytes(&self) -> u64 {
        let graph = self.graph();
        let layer = graph.top();
        let (Some(file), Some(data)) = (layer.file(), layer.data_storage()) else {
            return 0;
        };
        let mut bytes = file.allocated_bytes();
        if !Arc::ptr_eq(file, data) {
            bytes = bytes.saturating_add(data.allocated_bytes());
        }
        if graph.window.is_part() { bytes.min(graph.visible_size()) } else { bytes }
    }

    /// Transfer size that suits the storage, bytes.
    pub fn optimal_transfer(&self) -> u32 {
        let graph = self.graph();
        graph
            .top()
            .data_storage()
            .map_or(NULL_TRANSFER, |storage| storage.limits().optimal_transfer)
    }

    /// Use of page cache and flushes.
    pub fn cache(&self) -> Cache {
        self.policy.cache
    }

    /// The disk is what a file of this file system shows (its device number, as stat(2) says it),
    /// so no image of its chain may be there: a read would wait for itself.
    pub fn set_shown_on(&self, device: u64) {
        self.shown_on.store(device, Ordering::Release);
    }

    /// The chain at this moment, top first; never empty. Control path: takes a lock for a moment.
    pub fn layers(&self) -> Vec<Arc<Layer>> {
        self.graph().layers.clone()
    }

    /// Finds out, for each layer that is there now, whether its storage may be given pages of
    /// clients as they are ([`ringdisk_storage::Storage::probe_client_pages`]); what may not is
    /// copied. Blocks for a few reads. Returns whether all may.
    pub fn probe_client_pages(&self) -> bool {
        let layers = self.layers();
        let storages = layers.iter().filter_map(|layer| layer.data_storage());
        // All of them, not only up to the first that may not.
        storages.filter(|storage| !storage.probe_client_pages()).count() == 0
    }

    /// Index in [`Disk::layers`] of the layer with this name: as it was opened, as an image above
    /// spells it, or another name of the same file.
    pub fn layer_named(&self, name: &Path) -> Option<usize> {
        let layers = self.layers();
        let opened = layers.iter().position(|layer| layer.name() == name);
        let spelt = || {
            let above = layers.iter().position(|layer| {
                let file = layer.qcow2().and_then(|image| image.info().backing_file.as_deref());
                file == Some(name.as_os_str().as_encoded_bytes())
                    || layer.full_backing_name().map(Path::new) == Some(name)
            })?;
            (above + 1 < layers.len()).then_some(above + 1)
        };
        let same_file = || {
            let identity = Some(Storage::identity_of(&std::fs::metadata(name).ok()?));
            let of = |layer: &Arc<Layer>| layer.file().and_then(|file| file.identity());
            layers.iter().position(|layer| of(layer) == identity)
        };
        opened.or_else(same_file).or_else(spelt)
    }

    /// Calls `callback` with each new size in bytes, on the thread that made the change; also when
    /// the content changed as a whole (a snapshot was applied), with the size as it is.
    pub fn watch_size(&self, callback: impl Fn(u64) + Send + Sync + 'static) -> SizeWatch {
        self.watchers.add(Arc::new(callback))
    }

    /// Calls `callback` with the layers that are about to become the chain, top first, while no
    /// request is in flight and before any goes to them. What they show is what the former ones
    /// show. Whoever hears of them opens them by their names later, so a commit that would put an
    /// image on top which is another one by its name, or of which `check` says why it may not be,
    /// is refused from then on. Only the first call counts.
    pub fn watch_chain(
        &self,
        check: impl Fn(&Layer) -> Result<(), String> + Send + Sync + 'static,
        callback: impl Fn(&[Arc<Layer>]) + Send + Sync + 'static,
    ) {
        self.chain_watch.set(Box::new(check), Box::new(callback));
    }

    /// Begins a request; waits while the disk is being changed. Once for each request: a second
    /// time could wait for a change that waits for the first.
    #[inline]
    pub(crate) async fn enter(&self) -> Pass<'_> {
        self.gateway.enter().await
    }

    /// Whether a change has the disk for itself at this moment, so that every request waits for it.
    pub fn is_held_by_a_change(&self) -> bool {
        self.gateway.is_closed_alone()
    }

    /// The graph in place, for names and numbers.
    pub(crate) fn graph(&self) -> Arc<Graph> {
        self.gateway.current()
    }

    pub(crate) fn gateway(&self) -> &Gateway {
        &self.gateway
    }

    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }

    pub(crate) fn options(&self) -> &ImageOptions {
        &self.options
    }

    /// Held by each change of the graph, one after the other.
    pub(crate) fn turns(&self) -> &Gate {
        &self.turns
    }

    pub(crate) fn weak(&self) -> Weak<Disk> {
        Weak::clone(&self.this)
    }

    /// Tells requests to come of a size as clients see it, bytes.
    pub(crate) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    pub(crate) fn chain_watch(&self) -> &ChainWatch {
        &self.chain_watch
    }

    pub(crate) fn watchers(&self) -> &Watchers {
        &self.watchers
    }
}
