//! An export from its start to its end.
//!
//! Promises: one disk, one device; what goes wrong with it ends it and nothing else. Control path.

mod options;

use std::sync::Arc;

use ringdisk_disk::Disk;
use ringdisk_ring::stats::Stats;

use crate::{Error, ErrorKind};

pub use options::{
    BLOCK_SIZE_MAX, BLOCK_SIZE_MIN, ExportOptions, Listen, Numa, OnError, QUEUE_SIZE_MAX,
    QUEUES_MAX, SERIAL_BYTES_MAX, Second, THREADS_MAX, Threads, check_block_size, check_serial,
    queues_default,
};

/// Asks an export for a clean stop, from any thread; also after its end.
#[derive(Clone, Debug)]
pub struct StopHandle(());

impl StopHandle {
    /// Asks for a clean stop; returns at once.
    pub fn stop(&self) {}
}

/// A disk that is being served. Dropping it stops it.
#[derive(Debug)]
pub struct Export {
    never: std::convert::Infallible,
}

impl Export {
    /// Serves from now on: the socket answers when this returns.
    ///
    /// Errors: [`ErrorKind::Usage`] for options that cannot be; those of sockets, threads and rings.
    pub fn start(_disk: Arc<Disk>, options: ExportOptions) -> Result<Export, Error> {
        options.check()?;
        Err(Error::new(ErrorKind::Unsupported, "vhost-user-blk is not there yet"))
    }

    /// What was asked for and could not be had, each with what would enable it.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        match self.never {}
    }

    /// A handle that asks for a clean stop.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        match self.never {}
    }

    /// Reads the counters later and from elsewhere.
    pub fn stats_reader(&self) -> Box<dyn Fn() -> Stats + Send + Sync> {
        match self.never {}
    }

    /// Waits until the export has ended: it was stopped, or the one front end of [`Listen::Stream`] has gone.
    ///
    /// Errors: why it ended by itself; the process and its other exports go on.
    pub fn wait(self) -> Result<Stats, Error> {
        match self.never {}
    }
}
