//! What the control socket asks of the side that serves a disk.
//!
//! Promises: nothing here waits for a client of the disk.

use ringdisk_export::stats::QueueView;
use serde_json::Value;

use crate::stats::Report;

/// The side that serves the disk.
pub trait Serving: Send + Sync {
    /// The counters now.
    fn report(&self) -> Report;

    /// Its queue threads.
    fn queues(&self) -> Vec<QueueView>;

    /// The machine, and where the disk is served on it; with the text for people under `text`.
    fn topology(&self) -> Value;

    /// Programs that use the disk over a socket, where it is served over one.
    fn clients(&self) -> Vec<SocketClient> {
        Vec::new()
    }

    /// Whether clients over a network get in with TLS only.
    fn requires_tls(&self) -> bool {
        false
    }

    /// Whether the host kernel moves the data now.
    fn is_accelerated(&self) -> bool {
        false
    }

    /// Lets the host kernel move the data, or not. Waits until that is so. Gives whether the kernel
    /// serves now; without a guest it may later.
    ///
    /// Errors: why it stays as it is.
    fn switch_accel(&self, _on: bool) -> Result<bool, String> {
        Err(String::from("only disks of virtual machines can be accelerated (`ringdisk serve`)"))
    }

    /// Has the queue threads serve the disk, where the host kernel might, so that limits hold.
    /// Waits until that is so.
    ///
    /// Errors: why the kernel goes on.
    fn serve_here(&self) -> Result<(), String> {
        Ok(())
    }
}

/// A program that uses a disk over a socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketClient {
    /// Its process, where it is on this machine.
    pub pid: Option<u32>,
    /// Its address, where it is not.
    pub address: Option<String>,
    /// The export of NBD that it uses.
    pub export: Option<String>,
}
