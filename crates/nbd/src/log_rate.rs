//! Lines of the log that clients cause.
//!
//! Promises: however many clients come and go, a thread writes [`LINES`] of them in [`WINDOW`] at
//! most, and one more that says how many were left out. Queue thread only; no part of a request.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use ringdisk_ring::Ring;
use tracing::Level;

/// Lines in a window.
const LINES: u32 = 10;
/// A window begins with its first line.
const WINDOW: Duration = Duration::from_secs(10);

/// Why clients wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Crowd {
    /// As many use the export as may.
    Served,
    /// Handshakes fill the rest.
    Handshakes,
    /// Those that use the export have all descriptors.
    Files,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Rarely {
    begun: Cell<Option<Instant>>,
    lines: Cell<u32>,
    left_out: Cell<u64>,
    /// When it was last said that clients wait, for each reason ([`Crowd`]).
    crowded: [Cell<Option<Instant>>; 3],
}

impl Rarely {
    /// A warning.
    pub(crate) fn warn(self: &Rc<Rarely>, ring: &Ring, line: impl FnOnce() -> String) {
        if tracing::enabled!(Level::WARN) && self.allows(ring) {
            tracing::warn!("{}", line());
        }
    }

    /// What happens every day.
    pub(crate) fn info(self: &Rc<Rarely>, ring: &Ring, line: impl FnOnce() -> String) {
        if tracing::enabled!(Level::INFO) && self.allows(ring) {
            tracing::info!("{}", line());
        }
    }

    /// A warning that clients wait, once in a window for each reason.
    pub(crate) fn crowded(&self, why: Crowd, line: impl FnOnce() -> String) {
        let (now, last) = (Instant::now(), &self.crowded[why as usize]);
        if last.get().is_none_or(|last| now.duration_since(last) >= WINDOW) {
            last.set(Some(now));
            tracing::warn!("{}", line());
        }
    }

    fn allows(self: &Rc<Rarely>, ring: &Ring) -> bool {
        let now = Instant::now();
        if self.begun.get().is_none_or(|begun| now.duration_since(begun) >= WINDOW) {
            self.begun.set(Some(now));
            self.lines.set(0);
        }
        if self.lines.get() < LINES {
            self.lines.set(self.lines.get() + 1);
            return true;
        }
        if self.left_out.replace(self.left_out.get() + 1) == 0 {
            let (rarely, of_ring) = (Rc::clone(self), ring.clone());
            ring.spawn(async move {
                of_ring.sleep(WINDOW).await;
                let count = rarely.left_out.take();
                tracing::warn!("{count} more lines about clients of NBD were left out");
            });
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use ringdisk_ring::{Config, Runtime};

    use super::*;

    #[test]
    fn ten_lines_of_a_thousand_are_written() {
        let runtime = Runtime::new(Config::default()).expect("a ring");
        let (rarely, ring) = (Rc::new(Rarely::default()), runtime.ring().clone());
        let written = RefCell::new(0);
        for _ in 0..1000 {
            if rarely.allows(&ring) {
                *written.borrow_mut() += 1;
            }
        }
        assert_eq!((written.take(), rarely.left_out.get()), (10, 990));
    }
}
