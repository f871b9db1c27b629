//! Runs a change as a task of the ring, detached from its caller.
//!
//! Promises: dropping the caller's future does not stop the change; the end of the ring gives the
//! caller an error.

use std::future::Future;
use std::sync::Arc;

use ringdisk_ring::Ring;

use crate::task_join::spawn;
use crate::{Disk, Error, ErrorKind};

impl Disk {
    /// Runs `change` as a task of the ring and awaits its result. Dropping the future leaves the
    /// task alone.
    pub(crate) async fn detached<T, F>(
        &self,
        ring: &Ring,
        change: impl FnOnce(Arc<Disk>, Ring) -> F,
    ) -> Result<T, Error>
    where
        T: 'static,
        F: Future<Output = Result<T, Error>> + 'static,
    {
        // Every disk is in an `Arc`, and the caller has it.
        let Some(disk) = self.weak().upgrade() else { return Err(ended()) };
        let task = spawn(ring, change(disk, ring.clone()));
        task.await.unwrap_or_else(|| Err(ended()))
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::Io, "the thread that made the change has ended")
}
