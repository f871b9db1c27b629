//! The log of I/O errors that clients get: the first of each kind (operation and errno) with its
//! place and cause, then counts. The same thread tells of faults and limits of the disk
//! ([`crate::notices`]).
//!
//! Promises: costs nothing while nothing fails. [`ClientErrors::record`], which queue threads call,
//! allocates nothing and never waits: it takes the lock only when that is free (else the error
//! is counted without its kind). A separate thread writes the lines, so a standard error that
//! is not read holds up no queue. At most one line of each kind is written in [`WINDOW`].

use ringdisk_qcow2::Bytes;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use ringdisk_ring::Errno;
use ringdisk_storage::Failure;

use crate::Disk;
use crate::events::Events;
use crate::notices::Notice;

/// Most kinds that are counted separately: six operations with the usual errno values of storage.
/// Further kinds are counted together.
const KINDS_MAX: usize = 32;
/// How often counts are logged. A kind that did not occur for so long is new again.
const WINDOW: Duration = Duration::from_secs(10);
/// How often limits are looked at, where there are any.
const LIMITS_INTERVAL: Duration = Duration::from_secs(1);
/// How long a drop waits for the last lines: standard error may be a pipe that is not read.
const FINAL_WAIT: Duration = Duration::from_millis(500);

/// One kind of error.
#[derive(Clone, Copy, Debug)]
struct Kind {
    operation: &'static str,
    errno: Errno,
    /// Offset of the first one, bytes.
    offset: u64,
    len: Bytes,
    why: Option<Failure>,
    is_logged: bool,
    /// Further ones since the last line.
    more: u64,
}

/// Shared with the thread that writes.
struct Shared {
    kinds: Mutex<[Option<Kind>; KINDS_MAX]>,
    /// Errors that were counted without their kind.
    others: AtomicU64,
    /// There are errors that the thread has not handled yet.
    is_due: AtomicBool,
    is_ending: AtomicBool,
    window: Duration,
    /// Name and disk, where that is watched, too.
    disk: OnceLock<(String, Weak<Disk>)>,
}

/// Logs the errors of one disk's clients; dropping it writes the remaining lines.
pub struct ClientErrors {
    name: String,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended. Only the drop reads it; the lock makes the type
    /// `Sync`.
    ended: Mutex<Receiver<()>>,
}

impl fmt::Debug for ClientErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientErrors").finish_non_exhaustive()
    }
}

