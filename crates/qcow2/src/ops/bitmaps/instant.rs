//! The bitmaps that record, at an instant at which no request is in flight.
//!
//! Promises: pure memory, so an instant costs no I/O. What the storage has of a cleared bitmap is
//! what it had before, which says more than the bitmap does: never less.

use super::BitmapContents;
use crate::engine::Qcow2;

impl Qcow2 {
    /// Whether a bitmap of this name records writes.
    pub fn bitmap_records(&self, name: &str) -> bool {
        self.recorded(name).is_some()
    }

    /// What a bitmap that records has recorded until now. `None`: none of this name records, or
    /// there is no memory for the copy.
    pub fn bitmap_recorded(&self, name: &str) -> Option<BitmapContents> {
        Some(BitmapContents { bits: self.recorded(name)?.copy()? })
    }

    /// Clears a bitmap that records. Returns whether there is one of this name.
    pub fn bitmap_clear_recorded(&self, name: &str) -> bool {
        let Some(bits) = self.recorded(name) else { return false };
        bits.clear();
        true
    }

    fn recorded(&self, name: &str) -> Option<&crate::bitmaps::bits::Bits> {
        let mut all = self.engine().ok()?.recording.contents();
        all.find(|(found, _)| *found == name.as_bytes()).map(|(_, bits)| bits)
    }
}
