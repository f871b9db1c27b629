//! What a cluster should hold that a table names.
//!
//! Promises: plain values; what is checked for each kind is with the caller.

/// What a cluster that is named should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClusterKind {
    /// A table.
    Table,
    /// Data, or bits of a bitmap.
    Data,
}
