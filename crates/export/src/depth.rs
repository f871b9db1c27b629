//! How many requests an export serves at once, bounded by the memory of their buffers.
//!
//! Promises: pure arithmetic. Control path.

/// Bounds for the buffers of each queue (or connection) of an export.
///
/// ```
/// use ringdisk_export::DepthRule;
///
/// let rule = DepthRule { min: 8, max: 64, memory_bytes: 1 << 30 };
/// assert_eq!(rule.depth(2, 1 << 20), 64);
/// assert_eq!(rule.depth(32, 1 << 20), 32);
/// assert_eq!(rule.depth(1000, 1 << 20), 8);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DepthRule {
    /// Requests of a queue at least, whatever the memory: 1 or more.
    pub min: usize,
    /// Requests of a queue at most.
    pub max: usize,
    /// What the buffers of all queues may take together, bytes.
    pub memory_bytes: usize,
}

impl DepthRule {
    /// Requests that each of so many queues serves at once.
    ///
    /// * `request_bytes`: the buffer of one request.
    #[must_use]
    pub fn depth(self, queues: usize, request_bytes: usize) -> usize {
        let by_memory = self.memory_bytes / (queues.max(1) * request_bytes.max(1));
        by_memory.clamp(self.min, self.max)
    }
}
