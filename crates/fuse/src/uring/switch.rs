//! The kernel's module parameter that allows FUSE over io_uring, and whether it stayed on while a
//! mount began.
//!
//! The kernel looks at it twice for a mount: when it offers io_uring, and when it takes our answer.
//! Switched off in between, it forgets that io_uring was accepted and says nothing; Linux 6.18 then
//! still takes entries while the switch is on, and refuses replies as soon as it is off
//! (fs/fuse/inode.c:process_init_reply, dev_uring.c:fuse_uring_cmd). Such a mount must not go live.
//!
//! Promises: only reads the parameter; control path, around the start of a mount.

use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Whether it is on; `None`: this kernel has no FUSE over io_uring.
pub(crate) fn is_enabled() -> Option<bool> {
    let text = fs::read_to_string(SWITCH).ok()?;
    Some(matches!(text.trim(), "Y" | "y" | "1"))
}

/// Sees the switch being turned, from when it was made.
#[derive(Debug)]
pub(crate) struct SwitchWatch(Option<OwnedFd>);

impl SwitchWatch {
    /// Without inotify (no descriptor left, too many instances of this user) only the switch as it
    /// is in the end is looked at.
    pub(crate) fn new() -> SwitchWatch {
        let watch = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).and_then(|watch| {
            inotify::add_watch(&watch, SWITCH, WatchFlags::MODIFY)?;
            Ok(watch)
        });
        SwitchWatch(watch.ok())
    }

    /// Whether it is on and no process has written to it.
    pub(crate) fn stayed_on(self) -> bool {
        let is_on = is_enabled() == Some(true);
        is_on && self.0.is_none_or(|watch| !was_written(&watch))
    }
}

/// Whether the watch has something to tell.
fn was_written(watch: &OwnedFd) -> bool {
    let mut events = [MaybeUninit::uninit(); 256];
    inotify::Reader::new(watch, &mut events).next().is_ok()
}

#[cfg(test)]
mod tests;
