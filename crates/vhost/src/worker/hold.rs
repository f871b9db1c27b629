//! The disk, held as it is for somebody who moves its bytes past us.

use std::cell::RefCell;
use std::rc::Rc;

use ringdisk_disk::{Error, Plain};
use ringdisk_ring::Parker;

use super::Worker;

/// A hold, between the task that has it and who asked for it.
#[derive(Default)]
struct Hold {
    answer: RefCell<Option<Result<Plain, Error>>>,
    answered: Parker,
    released: Parker,
}

/// The hold of a thread, if it has one.
#[derive(Default)]
pub(super) struct Held(RefCell<Option<Rc<Hold>>>);

impl Worker {
    /// Holds the disk until [`Worker::release_disk`]; a task of this thread counts as a request in flight until then.
    ///
    /// Errors: as [`ringdisk_disk::Disk::hold_plain`].
    pub(crate) async fn hold_disk(self: Rc<Worker>) -> Result<Plain, Error> {
        self.release_disk();
        let hold = Rc::new(Hold::default());
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
        if matches!(answer, Some(Ok(_))) {
            *self.held.0.borrow_mut() = Some(hold);
        }
        answer.expect("an answer comes before the permit")
    }

    /// Lets changes of the disk go on. Does nothing when it is not held here.
    pub(crate) fn release_disk(&self) {
        if let Some(hold) = self.held.0.borrow_mut().take() {
            hold.released.unpark(&self.ring);
        }
    }
}
