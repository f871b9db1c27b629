//! Everything that happened to a storage, to be lived through again: every prefix, with every state
//! that a power cut could have left.
//!
//! Promises: the storage of each prefix is the same whenever it is replayed; the recorded one is
//! not changed.

use super::SimStorage;
use super::recording::{Event, History};
use super::state::State;

/// A recorded storage at some moment of its life.
#[derive(Debug)]
pub struct Replay {
    sim: SimStorage,
    events: std::vec::IntoIter<Event>,
    /// Events that have happened.
    pub at: usize,
}

impl Replay {
    /// Lets one more event happen. Returns whether there was one.
    pub fn advance(&mut self) -> bool {
        let Some(event) = self.events.next() else { return false };
        self.sim.state().live_through(&event);
        self.at += 1;
        true
    }

    /// The storage as it is now.
    pub fn sim(&self) -> &SimStorage {
        &self.sim
    }
}

impl SimStorage {
    /// Records everything from now on. What is there now counts as durable in the replay.
    pub fn record(&self) {
        let mut state = self.state();
        let start = state.image.clone();
        let first_change = state.next_change();
        state.history = Some(History { start, first_change, events: Vec::new() });
    }

    /// Events that were recorded so far.
    pub fn recorded(&self) -> usize {
        self.state().history.as_ref().map_or(0, |history| history.events.len())
    }

    /// The recorded storage at its beginning.
    #[must_use]
    pub fn replay(&self) -> Option<Replay> {
        let state = self.state();
        let history = state.history.clone()?;
        let sim = SimStorage::after(history.start, &state, 1);
        sim.state().start_at(history.first_change);
        Some(Replay { sim, events: history.events.into_iter(), at: 0 })
    }
}

impl State {
    fn live_through(&mut self, event: &Event) {
        match event {
            Event::Change(change) => self.change(change.clone()),
            Event::Flush { before } => self.flush(*before),
        }
    }
}
