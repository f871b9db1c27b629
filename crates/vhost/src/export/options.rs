//! What an export is asked for.
//!
//! Promises: plain values; control path.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_export::keep::Keeper;
use ringdisk_export::{CommonOptions, SecondExport, THREADS_MAX, Threads};

use super::kernel_device::AccelOptions;
use crate::device::OnError;
use crate::{Error, ErrorKind};

/// Most virtqueues of a disk.
pub const QUEUES_MAX: u16 = 64;
/// Largest virtqueue, descriptors: the most that QEMU takes for this device.
pub const QUEUE_SIZE_MAX: u16 = 1024;
/// Bytes of a serial number (virtio 1.3, 5.2.6: `VIRTIO_BLK_T_GET_ID`).
pub const SERIAL_BYTES_MAX: usize = 20;
/// Smallest block, bytes: the sector of the protocol (virtio 1.3, 5.2.4).
pub const BLOCK_SIZE_MIN: u32 = 512;
/// Largest block, bytes: as QEMU's exports have it.
pub const BLOCK_SIZE_MAX: u32 = 2 << 20;

/// Where front ends come from.
#[derive(Debug)]
pub enum Listen {
    /// A listening socket; its name, if it has one, is the caller's to remove.
    Listener(OwnedFd),
    /// The one front end that there will ever be: the export ends with it.
    Stream(OwnedFd),
    /// The front end listens; we connect, and again when it has gone.
    Connect(PathBuf),
}

type Connect = dyn Fn(&Path) -> io::Result<OwnedFd> + Send + Sync;

/// How [`Listen::Connect`] gets to the front end: by itself, or through a helper process that may
/// where this process may not.
#[derive(Clone)]
pub struct Connector(Arc<Connect>);

impl Connector {
    /// * `connect`: gives a connected Unix stream socket, blocking or not; does not wait for long.
    pub fn new(
        connect: impl Fn(&Path) -> io::Result<OwnedFd> + Send + Sync + 'static,
    ) -> Connector {
        Connector(Arc::new(connect))
    }

    /// Errors: no front end listens there.
    pub(super) fn connect(&self, path: &Path) -> io::Result<OwnedFd> {
        (self.0)(path)
    }
}

impl Default for Connector {
    /// With sockets of its own.
    fn default() -> Connector {
        Connector::new(|path| UnixStream::connect(path).map(OwnedFd::from))
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connector")
    }
}

/// Whether packed virtqueues are offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packed {
    /// Unless the host kernel could serve split ones, which it alone knows.
    #[default]
    Auto,
    /// They are.
    On,
    /// They are not.
    Off,
}

/// What happens to a front end that comes while another one is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Second {
    /// It waits until that one has gone.
    #[default]
    Wait,
    /// It is sent away.
    Refuse,
}

/// How to serve a disk as a vhost-user-blk device.
#[derive(Debug)]
pub struct ExportOptions {
    /// Name, queue threads, whether writes are refused. Each of several threads gets one of the
    /// named CPUs; where none are named the scheduler chooses, within a node where there are
    /// several.
    pub common: CommonOptions,
    /// Where front ends come from.
    pub listen: Listen,
    /// For [`Listen::Connect`].
    pub connector: Connector,
    /// No word of a front end is read before [`Export::release`](super::Export::release): those
    /// that come wait.
    pub held: bool,
    /// For a second one.
    pub second: Second,
    /// Virtqueues that are offered, 1..=[`QUEUES_MAX`].
    pub queues: u16,
    /// Largest virtqueue that a front end may ask for, descriptors, 2..=[`QUEUE_SIZE_MAX`].
    pub queue_size_max: u16,
    /// What the guest reads as the serial number, at most [`SERIAL_BYTES_MAX`] bytes of printable
    /// ASCII; may be empty.
    pub serial: String,
    /// Bytes, a power of two, [`BLOCK_SIZE_MIN`]..=[`BLOCK_SIZE_MAX`].
    pub logical_block_size: u32,
    /// Bytes, a power of two, not smaller than the logical one; `None`: what the storage has.
    pub physical_block_size: Option<u32>,
    /// Whether the device's write cache is on (`wce`) at the start; the guest may change it.
    pub write_cache: bool,
    /// Packed virtqueues are offered.
    pub packed: Packed,
    /// The host kernel moves the data where it can; `None`: never.
    pub accel: Option<AccelOptions>,
    /// Memory of the guest is registered with the ring of each queue thread, and so pinned.
    pub pin_guest_memory: bool,
    /// For I/O errors of the image.
    pub on_error: OnError,
    /// Keeps the export's state outside of this process: when that is killed, another one goes on
    /// ([`Export::go_on`](super::Export::go_on)), and the front end notices a pause. Not with
    /// `accel`.
    pub keep: Option<Box<dyn Keeper>>,
    /// A second export of the disk in this process, which ends before the disk is closed. Not with
    /// `accel`: the second export would not see what the kernel has in flight.
    pub beside: Option<Arc<dyn SecondExport>>,
}

