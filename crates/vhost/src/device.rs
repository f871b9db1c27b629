//! What all threads of one device share.
//!
//! Promises: the control thread writes the state, and any thread its errors; queue threads read it
//! for each request by plain loads, without a lock. What a guest or a front end can cause again and
//! again is counted always, and logged at most as often as a limit allows.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_disk::{Bytes, ClientErrors, Disk, Events};
use ringdisk_ring::Errno;

use crate::blk::SERIAL_BYTES;
use crate::blk::features;
use crate::signals::Signals;

/// The effect of an I/O error of the image, beside the answer that the guest gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// It is counted and logged; requests go on.
    #[default]
    Report,
    /// It also ends the export.
    Stop,
}

/// State of a device. The control thread writes it, any thread its errors; queue threads read it
/// for each request, by plain loads.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) serial: [u8; SERIAL_BYTES],
    /// Bytes; a power of two.
    pub(crate) logical_block: u32,
    pub(crate) read_only: bool,
    pub(crate) on_error: OnError,
    features: AtomicU64,
    write_cache: AtomicBool,
    needs_reset: AtomicBool,
    reason: Mutex<Option<String>>,
    gives_up: AtomicBool,
    counts: Counts,
    /// Process of the front end that is connected; 0: none is, or it is not known.
    front_end_pid: AtomicU32,
    /// Logs errors of the image.
    errors: ClientErrors,
    /// Of the disk.
    events: Arc<Events>,
    signals: Arc<Signals>,
}

/// Counters of errors since the start of the export. Any thread; a request without an error touches
/// none of them.
#[derive(Debug, Default)]
struct Counts {
    /// Requests answered with `VIRTIO_BLK_S_IOERR`.
    io_errors: AtomicU64,
    /// Operations on the image that failed.
    image_errors: AtomicU64,
    /// Refused requests of the guest.
    refused: AtomicU64,
    /// Times that the device needed a reset.
    breaks: AtomicU64,
    /// Messages to the log, by [`Complaint`].
    complaints: [AtomicU64; Complaint::COUNT],
}

/// Messages to the log that a front end, or its guest, can cause as often as it likes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Complaint {
    /// A message that the control thread refused.
    Refused,
    /// A connection that ended because of what came over it.
    Connection,
    /// A second front end.
    Second,
    /// A call that waited.
    Call,
    /// A kick that cannot be waited for.
    Kick,
    /// An inflight area that makes no sense.
    Inflight,
    /// A virtqueue that does not go on in its memory.
    Suspended,
}

impl Complaint {
    /// How many kinds there are.
    const COUNT: usize = Complaint::Suspended as usize + 1;
}

/// Counts one more. Returns the count if it is to be logged: the first ten are, then every 1000th,
/// so that a guest cannot fill a log.
fn count_for_log(counter: &AtomicU64) -> Option<u64> {
    let count = counter.fetch_add(1, Ordering::Relaxed) + 1;
    (count <= 10 || count.is_multiple_of(1000)).then_some(count)
}

impl Device {
    /// * `serial`: cut to what a guest can read.
    pub(crate) fn new(
        (name, events): (&str, Arc<Events>),
        serial: &str,
        logical_block: u32,
        read_only: bool,
        write_cache: bool,
        on_error: OnError,
        signals: Arc<Signals>,
    ) -> Device {
        let mut padded = [0; SERIAL_BYTES];
        let bytes = &serial.as_bytes()[..serial.len().min(SERIAL_BYTES)];
        padded[..bytes.len()].copy_from_slice(bytes);
        Device {
            name: name.to_owned(),
            serial: padded,
            logical_block,
            read_only,
            on_error,
            features: AtomicU64::new(0),
            write_cache: AtomicBool::new(write_cache),
            needs_reset: AtomicBool::new(false),
            reason: Mutex::new(None),
            gives_up: AtomicBool::new(false),
            counts: Counts::default(),
            front_end_pid: AtomicU32::new(0),
            errors: ClientErrors::start(name, Arc::clone(&events)),
            events,
            signals,
        }
    }

    /// Tells of faults and limits of the disk, too.
    pub(crate) fn watch(&self, disk: &Disk) {
        self.errors.watch(disk);
    }

    /// Features that were agreed on.
    pub(crate) fn features(&self) -> u64 {
        self.features.load(Ordering::Acquire)
    }

    pub(crate) fn set_features(&self, features: u64) {
        self.features.store(features, Ordering::Release);
    }

    pub(crate) fn write_cache(&self) -> bool {
        self.write_cache.load(Ordering::Acquire)
    }

    pub(crate) fn set_write_cache(&self, on: bool) {
        self.write_cache.store(on, Ordering::Release);
    }

    /// Whether a write is answered only when it is durable.
    pub(crate) fn is_write_through(&self) -> bool {
        features::is_write_through(self.features(), self.write_cache())
    }

    /// The guest did what no driver may do: no virtqueue takes a request before a reset; what was
    /// taken is completed. The first reason counts.
    pub(crate) fn set_broken(&self, reason: String) {
        let mut kept = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.is_none() {
            // A guest can reset the device and break it again, as often as it likes.
            if let Some(count) = count_for_log(&self.counts.breaks) {
                let name = &self.name;
                let event = "needs-reset";
                tracing::error!(
                    disk = name,
                    event,
                    "{name}: the device needs a reset (time {count}): {reason}"
                );
                self.events.emit(event, reason.as_str());
            }
            *kept = Some(reason);
        }
        self.needs_reset.store(true, Ordering::Release);
        // The driver learns of it as of a change of the configuration (virtio 1.3, section 2.1.2).
        self.signals.changed();
    }

