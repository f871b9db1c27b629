//! Numbers and names of the requests of a front end, and the protocol feature that each belongs to.
//!
//! Promises: a table and nothing else; a number that is not in it is a request that we do not
//! serve. Numbers, names and features are those of the vhost-user specification.

use super::features;

macro_rules! requests {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal, $feature:expr;)*) => {
        /// A request of a front end that we serve.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Request {
            $($(#[$doc])* $variant = $number,)*
        }

        impl Request {
            /// All of them, in the order of their numbers.
            pub const ALL: &[Request] = &[$(Request::$variant),*];

            /// The request with this number, if we serve it.
            #[must_use]
            pub fn from_number(number: u32) -> Option<Request> {
                match number {
                    $($number => Some(Request::$variant),)*
                    _ => None,
                }
            }

            /// Its name in the specification, without the prefix.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Request::$variant => $name,)*
                }
            }

            /// The protocol feature that must have been negotiated; 0: none.
            #[must_use]
            pub fn feature(self) -> u64 {
                match self {
                    $(Request::$variant => $feature,)*
                }
            }
        }
    };
}

requests! {
    /// Which virtio features there are.
    GetFeatures = 1, "GET_FEATURES", 0;
    /// Which of them the driver took.
    SetFeatures = 2, "SET_FEATURES", 0;
    /// The session begins.
    SetOwner = 3, "SET_OWNER", 0;
    /// Deprecated; some front ends send it at a reset.
    ResetOwner = 4, "RESET_OWNER", 0;
    /// All of the guest's memory.
    SetMemTable = 5, "SET_MEM_TABLE", 0;
    /// The dirty log.
    SetLogBase = 6, "SET_LOG_BASE", features::LOG_SHMFD;
    /// What to signal when something was logged.
    SetLogFd = 7, "SET_LOG_FD", 0;
    /// Size of a virtqueue.
    SetVringNum = 8, "SET_VRING_NUM", 0;
    /// Where it is.
    SetVringAddr = 9, "SET_VRING_ADDR", 0;
    /// Where in it to begin.
    SetVringBase = 10, "SET_VRING_BASE", 0;
    /// Stop it, and say where it is.
    GetVringBase = 11, "GET_VRING_BASE", 0;
    /// What the driver kicks; starts the queue.
    SetVringKick = 12, "SET_VRING_KICK", 0;
    /// What the driver is called by.
    SetVringCall = 13, "SET_VRING_CALL", 0;
    /// What is signalled when the queue is broken.
    SetVringErr = 14, "SET_VRING_ERR", 0;
    /// Which features of vhost-user there are.
    GetProtocolFeatures = 15, "GET_PROTOCOL_FEATURES", 0;
    /// Which of them the front end took.
    SetProtocolFeatures = 16, "SET_PROTOCOL_FEATURES", 0;
    /// How many virtqueues there are.
    GetQueueNum = 17, "GET_QUEUE_NUM", features::MQ;
    /// Serve a virtqueue, or drain it and wait.
    SetVringEnable = 18, "SET_VRING_ENABLE", 0;
    /// The socket on which we ask.
    SetBackendReqFd = 21, "SET_BACKEND_REQ_FD", features::BACKEND_REQ;
    /// Configuration space.
    GetConfig = 24, "GET_CONFIG", features::CONFIG;
    /// A write to it.
    SetConfig = 25, "SET_CONFIG", features::CONFIG;
    /// A new area for requests in flight.
    GetInflightFd = 31, "GET_INFLIGHT_FD", features::INFLIGHT_SHMFD;
    /// The area to use.
    SetInflightFd = 32, "SET_INFLIGHT_FD", features::INFLIGHT_SHMFD;
    /// Back to the beginning.
    ResetDevice = 34, "RESET_DEVICE", features::RESET_DEVICE;
    /// How many regions of memory there may be.
    GetMaxMemSlots = 36, "GET_MAX_MEM_SLOTS", features::CONFIGURE_MEM_SLOTS;
    /// One more region.
    AddMemReg = 37, "ADD_MEM_REG", features::CONFIGURE_MEM_SLOTS;
    /// One less.
    RemMemReg = 38, "REM_MEM_REG", features::CONFIGURE_MEM_SLOTS;
    /// The device status of virtio.
    SetStatus = 39, "SET_STATUS", features::STATUS;
    /// The same, with what the device adds to it.
    GetStatus = 40, "GET_STATUS", features::STATUS;
    /// Where internal state goes to or comes from.
    SetDeviceStateFd = 42, "SET_DEVICE_STATE_FD", features::DEVICE_STATE;
    /// Whether all of it arrived.
    CheckDeviceState = 43, "CHECK_DEVICE_STATE", features::DEVICE_STATE;
}
