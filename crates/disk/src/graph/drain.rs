//! A change of the graph: nobody else is inside.
//!
//! Promises: the gate closes, requests in flight are waited for without blocking the thread, and
//! then the change is alone. When it is dropped the gate opens, with the graph that was put in
//! place last. A change that was dropped while images were half way between two states
//! ([`Drained::begin`]) leaves a graph that fails every request: serving bytes of an image in an
//! unknown state would be worse.
//!
//! The guards of the copies are held across awaits on purpose: a request only ever tries to take
//! its copy and suspends when it cannot, so nobody blocks on them.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_ring::Ring;

use super::sync::lock;
use super::{Gateway, Graph, State, shards};
use crate::gate::Pass as Turn;
use crate::watch::{Change, ChangeWatch};

/// How often a change looks by itself whether it is alone; see `shards.rs`.
const LOOK: Duration = Duration::from_millis(5);

/// The right to change the graph. Opens the gate on drop.
pub(crate) struct Drained<'a> {
    closed: shards::Closed<'a, Arc<Graph>>,
    gateway: &'a Gateway,
    graph: Arc<Graph>,
    /// Images are between two states.
    is_under_way: bool,
    /// Changes take turns; let go after the gate is open.
    _turn: Turn<'a>,
    /// The last: who wants to know finds the gate open.
    _over: Over<'a>,
}

/// Tells that a change is over.
struct Over<'a>(&'a ChangeWatch);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.tell(Change::Over);
    }
}

impl Gateway {
    /// Closes the gate and waits until no request is in flight.
    ///
    /// * `turn`: that of this change; changes take turns.
    pub(crate) async fn drain<'a>(&'a self, ring: &Ring, turn: Turn<'a>) -> Drained<'a> {
        let over = Over(&self.change_watch);
        let mut closed = self.shards.close();
        // Whoever holds the disk from now on waits for this change.
        self.change_watch.tell(Change::Coming);
        loop {
            let alone = poll_fn(|context| closed.poll_alone(context));
            if ring.within(LOOK, alone).await.is_ok() {
                break;
            }
        }
        let graph = self.current();
        Drained { closed, gateway: self, graph, is_under_way: false, _turn: turn, _over: over }
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
