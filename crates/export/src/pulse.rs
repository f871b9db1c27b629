//! Whether a queue thread answers, for the thread that reports to a watchdog.
//!
//! Promises: asking never waits. A thread that has ended owes no answer: its export tells of that.
//! One that sleeps in the kernel and cannot be interrupted, as it may while a storage does not
//! answer, is not taken for one that hangs; nothing could end it either. Any thread but queue
//! threads.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringdisk_ring::Remote;

use crate::stats::QueueView;

/// What is read of `/proc/PID/task/TID/stat`, bytes: number, name and state stand at its beginning.
const STAT_BYTES: usize = 64;

/// Asks one queue thread whether it answers. Made before the process is confined: it opens a file.
pub struct Pulse {
    remote: Remote,
    /// How the thread is, as the kernel sees it. `None`: that cannot be seen.
    stat: Option<File>,
    /// No answer is owed.
    has_answered: Arc<AtomicBool>,
}

/// A question. Dropped, it is answered.
struct Question(Arc<AtomicBool>);

impl Drop for Question {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Pulse {
    /// Of the thread of this process that a view is of.
    #[must_use]
    pub fn of(view: &QueueView) -> Pulse {
        Pulse::new(view.remote.clone(), view.cells.thread_id.get())
    }

    fn new(remote: Remote, thread: u64) -> Pulse {
        let stat = File::open(format!("/proc/self/task/{thread}/stat")).ok();
        Pulse { remote, stat, has_answered: Arc::new(AtomicBool::new(true)) }
    }

    /// Asks, unless an answer is still owed.
    pub fn ask(&self) {
        if self.has_answered.swap(false, Ordering::AcqRel) {
            let question = Question(Arc::clone(&self.has_answered));
            self.remote.run(move |_| drop(question));
        }
    }

    /// Whether it has answered what it was asked last, waits for the kernel, or has ended.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.has_answered.load(Ordering::Acquire) || self.need_not_answer()
    }

    /// Whether it has ended, or sleeps and cannot be interrupted.
    fn need_not_answer(&self) -> bool {
        let mut bytes = [0; STAT_BYTES];
        match self.stat.as_ref().map(|stat| stat.read_at(&mut bytes, 0)) {
            Some(Ok(len)) => matches!(state(&bytes[..len]), Some(b'D' | b'X' | b'Z')),
            // There is no such thread (ESRCH); another one may have its number.
            Some(Err(_)) => true,
            None => false,
        }
    }
}

impl fmt::Debug for Pulse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pulse").field("has_answered", &self.has_answered).finish_non_exhaustive()
    }
}

/// The letter of the state in the text of `/proc/PID/stat`: it follows the name, in which anything
/// may stand, in parentheses.
fn state(stat: &[u8]) -> Option<u8> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(end + 2).copied()
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::mpsc::channel;
    use std::task::Poll;
    use std::time::{Duration, Instant};

    use ringdisk_ring::{Config, Runtime};
    use rustix::thread::gettid;

    use super::*;

    /// A thread with a ring that runs until the flag is set, and its number.
    fn started(stop: &Arc<AtomicBool>) -> (std::thread::JoinHandle<()>, Remote, u64) {
        let (sender, told) = channel();
        let stop = Arc::clone(stop);
        let thread = std::thread::spawn(move || {
            let mut runtime = Runtime::new(Config::default()).expect("a ring");
            let number = u64::from(gettid().as_raw_nonzero().get().unsigned_abs());
            sender.send((runtime.ring().remote(), number)).expect("the test");
            runtime.block_on(poll_fn(|_| match stop.load(Ordering::Acquire) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }));
        });
        let (remote, number) = told.recv().expect("a ring");
        (thread, remote, number)
    }

    fn until(what: impl Fn() -> bool) -> bool {
        let begun = Instant::now();
        while !what() && begun.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(1));
        }
        what()
    }

    #[test]
    fn a_thread_that_is_idle_answers_and_one_that_does_not_come_back_does_not() {
        let stop = Arc::new(AtomicBool::new(false));
        let (thread, remote, number) = started(&stop);
        let pulse = Pulse::new(remote.clone(), number);
        assert!(pulse.is_well(), "nothing was asked");
        for _ in 0..3 {
            pulse.ask();
            assert!(until(|| pulse.is_well()));
        }
        // It waits for what does not come, where a signal would wake it.
        let (go_on, gate) = channel::<()>();
        let (tell, hangs) = channel();
        remote.run(move |_| {
            tell.send(()).expect("the test");
            let _ = gate.recv();
        });
        hangs.recv().expect("it hangs");
        pulse.ask();
        pulse.ask();
        assert!(!pulse.is_well());
        drop(go_on);
        assert!(until(|| pulse.is_well()));
        // A thread that has ended owes nothing.
        stop.store(true, Ordering::Release);
        remote.run(|_| {});
        thread.join().expect("no panic");
        pulse.ask();
        assert!(pulse.is_well());
    }

    #[test]
    fn the_state_stands_behind_the_name_whatever_that_is() {
        assert_eq!(state(b"12 (vq 0) D 1 1"), Some(b'D'));
        assert_eq!(state(b"12 (a) D (b)) S 1 1"), Some(b'S'));
        assert_eq!((state(b"12 (vq"), state(b"12 (vq)"), state(b"")), (None, None, None));
    }
}
