//! Which long changes of a disk are under way, and which may begin beside them.
//!
//! Promises: two that run at once never write, drop or record the same layers. A backup is none of
//! them: it reads the state of one instant ([`crate::Checkpoint`]), whatever is changed meanwhile.
//! Any thread; takes a lock for a moment.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::commit_options::COMMITS_MAX;
use crate::{CommitOptions, Error, ErrorKind};

/// A kind of long change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LongChange {
    /// It records what clients write, and changes or drops layers from the top on: a commit of the
    /// top layer, a stream of all layers, a change of the backing file; or the disk is the target
    /// of a copy.
    Whole,
    /// A stream down to this layer: it records what clients write, and drops the layers between the
    /// top and this one, which the header of the top names in the end. Commits of layers below this
    /// one may run beside it; this one may be the layer above theirs.
    Stream(usize),
    /// A commit of layers below the top: what clients write is none of its business. Another one
    /// may run beside it where neither merges, or writes, a layer that the other one does. The
    /// layer above the merged ones, whose header names another base in the end, may be the base of
    /// the other one.
    Below(CommitOptions),
    /// A mirror: it records what clients write, and reads the disk whatever its layers are. It
    /// switches over when nothing else is under way.
    Mirror,
}

/// The layers of a commit. Their numbers change when a commit above them ends.
#[derive(Debug)]
pub(crate) struct Place {
    top: AtomicUsize,
    base: AtomicUsize,
    keep_top: bool,
}

/// The long changes of a disk that are under way.
#[derive(Debug, Default)]
pub(crate) struct LongChanges(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_whole: bool,
    is_mirrored: bool,
    /// The base of a stream. Its number does not change: commits beside it are below it.
    stream: Option<usize>,
    /// Commits of layers below the top.
    commits: Vec<Arc<Place>>,
}

impl Place {
    pub(crate) fn new(options: CommitOptions) -> Place {
        let CommitOptions { top, base, keep_top } = options;
        Place { top: AtomicUsize::new(top), base: AtomicUsize::new(base), keep_top }
    }

    /// The layers of the graph in place. The caller holds a pass of it, or the lock of changes.
    pub(crate) fn options(&self) -> CommitOptions {
        let (top, base) = (self.top.load(Ordering::Acquire), self.base.load(Ordering::Acquire));
        CommitOptions { top, base, keep_top: self.keep_top }
    }
}

impl LongChanges {
    /// A panic elsewhere leaves it valid, so poison is ignored.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is any.
    pub(crate) fn any(&self) -> bool {
        let state = self.state();
        let is_top_busy = state.is_whole || state.is_mirrored || state.stream.is_some();
        is_top_busy || !state.commits.is_empty()
    }

    /// Whether layers below the top are being committed.
    pub(crate) fn has_commit_below(&self) -> bool {
        !self.state().commits.is_empty()
    }

    /// Whether a commit of layers below the top writes to this layer. The caller holds the lock of
    /// changes.
    pub(crate) fn is_base(&self, layer: usize) -> bool {
        self.state().commits.iter().any(|place| place.options().base == layer)
    }

    /// Errors: `Busy` where one is under way that this one may not begin beside.
    pub(crate) fn check(&self, change: LongChange) -> Result<(), Error> {
        self.state().check(change)
    }

    /// Marks one that is no commit.
    ///
    /// Errors: as [`LongChanges::check`].
    pub(crate) fn begin(&self, change: LongChange) -> Result<(), Error> {
        let mut state = self.state();
        state.check(change)?;
        state.set(change, true);
        Ok(())
    }

    /// Marks a commit. Gives where its layers are from now on.
    ///
    /// Errors: as [`LongChanges::check`].
    pub(crate) fn begin_commit(&self, options: CommitOptions) -> Result<Arc<Place>, Error> {
        let mut state = self.state();
        let change = LongChange::commit(options);
        state.check(change)?;
        let place = Arc::new(Place::new(options));
        match change {
            LongChange::Below(_) => state.commits.push(Arc::clone(&place)),
            LongChange::Whole | LongChange::Stream(_) | LongChange::Mirror => {
                state.set(change, true);
            }
        }
        Ok(place)
    }

    /// Ends a change that is no commit. Only its beginner calls this.
    pub(crate) fn end(&self, change: LongChange) {
        self.state().set(change, false);
    }

    /// As [`LongChanges::end`], of a commit.
    pub(crate) fn end_commit(&self, place: &Arc<Place>) {
        let mut state = self.state();
        if place.options().top == 0 {
            state.is_whole = false;
        }
        state.commits.retain(|other| !Arc::ptr_eq(other, place));
    }

