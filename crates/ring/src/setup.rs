//! Makes a ring with the best set of flags that the kernel has.
//!
//! Promises: an error says which limit or setting forbids the ring, and what the user can change.

use std::fmt;
use std::io;
use std::sync::Once;

use io_uring::{IoUring, cqueue, squeue};

use crate::Config;

/// Why no ring could be made.
#[derive(Debug)]
pub enum SetupError {
    /// The administrator or a container forbids io_uring.
    Forbidden(io::Error),
    /// The kernel has no io_uring at all.
    Missing(io::Error),
    /// A limit was hit: locked memory or descriptors.
    Limit(io::Error),
    /// Anything else.
    Other(io::Error),
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupError::Forbidden(_) => match disabled_sysctl() {
                Some(value) => write!(
                    f,
                    "io_uring is forbidden here: kernel.io_uring_disabled is {value}; \
                     allow it with `sysctl kernel.io_uring_disabled=0`"
                ),
                None => write!(
                    f,
                    "io_uring is forbidden here, probably by a container's seccomp profile; \
                     allow the io_uring_* system calls (`--security-opt seccomp=unconfined`, or a \
                     profile that lists io_uring_setup, io_uring_enter and io_uring_register)"
                ),
            },
            SetupError::Missing(_) => {
                write!(f, "this kernel has no io_uring; Linux 5.19 or newer is needed")
            }
            SetupError::Limit(_) => write!(
                f,
                "no memory or no descriptor left for an io_uring; raise RLIMIT_MEMLOCK \
                 (`ulimit -l`) and RLIMIT_NOFILE (`ulimit -n`)"
            ),
            SetupError::Other(_) => write!(f, "an io_uring could not be made"),
        }
    }
}

impl std::error::Error for SetupError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            SetupError::Forbidden(e)
            | SetupError::Missing(e)
            | SetupError::Limit(e)
            | SetupError::Other(e) => Some(e),
        }
    }
}

impl From<io::Error> for SetupError {
    fn from(error: io::Error) -> SetupError {
        match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => SetupError::Forbidden(error),
            // A seccomp profile may answer ENOSYS although the kernel has the call.
            Some(libc::ENOSYS) if kernel_has_it() => SetupError::Forbidden(error),
            Some(libc::ENOSYS) => SetupError::Missing(error),
            Some(libc::ENOMEM | libc::EMFILE | libc::ENFILE) => SetupError::Limit(error),
            _ => SetupError::Other(error),
        }
    }
}

/// Whether the kernel has io_uring although the system call fails: the sysctl exists since Linux
/// 6.6.
fn kernel_has_it() -> bool {
    std::path::Path::new("/proc/sys/kernel/io_uring_disabled").exists()
}

/// The value of `kernel.io_uring_disabled` when it forbids anything.
fn disabled_sysctl() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok()?;
    let value = text.trim();
    (value != "0").then(|| value.to_owned())
}

/// Flag sets, best first. A kernel that refuses one with EINVAL gets the next.
const LEVELS: [&str; 3] =
    ["single issuer, deferred task work", "cooperative task work", "no scheduling flags"];

/// The result: whether completions are posted only inside this thread's `io_uring_enter`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Level {
    pub(crate) taskrun_flag: bool,
}

/// Makes the ring; `S` chooses 64- or 128-byte entries.
pub(crate) fn build<S: squeue::EntryMarker>(
    config: &Config,
) -> Result<(IoUring<S, cqueue::Entry>, Level), SetupError> {
    static SAID: Once = Once::new();
    for (number, level) in LEVELS.iter().enumerate() {
        let mut builder = IoUring::<S, cqueue::Entry>::builder();
        builder.dontfork().setup_clamp().setup_cqsize(completions(config));
        if config.restricted {
            // Until `Uring::new` has said what it may do.
            builder.setup_r_disabled();
        }
        if number < 2 {
            builder.setup_submit_all().setup_taskrun_flag();
        }
        match number {
            0 => builder.setup_single_issuer().setup_defer_taskrun(),
            1 => builder.setup_coop_taskrun(),
            _ => &mut builder,
        };
        match builder.build(config.entries) {
            Ok(ring) => {
                if number > 0 {
                    SAID.call_once(|| {
                        tracing::warn!(
                            "this kernel's io_uring lacks `{}`; using `{level}` (slower)",
                            LEVELS[0]
                        );
                    });
                }
                return Ok((ring, Level { taskrun_flag: number < 2 }));
            }
            Err(error)
                if error.raw_os_error() == Some(libc::EINVAL) && number + 1 < LEVELS.len() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(SetupError::Other(io::Error::from_raw_os_error(libc::EINVAL)))
}

/// Completion entries: every slot may complete while the thread is busy, a linked poll may add one
/// more each, and cancellations and messages need room too.
fn completions(config: &Config) -> u32 {
    (config.slots * 2 + 64).max(config.entries * 2).next_power_of_two()
}
