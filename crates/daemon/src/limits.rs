//! What the process asks of the kernel for itself before it serves.
//!
//! Promises: [`raise`] is called once by the main thread before any other is started, so that all
//! inherit it; a refusal is never an error here: the call that later runs into the limit has the
//! better message.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that a mount with a long chain and many queues needs; fewer is worth a debug line.
const FILES_WANTED: u64 = 1024;

/// Raises the soft limits of open files and locked memory to the hard ones.
pub fn raise() {
    for (resource, name) in
        [(Resource::Nofile, "RLIMIT_NOFILE"), (Resource::Memlock, "RLIMIT_MEMLOCK")]
    {
        let old = getrlimit(resource);
        if old.current == old.maximum {
            continue;
        }
        let new = Rlimit { current: old.maximum, maximum: old.maximum };
        match setrlimit(resource, new) {
            Ok(()) => {
                tracing::debug!(
                    "{name}: {} raised to {}",
                    limit_text(old.current),
                    limit_text(old.maximum)
                );
            }
            Err(errno) => tracing::debug!("{name} stays at {}: {errno}", limit_text(old.current)),
        }
    }
    if getrlimit(Resource::Nofile).current.is_some_and(|files| files < FILES_WANTED) {
        tracing::debug!("RLIMIT_NOFILE is below {FILES_WANTED}; long backing chains may not open");
    }
}

/// Before root becomes another user: what root's capabilities have put above limits so far.
pub fn raise_for_another_user() {
    for (resource, name) in [
        // CAP_IPC_LOCK: buffers of rings, which are registered when the rings are there.
        (Resource::Memlock, "RLIMIT_MEMLOCK"),
        // Threads count beside all others of that user from now on, and some are made later.
        (Resource::Nproc, "RLIMIT_NPROC"),
    ] {
        let old = getrlimit(resource);
        match setrlimit(resource, Rlimit { current: None, maximum: None }) {
            Ok(()) => tracing::debug!("{name}: {} raised to unlimited", limit_text(old.current)),
            Err(errno) => tracing::debug!("{name} stays at {}: {errno}", limit_text(old.current)),
        }
    }
}

fn limit_text(limit: Option<u64>) -> String {
    limit.map_or_else(|| String::from("unlimited"), |limit| limit.to_string())
}
