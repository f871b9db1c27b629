//! The kernel's ring: submission, completion and enter, on top of the crate `io-uring`.
//!
//! Promises: never allocates after start-up. Ring thread only.

use std::io;

use io_uring::types::Timespec;
use io_uring::{EnterFlags, IoUring, Submitter, cqueue, squeue};

use crate::counters::Counters;
use crate::offload::count_cpus;
use crate::restrict::restrict;
use crate::setup::{self, Level, SetupError};
use crate::{Config, Errno};

/// 64- or 128-byte submission entries.
#[allow(clippy::large_enum_variant)] // One for each thread, boxed.
enum Kind {
    Narrow(IoUring<squeue::Entry>),
    Wide(IoUring<squeue::Entry128>),
}

/// A ring and the one `Submitter` that knows its registered descriptor.
pub(crate) struct Uring {
    /// Borrows from `kind`; declared first, so dropped first.
    submitter: Submitter<'static>,
    kind: Box<Kind>,
    level: Level,
}

/// A completion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub(crate) user_data: u64,
    pub(crate) result: i32,
    /// The operation goes on.
    pub(crate) more: bool,
}

impl Drop for Uring {
    fn drop(&mut self) {
        // A registered ring stays open until its thread ends, with all memory and files it keeps.
        let _ = self.submitter.unregister_ring_fd();
    }
}

impl Uring {
    pub(crate) fn new(config: &Config) -> Result<Uring, SetupError> {
        // Rings are made before a process is confined.
        count_cpus();
        let (kind, level) = if config.sqe128 {
            let (ring, level) = setup::build::<squeue::Entry128>(config)?;
            (Kind::Wide(ring), level)
        } else {
            let (ring, level) = setup::build::<squeue::Entry>(config)?;
            (Kind::Narrow(ring), level)
        };
        let kind = Box::new(kind);
        let submitter = match &*kind {
            Kind::Narrow(ring) => ring.submitter(),
            Kind::Wide(ring) => ring.submitter(),
        };
        // SAFETY: the submitter borrows from the ring in `kind`, whose heap address does not change
        // while this struct lives, and field order drops the submitter first.
        let mut submitter =
            unsafe { std::mem::transmute::<Submitter<'_>, Submitter<'static>>(submitter) };
        if config.files > 0 {
            submitter.register_files_sparse(config.files)?;
        }
        if config.restricted {
            restrict(&submitter, config.sqe128)?;
            // By the thread that uses it: a ring of a single issuer belongs to the thread that
            // enables it.
            submitter.register_enable_rings()?;
        }
        // A seccomp profile may allow io_uring_setup and forbid this: known now, not when the first
        // request would wait for ever.
        submitter.submit()?;
        if let Err(error) = submitter.register_ring_fd() {
            tracing::debug!("ring descriptor not registered ({error}); each enter looks it up");
        }
        Ok(Uring { submitter, kind, level })
    }

    /// Whether `count` more entries fit the submission queue.
    pub(crate) fn has_room(&self, count: usize) -> bool {
        // SAFETY: no other submission queue handle exists: each is made and dropped inside one
        // method of this type, which is neither Sync nor re-entered.
        let (capacity, len) = unsafe {
            match &*self.kind {
                Kind::Narrow(ring) => {
                    let queue = ring.submission_shared();
                    (queue.capacity(), queue.len())
                }
                Kind::Wide(ring) => {
                    let queue = ring.submission_shared();
                    (queue.capacity(), queue.len())
                }
            }
        };
        capacity - len >= count
    }

    /// Puts an entry into the submission queue. The caller made room and keeps the memory that
    /// the entry names alive until its completion.
    pub(crate) fn push(&self, entry: squeue::Entry) {
        // SAFETY: one submission queue handle at a time, as in `has_room`. The memory named by the
        // entry is kept by the slot named in its user data (`Slots`), until the completion.
        let pushed = unsafe {
            match &*self.kind {
                Kind::Narrow(ring) => ring.submission_shared().push(&entry),
                Kind::Wide(ring) => ring.submission_shared().push(&entry.into()),
            }
        };
        debug_assert!(pushed.is_ok(), "no room was made");
    }

