//! The end of disks of virtual machines: the actions of signals, and what is removed with a disk.
//!
//! Promises: one disk that breaks down ends alone; the image of a disk is free before its end
//! is reported.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ringdisk_daemon::control::disk::DiskControl;
use ringdisk_daemon::control::serving::Serving;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::notify::Notify;
use ringdisk_daemon::signals::Actions;
use ringdisk_daemon::stopping::Stop;
use ringdisk_daemon::terminal;
use ringdisk_disk::Disk;

use super::Running;
use crate::hand_over::handed_over;
use crate::vhost::Handle;

/// The actions of signals while disks are served.
pub(super) fn actions(running: &[Running], notify: &Arc<Notify>) -> Actions {
    let disks: Vec<(Handle, Arc<DiskControl>)> =
        running.iter().map(|disk| (disk.served.handle(), Arc::clone(&disk.commands))).collect();
    // Weak: an image is closed as soon as its own disk has ended, not with the last disk.
    let shown: Vec<_> =
        running.iter().map(|disk| (disk.served.handle(), Arc::downgrade(&disk.disk))).collect();
    let told = Arc::clone(notify);
    Actions {
        stop: Box::new(move |signal| {
            told.stopping(&format!("stopping on {signal}"));
            for (handle, commands) in &disks {
                commands.cancel();
                handle.stop();
            }
        }),
        print: Box::new(move || {
            for (handle, disk) in &shown {
                if let Some(disk) = disk.upgrade() {
                    print(handle, &disk);
                }
            }
        }),
    }
}

fn print(handle: &Handle, disk: &Disk) {
    terminal::say_error(handle.report().with_layers(&disk.layers(), disk.fault().as_deref()));
}

/// Waits until no disk is served any longer. Returns the exit code.
///
/// Errors: why the only disk ended; of several disks each has reported its own end.
pub(super) fn wait(stats: bool, mut running: Vec<Running>) -> Result<u8, Failure> {
    let left = AtomicUsize::new(running.len());
    if running.len() == 1
        && let Some(disk) = running.pop()
    {
        return disk.end(stats, &left).map(|()| Exit::Clean.code());
    }
    let codes: Vec<u8> = std::thread::scope(|scope| {
        let waiting = running.into_iter().map(|disk| {
            let left = &left;
            scope.spawn(move || match disk.end(stats, left) {
                Ok(()) => Exit::Clean.code(),
                Err(failure) => {
                    terminal::complain(&failure);
                    failure.code()
                }
            })
        });
        let waiting: Vec<_> = waiting.collect();
        waiting.into_iter().map(|end| end.join().unwrap_or(Exit::General.code())).collect()
    });
    Ok(codes.into_iter().find(|code| *code != Exit::Clean.code()).unwrap_or(Exit::Clean.code()))
}

impl Running {
    /// Waits until the disk is served no longer, and removes its socket and control socket.
    ///
    /// * `left`: disks of this process that are served, with this one.
    ///
    /// Errors: as [`Served::wait`].
    fn end(self, stats: bool, left: &AtomicUsize) -> Result<(), Failure> {
        let handle = self.served.handle();
        let result = self.served.wait(&self.disk);
        if stats {
            print(&handle, &self.disk);
        }
        let was_given = self
            .successor
            .as_ref()
            .is_some_and(|successor| successor.was_given().load(Ordering::Acquire));
        if was_given {
            handed_over(&self.disk, &self.name);
        }
        match self.made {
            // The name is the socket of the successor now.
            Some(made) if was_given => made.leave(),
            made => drop(made),
        }
        // The image is free before clients of the control socket hear of the end.
        self.commands.end(&result);
        self.commands.let_go();
        drop(self.disk);
        drop(self.control);
        // The successor may use the names of the disk now. With the last disk it gets the pid file,
        // too, which is free when this process has ended.
        let successor = self.successor.and_then(|successor| match handle.is_stopped() {
            true => successor.end_with_stop(Stop::Clean),
            false => successor.end(),
        });
        if left.fetch_sub(1, Ordering::AcqRel) == 1 {
            std::mem::forget(successor);
        }
        result
    }
}