    /// Layers are dropped from the graph, the merged ones of a commit, or those that a stream has
    /// brought up: those below them move up. The caller has the graph for itself.
    ///
    /// * `top`, `base`: the uppermost of them, and the layer below the lowest.
    pub(crate) fn dropped(&self, top: usize, base: usize) {
        let count = base - top;
        for place in self.state().commits.iter().filter(|place| place.options().top > base) {
            place.top.fetch_sub(count, Ordering::AcqRel);
            place.base.fetch_sub(count, Ordering::AcqRel);
        }
    }
}

impl LongChange {
    /// That of a commit.
    pub(crate) fn commit(options: CommitOptions) -> LongChange {
        if options.top == 0 { LongChange::Whole } else { LongChange::Below(options) }
    }
}

impl State {
    fn check(&self, change: LongChange) -> Result<(), Error> {
        let commits = &self.commits;
        let is_recorded = self.is_mirrored || self.stream.is_some();
        let may_begin = !self.is_whole
            && match change {
                LongChange::Whole => !is_recorded && commits.is_empty(),
                LongChange::Stream(base) => {
                    !is_recorded && commits.iter().all(|place| base < place.options().top)
                }
                LongChange::Mirror => !is_recorded,
                LongChange::Below(new) => {
                    let is_apart = |old: CommitOptions| new.base < old.top || old.base < new.top;
                    self.stream.is_none_or(|base| base < new.top)
                        && commits.len() < COMMITS_MAX
                        && commits.iter().all(|place| is_apart(place.options()))
                }
            };
        if may_begin { Ok(()) } else { Err(busy()) }
    }

    fn set(&mut self, change: LongChange, is_on: bool) {
        match change {
            LongChange::Whole => self.is_whole = is_on,
            LongChange::Stream(base) => self.stream = is_on.then_some(base),
            LongChange::Mirror => self.is_mirrored = is_on,
            LongChange::Below(_) => {}
        }
    }
}

pub(crate) fn busy() -> Error {
    Error::new(
        ErrorKind::Busy,
        "a commit, a stream, a mirror or a change of the backing file of this disk is under way; \
         wait until it is done, or cancel it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use LongChange::{Below, Mirror, Stream, Whole};

    const fn commit(top: usize, base: usize) -> CommitOptions {
        CommitOptions { top, base, keep_top: false }
    }

    fn begin(changes: &LongChanges, change: LongChange) -> Result<(), Error> {
        match change {
            Below(options) => changes.begin_commit(options).map(drop),
            other => changes.begin(other),
        }
    }

    #[test]
    fn a_mirror_or_a_stream_and_commits_run_at_once_where_their_layers_are_apart() {
        let (upper, lower) = (Below(commit(1, 2)), Below(commit(3, 5)));
        let between = [Below(commit(2, 3)), Below(commit(4, 5))];
        let all = [Whole, Mirror, Stream(1), Stream(2), Stream(3), upper, lower];
        let all: Vec<LongChange> = all.into_iter().chain(between).collect();
        for &running in &all {
            for &new in &all {
                let changes = LongChanges::default();
                begin(&changes, running).expect("the first");
                let may = match (running, new) {
                    (Below(_), Mirror) | (Mirror, Below(_)) => true,
                    (Below(one), Stream(base)) | (Stream(base), Below(one)) => base < one.top,
                    (Below(one), Below(other)) => one.base < other.top || other.base < one.top,
                    _ => false,
                };
                assert_eq!(changes.check(new).is_ok(), may, "{new:?} beside {running:?}");
                assert_eq!(begin(&changes, new).is_ok(), may, "{new:?} beside {running:?}");
            }
        }
    }

    #[test]
    fn commits_end_in_any_order_and_those_below_move_up() {
        let changes = LongChanges::default();
        let upper = changes.begin_commit(commit(1, 3)).expect("the upper one");
        let lower = changes.begin_commit(commit(4, 6)).expect("the lower one");
        changes.begin(Mirror).expect("a mirror beside them");
        assert!(changes.begin_commit(commit(8, 9)).is_err(), "not more than two");
        assert!(changes.is_base(3) && changes.is_base(6) && !changes.is_base(4));
        changes.dropped(1, 3);
        changes.end_commit(&upper);
        assert_eq!(lower.options(), commit(2, 4));
        changes.dropped(2, 4);
        assert!(changes.has_commit_below());
        changes.end_commit(&lower);
        assert!(!changes.has_commit_below() && changes.any());
        changes.end(Mirror);
        assert!(!changes.any());
        changes.begin(Stream(2)).expect("a stream");
        let below = changes.begin_commit(commit(3, 4)).expect("the layer below its base");
        assert!(changes.any());
        changes.dropped(1, 2);
        changes.end(Stream(2));
        assert_eq!(below.options(), commit(2, 3));
        changes.end_commit(&below);
        assert!(!changes.any());
        let top = changes.begin_commit(commit(0, 1)).expect("of the top");
        assert!(changes.check(Mirror).is_err() && changes.check(Below(commit(2, 3))).is_err());
        changes.end_commit(&top);
        assert!(!changes.any());
    }
}
