//! Freezes the disk's layout while the host kernel reads and writes the image directly (`--accel`).
//!
//! Promises: a thread has one hold at most, asked for or granted, and [`Worker::release_disk`] ends
//! it in either state: one that no thread waits for any more ends at once. Queue thread.

use std::cell::RefCell;
use std::rc::Rc;

use ringdisk_disk::{Error, ErrorKind, Plain};
use ringdisk_ring::Parker;

use super::Worker;

/// A hold, shared by the task that has it and the thread that asked for it.
#[derive(Default)]
struct Hold {
    answer: RefCell<Option<Result<Plain, Error>>>,
    answered: Parker,
    released: Parker,
}

/// The hold of a thread, if it has one, or waits for one.
#[derive(Default)]
pub(super) struct Held(RefCell<Option<Rc<Hold>>>);

impl Worker {
    /// Holds the disk until [`Worker::release_disk`]; a task of this thread counts as a request in
    /// flight until then.
    ///
    /// Errors: as [`ringdisk_disk::Disk::hold_plain`]; `Busy`, too, when it was released before it
    /// was granted.
    pub(crate) async fn hold_disk(self: Rc<Worker>) -> Result<Plain, Error> {
        self.release_disk();
        let hold = Rc::new(Hold::default());
        *self.held.0.borrow_mut() = Some(Rc::clone(&hold));
        let (worker, held) = (Rc::clone(&self), Rc::clone(&hold));
        self.ring.spawn(async move {
            let ring = worker.ring.clone();
            let kept = worker.disk.hold_plain(async |plain| {
                *held.answer.borrow_mut() = Some(Ok(plain));
                held.answered.unpark(&ring);
                held.released.park(&ring).await;
            });
            if let Err(error) = kept.await {
                *held.answer.borrow_mut() = Some(Err(error));
                held.answered.unpark(&ring);
            }
        });
        hold.answered.park(&self.ring).await;
        let answer = hold.answer.borrow_mut().take();
        let is_ours = self.held.0.borrow().as_ref().is_some_and(|held| Rc::ptr_eq(held, &hold));
        let Some(answer) = answer.filter(|_| is_ours) else {
            return Err(Error::new(ErrorKind::Busy, "nobody waits for the disk any more"));
        };
        if answer.is_err() {
            self.release_disk();
        }
        answer
    }

    /// Lets changes of the disk go on. Does nothing when it is not held here.
    pub(crate) fn release_disk(&self) {
        if let Some(hold) = self.held.0.borrow_mut().take() {
            hold.released.unpark(&self.ring);
        }
    }
}

#[cfg(test)]
mod tests;
