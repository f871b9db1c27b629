//! A second export of a disk in the same process, as the export in charge of the disk sees it.
//!
//! Promises: one export of a disk is in charge: it hands the disk over and closes it. The second
//! one has ended on the disk before that. Control path.

use std::fmt;

/// A second export of the disk.
pub trait Beside: Send + Sync + fmt::Debug {
    /// A client of the export in charge has come, so the disk is in use. Returns at once.
    fn client_came(&self);

    /// That client has gone. Returns at once.
    fn client_gone(&self);

    /// Ends the second export of this disk: requests in flight are answered, its clients are sent
    /// away. Waits for that, some seconds at most. Does nothing the second time.
    fn end(&self);
}
