//! Signals that the helper process forwards to the server whose mount or disks it keeps.
//!
//! Promises: no signal is lost while no server is there to take it. A handler writes a byte and
//! sets a flag, and nothing else.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Signal;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::{flag, low_level::pipe};

use crate::signals::is_ignored;

/// The signals that are passed on, with what has to be noted of each.
const PASSED_ON: [(i32, Signal, bool); 4] = [
    (SIGTERM, Signal::TERM, true),
    (SIGINT, Signal::INT, true),
    (SIGHUP, Signal::HUP, true),
    (SIGUSR1, Signal::USR1, false),
];

/// Signals that have come.
pub(super) struct Signals {
    /// Readable when a signal has come.
    pub(super) wake: UnixStream,
    pub(super) came: Vec<(Arc<AtomicBool>, Signal, bool)>,
}

impl Signals {
    /// Takes signals from now on.
    ///
    /// Errors: those of sigaction(2); no socket.
    pub(super) fn watch() -> io::Result<Signals> {
        let (wake, write) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        write.set_nonblocking(true)?;
        let mut came = Vec::new();
        for (number, signal, stops) in PASSED_ON {
            if number == SIGHUP && is_ignored(SIGHUP) {
                continue;
            }
            let flag = Arc::new(AtomicBool::new(false));
            // The flag is set first, so that the thread that is woken finds it.
            flag::register(number, Arc::clone(&flag))?;
            pipe::register(number, write.try_clone()?)?;
            came.push((flag, signal, stops));
        }
        pipe::register(SIGCHLD, write)?;
        Ok(Signals { wake, came })
    }

    /// Those that came since the last call, and whether each asks for the end.
    pub(super) fn take(&self) -> Vec<(Signal, bool)> {
        let mut bytes = [0; 64];
        while matches!(io::Read::read(&mut &self.wake, &mut bytes), Ok(1..)) {}
        let came = self.came.iter().filter(|(flag, ..)| flag.swap(false, Ordering::AcqRel));
        came.map(|(_, signal, stops)| (*signal, *stops)).collect()
    }
}
