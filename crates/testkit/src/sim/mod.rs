//! Simulated storage: memory that misbehaves on command.
//!
//! [`SimStorage`] is a handle for the test; [`SimStorage::storage`] gives the storage that the code
//! under test uses. Rules ([`SimStorage::on`]) say what happens to which operation: it fails, ends
//! short, takes time, waits until the test lets it go (in any order), or never ends.
//! [`SimStorage::power_cut`] leaves what a disk may leave: everything flushed, and any part of the
//! rest.
//!
//! Promises: deterministic: the same seed and the same order of calls give the same result. Any
//! thread may hold handles. An operation without a rule takes effect and ends at once.
//!
//! ```
//! use ringdisk_storage::Errno;
//! use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};
//! let sim = SimStorage::new(1 << 20, 42);
//! sim.on(When::kind(OpKind::Write).at(0..4096).once(), Fault::Fail(Errno::NOSPC));
//! sim.on(When::kind(OpKind::Read), Fault::Hold);
//! let storage = sim.storage(); // Arc<Storage>, for the code under test
//! # drop(storage);
//! assert_eq!(sim.held().len(), 0);
//! ```

mod device;
mod history;
mod image;
mod operation;
mod perform;
mod power;
mod prng;
mod recording;
mod rules;
mod serve;
mod state;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringdisk_storage::{Errno, Kind, Limits, Storage};

pub use history::Replay;
pub use operation::{Held, OpKind, Record};
pub use prng::Prng;
pub use rules::{Fault, Injected, When};

use operation::Change;
use state::State;

/// Pieces of a storage: offset and length in bytes.
pub type Ranges = Vec<(u64, u64)>;

/// Handle of a simulated storage; clones are handles of the same one.
#[derive(Clone, Debug)]
pub struct SimStorage(Arc<Mutex<State>>);

impl SimStorage {
    /// Storage of `len` zero bytes (sparse: any length is cheap). `seed` decides all chance.
    pub fn new(len: u64, seed: u64) -> SimStorage {
        SimStorage(Arc::new(Mutex::new(State::new(len, seed))))
    }

    /// Storage with this content, all of it durable.
    pub fn from_image(content: &[u8], seed: u64) -> SimStorage {
        let sim = SimStorage::new(content.len() as u64, seed);
        sim.put(0, content);
        sim
    }

    /// A block device of `len` bytes that holds old bytes of others: its length is fixed, and a
    /// discard leaves what the seed likes.
    pub fn device(len: u64, seed: u64) -> SimStorage {
        let mut state = State::with_image(image::Image::stale(len), seed);
        state.kind = Kind::BlockDevice;
        SimStorage(Arc::new(Mutex::new(state)))
    }

    /// Takes the state; a panic of another test thread does not matter.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The storage for the code under test.
    pub fn storage(&self) -> Arc<Storage> {
        Arc::new(Storage::custom(Box::new(self.clone())))
    }

    /// Sets what [`Storage::limits`] reports. Every request works all the same.
    pub fn set_limits(&self, limits: Limits) {
        self.state().limits = limits;
    }

    /// Lets [`Storage::kind`] say that it is a regular file, for code that asks; nothing else
    /// changes. (A block device is made by [`SimStorage::device`].)
    pub fn become_regular(&self) {
        self.state().kind = Kind::Regular;
    }

    /// Makes it storage that zeroes only by writing: where that is not allowed, zeroing is refused
    /// and changes nothing.
    pub fn refuse_holes(&self) {
        self.state().refuses_holes = true;
    }

    /// Sets whether changes are refused with `EROFS`.
    pub fn set_read_only(&self, read_only: bool) {
        self.state().read_only = read_only;
    }

    /// Puts bytes there as if they had always been there (durable, not logged).
    pub fn put(&self, offset: u64, bytes: &[u8]) {
        self.state().put(offset, bytes);
    }

    /// Changes the length behind the back of its user, as another process would. Durable.
    pub fn set_len_behind(&self, len: u64) {
        self.state().set_len_behind(len);
    }

    /// The bytes as a reader sees them now.
    pub fn image(&self) -> Vec<u8> {
        let state = self.state();
        state.image.to_vec()
    }

    /// The bytes that certainly survive a power cut.
    pub fn durable_image(&self) -> Vec<u8> {
        self.state().durable.to_vec()
    }

    /// Changes that took effect and were not flushed.
    pub fn unflushed(&self) -> usize {
        self.state().journal.len()
    }

    /// Adds a rule. Of the rules that match an operation the first one added applies.
    pub fn on(&self, when: When, fault: Fault) {
        self.state().rules.push(when.rule(fault));
    }

    /// Removes all rules. Operations that are held stay held.
    pub fn clear_rules(&self) {
        self.state().rules.clear();
    }

