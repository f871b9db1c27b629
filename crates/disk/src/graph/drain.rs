//! Exclusive access to the graph, for a change of it.
//!
//! Promises: the gate closes, the change waits for the requests in flight without blocking the
//! thread, and then no request is inside. Dropping [`Drained`] opens the gate, with the graph that
//! was put in place last. A change that is dropped while images are between two states
//! ([`Drained::begin`]) leaves a graph that fails every request: serving bytes of an image in an
//! unknown state would be worse.
//!
//! The write guards of the shards are held across awaits on purpose: a request only tries to take
//! its shard and suspends when it cannot, so no thread blocks on them.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_ring::Ring;

use super::sync::lock;
use super::{Gateway, Graph, State, shards};
use crate::task_mutex::TaskGuard;
use crate::watch::{Change, ChangeWatch};

/// How often a waiting change checks by itself for requests in flight; see `shards.rs`.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// The right to change the graph. Opens the gate on drop.
pub(crate) struct Drained<'a> {
    closed: shards::Closed<'a, Arc<Graph>>,
    gateway: &'a Gateway,
    graph: Arc<Graph>,
    /// Images are between two states.
    is_under_way: bool,
    /// No write-back is under way.
    _write_back: TaskGuard<'a>,
    /// The lock of changes; released after the gate is open.
    _turn: TaskGuard<'a>,
    /// Dropped last: the watcher finds the gate open.
    _over: Over<'a>,
}

/// Reports the end of a change to the watcher.
struct Over<'a>(&'a ChangeWatch);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.notify(Change::Over);
    }
}

impl Gateway {
    /// Closes the gate and waits until no request is in flight.
    ///
    /// * `turn`: the lock of changes, held by this one.
    pub(crate) async fn drain<'a>(&'a self, ring: &Ring, turn: TaskGuard<'a>) -> Drained<'a> {
        // While clients go on: a write-back may take long.
        let write_back = self.write_backs.lock().await;
        let over = Over(&self.change_watch);
        let mut closed = self.shards.close();
        // A holder of the disk (`Disk::hold_plain`) ends soon after this report.
        self.change_watch.notify(Change::Coming);
        loop {
            let alone = poll_fn(|context| closed.poll_alone(context));
            if ring.within(CHECK_INTERVAL, alone).await.is_ok() {
                break;
            }
        }
        let graph = self.current();
        Drained {
            closed,
            gateway: self,
            graph,
            is_under_way: false,
            _write_back: write_back,
            _turn: turn,
            _over: over,
        }
    }
}

impl Drained<'_> {
    /// The graph in place.
    pub(crate) fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// From here on images may be in a state that no graph describes.
    pub(crate) fn begin(&mut self) {
        self.is_under_way = true;
    }

    /// Puts a graph in place that describes the images as they are.
    pub(crate) fn replace(&mut self, graph: Graph) {
        self.graph = Arc::new(graph);
        self.closed.replace(&self.graph);
        *lock(&self.gateway.current) = Arc::clone(&self.graph);
        self.is_under_way = false;
    }
}

impl Drop for Drained<'_> {
    fn drop(&mut self) {
        if self.is_under_way {
            let mut graph = Graph::clone(&self.graph);
            graph.state = State::Broken;
            self.replace(graph);
            tracing::error!(
                "a change of the disk ended half way: it answers every request with an error until \
                 it is opened again"
            );
        }
    }
}
