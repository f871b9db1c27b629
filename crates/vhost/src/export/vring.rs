//! A virtqueue as its front end has set it up.
//!
//! Promises: plain values of the control thread; a queue thread gets duplicates of the descriptors.

use std::os::fd::OwnedFd;

use crate::session::VringSetup;

/// What the front end gave for a virtqueue.
#[derive(Debug, Default)]
pub(super) struct Ring {
    pub(super) call: Option<OwnedFd>,
    pub(super) error: Option<OwnedFd>,
    /// What it was started with, while it runs or is suspended.
    pub(super) setup: Option<VringSetup>,
    /// It waits for its memory to come back, and goes on here.
    pub(super) suspended_at: Option<u32>,
}
