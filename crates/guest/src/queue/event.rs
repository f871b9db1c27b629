//! Whether the other side wants to be told.
//!
//! Both sides follow one rule: write the index, full fence, read the other's wish; and: write the
//! wish, full fence, read the other's index. So of two that meet at least one sees the other, and
//! no wake-up is missed (`model.rs` tries the orders).

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
/// * `wish`: event suppression structure, `off_wrap` in the low half and `flags` in the high.
/// * `new`, `wrap`: where the side that asks will write next. `count`: descriptors since it asked
///   last.
pub(crate) fn packed_wants(
    wish: u32,
    event_idx: bool,
    size: u16,
    (new, wrap): (u16, bool),
    count: u16,
) -> bool {
    let [a, b, c, d] = wish.to_le_bytes();
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