    /// As [`Uring::push`], for a 128-byte entry. Errors: `EOPNOTSUPP` on a ring of 64-byte entries.
    pub(crate) fn push_wide(&self, entry: &squeue::Entry128) -> Result<(), Errno> {
        match &*self.kind {
            Kind::Narrow(_) => Err(Errno::OPNOTSUPP),
            Kind::Wide(ring) => {
                // SAFETY: as in `push`.
                let pushed = unsafe { ring.submission_shared().push(entry) };
                debug_assert!(pushed.is_ok(), "no room was made");
                Ok(())
            }
        }
    }

    /// Entries waiting to be submitted.
    pub(crate) fn queued(&self) -> usize {
        // SAFETY: as in `has_room`.
        unsafe {
            match &*self.kind {
                Kind::Narrow(ring) => ring.submission_shared().len(),
                Kind::Wide(ring) => ring.submission_shared().len(),
            }
        }
    }

    /// The next completion that is there already.
    pub(crate) fn next_completion(&self) -> Option<Completion> {
        // SAFETY: one completion queue handle at a time, by the same argument as for submissions.
        let entry = unsafe {
            match &*self.kind {
                Kind::Narrow(ring) => ring.completion_shared().next(),
                Kind::Wide(ring) => ring.completion_shared().next(),
            }
        }?;
        let more = cqueue::more(entry.flags());
        Some(Completion { user_data: entry.user_data(), result: entry.result(), more })
    }

    /// Whether an enter would find something: a completion, or work that the kernel left for our
    /// next enter. Reads shared memory only.
    pub(crate) fn has_work(&self) -> bool {
        // SAFETY: as in `next_completion` and `has_room`.
        unsafe {
            match &*self.kind {
                Kind::Narrow(ring) => {
                    !ring.completion_shared().is_empty() || ring.submission_shared().taskrun()
                }
                Kind::Wide(ring) => {
                    !ring.completion_shared().is_empty() || ring.submission_shared().taskrun()
                }
            }
        }
    }

    /// Whether [`Uring::has_work`] can see work that the kernel has deferred, i.e. polling makes
    /// sense.
    pub(crate) fn can_poll(&self) -> bool {
        self.level.taskrun_flag
    }

    /// One `io_uring_enter`: submits all, runs deferred work, and waits until `want` completions
    /// are there (0: does not wait) or `timeout` passed.
    pub(crate) fn enter(
        &self,
        counters: &Counters,
        want: u32,
        timeout: Option<std::time::Duration>,
    ) -> io::Result<()> {
        let queued = u32::try_from(self.queued()).unwrap_or(u32::MAX);
        counters.enters.add(1);
        counters.sqes.add(u64::from(queued));
        let flags = EnterFlags::GETEVENTS.bits();
        let result = if let Some(timeout) = timeout {
            let timespec = Timespec::from(timeout);
            let args = io_uring::types::SubmitArgs::new().timespec(&timespec);
            // SAFETY: `args` and the time it points to live until the call returns, and EXT_ARG
            // says that this is what the argument is.
            unsafe {
                self.submitter.enter(queued, want, flags | EnterFlags::EXT_ARG.bits(), Some(&args))
            }
        } else {
            // SAFETY: no argument is passed.
            unsafe { self.submitter.enter::<libc::sigset_t>(queued, want, flags, None) }
        };
        match result.map_err(|e| (e.raw_os_error(), e)) {
            Ok(_) | Err((Some(libc::EINTR | libc::ETIME | libc::EAGAIN | libc::EBUSY), _)) => {
                Ok(())
            }
            Err((_, error)) => Err(error),
        }
    }

    pub(crate) fn submitter(&self) -> &Submitter<'static> {
        &self.submitter
    }

    pub(crate) fn raw_fd(&self) -> std::os::fd::RawFd {
        use std::os::fd::AsRawFd;
        match &*self.kind {
            Kind::Narrow(ring) => ring.as_raw_fd(),
            Kind::Wide(ring) => ring.as_raw_fd(),
        }
    }
}
