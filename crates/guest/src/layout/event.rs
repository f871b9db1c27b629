//! Event suppression: whether the other side wants a notification.
//!
//! Promises: no wake-up is missed. Both sides follow one rule: write the index, full fence, read
//! the other's event suppression; and: write the event suppression, full fence, read the other's
//! index. So at least one of two concurrent sides sees the other (`queue/model.rs` tries the
//! orders).

/// Flag of a split ring's `used.flags` (no kicks) and `avail.flags` (no calls).
pub(crate) const NO_NOTIFY: u16 = 1;
/// Packed rings, `flags` of an event suppression structure: always.
pub(crate) const PACKED_ENABLE: u16 = 0;
/// Never.
pub(crate) const PACKED_DISABLE: u16 = 1;
/// When a descriptor is reached (EVENT_IDX only).
pub(crate) const PACKED_DESCRIPTOR: u16 = 2;
/// Bit of the wrap counter in `off_wrap`.
pub(crate) const PACKED_WRAP: u16 = 1 << 15;

/// Whether an index was passed on the way from `old` to `new` (virtio 1.3, 2.7.7.2: the entry *at*
/// `event` was used).
pub(crate) fn passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// The same for a packed ring (virtio 1.3, 2.8.10).
///
/// * `suppression`: event suppression structure, `off_wrap` in the low half and `flags` in the
///   high.
/// * `new`, `wrap`: where the side that asks will write next. `count`: descriptors since it asked
///   last.
pub(crate) fn packed_wants(
    suppression: u32,
    event_idx: bool,
    size: u16,
    (new, wrap): (u16, bool),
    count: u16,
) -> bool {
    let [a, b, c, d] = suppression.to_le_bytes();
    let (off_wrap, flags) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]) & 3);
    if flags == PACKED_DISABLE {
        return false;
    }
    if flags != PACKED_DESCRIPTOR || !event_idx {
        return true;
    }
    let mut event = off_wrap & !PACKED_WRAP;
    if (off_wrap & PACKED_WRAP != 0) != wrap {
        event = event.wrapping_sub(size);
    }
    passed(event, new, new.wrapping_sub(count))
}
