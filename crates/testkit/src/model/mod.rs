//! A virtual machine without a guest: a vhost-user front end that speaks by hand, memory in a
//! memfd, and a driver of virtio-blk that lays its own rings.
//!
//! Promises: knows nothing of the code under test but the driver's side of the rings; waits for
//! nothing longer than [`TIMEOUT`], and panics with what it waited for. What the device writes
//! beside the buffers that it was given is found.

mod front;
mod load;
mod machine;
mod queue;
mod request;

use std::time::Duration;

pub use ringdisk_guest::Segment;
pub use ringdisk_guest::driver::GuestRam;

pub use front::{FrontEnd, Refused, number, words};
pub use load::{Discards, Load, LoadOptions};
pub use machine::{BaseRule, Inflight, Vm, VmOptions};
pub use queue::{Done, Queue};
pub use request::{Cut, Kind, Request, range};

/// Nothing that is waited for takes so long, on a busy machine either.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Bits of virtio and vhost-user, written down from the specifications.
#[expect(missing_docs, reason = "the names are those of the specifications")]
pub mod bits {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const READ_ONLY: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const SECURE_ERASE: u64 = 1 << 16;
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const PROTOCOL: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const PACKED: u64 = 1 << 34;

    pub const P_MQ: u64 = 1 << 0;
    pub const P_LOG_SHMFD: u64 = 1 << 1;
    pub const P_REPLY_ACK: u64 = 1 << 3;
    pub const P_BACKEND_REQ: u64 = 1 << 5;
    pub const P_CONFIG: u64 = 1 << 9;
    pub const P_INFLIGHT: u64 = 1 << 12;
    pub const P_RESET_DEVICE: u64 = 1 << 13;
    pub const P_MEM_SLOTS: u64 = 1 << 15;
    pub const P_STATUS: u64 = 1 << 16;
    pub const P_DEVICE_STATE: u64 = 1 << 19;
}

/// Numbers of messages.
#[expect(missing_docs, reason = "the names are those of the specification")]
pub mod ask {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
    pub const SET_DEVICE_STATE_FD: u32 = 42;
    pub const CHECK_DEVICE_STATE: u32 = 43;
}
