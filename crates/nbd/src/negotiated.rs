//! What a client and the server have agreed on in the handshake.
//!
//! Promises: plain values, which do not change once the handshake is over.

use std::sync::Arc;

use ringdisk_nbd_protocol::request::Style;

use crate::exported_disk::Exported;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Agreed {
    pub(crate) export: Arc<Exported>,
    pub(crate) style: Style,
    /// Places in the export's contexts; the number of a context on the wire is its place in this
    /// list.
    pub(crate) contexts: Vec<usize>,
}
