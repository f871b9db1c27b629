//! A disk: the object that an export serves, shared by all its queue threads.
//!
//! Promises: a request enters the graph (`graph/`) without waiting for a lock, and works on layers
//! that do not change while it runs; a request whose mapping is cached allocates nothing and
//! touches no reference count that another thread touches.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use ringdisk_qcow2::{Bytes, GuestOffset, HostOffset};
use ringdisk_ring::Ring;
use ringdisk_storage::Storage;
use ringdisk_throttle::{Changed, Member};

use crate::background::{Background, Turn};
use crate::events::Events;
use crate::graph::{Drained, Gateway, Graph, Pass, State, Window};
use crate::kept_reads::CopyOnRead;
use crate::layer::{Layer, Node, Raw, SectorGuard};
use crate::long_changes::LongChanges;
use crate::notices::Notices;
use crate::options::{DetectZeroes, Discard};
use crate::task_mutex::TaskMutex;
use crate::watch::{ChainWatch, LimitWatch, SizeWatch, Watchers};
use crate::{Cache, ImageOptions, NullOptions, Progress};

/// Transfer size that a null disk reports, bytes.
const NULL_TRANSFER: u32 = 4096;

/// A disk: a top layer and the backing chain below it.
#[derive(Debug)]
pub struct Disk {
    gateway: Gateway,
    /// Size of the graph in place, for callers that hold no pass. Bytes.
    size: AtomicU64,
    policy: Policy,
    read_only_reason: Option<String>,
    /// The options of the open, for files that are opened later.
    options: ImageOptions,
    /// Held by each change of the graph, so that changes run one after the other.
    changes: TaskMutex,
    /// Long changes (a commit, the comparison of backing files) that are under way; most other
    /// changes are refused meanwhile.
    pub(crate) long: LongChanges,
    /// Backups that are under way.
    pub(crate) backups: AtomicUsize,
    /// Long changes that stop when the disk is handed over.
    pub(crate) suspends: std::sync::Mutex<Vec<Arc<Progress>>>,
    /// Calls of [`Disk::resume`] that hold, or wait for, the lock of changes.
    pub(crate) resuming: AtomicUsize,
    /// The kernel has a descriptor of the image.
    pub(crate) is_lent: AtomicBool,
    /// A duplicate of the descriptor that the kernel has; it holds the locks.
    pub(crate) lent: std::sync::Mutex<Option<std::os::fd::OwnedFd>>,
    /// Device number of the file system that shows the disk as a file; 0: none.
    pub(crate) mounted_on: AtomicU64,
    /// Held while the length of a file that the kernel writes is asked and stored.
    pub(crate) length_check: TaskMutex,
    watchers: Arc<Watchers>,
    events: Arc<Events>,
    chain_watch: ChainWatch,
    /// The limits of its clients, once there were any.
    pub(crate) limit: OnceLock<Arc<Member>>,
    /// Hears of changes of the limits.
    pub(crate) limit_watch: OnceLock<LimitWatch>,
    /// Limits that a command had set in the process before this one.
    pub(crate) handed_limits: OnceLock<Changed>,
    pub(crate) notices: Notices,
    pub(crate) copy_on_read: CopyOnRead,
    /// Whose turn it is of the work beside clients.
    background: Background,
    /// A write-back was asked for, and the ring of its task was closed: the next request starts
    /// another one.
    pub(crate) is_write_back_orphaned: AtomicBool,
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

/// The parts of a [`Disk`] beside its layers.
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
        // Files that are opened later are opened for use.
        let kept = ImageOptions { inactive: false, wait_for_locks: None, ..options.clone() };
        Parts { policy: Policy::new(options), options: kept, state, ..Parts::default() }
    }
}

impl Disk {
    /// A disk that stores nothing; writable, of fixed size.
    pub fn null(options: &NullOptions) -> Arc<Disk> {
        Disk::build(vec![Layer::null(options)], Parts::default())
    }

