//! Events for the control thread of an export.
//!
//! Promises: sending never waits. Any thread sends; the control thread ([`crate::control`])
//! receives.

use std::sync::mpsc::Sender;

use ringdisk_export::HandOverRequest;
use ringdisk_ring::Errno;

use crate::mount_terms::HandedMount;
use crate::request::ParseError;

/// Why a queue ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EndReason {
    /// The mount is gone.
    Unmounted,
    /// The connection was aborted from outside (`umount -f`, fusectl).
    Aborted,
    /// Reading the device failed.
    Device(Errno),
    /// Writing a reply failed in a way that cannot be the caller's.
    Reply(Errno),
    /// The kernel gave bytes that are no request.
    Protocol(ParseError),
    /// The thread panicked.
    Panicked,
}

/// One event.
#[derive(Debug)]
pub(crate) enum Event {
    /// A clean stop is asked for: once no client uses the mount.
    Stop,
    /// The end is asked for now, also while clients use the mount.
    Force,
    /// The mount could not be started after all: it goes, and the disk stays as it is, for another
    /// one.
    Discard,
    /// The queue with this number ended.
    QueueEnded(usize, EndReason),
    /// The disk has a new size.
    Resized,
    /// A successor process wants the mount.
    HandOver(HandOverRequest<HandedMount>),
}

/// Sends events. Any thread.
#[derive(Clone, Debug)]
pub(crate) struct EventSender(pub(crate) Sender<Event>);

impl EventSender {
    pub(crate) fn send(&self, event: Event) {
        // A control thread that is gone has stopped everything already.
        let _ = self.0.send(event);
    }
}
