//! The hand-over of a mount to a successor process, on the control thread of its export.
//!
//! Promises: a mount that is handed over stands still: no queue thread reads a request, every
//! request that was read has its reply, and the disk is on stable storage. It either goes on in the
//! successor or, when that fails, here. What cannot be handed over is refused before anything
//! stands still. When the end at once is asked for meanwhile, the hand-over is given up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_disk::{Disk, HandOver};
use ringdisk_export::{HandOverRequest, HandOverSteps, carry_out};

use super::Control;
use crate::events::Event;
use crate::kept::{HandedMount, Parked, Terms};
use crate::thread::FuseThread;
use crate::{Error, ErrorKind};

/// How long requests in flight may take to end.
const DRAINING: Duration = Duration::from_secs(8);
/// How long the disk may take. What was written is on stable storage already, but for what came
/// last.
const DISK: Duration = Duration::from_secs(60);

impl Control {
    /// Carries a request out. Returns whether the successor has the mount; else it goes on here.
    ///
    /// * `is_stopping`: a stop waits for the users of the mount.
    pub(super) fn hand_over(
        &mut self,
        request: HandOverRequest<HandedMount>,
        is_stopping: bool,
    ) -> bool {
        carry_out(request, &mut MountHandOver { control: self, is_stopping })
    }

    /// Why the mount cannot be handed over.
    fn refusal(&mut self, is_stopping: bool) -> Option<Error> {
        let never = |what: &str| Error::new(ErrorKind::Unsupported, what);
        if self.rings.is_some() {
            let what = "its requests travel over io_uring, and the kernel ties the rings of a \
                mount to the process that registered them";
            return Some(never(what).hint(
                "end it with `ringdisk umount` and mount the image anew; a mount with `--transport \
                 dev` can be upgraded",
            ));
        }
        if self.disk.is_lent() {
            let what = "the kernel reads and writes its image itself (--passthrough)";
            return Some(
                never(what).hint("end it with `ringdisk umount` and mount the image anew"),
            );
        }
        if is_stopping {
            let what = "it was stopped, and ends when its last user has closed it";
            return Some(Error::new(ErrorKind::Refused, what));
        }
        self.shall_end()
            .then(|| Error::new(ErrorKind::Refused, "its end at once was asked for meanwhile"))
    }

    /// Flushes as long as a thread waits for the hand-over.
    fn flush_before(&mut self, is_awaited: &dyn Fn() -> bool) {
        if self.disk.is_read_only() {
            return;
        }
        let disk = self.disk.clone();
        let flushed = self.queues[0].on_ring(async move |ring| disk.flush(&ring).await);
        let _ = flushed.wait(|| is_awaited() && !self.shall_end());
    }

    /// Makes the mount stand still, and gives its state.
    ///
    /// Errors: why it cannot be handed over; it has to go on.
    fn pack(&mut self) -> Result<HandedMount, Error> {
        let connection = self.mount.connection().ok_or_else(|| {
            Error::new(ErrorKind::Refused, "the kernel does not say which connection it is")
        })?;
        let device = self.mount.device().try_clone_to_owned().map_err(|source| {
            Error::new(ErrorKind::System, "no descriptors for the hand-over").source(source)
        })?;
        self.drain_queues()?;
        let terms = Terms {
            mountpoint: self.mount.mountpoint().to_owned(),
            connection,
            profile: *self.server.profile(),
            negotiated: self.negotiated,
            queues: self.queues.len(),
        };
        let disk = self.hand_over_disk()?;
        let file = self.server.state();
        Ok(HandedMount { parked: Parked { terms, devices: vec![device] }, file, disk })
    }

    /// Waits until all that was read from the kernel is answered, and nothing is read any more.
    ///
    /// Errors: requests that do not end.
    fn drain_queues(&mut self) -> Result<(), Error> {
        let end = Instant::now() + DRAINING;
        self.place.drain();
        self.queues.iter().for_each(FuseThread::wake);
        let drained: Vec<_> = self.queues.iter().map(FuseThread::drained).collect();
        for queue in drained {
            if queue.wait(|| Instant::now() < end && !self.shall_end()).is_err() {
                let text = format!("{} requests in flight do not end", self.in_flight());
                return Err(Error::new(ErrorKind::Refused, text));
            }
        }
        Ok(())
    }

    /// Errors: as [`ringdisk_disk::Disk::hand_over`].
    fn hand_over_disk(&mut self) -> Result<HandOver, Error> {
        let disk = self.disk.clone();
        let handed = self.queues[0].on_ring(async move |ring| disk.hand_over(&ring).await);
        // It goes on by itself when this thread does not wait: it is waited for longer than the
        // successor does, so that the disk is not handed over when it is served again.
        let end = Instant::now() + DISK;
        let handed = handed.wait(|| Instant::now() < end && !self.shall_end());
        let handed = handed.ok().flatten();
        let silent = || Error::new(ErrorKind::Refused, "the queue thread does not answer");
        handed.ok_or_else(silent)?.map_err(|why| {
            Error::new(ErrorKind::Refused, format!("the disk cannot be handed over: {why}"))
        })
    }

    /// Goes on here.
    fn go_on(&mut self) {
        let disk = self.disk.clone();
        let resumed = self.queues[0].on_ring(async move |ring| disk.resume(&ring).await);
        let end = Instant::now() + DISK;
        let resumed = resumed.wait(|| Instant::now() < end && !self.shall_end());
        if let Ok(Some(Err(why))) = resumed {
            let name = self.mount.mountpoint().display();
            tracing::error!("{name}: the disk cannot go on after a hand-over that failed: {why}");
        }
        self.place.resume();
        self.queues.iter().for_each(FuseThread::wake);
    }

    /// Whether the end at once was asked for. Events that came meanwhile are looked at later.
    fn shall_end(&mut self) -> bool {
        self.postponed.extend(self.events.try_iter());
        self.postponed.iter().any(|event| matches!(event, Event::Force))
    }
}

/// The mount, while it is handed over.
struct MountHandOver<'a> {
    control: &'a mut Control,
    is_stopping: bool,
}

impl HandOverSteps for MountHandOver<'_> {
    type State = HandedMount;

    fn disks(&self) -> Vec<Arc<Disk>> {
        vec![Arc::clone(&self.control.disk)]
    }

    fn refusal(&mut self) -> Option<Error> {
        self.control.refusal(self.is_stopping)
    }

    fn flush(&mut self, is_awaited: &dyn Fn() -> bool) {
        self.control.flush_before(is_awaited);
    }

    fn stand_still(&mut self) -> Result<HandedMount, Error> {
        self.control.pack()
    }

    fn go_on(&mut self) {
        self.control.go_on();
    }
}
