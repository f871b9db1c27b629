//! The last phases of a start: the control thread, and whether the mount answers.
//!
//! Promises: when the control thread runs it has all that the end of the export will need. Control
//! path.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use ringdisk_disk::{Disk, SizeWatch};
use ringdisk_export::{ControlThread, Error};

use super::Export;
use super::phases::{Attempt, Connection, Layout, Threads};
use crate::control::{Control, InUseSlot};
use crate::events::{Event, EventSender};
use crate::file::FileServer;
use crate::mount::AnswerCheck;
use crate::thread::FuseThread;
use crate::topology::Live;
use crate::uring::Rings;

/// How long the first answer of a mount may take: it needs no storage.
const FIRST_ANSWER: Duration = Duration::from_secs(10);
/// How long the queues of a process that goes on with a mount look for requests by themselves.
const LOOK_AFTER_DEATH: Duration = Duration::from_secs(10);

impl Attempt<'_> {
    /// Phase 7: starts the control thread, which sees to the end of the export.
    ///
    /// * `thread`: made by [`control_thread`].
    pub(super) fn look_after(
        &self,
        layout: Layout,
        threads: Threads,
        connection: Connection,
        server: Arc<FileServer>,
        thread: ControlThread<Work>,
    ) -> (Export, PathBuf) {
        let Threads { queues, place, rings, clock, events, received, .. } = threads;
        let live = live(&queues[..threads.count], rings.as_deref());
        let views = queues.iter().map(|queue| queue.thread.view.clone()).collect();
        let size_watch = watch_size(self.disk, &events, &server);
        let mut topology = layout.topology;
        topology.ring_mode = rings.as_ref().map(|rings| rings.mode());
        let mountpoint = connection.mount.mountpoint().to_owned();
        let negotiated = connection.negotiated;
        // Until now a mount that another process has made stays when this start fails: its helper
        // process keeps it, and the next process may do better.
        let mount = connection.mount.take_over();
        let (remover, connection) = (mount.remover(), mount.connection());
        let in_use = InUseSlot::default();
        let is_resumed = self.left().is_some();
        let control = Control {
            mount,
            queues,
            disk: Arc::clone(self.disk),
            server,
            negotiated,
            place,
            clock,
            rings,
            events: received,
            postponed: VecDeque::new(),
            io_timeout: self.options.io_timeout,
            stop_timeout: self.options.stop_timeout,
            in_use: in_use.clone(),
            kernel_cache: self.options.kernel_cache,
            is_kept: self.options.keep.is_some(),
            restricted: self.options.common.restricted,
            look_until: is_resumed.then(|| Instant::now() + LOOK_AFTER_DEATH),
        };
        // Until it has all that the end will need, the process gives nothing up.
        let (prepared, is_prepared) = channel();
        let control = Some(thread.start((control, prepared)));
        let _ = is_prepared.recv();
        let (queues, parked, _size_watch) = (views, None, size_watch);
        let export = Export {
            control,
            events,
            queues,
            topology,
            live,
            parked,
            remover,
            in_use,
            connection,
            _size_watch,
        };
        (export, mountpoint)
    }
}

/// The threads of the mount, for `ringdisk topology`.
///
/// * `rings`: through which requests travel, if they do.
fn live(queues: &[FuseThread], rings: Option<&Rings>) -> Vec<Live> {
    let live = |(index, queue): (usize, &FuseThread)| {
        let memory = rings.map(|rings| rings.memory_of(index));
        for (start, len) in memory.into_iter().flatten() {
            queue.buffers.add(start, len);
        }
        let cells = Arc::clone(&queue.thread.view.cells);
        Live { cells, buffers: Arc::clone(&queue.buffers) }
    };
    queues.iter().enumerate().map(live).collect()
}

/// Has the kernel told of sizes that no client has made.
fn watch_size(disk: &Disk, events: &EventSender, server: &Arc<FileServer>) -> SizeWatch {
    let (events, server) = (events.clone(), Arc::clone(server));
    disk.watch_size(move |_| {
        if !server.is_resized_by_client() {
            events.send(Event::Resized);
        }
    })
}

/// What the control thread is given: the export, and how it says that it has all that the end will
/// need.
pub(super) type Work = (Control, Sender<()>);

/// Makes the control thread.
///
/// Errors: the system has no thread.
pub(super) fn control_thread() -> Result<ControlThread<Work>, Error> {
    ControlThread::make("export", |(control, prepared): Work| control.run(&prepared))
}

/// Phase 8, over io_uring: whether the mount answers, which is not known otherwise. (Over /dev/fuse
/// it need not be asked: the size, without which asynchronous reads find an empty file, the kernel
/// asks for at each first open: `default_permissions`.)
///
/// Gives the process that asks when there is no answer: it ends when the connection is aborted.
pub(super) fn ask_first(mountpoint: &Path) -> Option<AnswerCheck> {
    let look = AnswerCheck::start(mountpoint);
    if let Err(errno) = &look {
        tracing::debug!("{}: not looked at: {errno}", mountpoint.display());
    }
    look.ok().filter(|look| !look.is_answered(FIRST_ANSWER))
}
