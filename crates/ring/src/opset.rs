//! Several operations at once.
//!
//! Promises: no allocation; all operations have ended when the wait returns.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use crate::{Errno, Op};

/// Up to `N` operations that run at once; lives inside the task that waits for them.
#[derive(Debug)]
pub struct OpSet<const N: usize> {
    ops: [Option<Op>; N],
    len: usize,
}

impl<const N: usize> Default for OpSet<N> {
    fn default() -> Self {
        OpSet::new()
    }
}

impl<const N: usize> OpSet<N> {
    /// An empty set.
    pub fn new() -> OpSet<N> {
        OpSet { ops: [const { None }; N], len: 0 }
    }

    /// Operations added so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether none was added.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether no more fit.
    pub fn is_full(&self) -> bool {
        self.len == N
    }

    /// Adds an operation; it starts in [`OpSet::wait`]. Panics when the set is full.
    pub fn push(&mut self, op: Op) {
        assert!(self.len < N, "the set holds {N} operations");
        self.ops[self.len] = Some(op);
        self.len += 1;
    }

    /// Starts all, waits for all, and empties the set. `each` gets the place of an operation and
    /// its result, in the order in which they end.
    pub async fn wait(&mut self, mut each: impl FnMut(usize, Result<u32, Errno>)) {
        poll_fn(|cx| {
            let mut pending = false;
            for (place, entry) in self.ops[..self.len].iter_mut().enumerate() {
                if let Some(op) = entry {
                    match Pin::new(op).poll(cx) {
                        Poll::Ready(result) => {
                            *entry = None;
                            each(place, result);
                        }
                        Poll::Pending => pending = true,
                    }
                }
            }
            if pending { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        self.len = 0;
    }
}
