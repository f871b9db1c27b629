//! State and counters of each queue, as the module reports them.
//!
//! Promises: a state or counter that this program does not know is no error.

use crate::kernel::uapi::{self, StatsWords};

/// State of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// It is not started.
    #[default]
    Idle,
    /// Its ring is served.
    Running,
    /// The ring violates the specification, or its memory is lost: no request is taken until the
    /// queue is stopped and started again.
    Broken,
    /// Its stop was interrupted.
    Draining,
    /// A state that this program does not know.
    Unknown,
}

/// Counters of a queue since the device was opened; starts and stops do not reset them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
#[non_exhaustive]
pub struct Stats {
    pub state: State,
    /// Requests that were taken and not answered.
    pub in_flight: u32,
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
    pub discards: u64,
    pub write_zeroes: u64,
    pub get_ids: u64,
    pub read_bytes: u64,
    pub write_bytes: u64,
    /// Answered with an I/O error.
    pub errors: u64,
    /// Answered with "not supported".
    pub unsupported: u64,
    /// Number of times that the worker read the ring.
    pub rounds: u64,
    /// Updates of the used index, each with one decision about a call.
    pub batches: u64,
    /// Reads and writes that were copied because the guest's buffers are misaligned.
    pub bounced: u64,
    /// Number of copies that had to wait for memory.
    pub bounce_waits: u64,
    /// Reads and writes that went as a bio.
    pub bios: u64,
    /// Reads and writes that went as a kiocb.
    pub kiocbs: u64,
    /// Number of times that the ring had more requests than may be in flight.
    pub starved: u64,
    /// Requests that were completed after the death of their worker.
    pub orphans: u64,
    /// Number of times that the ring became broken.
    pub broken: u64,
}

impl Stats {
    pub(crate) fn of(words: &StatsWords) -> Stats {
        Stats {
            state: match words.state {
                uapi::RUNNING => State::Running,
                uapi::BROKEN => State::Broken,
                uapi::DRAINING => State::Draining,
                uapi::IDLE => State::Idle,
                _ => State::Unknown,
            },
            in_flight: words.in_flight,
            reads: words.reads,
            writes: words.writes,
            flushes: words.flushes,
            discards: words.discards,
            write_zeroes: words.write_zeroes,
            get_ids: words.get_ids,
            read_bytes: words.read_bytes,
            write_bytes: words.write_bytes,
            errors: words.errors,
            unsupported: words.unsupported,
            rounds: words.rounds,
            batches: words.batches,
            bounced: words.bounced,
            bounce_waits: words.bounce_waits,
            bios: words.bios,
            kiocbs: words.kiocbs,
            starved: words.starved,
            orphans: words.orphans,
            broken: words.broken,
        }
    }
}
