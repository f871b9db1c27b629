//! What one phase of a start hands to the next.
//!
//! Promises: each value undoes what it holds when it is dropped: threads end, and a mount that this
//! start has made goes. Control path.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use ringdisk_disk::Disk;
use ringdisk_export::{Clock, Error};

use super::{Export, ExportOptions, Forced};
use crate::dev::Place;
use crate::events::{Event, EventSender};
use crate::kept::TakenMount;
use crate::mount::Mount;
use crate::negotiate::{Negotiated, Profile};
use crate::placement::Placement;
use crate::thread::FuseThread;
use crate::topology::MountTopology;
use crate::uring::{Plan, RingMode, Rings, Starting};

/// What is tried.
pub(super) struct Attempt<'a> {
    pub(super) disk: &'a Arc<Disk>,
    pub(super) options: &'a ExportOptions,
    /// The most that rings shall do; `None`: no rings.
    pub(super) mode: Option<RingMode>,
    /// The mount of a live process; `None`: it is made, or was left by a process that is gone.
    pub(super) taken: Option<&'a TakenMount>,
    pub(super) forced: Forced,
}

/// What came of an attempt.
pub(super) enum Outcome {
    Serves(Box<Export>),
    /// Rings of this mode could not be had; nothing is mounted. With the reason.
    RingsRefused(RingMode, String),
    /// The kernel's switch was turned while the mount began; nothing is mounted.
    SwitchTurned,
}

/// Why an attempt stops.
pub(super) enum Stop {
    /// The export cannot be started.
    Error(Error),
    /// Another attempt may do.
    Outcome(Outcome),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Error(error)
    }
}

/// Where everything will be.
pub(super) struct Layout {
    pub(super) placement: Placement,
    pub(super) plan: Option<Plan>,
    /// Entries of each thread over `/dev/fuse`.
    pub(super) entries: usize,
    pub(super) profile: Profile,
    pub(super) topology: MountTopology,
}

/// The threads of the export. Dropped, they end.
pub(super) struct Threads {
    pub(super) queues: Vec<FuseThread>,
    /// How many of them serve the mount; the others serve injected devices.
    pub(super) count: usize,
    pub(super) place: Arc<Place>,
    pub(super) rings: Option<Arc<Rings>>,
    pub(super) clock: Clock,
    pub(super) events: EventSender,
    pub(super) received: Receiver<Event>,
}

/// A mount that has agreed on the protocol. Dropped, it goes, if this attempt has made it.
pub(super) struct Connection {
    pub(super) mount: Mount,
    pub(super) negotiated: Negotiated,
    /// Number of the image for the kernel, with passthrough; 0: none.
    pub(super) backing_id: u32,
    /// The switch of the kernel for io_uring stayed on meanwhile.
    pub(super) switch_stayed_on: bool,
}

/// A start over io_uring under way, and what the threads report of it.
pub(super) type RingStart = (Starting, Receiver<()>);
