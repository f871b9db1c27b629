//! What others watch a server of virtual machines' disks or of NBD clients by: pid file, service
//! manager, metrics.
//!
//! Promises: what cannot be made for a disk that was taken over is complained of, and does not end
//! it. Main thread.

use std::path::Path;
use std::sync::Arc;

use ringdisk_daemon::control::disk::DiskControl;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::metrics::MetricsServer;
use ringdisk_daemon::notify::Notify;
use ringdisk_daemon::pidfile::Pidfile;
use ringdisk_daemon::sockets::Address;
use ringdisk_daemon::watchdog::Watchdog;

use crate::keep::Kept;
use crate::metrics::MetricsSockets;

/// The fields go in the order in which others rely on them.
pub(crate) struct Observers {
    /// Answers for Prometheus.
    pub(crate) answering: Option<MetricsServer>,
    /// Says to the service manager that the queue threads answer.
    pub(crate) watchdog: Option<Watchdog>,
    pub(crate) metrics: MetricsSockets,
    pub(crate) pidfile: Option<Pidfile>,
    pub(crate) notify: Arc<Notify>,
}

impl Observers {
    /// Makes them.
    ///
    /// * `pidfile`, `metrics`: where the pid and the metrics are.
    /// * `is_upgrade`: the disks are taken over from another process.
    /// * `commands`: the disks; the first `threads` of them have queue threads of their own.
    ///
    /// Errors: one of these cannot be made.
    pub(crate) fn make(
        kept: Option<&Kept>,
        pidfile: Option<&Path>,
        metrics: &[Address],
        is_upgrade: bool,
        commands: Vec<Arc<DiskControl>>,
        threads: usize,
    ) -> Result<Observers, Failure> {
        let notify = match kept {
            Some(kept) => Arc::clone(&kept.disks.notify),
            None => Arc::new(Notify::from_environment()),
        };
        let pidfile = Pidfile::create_for(pidfile, is_upgrade)?;
        let mut metrics = MetricsSockets::make_for(metrics, is_upgrade)?;
        let watched = &commands[..threads.min(commands.len())];
        let watchdog = Watchdog::start(&notify, watched);
        let answering = metrics.start(commands)?;
        Ok(Observers { answering, watchdog, metrics, pidfile, notify })
    }
}
