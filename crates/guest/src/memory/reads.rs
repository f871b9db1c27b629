//! Records reads of memory that a guest can change, for tests.
//!
//! Promises: compiled for tests and with the feature `note-reads` only. Checked bytes must be the
//! used bytes: each byte of a descriptor, a table or a header is read once, into private memory.
//! Data of requests never come here: the kernel moves them, or they are copied as buffers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A test records reads.
static IS_ON: AtomicBool = AtomicBool::new(false);
/// The recorded threads, by the beginning of their names, and their reads: address and bytes.
static NOTED: Mutex<(String, Vec<(u64, usize)>)> = Mutex::new((String::new(), Vec::new()));
/// One test records at a time.
static TURN: Mutex<()> = Mutex::new(());

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called at every read.
#[inline]
pub(super) fn note(guest_addr: u64, len: usize) {
    if IS_ON.load(Ordering::Relaxed) {
        keep(guest_addr, len);
    }
}

#[cold]
fn keep(guest_addr: u64, len: usize) {
    let this = std::thread::current();
    let mut noted = locked(&NOTED);
    if this.name().is_some_and(|name| name.starts_with(&noted.0)) {
        noted.1.push((guest_addr, len));
    }
}

/// Reads are recorded until this is dropped.
#[derive(Debug)]
pub struct Reads {
    _turn: MutexGuard<'static, ()>,
}

impl Reads {
    /// Records reads by threads whose names begin so.
    #[must_use]
    pub fn of_threads(name: &str) -> Reads {
        let turn = locked(&TURN);
        *locked(&NOTED) = (name.to_owned(), Vec::new());
        IS_ON.store(true, Ordering::SeqCst);
        Reads { _turn: turn }
    }

    /// How often each byte was read since the last call, by its address of the guest. (An inflight
    /// area begins at 0: guests have nothing there in tests.)
    #[must_use]
    pub fn take(&self) -> BTreeMap<u64, u32> {
        let mut counts = BTreeMap::new();
        for (start, len) in std::mem::take(&mut locked(&NOTED).1) {
            for at in start..start + len as u64 {
                *counts.entry(at).or_default() += 1;
            }
        }
        counts
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        IS_ON.store(false, Ordering::SeqCst);
    }
}