/// Whether an error means a failure, not an operation that is unsupported or forbidden here.
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
    /// * `events`: get each line, too.
    #[must_use]
    pub fn start(name: &str, events: Arc<Events>) -> ClientErrors {
        let shown = name.to_owned();
        let mut errors = ClientErrors::start_with(WINDOW, move |errno, text| {
            let is_full = matches!(errno, Some(Errno::NOSPC | Errno::DQUOT));
            let event = if is_full { "disk-full" } else { "io-error" };
            tracing::error!(disk = shown, event, "{shown}: {text}");
            events.emit(event, text);
        });
        name.clone_into(&mut errors.name);
        errors
    }

    /// Tells of faults and limits of the disk, too; once.
    pub fn watch(&self, disk: &Disk) {
        let watched = (self.name.clone(), disk.weak());
        if let (Ok(()), Some(thread)) = (self.shared.disk.set(watched), &self.thread) {
            disk.notices.add(thread.thread());
            thread.thread().unpark();
        }
    }

    /// * `write`: gets each line, with the error where it is about one.
    fn start_with(
        window: Duration,
        write: impl Fn(Option<Errno>, &str) + Send + 'static,
    ) -> ClientErrors {
        let shared = Arc::new(Shared {
            kinds: Mutex::new([None; KINDS_MAX]),
            others: AtomicU64::new(0),
            is_due: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            window,
            disk: OnceLock::new(),
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
        ClientErrors { name: String::new(), shared, thread, ended: Mutex::new(ended) }
    }

    /// Records an error that a client gets. Called by queue threads.
    ///
    /// * `operation`: such as "a read".
    /// * `offset`, `len`: bytes; both 0 for an operation without a range.
    #[cold]
    pub fn record(&self, operation: &'static str, offset: u64, len: Bytes, errno: Errno) {
        if !is_failure(errno) {
            return;
        }
        let why = Failure::take(errno);
        let kind = Kind { operation, errno, offset, len, why, is_logged: false, more: 0 };
        let is_counted = match self.shared.kinds.try_lock() {
            Ok(mut kinds) => count(&mut kinds, kind),
            Err(TryLockError::Poisoned(kinds)) => count(&mut kinds.into_inner(), kind),
            Err(TryLockError::WouldBlock) => false,
        };
        if !is_counted {
            self.shared.others.fetch_add(1, Ordering::Relaxed);
        }
        if !self.shared.is_due.swap(true, Ordering::AcqRel) {
            self.thread.as_ref().map(JoinHandle::thread).map(Thread::unpark);
        }
    }
}

/// Counts an error with its kind. Returns false when the table has no room for the kind.
fn count(kinds: &mut [Option<Kind>; KINDS_MAX], new: Kind) -> bool {
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
        if let Some(disk) = self.shared.disk() {
            disk.notices.remove(thread.thread());
        }
        thread.thread().unpark();
        // Nothing is ever sent: this waits until the thread has dropped the other end.
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let ended = ended.recv_timeout(FINAL_WAIT);
        if ended == Err(std::sync::mpsc::RecvTimeoutError::Disconnected) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn disk(&self) -> Option<Arc<Disk>> {
        self.disk.get().and_then(|(_, disk)| disk.upgrade())
    }

    /// Tells what is new of the disk. Gives when to look again.
    fn look(&self) -> Option<Instant> {
        let disk = self.disk()?;
        let name = self.disk.get().map(|(name, _)| name.as_str()).unwrap_or_default();
        let (fault, waits) = (disk.fault(), disk.limit_waits());
        for notice in disk.notices.take(fault, &disk.limits(), waits) {
            match notice {
                // The image has logged it when it was found.
                Notice::Fault(why) => disk.events().emit("fault", why),
                Notice::Limited(limits) => {
                    let (event, text) =
                        ("rate-limited", format!("requests wait for the limits ({limits})"));
                    tracing::info!(disk = name, event, "{name}: {text}");
                    disk.events().emit(event, text);
                }
            }
        }
        (!disk.limits().are_none()).then(|| Instant::now() + LIMITS_INTERVAL)
    }

    fn lock(&self) -> MutexGuard<'_, [Option<Kind>; KINDS_MAX]> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, write: &dyn Fn(Option<Errno>, &str)) {
        let mut window_ends = None;
        loop {
            let is_ending = self.is_ending.load(Ordering::Acquire);
            if self.is_due.swap(false, Ordering::AcqRel) {
                self.log_new(write);
                window_ends.get_or_insert_with(|| Instant::now() + self.window);
            }
            if is_ending || window_ends.is_some_and(|end| Instant::now() >= end) {
                let is_quiet = self.log_counts(write);
                window_ends = (!is_quiet).then(|| Instant::now() + self.window);
            }
            let look_again = self.look();
            if is_ending {
                return;
            }
            match window_ends.into_iter().chain(look_again).min() {
                Some(end) => {
                    std::thread::park_timeout(end.saturating_duration_since(Instant::now()));
                }
                None => std::thread::park(),
            }
        }
    }

    /// Logs the first error of each new kind.
    fn log_new(&self, write: &dyn Fn(Option<Errno>, &str)) {
        for place in 0..KINDS_MAX {
            let new = match &mut self.lock()[place] {
                Some(kind) if !kind.is_logged => {
                    kind.is_logged = true;
                    *kind
                }
                _ => continue,
            };
            // Not under the lock: the write may wait for the reader of standard error.
            let Kind { operation, errno, offset, len, why, .. } = new;
            let at = if (offset, len) == (0, Bytes::ZERO) {
                String::new()
            } else {
                format!(" of {len} bytes at {offset}")
            };
            let why = why.map_or_else(String::new, |why| format!(" ({why})"));
            write(Some(errno), &format!("{operation}{at} failed for a client: {errno}{why}"));
        }
    }

    /// Logs the counts since the last line. Returns whether there were none; a kind without any is
    /// removed, so it is new when it occurs again.
    fn log_counts(&self, write: &dyn Fn(Option<Errno>, &str)) -> bool {
        let seconds = self.window.as_secs();
        let mut is_quiet = true;
        for place in 0..KINDS_MAX {
            let more = match &mut self.lock()[place] {
                Some(kind) if kind.more > 0 => {
                    Kind { more: std::mem::take(&mut kind.more), ..*kind }
                }
                kind => {
                    if kind.is_some_and(|kind| kind.is_logged) {
                        *kind = None;
                    }
                    continue;
                }
            };
            is_quiet = false;
            let Kind { operation, errno, more, .. } = more;
            let text = format!(
                "{operation} failed for clients {more} more times in the last {seconds} s: {errno}"
            );
            write(Some(errno), &text);
        }
        let others = self.others.swap(0, Ordering::Relaxed);
        if others > 0 {
            is_quiet = false;
            let text = format!(
                "{others} requests of other kinds failed for clients in the last {seconds} s"
            );
            write(None, &text);
        }
        is_quiet
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log that writes its lines to a channel.
    fn logged(window: Duration) -> (ClientErrors, Receiver<String>) {
        let (sender, lines) = channel();
        let errors = ClientErrors::start_with(window, move |_, text| {
            let _ = sender.send(text.to_owned());
        });
        (errors, lines)
    }

    const LONG: Duration = Duration::from_secs(3600);
    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn the_first_of_each_kind_is_logged_at_once_and_the_others_are_counted() {
        let (errors, lines) = logged(LONG);
        errors.record("a read", 4096, Bytes(512), Errno::IO);
        let first = lines.recv_timeout(LIMIT).expect("a line");
        assert!(first.starts_with("a read of 512 bytes at 4096 failed for a client: "), "{first}");
        errors.record("a flush", 0, Bytes::ZERO, Errno::NOSPC);
        let first = lines.recv_timeout(LIMIT).expect("a line");
        assert!(first.starts_with("a flush failed for a client: "), "{first}");
        for _ in 0..1000 {
            errors.record("a read", 8192, Bytes(512), Errno::IO);
        }
        errors.record("a read", 0, Bytes(512), Errno::OPNOTSUPP);
        drop(errors);
        // The thread may have had the lock for a moment.
        let rest: Vec<String> = lines.iter().collect();
        let counts = rest
            .iter()
            .filter_map(|text| text.split_whitespace().find_map(|word| word.parse::<u64>().ok()));
        assert_eq!(counts.sum::<u64>(), 1000, "{rest:?}");
        assert!(rest.len() <= 2 && rest[0].starts_with("a read failed for clients"), "{rest:?}");
    }

    #[test]
    fn counts_are_logged_once_in_a_window_and_a_kind_that_paused_is_new() {
        let (errors, lines) = logged(Duration::from_millis(50));
        errors.record("a write", 1, Bytes(1), Errno::IO);
        assert!(lines.recv_timeout(LIMIT).expect("a line").contains("at 1 failed for a client"));
        errors.record("a write", 2, Bytes(1), Errno::IO);
        let text = lines.recv_timeout(LIMIT).expect("a line");
        assert!(text.contains("1 more times") || text.contains("at 2 failed"), "{text}");
        let is_forgotten = || errors.shared.lock().iter().all(Option::is_none);
        let begun = Instant::now();
        while !is_forgotten() {
            assert!(begun.elapsed() < LIMIT);
            std::thread::yield_now();
        }
        errors.record("a write", 3, Bytes(1), Errno::IO);
        assert!(lines.recv_timeout(LIMIT).expect("a line").contains("at 3 failed for a client"));
    }

    #[test]
    fn a_log_that_is_not_read_does_not_hold_up_queues() {
        let (open, gate) = channel::<()>();
        let (sender, lines) = channel();
        let errors = ClientErrors::start_with(LONG, move |_, _| {
            let _ = sender.send(());
            let _ = gate.recv();
        });
        errors.record("a read", 0, Bytes(1), Errno::IO);
        lines.recv_timeout(LIMIT).expect("it writes, and waits");
        for _ in 0..10_000 {
            errors.record("a read", 0, Bytes(1), Errno::IO);
            errors.record("a write", 0, Bytes(1), Errno::NOSPC);
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
            len: Bytes(1),
            why: None,
            is_logged: false,
            more: 0,
        };
        let room = (1..100).filter(|number| count(&mut kinds, kind(*number))).count();
        assert_eq!(room, KINDS_MAX);
    }
}
