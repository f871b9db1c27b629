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

#[cfg(test)]
mod tests {
    use ringdisk_ring::{Config, Errno, Runtime};

    use super::{AGAIN_MAX, Retry, is_passing};

    #[test]
    fn what_passes_is_tried_again_and_what_does_not_is_told() {
        let mut runtime = Runtime::new(Config::default()).expect("a ring");
        let ring = runtime.ring().clone();
        runtime.block_on(async {
            let mut retry = Retry::default();
            for errno in [Errno::AGAIN, Errno::INTR, Errno::AGAIN, Errno::AGAIN] {
                assert!(is_passing(errno) && retry.after(&ring, errno).await, "{errno}");
            }
            assert_eq!(retry.again, 3);
            for errno in [Errno::IO, Errno::NOSPC, Errno::INVAL, Errno::CANCELED] {
                assert!(!is_passing(errno) && !retry.after(&ring, errno).await, "{errno}");
            }
            // It does not go on for ever.
            let mut last = Retry { again: AGAIN_MAX - 1 };
            assert!(last.after(&ring, Errno::AGAIN).await);
            assert!(!last.after(&ring, Errno::AGAIN).await);
        });
    }
}
