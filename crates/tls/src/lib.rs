//! TLS for NBD: certificates in QEMU's layout, and encrypted streams on a ring.
//!
//! Promises: keys and certificates are read when a [`ServerTls`] or a [`ClientTls`] is made, and no
//! file is opened later, so a confined process can shake hands. Bytes that a peer sends are checked
//! by rustls before anything else sees them; the memory of a stream is bounded
//! ([`STREAM_BYTES_MAX`]). Nothing here knows NBD.
//!
//! ```
//! use ringdisk_tls::{AllowList, Source};
//!
//! // Where keys and certificates are: a directory in QEMU's layout, or descriptors.
//! let keys = Source::parse("/etc/pki/ringdisk")?;
//! assert!(!keys.has_descriptor());
//! // Which certificates of clients are let in.
//! let allowed = AllowList::exact([String::from("CN=backup.example.org")]);
//! assert!(allowed.allows("CN=backup.example.org") && !allowed.allows("CN=other.example.org"));
//! # Ok::<(), String>(())
//! ```
//!
//! | module | promises |
//! |---|---|
//! | `source`, `pem` | where keys and certificates are, and what is in these files |
//! | `name` | distinguished names as text, as QEMU's `authz` objects compare them |
//! | `allow` | which names of clients are let in |
//! | `server`, `client` | what one side of a handshake needs |
//! | `stream` | a connection: handshake, reading, writing |

#![forbid(unsafe_code)]

mod allow;
mod client;
mod name;
mod pem;
mod server;
mod source;
mod stream;

pub use allow::{AllowList, Match, Rule};
pub use client::ClientTls;
pub use server::{ServerTls, VerifyPeer};
pub use source::{Source, SourceError};
pub use stream::{Blocking, STREAM_BYTES_MAX, StreamError, TlsStream};
