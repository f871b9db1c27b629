//! The report of a check, with the counters of `qemu-img check`.
//!
//! Promises: at most [`MESSAGES_MAX`] messages are kept.

use crate::check::stop::Stop;
use crate::units::Bytes;

/// Most messages that are kept; the rest is counted.
pub(super) const MESSAGES_MAX: usize = 1000;

/// The outcome, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CheckVerdict {
    /// The check could not be completed.
    Failed,
    /// The image is damaged.
    Corrupt,
    /// Space is lost, and nothing else.
    Leaks,
    /// Nothing is wrong.
    Clean,
}

impl CheckVerdict {
    /// The exit code that `qemu-img check` has for it: 1, 2, 3, 0.
    pub fn exit_code(self) -> u8 {
        match self {
            CheckVerdict::Failed => 1,
            CheckVerdict::Corrupt => 2,
            CheckVerdict::Leaks => 3,
            CheckVerdict::Clean => 0,
        }
    }
}

/// What a check found and what a repair did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Things that are wrong in a way that can cost data, and are still wrong.
    pub corruptions: u64,
    /// Clusters that are counted as used more often than they are, and still are.
    pub leaks: u64,
    /// What could not be checked.
    pub check_errors: u64,
    /// Corruptions that were repaired.
    pub corruptions_fixed: u64,
    /// Leaks that were repaired.
    pub leaks_fixed: u64,
    /// Those among `corruptions` that `qemu-img check` does not look for: metadata that something
    /// else refers to as well, tables that the file cuts off, bitmaps that it does not open an
    /// image with, entries for the wrong place of a data file. The rest is counted as there.
    pub own_findings: u64,
    /// End of the last cluster that is in use or counted as used, in bytes.
    pub image_end_offset: u64,
    /// Guest clusters of the disk.
    pub total_clusters: u64,
    /// Guest clusters that have a place in the image, compressed ones too.
    pub allocated_clusters: u64,
    /// Guest clusters whose place does not follow that of the one before, and compressed ones.
    pub fragmented_clusters: u64,
    /// Compressed guest clusters.
    pub compressed_clusters: u64,
    /// The image is marked as not closed cleanly.
    pub dirty: bool,
    /// The image is marked as corrupt.
    pub marked_corrupt: bool,
    /// One sentence for each finding, with offsets, in the order found. At most 1000.
    pub messages: Vec<String>,
    /// Findings that have no sentence any more.
    pub messages_left_out: u64,
}

impl CheckReport {
    /// The outcome.
    pub fn verdict(&self) -> CheckVerdict {
        if self.check_errors > 0 {
            CheckVerdict::Failed
        } else if self.corruptions > 0 {
            CheckVerdict::Corrupt
        } else if self.leaks > 0 {
            CheckVerdict::Leaks
        } else {
            CheckVerdict::Clean
        }
    }

    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.verdict() == CheckVerdict::Clean
    }

    /// Adds a sentence; `text` is not called when there are too many.
    pub(super) fn say(&mut self, text: impl FnOnce() -> String) {
        if self.messages.len() < MESSAGES_MAX {
            self.messages.push(text());
        } else {
            self.messages_left_out = self.messages_left_out.saturating_add(1);
        }
    }

    /// Adds sentences in front of the others.
    pub(super) fn say_first(&mut self, texts: Vec<String>) {
        let rest = std::mem::take(&mut self.messages);
        for text in texts.into_iter().chain(rest) {
            self.say(|| text);
        }
    }

    /// Counts `count` corruptions with one sentence.
    pub(super) fn corrupt(&mut self, count: u64, text: impl FnOnce() -> String) {
        self.corruptions = self.corruptions.saturating_add(count);
        self.say(text);
    }

    /// Counts `count` corruptions that `qemu-img check` does not look for, with one sentence.
    pub(super) fn own_finding(&mut self, count: u64, text: impl FnOnce() -> String) {
        self.own_findings = self.own_findings.saturating_add(count);
        self.corrupt(count, text);
    }

    /// Counts `count` leaks with one sentence.
    pub(super) fn leak(&mut self, count: u64, text: impl FnOnce() -> String) {
        self.leaks = self.leaks.saturating_add(count);
        self.say(text);
    }
}

/// Progress and cancellation of a long check.
#[derive(Clone, Copy)]
pub struct CheckHooks<'a> {
    /// Called now and then with the bytes of metadata that were read, and their total.
    pub progress: &'a dyn Fn(Bytes, Bytes),
    /// Asked now and then; true ends the check with kind `Cancelled` as soon as the image is
    /// whole.
    pub cancelled: &'a dyn Fn() -> bool,
}

impl CheckHooks<'static> {
    /// Hooks that do nothing.
    pub fn none() -> CheckHooks<'static> {
        CheckHooks { progress: &|_, _| {}, cancelled: &|| false }
    }
}

impl std::fmt::Debug for CheckHooks<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CheckHooks").finish_non_exhaustive()
    }
}

impl CheckHooks<'_> {
    /// Errors: `Cancelled` when the caller wants the end.
    pub(super) fn step(&self, done: Bytes, total: Bytes) -> Result<(), Stop> {
        if (self.cancelled)() {
            return Err(Stop::Cancelled);
        }
        (self.progress)(done, total.max(done));
        Ok(())
    }
}
