//! The log of I/O errors that clients get: the first of each kind (operation and errno) with where
//! and why, then counts.
//!
//! Promises: costs nothing while nothing fails. [`ClientErrors::record`], which queue threads call,
//! allocates nothing and waits for nobody: it takes a lock only when that is free (else the error
//! is counted as one whose kind is not known), and a thread of its own does the writing, so a
//! standard error that nobody reads holds up no queue. Of each kind at most one line in [`WINDOW`]
//! is written.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use ringdisk_ring::Errno;
use ringdisk_storage::Failure;

/// Kinds that are kept apart: six operations with the errno that storage gives. More are counted
/// together.
const KINDS_MAX: usize = 32;
/// How often counts are told. A kind that did not come for so long is told again like a new one.
const WINDOW: Duration = Duration::from_secs(10);
/// How long the end waits for the last lines: standard error may be a pipe that nobody reads.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// One kind of error.
#[derive(Clone, Copy, Debug)]
struct Kind {
    operation: &'static str,
    errno: Errno,
    /// Where the first one was, bytes.
    offset: u64,
    len: u64,
    why: Option<Failure>,
    is_told: bool,
    /// Further ones since the last line.
    more: u64,
}

/// Shared with the thread that writes.
struct Shared {
    kinds: Mutex<[Option<Kind>; KINDS_MAX]>,
    /// Errors that could not be sorted.
    others: AtomicU64,
    /// The thread has something to look at.
    is_due: AtomicBool,
    is_ending: AtomicBool,
    window: Duration,
}

/// Writes errors of one disk's clients down; dropping it writes what is left.
pub struct ClientErrors {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended; the lock is for the compiler, only the end looks.
    ended: Mutex<Receiver<()>>,
}

impl fmt::Debug for ClientErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientErrors").finish_non_exhaustive()
    }
}

/// Whether an error says that something failed, and not that it cannot be done here or was not
/// allowed.
fn is_failure(errno: Errno) -> bool {
    !matches!(
        errno,
        Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM | Errno::ACCESS | Errno::ROFS | Errno::FBIG
    )
}

impl ClientErrors {
    /// Starts the thread; without one nothing is written.
    ///
    /// * `name`: of the disk, in front of each line.
    #[must_use]
    pub fn start(name: &str) -> ClientErrors {
        let name = name.to_owned();
        ClientErrors::start_with(WINDOW, move |text| tracing::error!("{name}: {text}"))
    }

    fn start_with(window: Duration, write: impl Fn(&str) + Send + 'static) -> ClientErrors {
        let shared = Arc::new(Shared {
            kinds: Mutex::new([None; KINDS_MAX]),
            others: AtomicU64::new(0),
            is_due: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            window,
        });
        let (end, ended): (Sender<()>, _) = channel();
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(String::from("errors"))
            .stack_size(128 << 10)
            .spawn(move || {
                theirs.run(&write);
                drop(end);
            })
            .ok();
        ClientErrors { shared, thread, ended: Mutex::new(ended) }
    }

    /// A client gets an error. Queue threads.
    ///
    /// * `operation`: such as "a read".
    /// * `offset`, `len`: bytes; 0 where they mean nothing.
    #[cold]
    pub fn record(&self, operation: &'static str, offset: u64, len: u64, errno: Errno) {
        if !is_failure(errno) {
            return;
        }
        let why = Failure::take(errno);
        let kind = Kind { operation, errno, offset, len, why, is_told: false, more: 0 };
        let is_sorted = match self.shared.kinds.try_lock() {
            Ok(mut kinds) => sort(&mut kinds, kind),
            Err(TryLockError::Poisoned(kinds)) => sort(&mut kinds.into_inner(), kind),
            Err(TryLockError::WouldBlock) => false,
        };
        if !is_sorted {
            self.shared.others.fetch_add(1, Ordering::Relaxed);
        }
        if !self.shared.is_due.swap(true, Ordering::AcqRel) {
            self.thread.as_ref().map(JoinHandle::thread).map(Thread::unpark);
        }
    }
}

/// Adds an error to those of its kind. Returns whether there is room for the kind.
fn sort(kinds: &mut [Option<Kind>; KINDS_MAX], new: Kind) -> bool {
    for place in kinds {
        match place {
            Some(kind) if (kind.operation, kind.errno) == (new.operation, new.errno) => {
                kind.more += 1;
                return true;
            }
            Some(_) => {}
            None => {
                *place = Some(new);
                return true;
            }
        }
    }
    false
}

