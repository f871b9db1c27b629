//! The numbers of the protocol: magics, options, commands, flags, errors and limits.
//!
//! Promises: values only; the one function, [`errno::of_system`], is pure.

/// First bytes of the server: `NBDMAGIC`.
pub const GREETING_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// Second number of the server, and first of each option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// First number of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First number of a request of 28 bytes.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First number of a request of 32 bytes.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First number of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First number of a chunk with a head of 20 bytes.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// First number of a chunk with a head of 32 bytes.
pub const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// Longest name of an export or a context, and longest text, in bytes.
pub const NAME_BYTES_MAX: usize = 4096;
/// Longest payload that every peer takes, in bytes.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// Most extents of a context in a reply to block status.
pub const EXTENTS_MAX: usize = 1 << 20;
/// Zeroes after the reply to `EXPORT_NAME`, unless both sides agreed on none.
pub const PADDING_BYTES: usize = 124;

/// Flags of the greeting and of its answer.
pub mod handshake_flags {
    /// The server answers unknown options.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No zeroes follow the reply to `EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 2;
}

/// Options.
pub mod option {
    /// Enters transmission; without a reply head.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the connection.
    pub const ABORT: u32 = 2;
    /// Asks for the names of all exports.
    pub const LIST: u32 = 3;
    /// Asks for TLS.
    pub const STARTTLS: u32 = 5;
    /// Asks for size and flags of an export.
    pub const INFO: u32 = 6;
    /// As `INFO`, then enters transmission.
    pub const GO: u32 = 7;
    /// Asks for replies in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Asks for contexts of block status.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Chooses contexts of block status.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Asks for heads with lengths of 64 bits.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Kinds of replies to options.
pub mod option_reply {
    /// The option is done.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// Something about an export.
    pub const INFO: u32 = 3;
    /// A context of block status.
    pub const META_CONTEXT: u32 = 4;
    /// This bit marks errors; their data is a text.
    pub const ERROR_BIT: u32 = 1 << 31;
    /// The server does not know the option.
    pub const UNSUPPORTED: u32 = ERROR_BIT | 1;
    /// The server does not permit it.
    pub const POLICY: u32 = ERROR_BIT | 2;
    /// The option's data is malformed, or the option comes at the wrong time.
    pub const INVALID: u32 = ERROR_BIT | 3;
    /// The platform cannot do it.
    pub const PLATFORM: u32 = ERROR_BIT | 4;
    /// Not before TLS.
    pub const TLS_REQUIRED: u32 = ERROR_BIT | 5;
    /// There is no such export.
    pub const UNKNOWN: u32 = ERROR_BIT | 6;
    /// The server ends.
    pub const SHUTDOWN: u32 = ERROR_BIT | 7;
    /// The client must ask for block sizes.
    pub const BLOCK_SIZE_REQUIRED: u32 = ERROR_BIT | 8;
    /// The option is too large.
    pub const TOO_BIG: u32 = ERROR_BIT | 9;
    /// The client must ask for extended heads.
    pub const EXTENDED_HEADERS_REQUIRED: u32 = ERROR_BIT | 10;
}

/// Kinds of information about an export.
pub mod info {
    /// Size and flags.
    pub const EXPORT: u16 = 0;
    /// The name.
    pub const NAME: u16 = 1;
    /// A text for people.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, preferred and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Flags of an export (transmission flags).
pub mod export_flags {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH works.
    pub const FLUSH: u16 = 1 << 2;
    /// The flag FUA works.
    pub const FUA: u16 = 1 << 3;
    /// A rotating disk.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// TRIM works.
    pub const TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` works.
    pub const WRITE_ZEROES: u16 = 1 << 6;
    /// The flag DF works.
    pub const DF: u16 = 1 << 7;
    /// A flush on one connection covers what was answered on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// RESIZE works.
    pub const RESIZE: u16 = 1 << 9;
    /// CACHE works.
    pub const CACHE: u16 = 1 << 10;
    /// The flag `FAST_ZERO` works.
    pub const FAST_ZERO: u16 = 1 << 11;
    /// Block status takes a filter as its payload.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Commands of requests.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// End of the connection; has no reply.
    pub const DISCONNECT: u16 = 2;
    /// Make durable what was answered.
    pub const FLUSH: u16 = 3;
    /// Discard.
    pub const TRIM: u16 = 4;
    /// Prefetch.
    pub const CACHE: u16 = 5;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Block status.
    pub const BLOCK_STATUS: u16 = 7;
    /// Not in use.
    pub const RESIZE: u16 = 8;
}

/// Flags of requests.
pub mod command_flags {
    /// The reply comes when the data is durable.
    pub const FUA: u16 = 1;
    /// Zeroes must take space.
    pub const NO_HOLE: u16 = 2;
    /// The reply to a read is one chunk.
    pub const DF: u16 = 4;
    /// The reply to block status has one extent.
    pub const REQ_ONE: u16 = 8;
    /// Zeroes only where that is faster than a write.
    pub const FAST_ZERO: u16 = 16;
    /// The length is that of the payload (extended heads only).
    pub const PAYLOAD_LEN: u16 = 32;
}

/// Kinds of chunks.
pub mod chunk {
    /// Nothing; with the flag DONE.
    pub const NONE: u16 = 0;
    /// An offset (8 bytes) and data.
    pub const OFFSET_DATA: u16 = 1;
    /// An offset (8) and a length (4) of zeroes.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of 32 bits.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents of 64 bits.
    pub const BLOCK_STATUS_EXTENDED: u16 = 6;
    /// This bit marks errors.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// An error and its text.
    pub const ERROR: u16 = ERROR_BIT | 1;
    /// An error, its text, and an offset.
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// Flags of chunks.
pub mod chunk_flags {
    /// The last chunk of a reply.
    pub const DONE: u16 = 1;
}

/// Flags of the extents of `base:allocation` and of `qemu:dirty-bitmap:`.
pub mod extent_flags {
    /// `base:allocation`: takes no space.
    pub const HOLE: u64 = 1;
    /// `base:allocation`: reads as zeroes.
    pub const ZERO: u64 = 2;
    /// `qemu:dirty-bitmap:NAME`: changed.
    pub const DIRTY: u64 = 1;
}

/// Names of contexts of block status.
pub mod context {
    /// Data, holes and zeroes.
    pub const ALLOCATION: &str = "base:allocation";
    /// The layer of the chain that has the bytes.
    pub const ALLOCATION_DEPTH: &str = "qemu:allocation-depth";
    /// What a bitmap marks; the bitmap's name follows.
    pub const DIRTY_BITMAP_PREFIX: &str = "qemu:dirty-bitmap:";
}

/// Errors of replies; the numbers of Linux.
pub mod errno {
    /// Not permitted.
    pub const EPERM: u32 = 1;
    /// Input or output failed.
    pub const EIO: u32 = 5;
    /// No memory.
    pub const ENOMEM: u32 = 12;
    /// Not a valid request.
    pub const EINVAL: u32 = 22;
    /// No space.
    pub const ENOSPC: u32 = 28;
    /// Cannot be answered in one chunk.
    pub const EOVERFLOW: u32 = 75;
    /// Not supported; also: not fast.
    pub const ENOTSUP: u32 = 95;
    /// The server ends.
    pub const ESHUTDOWN: u32 = 108;

    /// The error of the wire for an errno of Linux; what the wire has not is `EINVAL`.
    #[must_use]
    pub const fn of_system(errno: i32) -> u32 {
        /// EROFS, EDQUOT and EFBIG have no number of their own on the wire.
        const EROFS: i32 = 30;
        const EFBIG: i32 = 27;
        const EDQUOT: i32 = 122;
        match errno {
            0 => 0,
            1 | EROFS => EPERM,
            5 => EIO,
            12 => ENOMEM,
            28 | EFBIG | EDQUOT => ENOSPC,
            75 => EOVERFLOW,
            95 => ENOTSUP,
            108 => ESHUTDOWN,
            _ => EINVAL,
        }
    }
}
