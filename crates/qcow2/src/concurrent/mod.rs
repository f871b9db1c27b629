//! Structures that several threads use at once: the slice cache, loads under way, claims, grace
//! periods, unlinked clusters, and the place of a table that moves.
//!
//! Promises: none of them knows the format, a ring or a storage, and each takes its atomics and
//! locks from [`sync`](crate::sync) alone. So the model test (`model/`) builds the very same source
//! files on simulated primitives and tries the orders in which their steps can run.

pub(crate) mod grace;
pub(crate) mod loads_in_flight;
pub(crate) mod region;
pub(crate) mod registry;
pub(crate) mod slices;
pub(crate) mod unlinked;

use crate::sync;
