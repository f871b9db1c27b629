//! The layout of virtqueues in memory, as the virtio specification defines it.
//!
//! Promises: pure. Shared by the device side (`queue`), the inflight area and the driver of the
//! tests.

pub(crate) mod descriptor;
pub(crate) mod event;
pub(crate) mod packed;

/// Descriptors of a queue at most: what QEMU takes. A chain in flight costs us memory.
pub const SIZE_MAX: u16 = 1024;
/// How descriptors and rings are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// virtio 1.3, 2.7.
    Split,
    /// virtio 1.3, 2.8; the feature RING_PACKED.
    Packed,
}