    /// All operations so far, in the order in which they began.
    pub fn log(&self) -> Vec<Record> {
        self.state().log.clone()
    }

    /// How many operations of this kind began so far.
    pub fn count(&self, kind: OpKind) -> usize {
        self.state().log.iter().filter(|record| record.kind == kind).count()
    }

    /// Operations that wait for their release, in the order in which they began.
    pub fn held(&self) -> Vec<Held> {
        self.state().held()
    }

    /// How many operations hang for ever (and whose futures still wait for them).
    pub fn hanging(&self) -> usize {
        self.state().hanging()
    }

    /// Lets a held operation take effect and end. Returns whether it was held.
    pub fn release(&self, number: u64) -> bool {
        self.state().release(number, None)
    }

    /// Ends a held operation with an error and without effect. Returns whether it was held.
    pub fn release_failed(&self, number: u64, errno: Errno) -> bool {
        self.state().release(number, Some(errno))
    }

    /// Releases all held operations in the order in which they began; returns how many.
    pub fn release_all(&self) -> usize {
        let held = self.held();
        held.iter().filter(|held| self.release(held.number)).count()
    }

    /// Releases all held operations in an order that the seed decides; returns how many.
    pub fn release_shuffled(&self) -> usize {
        let mut held = self.held();
        self.state().prng.shuffle(&mut held);
        held.iter().filter(|held| self.release(held.number)).count()
    }

    /// What could be on the medium if the power failed now: everything flushed, and of each other
    /// change, running writes included, all, nothing, or any of its 512-byte sectors. Changes
    /// nothing: call it with many seeds.
    pub fn crash_image(&self, seed: u64) -> Vec<u8> {
        power::crash_image(&self.state(), seed).to_vec()
    }

    /// As [`SimStorage::crash_image`], as a storage of its own. Cheap: pages are shared until one
    /// side changes them.
    #[must_use]
    pub fn crash_state(&self, seed: u64) -> SimStorage {
        let state = self.state();
        SimStorage::after(power::crash_image(&state, seed), &state, seed)
    }

    /// As [`SimStorage::crash_state`], if the last flush that had something to do had left out the
    /// changes for which `lost` says so (offset and length in bytes): what a missing barrier could
    /// leave. `None`: there was no such flush.
    #[must_use]
    pub fn crash_state_without_last_flush(
        &self,
        seed: u64,
        lost: impl Fn(u64, u64) -> bool,
    ) -> Option<SimStorage> {
        let state = self.state();
        let image = power::without_last_flush(&state, seed, &lost)?;
        Some(SimStorage::after(image, &state, seed))
    }

    /// What the last flush that had something to do made durable, and what took effect after it:
    /// offsets and lengths in bytes of the changes, in their order; (new length, 0) for a change of
    /// the length.
    pub fn around_last_flush(&self) -> (Ranges, Ranges) {
        let state = self.state();
        let before =
            state.flushed.iter().flat_map(|f| f.changes.iter().map(Change::range)).collect();
        (before, state.journal.iter().map(|(_, change)| change.range()).collect())
    }

    /// Whether a flush that had nothing to do came after the one that
    /// [`SimStorage::around_last_flush`] is about.
    pub fn was_flushed_idly(&self) -> bool {
        self.state().idle_since
    }

    /// A copy of what a reader sees now, all of it durable. Cheap.
    #[must_use]
    pub fn fork(&self, seed: u64) -> SimStorage {
        let state = self.state();
        SimStorage::after(state.image.clone(), &state, seed)
    }

    /// A storage of the same kind as `before` with this content.
    fn after(image: image::Image, before: &State, seed: u64) -> SimStorage {
        let mut state = State::with_image(image, seed);
        (state.limits, state.kind) = (before.limits, before.kind);
        state.refuses_holes = before.refuses_holes;
        SimStorage(Arc::new(Mutex::new(state)))
    }

    /// Reads what a reader sees now, without rules, log or ring. Returns the bytes there are: fewer
    /// at the end.
    pub fn peek(&self, offset: u64, bytes: &mut [u8]) -> usize {
        let len = bytes.len() as u64;
        self.state().image.visit(offset, len, |at, piece| {
            bytes[at..at + piece.len()].copy_from_slice(piece);
        })
    }

    /// Length in bytes as a reader sees it now.
    pub fn len(&self) -> u64 {
        self.state().image.len()
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Cuts the power: this storage fails every operation with `EIO` from now on (waiting ones
    /// too), and the one returned has what the medium kept (see [`SimStorage::crash_image`]).
    pub fn power_cut(&self, seed: u64) -> SimStorage {
        let mut state = self.state();
        let kept = power::crash_image(&state, seed);
        state.power_off();
        SimStorage::after(kept, &state, seed)
    }
}
