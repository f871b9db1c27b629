//! Says to a service manager that this process lives, as long as its queue threads answer
//! (`WatchdogSec=` of systemd).
//!
//! Promises: a thread of its own asks each queue thread at half of the manager's time, and says
//! `WATCHDOG=1` as soon as all have answered. A slow storage, a slow client and a control socket
//! that hangs do not count: only a queue thread that does not come back keeps it silent
//! ([`ringdisk_export::Pulse`]). Disks that have ended are not asked. Without `WATCHDOG_USEC`, and
//! where `WATCHDOG_PID` names another process, there is no thread.
//!
//! Where another process keeps the disks ([`crate::keep`]), it hears the same words in place of the
//! manager; it has a watchdog of its own for the manager.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringdisk_export::Pulse;

use crate::control::disk::DiskControl;
use crate::notify::{Notify, Word, watch};

/// Checks for answers of the queue threads within the manager's timeout.
const POLLS: u32 = 40;

/// The watchdog thread; dropping this ends the thread.
#[derive(Debug)]
pub struct Watchdog {
    end: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the thread, where a service manager has a watchdog. Before the process is confined.
    pub fn start(notify: &Arc<Notify>, disks: &[Arc<DiskControl>]) -> Option<Watchdog> {
        let time = watch::wanted()?;
        let pulses = disks.iter().flat_map(|disk| disk.pulses()).collect();
        let notify = Arc::clone(notify);
        Watchdog::run(time, pulses, move || notify.say(Word::Alive, "")).or_else(|| {
            tracing::warn!("no thread for the watchdog of the service manager");
            None
        })
    }

    /// * `time`: the manager's timeout.
    /// * `alive`: sends the sign of life.
    fn run(
        time: Duration,
        pulses: Vec<Pulse>,
        alive: impl Fn() + Send + 'static,
    ) -> Option<Watchdog> {
        let (end, ending) = sync_channel(1);
        let watch = std::thread::Builder::new().name(String::from("watchdog"));
        let thread = watch.stack_size(64 << 10).spawn(move || {
            watch_over(time, &pulses, &alive, &ending);
        });
        Some(Watchdog { end: Some(end), thread: Some(thread.ok()?) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.end.take());
        self.thread.take().map(JoinHandle::join);
    }
}

/// Asks the queue threads, and reports to the manager, until the end.
fn watch_over(time: Duration, pulses: &[Pulse], alive: &dyn Fn(), ending: &Receiver<()>) {
    // Nothing is ever sent: the end of the channel ends the thread.
    let waits = |limit: Duration| ending.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
    let mut was_told = false;
    loop {
        let begun = Instant::now();
        pulses.iter().for_each(Pulse::ask);
        while !pulses.iter().all(Pulse::is_well) {
            if !waits(time / POLLS) {
                return;
            }
            // Soon the manager's timeout may be over.
            if begun.elapsed() > time / 2 && !std::mem::replace(&mut was_told, true) {
                let silent = pulses.iter().filter(|pulse| !pulse.is_well()).count();
                tracing::error!(
                    "{silent} of {} queue threads do not answer: the service manager is not told \
                     that this process lives until they do",
                    pulses.len()
                );
            }
        }
        if std::mem::take(&mut was_told) {
            tracing::warn!("all queue threads answer again");
        }
        alive();
        if !waits((time / 2).saturating_sub(begun.elapsed())) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_again_and_again_until_the_end() {
        let (sender, said) = sync_channel(0);
        let alive = move || {
            let _ = sender.send(());
        };
        let watchdog = Watchdog::run(Duration::from_millis(2), Vec::new(), alive);
        let watchdog = watchdog.expect("a thread");
        assert!((0..3).all(|_| said.recv_timeout(Duration::from_secs(30)).is_ok()));
        // A manager that does not read must not keep the thread from its end.
        drop(said);
        drop(watchdog);
    }
}
