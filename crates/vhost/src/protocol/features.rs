//! Feature bits of virtio that the control plane acts on, and those of vhost-user.
//!
//! Promises: constants. What a device offers is the device's own; here are only the bits that
//! change how messages are treated.

/// Virtio: all writes to guest memory are logged (live migration).
pub const F_LOG_ALL: u64 = 1 << 26;
/// Virtio: vhost-user's own features are negotiated too.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// Virtio: virtqueues are packed.
pub const F_RING_PACKED: u64 = 1 << 34;

/// More than one queue, and GET_QUEUE_NUM.
pub const MQ: u64 = 1 << 0;
/// The dirty log comes as a descriptor.
pub const LOG_SHMFD: u64 = 1 << 1;
/// Any message may ask for an answer.
pub const REPLY_ACK: u64 = 1 << 3;
/// A second socket on which the back end asks.
pub const BACKEND_REQ: u64 = 1 << 5;
/// Configuration space travels in messages.
pub const CONFIG: u64 = 1 << 9;
/// Requests in flight are kept in shared memory, which outlives us.
pub const INFLIGHT_SHMFD: u64 = 1 << 12;
/// RESET_DEVICE.
pub const RESET_DEVICE: u64 = 1 << 13;
/// Memory regions come and go one at a time.
pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
/// The device status of virtio.
pub const STATUS: u64 = 1 << 16;
/// Internal state goes out and comes in through a descriptor.
pub const DEVICE_STATE: u64 = 1 << 19;

/// All that this crate implements. QEMU takes whatever is offered, so nothing else may ever be.
pub const ALL: u64 = MQ
    | LOG_SHMFD
    | REPLY_ACK
    | BACKEND_REQ
    | CONFIG
    | INFLIGHT_SHMFD
    | RESET_DEVICE
    | CONFIGURE_MEM_SLOTS
    | STATUS
    | DEVICE_STATE;

/// Virtio device status: the device needs a reset.
pub const STATUS_NEEDS_RESET: u8 = 0x40;

/// The name of one protocol feature, for messages.
#[must_use]
pub fn name(bit: u64) -> &'static str {
    match bit {
        MQ => "MQ",
        LOG_SHMFD => "LOG_SHMFD",
        REPLY_ACK => "REPLY_ACK",
        BACKEND_REQ => "BACKEND_REQ",
        CONFIG => "CONFIG",
        INFLIGHT_SHMFD => "INFLIGHT_SHMFD",
        RESET_DEVICE => "RESET_DEVICE",
        CONFIGURE_MEM_SLOTS => "CONFIGURE_MEM_SLOTS",
        STATUS => "STATUS",
        DEVICE_STATE => "DEVICE_STATE",
        _ => "unknown",
    }
}
