//! Helper threads for work that would block a ring thread.
//!
//! Promises: work begins in the order in which it was given; a panic of the work reaches the
//! waiting task only.
//!
//! One pool for the whole process, started when it is first needed. The result comes back through
//! the waker of the task, i.e. through the ring's eventfd.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::handoff::handoff;
use crate::placement::{pin_to_cpus, process_cpus};

/// Fewest helper threads: one may block in a system call while the other decompresses. More than
/// there are CPUs cost a fifth of the speed of compressed random reads (2 CPUs, 4 threads).
const THREADS_MIN: usize = 2;
/// Most helper threads; otherwise there is one for each CPU.
const THREADS_MAX: usize = 64;

type Work = Box<dyn FnOnce() + Send>;

/// State that the helper threads share.
struct Pool {
    queue: Mutex<Queue>,
    /// There is work, or a thread that was woken for it is on its way.
    filled: Condvar,
}

struct Queue {
    work: VecDeque<Work>,
    /// Threads that sleep and were not woken yet: waking one costs a system call.
    idle: usize,
    /// Threads that were started.
    threads: usize,
}

/// CPUs that the process may use at once, by its affinity and by the quota of its cgroup.
static CPUS: LazyLock<usize> = LazyLock::new(|| {
    let counted = on_all_cpus("cpus", || {
        std::thread::available_parallelism().map_or(THREADS_MIN, usize::from)
    });
    counted.unwrap_or(THREADS_MIN)
});

/// Counts the CPUs now: in a sandbox the files of a cgroup cannot be read later. Blocks for some
/// reads of small files.
pub(crate) fn count_cpus() {
    LazyLock::force(&CPUS);
}

/// Runs `work` on a thread that may use all CPUs of the process: the calling thread may be bound to
/// one. `None`: no thread can be started.
fn on_all_cpus<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(|| {
        if let Err(errno) = pin_to_cpus(&process_cpus()) {
            tracing::debug!("helper threads stay on the CPUs of one queue: {errno}");
        }
        work()
    });
    thread.ok()?.join().ok()
}

static POOL: LazyLock<&'static Pool> = LazyLock::new(|| {
    let queue = Queue { work: VecDeque::new(), idle: 0, threads: 0 };
    // For as long as the process lives, like its threads.
    let pool: &'static Pool =
        Box::leak(Box::new(Pool { queue: Mutex::new(queue), filled: Condvar::new() }));
    // Threads inherit the CPUs of the thread that starts them, and that one may be bound to one
    // CPU.
    if on_all_cpus("helpers", || pool.start()).is_none() {
        pool.start();
    }
    pool
});

impl Pool {
    /// Nothing under this lock is left half done by a panic.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the threads, on the CPUs of the calling one.
    fn start(&'static self) {
        for number in 0..CPUS.clamp(THREADS_MIN, THREADS_MAX) {
            let name = format!("helper-{number}");
            match std::thread::Builder::new().name(name).spawn(|| self.serve()) {
                Ok(_) => self.queue().threads += 1,
                Err(error) => tracing::warn!("helper thread {number} not started: {error}"),
            }
        }
    }

    fn serve(&self) {
        let mut queue = self.queue();
        loop {
            let Some(work) = queue.work.pop_front() else {
                queue.idle += 1;
                queue = self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(queue);
            // A panic of the work is its own: the waiting task sees it, this thread goes on.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            queue = self.queue();
        }
    }

    fn give(&self, work: Work) {
        let wake = {
            let mut queue = self.queue();
            if queue.threads == 0 {
                drop(queue);
                // No helper thread could be started (a limit on processes): the work runs here,
                // slower.
                return work();
            }
            queue.work.push_back(work);
            let wake = queue.idle > 0;
            queue.idle -= usize::from(wake);
            wake
        };
        if wake {
            self.filled.notify_one();
        }
    }
}

/// * `here`: on this thread, at once.
pub(crate) fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
    here: bool,
) -> impl Future<Output = T> {
    let (finish, value) = handoff();
    if here {
        finish.done(work());
    } else {
        POOL.give(Box::new(move || finish.done(work())));
    }
    value
}
