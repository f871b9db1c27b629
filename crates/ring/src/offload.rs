//! Helper threads for work that would block a ring thread.
//!
//! A small pool for the whole process, started when it is first needed. The result comes back
//! through the waker of the task, i.e. through the ring's eventfd.

use std::future::Future;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use crate::handoff::handoff;

/// Helper threads: enough to keep two CPUs busy with decompression while some block in a system
/// call.
const THREADS: usize = 4;

type Work = Box<dyn FnOnce() + Send>;

static POOL: LazyLock<Sender<Work>> = LazyLock::new(|| {
    let (sender, receiver) = channel::<Work>();
    let receiver = Arc::new(Mutex::new(receiver));
    for number in 0..THREADS {
        let receiver = Arc::clone(&receiver);
        let spawned = std::thread::Builder::new()
            .name(format!("helper-{number}"))
            .spawn(move || serve(&receiver));
        if let Err(error) = spawned {
            tracing::warn!("helper thread {number} not started: {error}");
        }
    }
    sender
});

fn serve(receiver: &Mutex<Receiver<Work>>) {
    loop {
        let work = receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(work) = work else { return };
        // A panic of the work is its own: the waiting task sees it, this thread goes on.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    }
}

pub(crate) fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = T> {
    let (finish, value) = handoff();
    if let Err(unsent) = POOL.send(Box::new(move || finish.done(work()))) {
        // No helper thread could be started (a limit on processes): slower is better than not at all.
        (unsent.0)();
    }
    value
}
