//! Whether a mount answers, asked from a process of its own.
//!
//! A thread of ours could wait for ever: a process that is being killed ends only when all of its
//! threads have, and a thread that waits for an answer of FUSE does not, since its memory keeps the
//! rings, which keep the connection.
//!
//! Promises: another process holds nothing of the mount: ours ends, the kernel aborts the
//! connection, and then the other one has its answer, too.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};

use super::ffi::stat_in_a_process;

/// A process that asks. Waited for when this is dropped: the mount must answer by then, or have
/// been aborted.
#[derive(Debug)]
pub(crate) struct AnswerCheck(OwnedFd);

impl AnswerCheck {
    /// Asks for the attributes of what is mounted at `mountpoint`.
    ///
    /// Errors: no process could be started.
    pub(crate) fn start(mountpoint: &Path) -> Result<AnswerCheck, Errno> {
        let path = CString::new(mountpoint.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
        let pid = stat_in_a_process(&path)?;
        pidfd_open(pid, PidfdFlags::empty()).map(AnswerCheck)
    }

    /// Whether an answer, also an error, comes in time.
    pub(crate) fn is_answered(&self, limit: Duration) -> bool {
        let limit = Timespec::try_from(limit).ok();
        let mut ended = [PollFd::new(&self.0, PollFlags::IN)];
        loop {
            match poll(&mut ended, limit.as_ref()) {
                Err(Errno::INTR) => {}
                Err(_) => return false,
                Ok(count) => return count > 0,
            }
        }
    }
}

impl AnswerCheck {
    /// What the server answers; `None`: nothing in time. The process is not waited for then: it may
    /// never end.
    pub(crate) fn answer(self, limit: Duration) -> Option<Result<(), Errno>> {
        if !self.is_answered(limit) {
            // It goes if no server has read its request yet. No descriptor is left open longer than
            // this one, and the child is init's when we end.
            let _ = pidfd_send_signal(&self.0, Signal::KILL);
            std::mem::forget(self);
            return None;
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::PidFd(self.0.as_fd()), options).ok().flatten();
        match status.and_then(|status| status.exit_status()) {
            Some(0) => Some(Ok(())),
            Some(errno) => Some(Err(Errno::from_raw_os_error(errno))),
            None => None,
        }
    }
}

impl Drop for AnswerCheck {
    fn drop(&mut self) {
        let _ = rustix::io::retry_on_intr(|| {
            waitid(WaitId::PidFd(self.0.as_fd()), WaitIdOptions::EXITED)
        });
    }
}

#[cfg(test)]
mod tests;
