//! The word of the user who asks for a job.
//!
//! Promises: nothing is said on it here; it lasts as long as its descriptors are open.

use std::os::fd::OwnedFd;

/// The word of the user who asks for a job ([`crate::helper::approval`]).
#[derive(Debug, Default)]
pub struct UserWord {
    /// What the helper process has heard, and that of the next server will hear.
    pub given: Option<OwnedFd>,
    /// What the user keeps; of a job in the background this process does, as long as it runs.
    pub kept: Option<OwnedFd>,
}
