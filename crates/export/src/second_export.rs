//! A second export of a disk in the same process, as the export in charge of the disk sees it.
//!
//! Promises: one export of a disk is in charge: it hands the disk over and closes it. Before that
//! the second one stands still on the disk, or has ended. Control path.

use std::fmt;

use crate::{Error, HandOverState};

/// A second export of the disk.
pub trait SecondExport: Send + Sync + fmt::Debug {
    /// A client of the export in charge has come, so the disk is in use. Returns at once.
    fn client_came(&self);

    /// That client has gone. Returns at once.
    fn client_gone(&self);

    /// Ends the second export of this disk: requests in flight are answered, its clients are sent
    /// away. Waits for that, some seconds at most. Does nothing the second time.
    fn end(&self);

    /// Lets the clients of this disk stand still for a successor, and packs them. Waits for
    /// requests in flight, some seconds at most. [`SecondExport::go_on`] or
    /// [`SecondExport::moved`] follows, unless it gives `None`: the second export has ended, and
    /// has no clients.
    ///
    /// Errors: requests in flight do not end; its clients go on.
    fn stand_still(&self) -> Result<Option<HandOverState>, Error>;

    /// The clients go on here: the disk is not handed over.
    fn go_on(&self);

    /// The successor has the disk and its clients: the second export ends on the disk, and leaves
    /// their connections alone.
    fn moved(&self);
}