impl ExportOptions {
    /// Defaults for a place.
    #[must_use]
    pub fn new(listen: Listen) -> ExportOptions {
        ExportOptions {
            common: CommonOptions::default(),
            listen,
            connector: Connector::default(),
            held: false,
            second: Second::Wait,
            queues: queues_default(),
            queue_size_max: QUEUE_SIZE_MAX,
            serial: String::new(),
            logical_block_size: BLOCK_SIZE_MIN,
            physical_block_size: None,
            write_cache: true,
            packed: Packed::Auto,
            accel: None,
            pin_guest_memory: false,
            on_error: OnError::Report,
            keep: None,
            beside: None,
        }
    }

    /// Looks whether the values can be.
    ///
    /// Errors: [`ErrorKind::Usage`] with the option, its limit and what to do.
    pub fn check(&self) -> Result<(), Error> {
        let usage = |text: String| Err(Error::new(ErrorKind::Usage, text));
        if !(1..=QUEUES_MAX).contains(&self.queues) {
            let queues = self.queues;
            return usage(format!("{queues} virtqueues; a disk has 1 to {QUEUES_MAX}"));
        }
        if !(2..=QUEUE_SIZE_MAX).contains(&self.queue_size_max) {
            let size = self.queue_size_max;
            return usage(format!(
                "virtqueues of {size} descriptors; they have 2 to {QUEUE_SIZE_MAX}"
            ));
        }
        if let Threads::Count(count) = self.common.threads.threads
            && !(1..=THREADS_MAX).contains(&count)
        {
            return usage(format!("{count} queue threads; there are 1 to {THREADS_MAX}"));
        }
        if self.keep.is_some() && self.accel.is_some() {
            return usage(String::from("a disk that is kept is not served by the host kernel"));
        }
        if self.beside.is_some() && self.accel.is_some() {
            let text = "a disk with a second export is not served by the host kernel";
            return usage(String::from(text));
        }
        check_serial(&self.serial).or_else(usage)?;
        check_block_size(self.logical_block_size).or_else(usage)?;
        if let Some(physical) = self.physical_block_size {
            check_block_size(physical).or_else(usage)?;
            let logical = self.logical_block_size;
            if physical < logical {
                return usage(format!(
                    "physical blocks of {physical} bytes are smaller than the logical ones of \
                     {logical}"
                ));
            }
        }
        Ok(())
    }
}

/// A virtqueue for each CPU that this process may use.
#[must_use]
pub fn queues_default() -> u16 {
    let cpus = ringdisk_ring::cpus_of_thread().len();
    u16::try_from(cpus).unwrap_or(QUEUES_MAX).clamp(1, QUEUES_MAX)
}

/// Looks whether a text can be a serial number.
///
/// Errors: why not.
pub fn check_serial(text: &str) -> Result<(), String> {
    if text.len() > SERIAL_BYTES_MAX {
        let len = text.len();
        return Err(format!("a serial number of {len} bytes; {SERIAL_BYTES_MAX} is the most"));
    }
    match text.chars().find(|c| !matches!(c, ' '..='~')) {
        Some(_) => Err(String::from("a serial number has printable ASCII characters only")),
        None => Ok(()),
    }
}

/// Looks whether blocks can have this size, bytes.
///
/// Errors: why not.
pub fn check_block_size(bytes: u32) -> Result<(), String> {
    if bytes.is_power_of_two() && (BLOCK_SIZE_MIN..=BLOCK_SIZE_MAX).contains(&bytes) {
        return Ok(());
    }
    Err(format!(
        "blocks of {bytes} bytes; it must be a power of two from {BLOCK_SIZE_MIN} to \
         {BLOCK_SIZE_MAX}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> ExportOptions {
        ExportOptions::new(Listen::Connect(PathBuf::from("socket")))
    }

    #[test]
    fn defaults_can_be() {
        options().check().expect("defaults");
        assert!((1..=QUEUES_MAX).contains(&options().queues));
    }

    #[test]
    fn each_value_out_of_its_limits_is_named() {
        for (options, text) in [
            (ExportOptions { queues: 0, ..options() }, "1 to 64"),
            (ExportOptions { queues: 65, ..options() }, "1 to 64"),
            (ExportOptions { queue_size_max: 1, ..options() }, "2 to 1024"),
            (ExportOptions { queue_size_max: 1025, ..options() }, "2 to 1024"),
            (ExportOptions { common: CommonOptions::with_threads(0), ..options() }, "1 to 64"),
            (ExportOptions { serial: "x".repeat(21), ..options() }, "20 is the most"),
            (ExportOptions { serial: String::from("a\tb"), ..options() }, "printable"),
            (ExportOptions { logical_block_size: 256, ..options() }, "power of two"),
            (ExportOptions { physical_block_size: Some(4095), ..options() }, "power of two"),
            (
                ExportOptions {
                    logical_block_size: 4096,
                    physical_block_size: Some(512),
                    ..options()
                },
                "smaller than the logical",
            ),
        ] {
            let error = options.check().expect_err(text);
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}
