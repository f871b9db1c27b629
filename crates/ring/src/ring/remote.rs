//! Cross-thread messages to a ring thread: wake-ups and closures.
//!
//! Promises: a message from another thread costs a lock and an eventfd (control path only); a ring
//! thread that wakes its own tasks through a `Waker` takes neither.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::mailbox::Mailbox;
use crate::{Errno, Ring};

/// Work for a ring thread.
pub(crate) type Closure = Box<dyn FnOnce(&Ring) + Send>;

/// Tasks that a thread may wake itself in one turn before the list grows.
const WOKEN_ROOM: usize = 1024;

enum Message {
    Wake(u32),
    Run(Closure),
}

thread_local! {
    /// Tasks woken by their own thread: (address of the ring's `Shared`, task).
    static WOKEN_HERE: RefCell<Vec<(usize, u32)>> = const { RefCell::new(Vec::new()) };
}

/// A number that differs between living threads, cheaper than a thread id.
fn thread_mark() -> usize {
    WOKEN_HERE.with(|woken| std::ptr::from_ref(woken) as usize)
}

/// The part of a ring that other threads may touch.
pub(crate) struct Shared {
    messages: Mailbox<Message>,
    event: OwnedFd,
    /// [`thread_mark`] of the ring's thread.
    owner: usize,
}

impl Shared {
    pub(crate) fn new() -> Result<Shared, Errno> {
        Ok(Shared {
            messages: Mailbox::default(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            owner: thread_mark(),
        })
    }

    /// Makes room on this thread for tasks that it wakes itself, so that waking does not allocate.
    pub(crate) fn reserve_local() {
        WOKEN_HERE.with_borrow_mut(|woken| woken.reserve(WOKEN_ROOM));
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Wakes a task, from any thread.
    pub(crate) fn wake(&self, task: u32) {
        if thread_mark() == self.owner {
            WOKEN_HERE.with_borrow_mut(|woken| woken.push((self.address(), task)));
        } else {
            self.send(Message::Wake(task));
        }
    }

    fn send(&self, message: Message) {
        if self.messages.put(message) {
            // The counter cannot overflow: it is read before 2^64 writes.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// The descriptor that becomes readable when a message arrives.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Empties the eventfd and delivers the messages of other threads. Ring thread only.
    pub(crate) fn receive(&self, ring: &Ring, mut wake: impl FnMut(u32)) {
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
        for message in self.messages.take() {
            match message {
                Message::Wake(task) => wake(task),
                Message::Run(closure) => closure(ring),
            }
        }
    }

    /// Delivers the wake-ups of this thread itself.
    pub(crate) fn receive_local(&self, mut wake: impl FnMut(u32)) {
        WOKEN_HERE.with_borrow_mut(|woken| {
            woken.retain(|&(address, task)| {
                let mine = address == self.address();
                if mine {
                    wake(task);
                }
                !mine
            });
        });
    }
}

/// Sends closures to a ring thread from any thread.
#[derive(Clone)]
pub struct Remote(pub(crate) Arc<Shared>);

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Remote")
    }
}

impl Remote {
    /// Runs `closure` on the ring's thread, soon; never when that thread ended before. Any thread,
    /// also the ring's own. The closure may spawn tasks and must not block.
    pub fn run(&self, closure: impl FnOnce(&Ring) + Send + 'static) {
        self.0.send(Message::Run(Box::new(closure)));
    }
}