    /// A raw disk over any storage. The caller states the format, so no sector is protected.
    ///
    /// * `options`: `read_only`, `cache` (flushes only), `discard`, `detect_zeroes`,
    ///   `window_offset` and `window_size` (cut to what the storage has).
    pub fn from_storage(storage: Arc<Storage>, options: &ImageOptions) -> Arc<Disk> {
        let size = storage.len();
        let read_only = options.read_only || storage.is_read_only();
        let name = PathBuf::from(storage.name());
        let raw = Raw::new(storage);
        let mut layer = Layer::new(Node::Raw(raw), Bytes(size));
        layer.name = name;
        layer.is_writable = !read_only;
        let mut parts = Parts::new(options);
        parts.policy.read_only = read_only;
        parts.window = Window::new(GuestOffset(options.window_offset), options.window_size);
        Disk::build(vec![layer], parts)
    }

    /// * `layers`: top first, at least one.
    pub(crate) fn build(layers: Vec<Layer>, parts: Parts) -> Arc<Disk> {
        let mut graph = Graph::new(layers.into_iter().map(Arc::new).collect());
        graph.state = parts.state;
        graph.window = parts.window;
        let copies_on_read = parts.options.copy_on_read;
        Arc::new_cyclic(|this| Disk {
            size: AtomicU64::new(graph.visible_size().0),
            gateway: Gateway::new(graph),
            policy: parts.policy,
            read_only_reason: parts.read_only_reason,
            options: parts.options,
            changes: TaskMutex::default(),
            long: LongChanges::default(),
            backups: AtomicUsize::new(0),
            suspends: std::sync::Mutex::default(),
            resuming: AtomicUsize::new(0),
            is_lent: AtomicBool::new(false),
            lent: std::sync::Mutex::default(),
            mounted_on: AtomicU64::new(0),
            length_check: TaskMutex::default(),
            watchers: Arc::default(),
            events: Arc::default(),
            chain_watch: ChainWatch::default(),
            limit: OnceLock::new(),
            limit_watch: OnceLock::new(),
            handed_limits: OnceLock::new(),
            notices: Notices::default(),
            copy_on_read: CopyOnRead::new(copies_on_read),
            background: Background::default(),
            is_write_back_orphaned: AtomicBool::new(false),
            this: Weak::clone(this),
        })
    }

    /// Size, bytes; any number, also 0.
    pub fn size(&self) -> Bytes {
        Bytes(self.size.load(Ordering::Acquire))
    }

    /// Whether writes are refused with EROFS.
    pub fn is_read_only(&self) -> bool {
        self.policy.read_only
    }

    /// Why the disk is read-only although the options did not ask for it
    /// ([`ImageOptions::auto_read_only`]); to be logged once.
    pub fn read_only_reason(&self) -> Option<&str> {
        self.read_only_reason.as_deref()
    }

    /// Why some writes to the first sector are refused with EPERM, when the image is a probed raw
    /// one; to be logged once.
    pub fn protection_reason(&self) -> Option<String> {
        let graph = self.graph();
        let is_in_sight = SectorGuard::covers(HostOffset(graph.window.start.0));
        graph.guard.as_ref().filter(|_| is_in_sight).map(|guard| guard.reason())
    }

    /// Whether the first sector of the raw image at the bottom is protected: the value of
    /// [`ImageOptions::protect_raw`] for a process that opens the disk again by its names.
    pub fn protects_raw(&self) -> bool {
        self.graph().bottom_guard().is_some()
    }

