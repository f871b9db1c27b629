//! The start of an export that goes on with a mount of a live process, which stands still
//! meanwhile.
//!
//! Promises: everything that can fail is made before the other process gives the mount up; nothing
//! reads a request before that. The requests travel over `/dev/fuse`: each that the other process
//! has read is answered, so that none is asked for again. Control path.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringdisk_disk::Disk;
use ringdisk_export::{ControlThread, Error, ErrorKind};

use super::Forced;
use super::control_thread::{Work, control_thread};
use super::phases::{Attempt, Connection, Layout, Stop, Threads};
use super::start::report;
use super::{Export, ExportOptions};
use crate::file::FileServer;
use crate::kept::{self, Parked, TakenMount};

/// An export that is complete but serves nothing yet. Dropped, it leaves the mount as it is.
#[must_use = "nothing is served yet"]
pub struct Prepared {
    disk: Arc<Disk>,
    options: ExportOptions,
    layout: Layout,
    threads: Threads,
    connection: Connection,
    server: Arc<FileServer>,
    devices: Vec<Arc<OwnedFd>>,
    parked: Option<Parked>,
    control: ControlThread<Work>,
    notes: Vec<String>,
}

/// As [`Export::take_over`].
pub(super) fn prepare(
    disk: Arc<Disk>,
    options: ExportOptions,
    mount: TakenMount,
) -> Result<Prepared, Error> {
    if let Some(why) =
        kept::refuse_successor(options.transport, options.zero_copy, options.passthrough)
    {
        return Err(why);
    }
    let forced = Forced::default();
    let (mode, taken) = (None, Some(&mount));
    let attempt = Attempt { disk: &disk, options: &options, mode, taken, forced };
    let mut notes = Vec::new();
    let mut layout = attempt.lay_out()?;
    let threads = attempt.start_threads(&mut layout, 0).map_err(error_of)?;
    let connection = attempt.connect(&mut layout, None)?;
    let server = Arc::new(attempt.file_server(&layout, &connection));
    let devices = attempt.queue_devices(&threads, &connection, &mut notes)?;
    let parked = attempt.park(&connection, &devices, &layout)?;
    let control = control_thread()?;
    Ok(Prepared {
        disk,
        options,
        layout,
        threads,
        connection,
        server,
        devices,
        parked,
        control,
        notes,
    })
}

impl Prepared {
    /// The disk.
    #[must_use]
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// What another process has to keep of a mount that outlives this one; once.
    pub fn take_parked(&mut self) -> Option<Parked> {
        self.parked.take()
    }

    /// Serves from now on.
    #[must_use]
    pub fn go(self) -> Export {
        let Prepared { disk, options, layout, threads, connection, server, devices, .. } = self;
        disk.take_charge();
        threads.serve(devices, Vec::new(), &server, None);
        let (mode, taken, forced) = (None, None, Forced::default());
        let attempt = Attempt { disk: &disk, options: &options, mode, taken, forced };
        let (mut export, _) = attempt.look_after(layout, threads, connection, server, self.control);
        export.topology.warnings.extend(self.notes);
        report(export, Some(kept::why_dev_taken()))
    }
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").field("disk", &self.disk).finish_non_exhaustive()
    }
}

/// Without rings there is no other attempt.
fn error_of(stop: Stop) -> Error {
    match stop {
        Stop::Error(error) => error,
        Stop::Outcome(_) => Error::new(ErrorKind::System, "the queue threads could not be started"),
    }
}
