//! Bitmaps that a check has found to be unusable.
//!
//! Promises: plain values.

/// Bitmaps that cannot be used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LostBitmaps {
    /// None of them can: the directory cannot be read.
    pub(super) all: bool,
    /// Their numbers in the directory, rising, each once.
    pub(super) numbers: Vec<u32>,
    /// For messages.
    pub(super) names: Vec<String>,
}

impl LostBitmaps {
    pub(super) fn is_empty(&self) -> bool {
        !self.all && self.numbers.is_empty()
    }

    /// What a repair that leaves them out has to say.
    pub(super) fn said(&self) -> Vec<String> {
        if self.all {
            return vec![
                "Repaired: all bitmaps are removed, as their directory cannot be read".into(),
            ];
        }
        let each = |name| format!("Repaired: bitmap '{name}' is removed, as it cannot be used");
        self.names.iter().map(each).collect()
    }

    pub(super) fn add(&mut self, number: u32) {
        if let Err(at) = self.numbers.binary_search(&number) {
            self.numbers.insert(at, number);
        }
    }
}