impl Drop for ClientErrors {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else { return };
        thread.thread().unpark();
        // Nothing is ever sent: this waits for the other end to go.
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let ended = ended.recv_timeout(LAST_WORDS);
        if ended == Err(std::sync::mpsc::RecvTimeoutError::Disconnected) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, [Option<Kind>; KINDS_MAX]> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, write: &dyn Fn(&str)) {
        let mut window_ends = None;
        loop {
            let is_ending = self.is_ending.load(Ordering::Acquire);
            if self.is_due.swap(false, Ordering::AcqRel) {
                self.tell_new(write);
                window_ends.get_or_insert_with(|| Instant::now() + self.window);
            }
            if is_ending || window_ends.is_some_and(|end| Instant::now() >= end) {
                let is_quiet = self.tell_more(write);
                window_ends = (!is_quiet).then(|| Instant::now() + self.window);
            }
            if is_ending {
                return;
            }
            match window_ends {
                Some(end) => {
                    std::thread::park_timeout(end.saturating_duration_since(Instant::now()));
                }
                None => std::thread::park(),
            }
        }
    }

    /// Tells of kinds that are new.
    fn tell_new(&self, write: &dyn Fn(&str)) {
        for place in 0..KINDS_MAX {
            let new = match &mut self.lock()[place] {
                Some(kind) if !kind.is_told => {
                    kind.is_told = true;
                    *kind
                }
                _ => continue,
            };
            // Not under the lock: this may wait for whoever reads.
            let Kind { operation, errno, offset, len, why, .. } = new;
            let at = if (offset, len) == (0, 0) {
                String::new()
            } else {
                format!(" of {len} bytes at {offset}")
            };
            let why = why.map_or_else(String::new, |why| format!(" ({why})"));
            write(&format!("{operation}{at} failed for a client: {errno}{why}"));
        }
    }

    /// Tells how many more there were. Returns whether there were none; the kinds are new again
    /// then.
    fn tell_more(&self, write: &dyn Fn(&str)) -> bool {
        let seconds = self.window.as_secs();
        let mut is_quiet = true;
        for place in 0..KINDS_MAX {
            let more = match &mut self.lock()[place] {
                Some(kind) if kind.more > 0 => {
                    Kind { more: std::mem::take(&mut kind.more), ..*kind }
                }
                kind => {
                    if kind.is_some_and(|kind| kind.is_told) {
                        *kind = None;
                    }
                    continue;
                }
            };
            is_quiet = false;
            let Kind { operation, errno, more, .. } = more;
            write(&format!(
                "{operation} failed for clients {more} more times in the last {seconds} s: {errno}"
            ));
        }
        let others = self.others.swap(0, Ordering::Relaxed);
        if others > 0 {
            is_quiet = false;
            write(&format!(
                "{others} requests of other kinds failed for clients in the last {seconds} s"
            ));
        }
        is_quiet
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Errors are told to a channel.
    fn told(window: Duration) -> (ClientErrors, Receiver<String>) {
        let (say, said) = channel();
        let errors = ClientErrors::start_with(window, move |text| {
            let _ = say.send(text.to_owned());
        });
        (errors, said)
    }

    const LONG: Duration = Duration::from_secs(3600);
    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn the_first_of_each_kind_is_told_at_once_and_the_others_are_counted() {
        let (errors, said) = told(LONG);
        errors.record("a read", 4096, 512, Errno::IO);
        let first = said.recv_timeout(LIMIT).expect("told");
        assert!(first.starts_with("a read of 512 bytes at 4096 failed for a client: "), "{first}");
        errors.record("a flush", 0, 0, Errno::NOSPC);
        let first = said.recv_timeout(LIMIT).expect("told");
        assert!(first.starts_with("a flush failed for a client: "), "{first}");
        for _ in 0..1000 {
            errors.record("a read", 8192, 512, Errno::IO);
        }
        errors.record("a read", 0, 512, Errno::OPNOTSUPP);
        drop(errors);
        // The thread may have had the lock for a moment.
        let rest: Vec<String> = said.iter().collect();
        let counts = rest
            .iter()
            .filter_map(|text| text.split_whitespace().find_map(|word| word.parse::<u64>().ok()));
        assert_eq!(counts.sum::<u64>(), 1000, "{rest:?}");
        assert!(rest.len() <= 2 && rest[0].starts_with("a read failed for clients"), "{rest:?}");
    }

    #[test]
    fn counts_are_told_once_in_a_window_and_a_kind_that_rested_is_new() {
        let (errors, said) = told(Duration::from_millis(50));
        errors.record("a write", 1, 1, Errno::IO);
        assert!(said.recv_timeout(LIMIT).expect("told").contains("at 1 failed for a client"));
        errors.record("a write", 2, 1, Errno::IO);
        let text = said.recv_timeout(LIMIT).expect("told");
        assert!(text.contains("1 more times") || text.contains("at 2 failed"), "{text}");
        let is_forgotten = || errors.shared.lock().iter().all(Option::is_none);
        let begun = Instant::now();
        while !is_forgotten() {
            assert!(begun.elapsed() < LIMIT);
            std::thread::yield_now();
        }
        errors.record("a write", 3, 1, Errno::IO);
        assert!(said.recv_timeout(LIMIT).expect("told").contains("at 3 failed for a client"));
    }

    #[test]
    fn a_log_that_nobody_reads_holds_up_nobody() {
        let (open, gate) = channel::<()>();
        let (say, said) = channel();
        let errors = ClientErrors::start_with(LONG, move |_| {
            let _ = say.send(());
            let _ = gate.recv();
        });
        errors.record("a read", 0, 1, Errno::IO);
        said.recv_timeout(LIMIT).expect("it writes, and waits");
        for _ in 0..10_000 {
            errors.record("a read", 0, 1, Errno::IO);
            errors.record("a write", 0, 1, Errno::NOSPC);
        }
        drop(errors);
        drop(open);
    }

    #[test]
    fn more_kinds_than_there_is_room_for_are_counted_together() {
        let mut kinds = [None; KINDS_MAX];
        let kind = |number: i32| Kind {
            operation: "a read",
            errno: Errno::from_raw_os_error(number),
            offset: 0,
            len: 1,
            why: None,
            is_told: false,
            more: 0,
        };
        let room = (1..100).filter(|number| sort(&mut kinds, kind(*number))).count();
        assert_eq!(room, KINDS_MAX);
    }
}