    /// Stops all answers: the export ends (`--on-error stop`).
    pub(crate) fn give_up(&self) {
        self.gives_up.store(true, Ordering::Release);
        self.signals.wake();
    }

    /// A queue thread ended by a defect of ours.
    pub(crate) fn thread_panicked(&self) {
        self.signals.panicked();
    }

    /// No thread may wait for queue threads: nothing is answered any more, or one of them is gone.
    pub(crate) fn gives_up(&self) -> bool {
        self.gives_up.load(Ordering::Acquire) || self.signals.has_panicked()
    }

    /// The export was asked to stop.
    pub(crate) fn is_ending(&self) -> bool {
        self.signals.is_stopped()
    }

    pub(crate) fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Why the device needs a reset.
    pub(crate) fn broken_reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All virtqueues were ended by a front end that may know no reset: those that are started next
    /// are new ones.
    pub(crate) fn mend(&self) {
        self.needs_reset.store(false, Ordering::Release);
        *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Back to the state before any driver. Whether there is a write cache is not forgotten: front
    /// ends that stop a device reset it, and do not set that again.
    pub(crate) fn reset(&self) {
        self.set_features(0);
        self.mend();
    }

    /// Counts an I/O error of the image, and logs some of them.
    pub(crate) fn image_error(&self, what: &'static str, offset: u64, len: u64, errno: Errno) {
        self.counts.image_errors.fetch_add(1, Ordering::Relaxed);
        self.errors.record(what, offset, Bytes(len), errno);
    }

    /// Counts a request of the guest that cannot be carried out, and logs some of them.
    ///
    /// * `sector`: as the guest names it, 512 bytes each.
    pub(crate) fn refused(&self, what: &str, sector: u64, why: &str) {
        if let Some(count) = count_for_log(&self.counts.refused) {
            let name = &self.name;
            tracing::warn!(
                "{name}: {what} at sector {sector} is refused: {why} (refusal {count} of this disk)"
            );
        }
    }

    /// Counts a complaint about the front end, and logs some of them.
    pub(crate) fn complain(&self, kind: Complaint, what: fmt::Arguments<'_>) {
        if let Some(count) = count_for_log(&self.counts.complaints[kind as usize]) {
            tracing::warn!("{}: {what} (time {count})", self.name);
        }
    }

    /// A request is answered with an I/O error.
    pub(crate) fn answered_io_error(&self) {
        self.counts.io_errors.fetch_add(1, Ordering::Relaxed);
    }

    /// A front end has connected.
    ///
    /// * `pid`: its process; 0: that is not known.
    pub(crate) fn front_end_came(&self, pid: u32) {
        self.front_end_pid.store(pid, Ordering::Relaxed);
        self.tell_of_front_end("client-came", pid, "has connected");
    }

    /// The front end has gone.
    pub(crate) fn front_end_gone(&self) {
        let pid = self.front_end_pid.swap(0, Ordering::Relaxed);
        self.tell_of_front_end("client-gone", pid, "has gone");
    }

    fn tell_of_front_end(&self, event: &'static str, pid: u32, what: &str) {
        let (name, process) = (&self.name, (pid > 0).then(|| format!(" (process {pid})")));
        let text = format!("the front end{} {what}", process.unwrap_or_default());
        tracing::info!(disk = name, event, "{name}: {text}");
        self.events.emit(event, text);
    }

    /// The state of the device, for users.
    pub(crate) fn health(&self) -> Health {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Health {
            io_errors: get(&self.counts.io_errors),
            image_errors: get(&self.counts.image_errors),
            refused: get(&self.counts.refused),
            breaks: get(&self.counts.breaks),
            broken_reason: self.broken_reason(),
            front_end_pid: Some(self.front_end_pid.load(Ordering::Relaxed)).filter(|pid| *pid != 0),
        }
    }
}

/// How a device is. Counted since the start of the export in this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Requests answered with `VIRTIO_BLK_S_IOERR` (virtio 1.3, section 5.2.6).
    pub io_errors: u64,
    /// Operations on the image that failed, also those whose request is never answered
    /// ([`OnError::Stop`]).
    pub image_errors: u64,
    /// Requests for what is not on the disk, or for writes to one that is read-only: a defect of
    /// the guest.
    pub refused: u64,
    /// Times that the device needed a reset (`DEVICE_NEEDS_RESET`).
    pub breaks: u64,
    /// Why it needs one now; `None` when it does not.
    pub broken_reason: Option<String>,
    /// Process of the front end that is connected, as seen from the serving process. `None`: none
    /// is connected, or its process is not known.
    pub front_end_pid: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_fails_for_ever_does_not_fill_a_log() {
        let counter = AtomicU64::new(0);
        let shown: Vec<u64> = (0..5000).filter_map(|_| count_for_log(&counter)).collect();
        assert_eq!(shown, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1000, 2000, 3000, 4000, 5000]);
    }
}
