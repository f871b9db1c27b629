//! Feature bits (virtio 1.3, sections 5.2.3 and 6; vhost-user specification).
//!
//! Promises: pure; what is offered depends on [`Offer`] alone. A bit that is not here is never
//! offered.

/// Largest number of segments of a request.
pub(crate) const SEG_MAX: u64 = 1 << 2;
/// Writes are refused.
pub(crate) const READ_ONLY: u64 = 1 << 5;
/// Logical block size.
pub(crate) const BLK_SIZE: u64 = 1 << 6;
/// The driver flushes.
pub(crate) const FLUSH: u64 = 1 << 9;
/// Physical block size and optimal transfers.
pub(crate) const TOPOLOGY: u64 = 1 << 10;
/// The driver may turn the write cache off and on.
pub(crate) const CONFIG_WCE: u64 = 1 << 11;
/// Several queues.
pub(crate) const MQ: u64 = 1 << 12;
/// Discard requests.
pub(crate) const DISCARD: u64 = 1 << 13;
/// Requests to write zeroes.
pub(crate) const WRITE_ZEROES: u64 = 1 << 14;
/// What is written to guest memory is logged (vhost).
pub(crate) const LOG_ALL: u64 = 1 << 26;
/// Tables of descriptors.
pub(crate) const RING_INDIRECT: u64 = 1 << 28;
/// Thresholds for kicks and calls.
pub(crate) const RING_EVENT_IDX: u64 = 1 << 29;
/// The front end may ask for protocol features (vhost-user).
pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;
/// Not a legacy device.
pub(crate) const VERSION_1: u64 = 1 << 32;
/// Packed virtqueues.
pub(crate) const RING_PACKED: u64 = 1 << 34;

/// What decides about the features of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    pub(crate) read_only: bool,
    pub(crate) discard: bool,
    pub(crate) several_queues: bool,
    pub(crate) packed: bool,
}

/// What the device offers.
pub(crate) fn offered(offer: Offer) -> u64 {
    let always = SEG_MAX
        | BLK_SIZE
        | FLUSH
        | TOPOLOGY
        | LOG_ALL
        | RING_INDIRECT
        | RING_EVENT_IDX
        | PROTOCOL_FEATURES
        | VERSION_1;
    let when = |condition: bool, bits: u64| if condition { bits } else { 0 };
    always
        | when(offer.read_only, READ_ONLY)
        | when(!offer.read_only, CONFIG_WCE | WRITE_ZEROES)
        | when(!offer.read_only && offer.discard, DISCARD)
        | when(offer.several_queues, MQ)
        | when(offer.packed, RING_PACKED)
}

/// Whether each write must be durable before it is answered: the driver cannot flush, or has turned
/// the write cache off (virtio 1.3, section 5.2.5.2).
///
/// * `features`: those that were agreed on.
/// * `write_cache`: as the configuration space says.
pub(crate) fn is_write_through(features: u64, write_cache: bool) -> bool {
    if features & CONFIG_WCE != 0 { !write_cache } else { features & FLUSH == 0 }
}
