//! Sizes and switches of a ring.
//!
//! Promises: plain data; all memory that follows from it is reserved at start-up.

use crate::SpinPolicy;

/// Sizes and switches of one ring. All memory that follows from them is reserved at start-up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Submission queue entries, 1..=32768, rounded up to a power of two by the kernel. A full
    /// queue is submitted early, which costs a system call and is counted, never an error.
    pub entries: u32,
    /// Operations that may be in flight at once. Further ones wait for a slot (and are counted).
    pub slots: u32,
    /// Registered file table, in slots. 0: none.
    pub files: u32,
    /// 128-byte submission entries, as FUSE over io_uring needs them.
    pub sqe128: bool,
    /// The kernel refuses every operation but those of this crate (`EACCES`), whatever code writes
    /// into the ring.
    pub restricted: bool,
    /// Whether and how long a thread polls before it sleeps.
    pub spin: SpinPolicy,
    /// Shown in log lines.
    pub name: String,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            entries: 256,
            slots: 512,
            files: 16,
            sqe128: false,
            restricted: true,
            spin: SpinPolicy::off(),
            name: String::from("ring"),
        }
    }
}
