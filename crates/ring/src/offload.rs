//! Helper threads for work that would block a ring thread.
//!
//! A small pool for the whole process, started when it is first needed. The result comes back
//! through the waker of the task, i.e. through the ring's eventfd.

use std::future::Future;
use std::pin::Pin;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

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

enum Outcome<T> {
    Running(Option<Waker>),
    Done(T),
    Panicked,
    Taken,
}

struct Offloaded<T>(Arc<Mutex<Outcome<T>>>);

/// Wakes the waiter however the work ends.
struct Finish<T>(Arc<Mutex<Outcome<T>>>);

impl<T> Finish<T> {
    fn set(&self, outcome: Outcome<T>) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *state, outcome);
        drop(state);
        if let Outcome::Running(Some(waker)) = before {
            waker.wake();
        }
    }
}

impl<T> Drop for Finish<T> {
    fn drop(&mut self) {
        let running =
            matches!(*self.0.lock().unwrap_or_else(PoisonError::into_inner), Outcome::Running(_));
        if running {
            self.set(Outcome::Panicked);
        }
    }
}

pub(crate) fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = T> {
    let state = Arc::new(Mutex::new(Outcome::Running(None)));
    let finish = Finish(Arc::clone(&state));
    let sent = POOL.send(Box::new(move || {
        let value = work();
        finish.set(Outcome::Done(value));
    }));
    debug_assert!(sent.is_ok(), "helper threads hold the receiver");
    Offloaded(state)
}

impl<T> Future for Offloaded<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, Outcome::Taken) {
            Outcome::Running(_) => {
                *state = Outcome::Running(Some(cx.waker().clone()));
                Poll::Pending
            }
            Outcome::Done(value) => Poll::Ready(value),
            Outcome::Panicked => panic!("work on a helper thread panicked"),
            Outcome::Taken => panic!("polled after completion"),
        }
    }
}
