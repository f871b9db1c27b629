//! The part of a disk that is served: all of it, or a window.
//!
//! Promises: clients see the bytes of the window and nothing else, whatever the format of the image
//! and whichever layers are added later; no request reaches a byte outside. Layers know nothing of
//! windows: the graph adds the start of the window once, where a request enters
//! ([`Graph::place`]). Pure numbers; never fails, allocates or waits.

use ringdisk_qcow2::{Bytes, GuestOffset};

use super::Graph;

/// A range of the disk that the layers make up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// First byte, bytes.
    pub(crate) start: GuestOffset,
    /// First byte after it, bytes; [`OPEN`]: it goes to the end of the disk, wherever that is.
    pub(crate) end: GuestOffset,
}

/// The end of a window that has none. No disk is so long: file offsets are signed numbers.
const OPEN: GuestOffset = GuestOffset(u64::MAX);

impl Default for Window {
    fn default() -> Window {
        Window { start: GuestOffset::ZERO, end: OPEN }
    }
}

impl Window {
    /// * `len`: bytes; `None`: to the end of the disk.
    pub(crate) fn new(start: GuestOffset, len: Option<Bytes>) -> Window {
        Window { start, end: len.map_or(OPEN, |len| start.saturating_add(len)) }
    }

    /// Whether it is less than the whole disk, or may be so one day.
    pub(crate) fn is_part(self) -> bool {
        self != Window::default()
    }

    /// Whether its size was given, so that no change of the disk changes it.
    pub(crate) fn is_fixed(self) -> bool {
        self.end != OPEN
    }

    /// Length as it was given, bytes.
    pub(crate) fn len(self) -> Option<Bytes> {
        self.is_fixed().then(|| self.end - self.start)
    }

    /// What of a disk of `size` bytes lies in it, bytes.
    pub(crate) fn visible(self, size: Bytes) -> Bytes {
        GuestOffset::after(size).min(self.end).saturating_sub(self.start)
    }
}

impl Graph {
    /// The place of a request in the layers, and its length inside the window and the disk, bytes.
    ///
    /// * `offset`, `len`: as the client gives them, any numbers; offsets count from the window.
    #[inline]
    pub(crate) fn place(&self, offset: u64, len: Bytes) -> (GuestOffset, Bytes) {
        let at = self.window.start.saturating_add(Bytes(offset));
        let left = GuestOffset::after(self.size()).min(self.window.end).saturating_sub(at);
        (at, len.min(left))
    }

    /// Size as clients see it, bytes.
    pub(crate) fn visible_size(&self) -> Bytes {
        self.window.visible(self.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_shows_what_the_disk_has_of_it() {
        let cases = [
            (Window::default(), 10, 10),
            (Window::new(GuestOffset(3), None), 10, 7),
            (Window::new(GuestOffset(3), None), 2, 0),
            (Window::new(GuestOffset(3), Some(Bytes(4))), 10, 4),
            (Window::new(GuestOffset(3), Some(Bytes(4))), 5, 2),
            (Window::new(GuestOffset(3), Some(Bytes::MAX)), 10, 7),
        ];
        for (window, size, visible) in cases {
            assert_eq!(window.visible(Bytes(size)), Bytes(visible), "{window:?} of {size}");
        }
    }

    #[test]
    fn the_length_is_what_was_given() {
        assert_eq!(Window::default().len(), None);
        assert_eq!(Window::new(GuestOffset(7), Some(Bytes::ZERO)).len(), Some(Bytes::ZERO));
        assert!(Window::new(GuestOffset(7), Some(Bytes::ZERO)).is_fixed());
        assert!(!Window::default().is_part());
        assert!(Window::new(GuestOffset(0), Some(Bytes(9))).is_part());
    }
}
