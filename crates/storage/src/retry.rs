//! Which failures of an operation are none: it is to be tried again.
//!
//! io_uring completes an operation with `EAGAIN` where it could not wait for something that is short for the moment
//! (memory, a request of the block layer), and with `EINTR` where a signal or the end of a worker came between. Clients
//! of a file expect neither. Ring threads.

use std::time::Duration;

use ringdisk_ring::{Errno, Ring};

/// First and longest pause after an `EAGAIN`.
const PAUSE_MIN: Duration = Duration::from_micros(100);
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// Times that an `EAGAIN` is tried again: with these pauses about 10 s. What lasts longer is passed on.
const AGAIN_MAX: u32 = 110;

/// Whether an error says nothing of the operation, only of the moment.
pub(crate) fn is_passing(errno: Errno) -> bool {
    matches!(errno, Errno::INTR | Errno::AGAIN)
}

/// Attempts at one operation.
#[derive(Debug, Default)]
pub(crate) struct Retry {
    again: u32,
}

impl Retry {
    /// Whether to try again after this error; has waited where that is of use.
    pub(crate) async fn after(&mut self, ring: &Ring, errno: Errno) -> bool {
        match errno {
            Errno::INTR => true,
            Errno::AGAIN if self.again < AGAIN_MAX => {
                let pause = PAUSE_MIN * 2u32.saturating_pow(self.again.min(16));
                self.again += 1;
                ring.sleep(pause.min(PAUSE_MAX)).await;
                true
            }
            _ => false,
        }
    }
}
