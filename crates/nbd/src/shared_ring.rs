//! Disks for NBD clients on a ring that runs something else, too.
//!
//! Promises: no thread and no ring is made, so a process that may make neither any more (inside its
//! sandbox) can still export a disk; at the end requests in flight are answered, clients are sent
//! away, and nobody listens any longer. The disks stay open: they are the caller's. Task of the
//! thread that has the ring.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_export::stats::QueueCells;
use ringdisk_export::{Error, ErrorKind};
use ringdisk_ring::Ring;
use rustix::net::{Shutdown, shutdown};

use crate::accept;
use crate::exported_disk::{Exported, Exports};
use crate::options::{NamedDisk, NbdOptions, check};
use crate::queue::{Queue, Shared};
use crate::stop_request::Ending;

/// At the end, clients have so long to take the last replies.
const LAST_REPLIES: Duration = Duration::from_secs(1);

/// Disks that are served on a ring of the caller. Dropped without [`RingExport::end`], it serves
/// on.
#[derive(Debug)]
pub struct RingExport {
    queue: Rc<Queue>,
    /// Copies of the descriptors, to wake the tasks that accept.
    listeners: Vec<OwnedFd>,
}

impl RingExport {
    /// Serves from now on.
    ///
    /// * `listeners`: listening stream sockets that do not block; their names, if they have any,
    ///   are the caller's to remove.
    /// * `options`: `idle_exit`, `held`, `beside_another` and the threads mean nothing here.
    ///
    /// Errors: [`ErrorKind::Usage`] for disks and options that cannot be; no descriptor is left.
    pub fn start(
        ring: &Ring,
        disks: Vec<NamedDisk>,
        listeners: Vec<OwnedFd>,
        options: &NbdOptions,
    ) -> Result<RingExport, Error> {
        check(&disks, options)?;
        let copies: Result<Vec<OwnedFd>, _> = listeners.iter().map(OwnedFd::try_clone).collect();
        let copies = copies.map_err(|error| {
            Error::new(ErrorKind::System, "a listening socket cannot be used").source(error)
        })?;
        let exports = disks.into_iter().map(|disk| Arc::new(Exported::new(disk, options)));
        let exports = Arc::new(Exports::new(exports.collect()));
        // The ring has something else to do: handshakes take places of clients here.
        let shared = Arc::new(Shared::new(exports, options, 1, options.max_connections));
        let (cells, ending) = (Arc::new(QueueCells::default()), Arc::new(Ending::default()));
        let queue = Rc::new(Queue::new(ring.clone(), cells, shared, ending, 0));
        for listener in listeners {
            accept::listen(&queue, listener, Vec::new());
        }
        Ok(RingExport { queue, listeners: copies })
    }

    /// Clients that are connected.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.queue.shared.places.connections()
    }

    /// Ends it: requests in flight are answered, later ones get ESHUTDOWN, clients are sent away.
    pub async fn end(self) {
        // Wakes the tasks that accept; nobody can connect any more.
        for listener in &self.listeners {
            let _ = shutdown(listener, Shutdown::Both);
        }
        self.queue.drain(LAST_REPLIES).await;
    }
}
