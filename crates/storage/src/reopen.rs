//! Opens a file again in another mode: for an image that becomes a backing file, or a backing file
//! that becomes writable.
//!
//! Promises: the file is reached through its descriptor, so no name is looked up again; the locks
//! of the old descriptor move to the new one without a moment in which another program could take
//! the image; on an error the old one is as it was. Control thread; may block for as long as the
//! file system takes.

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::error::Error;
use crate::file::File;
use crate::kinds::Lock;
use crate::options::OpenOptions;
use crate::{lock, open};

/// Opens the file of `old` again; see [`crate::Storage::reopen`].
pub(crate) fn reopen(old: &File, options: &OpenOptions) -> Result<File, Error> {
    let name = &old.name;
    let flags = OFlags::NOCTTY | OFlags::NONBLOCK;
    let opened = open::open_again(old.borrow(), options.read_only, flags, options);
    let fd = opened.map_err(|errno| {
        let context = match errno {
            Errno::ACCESS | Errno::PERM => {
                format!("'{name}' may be read but not written: change its mode")
            }
            Errno::KEYREJECTED => format!(
                "'{name}' is below the image that is served, and this process may only read it: \
                 ask with `ringdisk ctl` of this version, whose word it takes to write it"
            ),
            Errno::ROFS => format!("'{name}' is on a read-only file system"),
            Errno::NOENT => format!("cannot open '{name}' again: /proc is not there"),
            _ => return Error::system(format!("cannot open '{name}' again"), errno),
        };
        Error::explained(context, errno)
    })?;
    let unlocked = OpenOptions { lock: Lock::None, ..options.clone() };
    let mut file = open::from_fd(fd, name, &unlocked)?;
    // A flush that failed is not forgotten by another descriptor.
    file.flush_failed.store(old.flush_failed.load(Ordering::Relaxed), Ordering::Relaxed);
    old.unlock_twin();
    let held = lock::take_over(
        file.borrow(),
        name,
        options.lock,
        options.read_only,
        (old.borrow(), old.held()),
    )
    .inspect_err(|_| old.lock_twin())?;
    file.held = Mutex::new(held);
    file.lock_twin();
    Ok(file)
}

/// Takes the locks back that went over to `from`; see [`crate::Storage::reclaim`].
pub(crate) fn reclaim(file: &File, from: &File) -> Result<(), Error> {
    from.unlock_twin();
    let from = (from.borrow(), from.held());
    let result = lock::take_back(file.borrow(), &file.name, file.held(), from);
    file.lock_twin();
    result
}
