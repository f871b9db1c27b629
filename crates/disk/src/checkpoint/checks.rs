//! What a disk has to be for a checkpoint.
//!
//! Promises: nothing is changed here.

use crate::{Disk, Error, ErrorKind};

/// Refuses a disk whose writes this process does not see.
///
/// Errors: `Unsupported`.
pub(super) fn check_seen(disk: &Disk) -> Result<(), Error> {
    if disk.is_lent() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "the kernel reads and writes the image itself (--passthrough), so nothing can be kept \
             of what is overwritten; mount it without that option",
        ));
    }
    Ok(())
}

/// The error for a disk that is not as it was prepared.
///
/// * `what`: `its …`.
pub(super) fn changed(what: &str) -> Error {
    Error::new(
        ErrorKind::Busy,
        format!("the disk has changed {what} since the checkpoint was prepared; try again"),
    )
}
