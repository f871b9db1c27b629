//! Signals.
//!
//! Promises: SIGTERM, SIGINT and SIGHUP ask for a clean stop, at any time: before the mount is
//! there, while it serves, while it ends. SIGUSR1 prints the counters. One thread takes them; its
//! actions run outside of signal context, so they may lock, allocate and print.
//!
//! A SIGHUP that was ignored when we were started (nohup) stays ignored.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::{fmt, io};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

/// The name that [`Actions::stop`] gets when the helper process that keeps the mount asks for the
/// end at once (SIGUSR2).
pub const AT_ONCE: &str = "a second signal";

/// The phase of the process, which decides what a signal does.
pub enum Phase {
    /// Nothing is mounted yet: a stop calls this function, which ends the process.
    Starting(Box<dyn Fn(&'static str) + Send>),
    /// The mount is being made: the thread remembers a signal.
    Mounting,
    /// Requests are served.
    Serving(Actions),
    /// The end has begun; further signals change nothing.
    Ending,
}

/// The actions of signals while the process serves requests.
pub struct Actions {
    /// Asks for a clean stop; gets the signal's name. Called for each signal.
    pub stop: Box<dyn Fn(&'static str) + Send>,
    /// Prints the counters.
    pub print: Box<dyn Fn() + Send>,
}

impl fmt::Debug for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Starting(_) => "Starting",
            Phase::Mounting => "Mounting",
            Phase::Serving(_) => "Serving",
            Phase::Ending => "Ending",
        })
    }
}

impl fmt::Debug for Actions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Actions").finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// The first stop signal, if there was one.
    stopped_by: Option<&'static str>,
    /// SIGUSR1 came before there were counters.
    is_print_due: bool,
    /// SIGUSR2 came before anything was served.
    is_at_once_due: bool,
}

impl State {
    fn new(phase: Phase) -> State {
        State { phase, stopped_by: None, is_print_due: false, is_at_once_due: false }
    }
}

/// The handle of the signal thread.
#[derive(Clone, Debug)]
pub struct Watcher {
    state: Arc<Mutex<State>>,
}

impl Watcher {
    /// Installs the handlers, and starts the thread.
    ///
    /// Errors: those of making the handlers or the thread.
    pub fn start(phase: Phase) -> io::Result<Watcher> {
        Watcher::start_with(phase, &[])
    }

    /// As [`Watcher::start`], for a server whose mount the helper process keeps, which tells it to
    /// end at once by SIGUSR2.
    ///
    /// Errors: as [`Watcher::start`].
    pub fn start_kept(phase: Phase) -> io::Result<Watcher> {
        Watcher::start_with(phase, &[SIGUSR2])
    }

    fn start_with(phase: Phase, more: &[i32]) -> io::Result<Watcher> {
        let mut wanted = vec![SIGTERM, SIGINT, SIGUSR1];
        wanted.extend(more);
        if !is_ignored(SIGHUP) {
            wanted.push(SIGHUP);
        }
        let mut signals = Signals::new(&wanted)?;
        let watcher = Watcher { state: Arc::new(Mutex::new(State::new(phase))) };
        let theirs = watcher.clone();
        thread::Builder::new()
            .name(String::from("signals"))
            // Formatting the counters of all queues needs the most stack.
            .stack_size(128 << 10)
            .spawn(move || signals.forever().for_each(|signal| theirs.take(signal)))?;
        Ok(watcher)
    }

    /// Enters the next phase, and carries out signals that came too early. Returns the signal that
    /// asked for a stop meanwhile, if one did.
    pub fn enter(&self, phase: Phase) -> Option<&'static str> {
        let mut state = self.state();
        state.phase = phase;
        if let Phase::Serving(actions) = &state.phase {
            if state.is_print_due {
                (actions.print)();
            }
            if state.is_at_once_due {
                (actions.stop)(AT_ONCE);
            }
        }
        state.stopped_by
    }

    /// The signal that asked for a stop, if one did.
    pub fn stopped_by(&self) -> Option<&'static str> {
        self.state().stopped_by
    }

    /// Handles one signal. The lock is held meanwhile, so a phase does not end under an action.
    fn take(&self, signal: i32) {
        let mut state = self.state();
        if signal == SIGUSR1 {
            match &state.phase {
                Phase::Serving(actions) => (actions.print)(),
                _ => state.is_print_due = true,
            }
            return;
        }
        if signal == SIGUSR2 {
            match &state.phase {
                Phase::Serving(actions) => (actions.stop)(AT_ONCE),
                _ => state.is_at_once_due = true,
            }
            return;
        }
        let name = match signal {
            SIGTERM => "SIGTERM",
            SIGINT => "SIGINT",
            _ => "SIGHUP",
        };
        state.stopped_by.get_or_insert(name);
        match &state.phase {
            Phase::Starting(quit) => quit(name),
            Phase::Serving(actions) => (actions.stop)(name),
            Phase::Mounting | Phase::Ending => {}
        }
    }

    /// The state; a panic elsewhere leaves it valid, so poison is ignored.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a signal was ignored when we were started.
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_mask(&status).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// The mask of ignored signals in a process's status: bit 0 is signal 1.
fn ignored_mask(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

#[cfg(test)]
mod tests;
