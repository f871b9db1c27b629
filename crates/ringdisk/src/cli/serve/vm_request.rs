//! The words of `ringdisk serve` for virtual machines as the library takes them.
//!
//! Promises: plain copies; nothing can fail, and nothing is opened.

use ringdisk_server::vm::request::{DiskRequest, Request};
use ringdisk_vhost::export::{AccelOptions, Packed, queues_default};

use super::ServeArgs;
use crate::cli::disk_args::{Accel, DiskArgs, ServedDisk};

/// What the host kernel is to do: nothing where the user insists on packed virtqueues, or wants
/// limits.
fn accel(args: &DiskArgs) -> Option<AccelOptions> {
    let device = &args.device;
    let has_limits = !args.source.limit.is_empty();
    if device.accel == Accel::Off
        || device.accel == Accel::Auto && (device.packed == Packed::On || has_limits)
    {
        return None;
    }
    Some(AccelOptions {
        required: device.accel == Accel::Require,
        engine: device.accel_engine,
        workers: device.accel_workers,
    })
}

impl From<&ServedDisk> for DiskRequest {
    fn from(disk: &ServedDisk) -> DiskRequest {
        let DiskArgs { place, device, source, .. } = &disk.args;
        DiskRequest {
            image: disk.image.clone(),
            source: source.into(),
            socket: place.options(),
            second: place.second_front_end,
            queues: device.queues.unwrap_or_else(queues_default),
            queue_size: device.queue_size,
            serial: device.serial.clone(),
            logical_block_size: device.logical_block_size,
            physical_block_size: device.physical_block_size,
            packed: device.packed,
            on_error: device.on_error,
            incoming: device.incoming,
            threads: device.threads.options(),
            accel: accel(&disk.args),
            pin_guest_memory: device.pin_guest_memory,
        }
    }
}

impl From<&ServeArgs> for Request {
    fn from(args: &ServeArgs) -> Request {
        Request {
            daemonize: args.daemonize,
            keep: args.keep,
            upgrade: args.upgrade,
            pidfile: args.pidfile.clone(),
            metrics: args.log.metrics.clone(),
            sandbox: args.sandbox.word,
            stats: args.stats,
        }
    }
}