    /// What happens to the disk and its clients.
    pub fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// Why a writable image has stopped taking writes: its metadata was found damaged, or could not
    /// be written. `None`: no fault.
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
            Node::Raw(raw) => !self.is_read_only() && raw.can_resize(),
            Node::Qcow2(_) => !self.is_read_only(),
            Node::Null(_) | Node::Frozen(_) => false,
        }
    }

    /// Alignment that requests need, bytes. Always 1: storage copies where it has to.
    pub fn request_align(&self) -> u32 {
        1
    }

    /// Bytes that the top image takes on its storage, external data file included; 0 for null. For
    /// a window of an image: at most its size, since the allocation of a part is not counted.
    pub fn allocated_bytes(&self) -> Bytes {
        let graph = self.graph();
        let layer = graph.top();
        let (Some(file), Some(data)) = (layer.file(), layer.data_storage()) else {
            return Bytes::ZERO;
        };
        let mut bytes = Bytes(file.allocated_bytes());
        if !Arc::ptr_eq(file, data) {
            bytes = bytes.saturating_add(Bytes(data.allocated_bytes()));
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

    /// Sets the file system (its device number, as stat(2) gives it) on which the disk is mounted
    /// as a file. No image of the chain may lie there: a read would wait for itself.
    pub fn set_mounted_on(&self, device: u64) {
        self.mounted_on.store(device, Ordering::Release);
    }

    /// The chain at this moment, top first; never empty. Control path: takes a lock for a moment.
    pub fn layers(&self) -> Vec<Arc<Layer>> {
        self.graph().layers.clone()
    }

    /// Finds out, for each present layer, whether its storage can use pages of clients without a
    /// copy ([`ringdisk_storage::Storage::probe_client_pages`]). Blocks for a few reads. Returns
    /// whether all of them can.
    pub fn probe_client_pages(&self) -> bool {
        let layers = self.layers();
        let storages = layers.iter().filter_map(|layer| layer.data_storage());
        // All of them are probed, also after one that cannot.
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

    /// The part of the image that the disk is: first byte and, where it was given, length, in
    /// bytes. `None`: the whole image.
    pub fn window(&self) -> Option<(u64, Option<Bytes>)> {
        let window = self.graph().window;
        window.is_part().then(|| (window.start.0, window.len()))
    }

    /// Calls `callback` with each new size in bytes, on the thread that made the change; also when
    /// the content changed as a whole (a snapshot was applied), with the size as it is.
    pub fn watch_size(&self, callback: impl Fn(Bytes) + Send + Sync + 'static) -> SizeWatch {
        self.watchers.add(Arc::new(callback))
    }

    /// Calls `callback` with the layers that are about to become the chain, top first, while no
    /// request is in flight and before any request goes to them. They have the same content as the
    /// former ones. The caller opens them by their names later: from now on a commit is refused if
    /// the name of its new top image leads to other content, or if `check` gives a reason against
    /// that image. Only the first call counts.
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
        let pass = self.gateway.enter().await;
        match pass.state {
            // Boxed: the future of a plain request stays small.
            State::Quiet => Box::pin(self.enter_again(pass)).await,
            State::Active | State::Inactive | State::Broken => pass,
        }
    }

    /// Waits where a disk that was handed over is about to go on here: a hand-over that failed is
    /// no error of its clients.
    async fn enter_again<'a>(&'a self, pass: Pass<'a>) -> Pass<'a> {
        let mut pass = pass;
        while pass.state == State::Quiet && self.resuming.load(Ordering::Acquire) > 0 {
            drop(pass);
            // The thread that resumes it has come before.
            drop(self.changes.lock().await);
            pass = self.gateway.enter_beside_clients().await;
        }
        pass
    }

    /// As [`Disk::enter`], for work of the disk itself: it does not count as a client's.
    pub(crate) async fn enter_beside_clients(&self) -> Pass<'_> {
        self.gateway.enter_beside_clients().await
    }

    /// Waits for the turn of a piece of a job, or of a read of a checkpoint ([`Background::turn`]).
    pub(crate) async fn turn(&self, ring: &Ring) -> Turn<'_> {
        self.background.turn(ring, || self.gateway.entered()).await
    }

    /// Whether a change excludes all requests at this moment, so that they wait for it.
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

    /// Held by each change of the graph, so that changes run one after the other.
    pub(crate) fn changes(&self) -> &TaskMutex {
        &self.changes
    }

    pub(crate) fn weak(&self) -> Weak<Disk> {
        Weak::clone(&self.this)
    }

    /// Puts a new graph in place and calls the watchers.
    ///
    /// * `always_tell`: call the watchers of the size also when the size is as before.
    pub(crate) fn put(&self, drained: &mut Drained<'_>, graph: Graph, always_tell: bool) {
        let before = drained.graph().visible_size();
        let size = graph.visible_size();
        let names = |graph: &Graph| -> Vec<PathBuf> {
            graph.layers.iter().map(|layer| layer.name().to_owned()).collect()
        };
        if names(&graph) != names(drained.graph()) {
            self.chain_watch().notify(&graph.layers);
        }
        drained.replace(graph);
        self.set_size(size);
        if always_tell || size != before {
            self.watchers().notify(size);
        }
    }

    /// Sets the size that clients see, bytes.
    pub(crate) fn set_size(&self, size: Bytes) {
        self.size.store(size.0, Ordering::Release);
    }

    pub(crate) fn chain_watch(&self) -> &ChainWatch {
        &self.chain_watch
    }

    pub(crate) fn watchers(&self) -> &Watchers {
        &self.watchers
    }
}
