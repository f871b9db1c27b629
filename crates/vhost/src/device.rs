//! What all threads of one device share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::blk::SERIAL_BYTES;
use crate::blk::features;
use crate::export::OnError;
use crate::export::signals::Signals;

/// State of a device. Written by the control thread, but for what goes wrong; read by queue threads for each request: plain loads.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) serial: [u8; SERIAL_BYTES],
    /// Bytes; a power of two.
    pub(crate) logical_block: u32,
    pub(crate) read_only: bool,
    pub(crate) on_error: OnError,
    features: AtomicU64,
    write_cache: AtomicBool,
    needs_reset: AtomicBool,
    reason: Mutex<Option<String>>,
    gives_up: AtomicBool,
    io_errors: AtomicU64,
    signals: Arc<Signals>,
}

impl Device {
    /// * `serial`: cut to what a guest can read.
    pub(crate) fn new(
        name: &str,
        serial: &str,
        logical_block: u32,
        read_only: bool,
        write_cache: bool,
        on_error: OnError,
        signals: Arc<Signals>,
    ) -> Device {
        let mut padded = [0; SERIAL_BYTES];
        let bytes = &serial.as_bytes()[..serial.len().min(SERIAL_BYTES)];
        padded[..bytes.len()].copy_from_slice(bytes);
        Device {
            name: name.to_owned(),
            serial: padded,
            logical_block,
            read_only,
            on_error,
            features: AtomicU64::new(0),
            write_cache: AtomicBool::new(write_cache),
            needs_reset: AtomicBool::new(false),
            reason: Mutex::new(None),
            gives_up: AtomicBool::new(false),
            io_errors: AtomicU64::new(0),
            signals,
        }
    }

    /// Features that were agreed on.
    pub(crate) fn features(&self) -> u64 {
        self.features.load(Ordering::Acquire)
    }

    pub(crate) fn set_features(&self, features: u64) {
        self.features.store(features, Ordering::Release);
    }

    pub(crate) fn write_cache(&self) -> bool {
        self.write_cache.load(Ordering::Acquire)
    }

    pub(crate) fn set_write_cache(&self, on: bool) {
        self.write_cache.store(on, Ordering::Release);
    }

    /// Whether a write is answered only when it is durable.
    pub(crate) fn is_write_through(&self) -> bool {
        features::is_write_through(self.features(), self.write_cache())
    }

    /// The guest did what no driver may do: nothing goes on before a reset. The first reason counts.
    pub(crate) fn set_broken(&self, reason: String) {
        let mut kept = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.is_none() {
            tracing::error!("{}: the device needs a reset: {reason}", self.name);
            *kept = Some(reason);
        }
        self.needs_reset.store(true, Ordering::Release);
        // The driver learns of it as of a change of the configuration (virtio 1.3, section 2.1.2).
        self.signals.changed();
    }

    /// Nothing is answered any more: the export ends (`--on-error stop`).
    pub(crate) fn give_up(&self) {
        self.gives_up.store(true, Ordering::Release);
        self.signals.wake();
    }

    /// A queue thread ended by a defect of ours.
    pub(crate) fn thread_panicked(&self) {
        self.signals.panicked();
    }

    /// Nobody may wait for queue threads: nothing is answered any more, or one of them is gone.
    pub(crate) fn gives_up(&self) -> bool {
        self.gives_up.load(Ordering::Acquire) || self.signals.has_panicked()
    }

    /// The export was asked to stop.
    pub(crate) fn is_ending(&self) -> bool {
        self.signals.is_stopped()
    }

    pub(crate) fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Why the device needs a reset.
    pub(crate) fn broken_reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Back to the state before any driver. Whether there is a write cache is not forgotten: front ends that stop a device reset it,
    /// and do not set that again.
    pub(crate) fn reset(&self) {
        self.set_features(0);
        self.needs_reset.store(false, Ordering::Release);
        *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// An I/O error of the image. The first ones are told, then every 1000th, so that a guest cannot fill a log.
    pub(crate) fn io_error(&self, what: &str, offset: u64, len: u64, errno: ringdisk_ring::Errno) {
        let count = self.io_errors.fetch_add(1, Ordering::Relaxed) + 1;
        if count <= 10 || count.is_multiple_of(1000) {
            let name = &self.name;
            tracing::error!(
                "{name}: {what} of {len} bytes at {offset} failed: {errno} (error {count} of this disk)"
            );
        }
    }

    /// I/O errors of the image so far.
    pub(crate) fn io_errors(&self) -> u64 {
        self.io_errors.load(Ordering::Relaxed)
    }
}
