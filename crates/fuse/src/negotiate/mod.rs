//! The INIT exchange: what the kernel offers, what we answer, and what both sides then rely on.
//!
//! Promises: the answer depends on the offer and on [`Profile`] only; ASYNC_DIO is in every answer,
//! since without it all direct I/O of a client runs one request at a time. Called once per mount,
//! before any other request is served.
//!
//! How a page-cached mount (`kernel_cache`) stays coherent. The kernel writes through (no
//! WRITEBACK_CACHE), so the only dirty pages are those of shared mappings, and it writes these out
//! before each direct I/O on the same range. The daemon is the only writer of the image, so cached
//! data goes stale in one way only: a resize from outside the mount. Therefore:
//! - AUTO_INVAL_DATA is clear: our time stamps move with the clock and would drop the cache at each
//!   revalidation;
//! - EXPLICIT_INVAL_DATA is clear too: a new size, seen by any GETATTR, drops all cached pages
//!   (dirty ones are written first);
//! - a resize sends NOTIFY_INVAL_INODE, so that it is seen at once;
//! - an open keeps the cache (FOPEN_KEEP_CACHE).

use std::fmt;
use std::fs;

use crate::abi::flags::{
    FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, FOPEN_NOFLUSH, FOPEN_PARALLEL_DIRECT_WRITES,
    FOPEN_PASSTHROUGH, INIT_ABORT_ERROR, INIT_ASYNC_DIO, INIT_ASYNC_READ, INIT_BIG_WRITES,
    INIT_DIRECT_IO_ALLOW_MMAP, INIT_EXT, INIT_HANDLE_KILLPRIV_V2, INIT_HAS_RESEND, INIT_MAX_PAGES,
    INIT_OVER_IO_URING, INIT_PARALLEL_DIROPS, INIT_PASSTHROUGH,
};
use crate::abi::{
    InitIn, InitOut, KERNEL_MINOR_VERSION, KERNEL_MINOR_VERSION_MIN, KERNEL_VERSION,
    MIN_READ_BUFFER, WRITE_DATA_OFFSET,
};

/// Largest READ or WRITE that we ask for, bytes.
pub const TRANSFER_BYTES_MAX: u32 = 1 << 20;
/// Background requests in flight before the kernel makes submitters sleep. The default of 12 would
/// throttle every asynchronous client; this covers 16 clients at iodepth 256.
pub const MAX_BACKGROUND: u16 = 4096;
/// Background requests in flight before readahead is dropped: three quarters of [`MAX_BACKGROUND`],
/// the kernel's own proportion.
pub const CONGESTION_THRESHOLD: u16 = MAX_BACKGROUND / 4 * 3;
/// What the kernel allows when it has no `max_pages_limit` file (before Linux 6.13).
const MAX_PAGES_LIMIT_DEFAULT: u32 = 256;
/// Pages of a request when the kernel does not know MAX_PAGES (before Linux 4.20).
const MAX_PAGES_OLD: u32 = 32;

/// What this mount wants; the same values are needed for the mount options (`max_read`), before
/// INIT arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Size of a page, bytes.
    pub page_bytes: u32,
    /// Pages of one request.
    pub max_pages: u16,
    /// Pages are cached by the kernel, instead of every open being FOPEN_DIRECT_IO.
    pub kernel_cache: bool,
    /// The rings are there, so the kernel may be told to use them.
    pub over_io_uring: bool,
    /// The kernel shall read and write the image itself.
    pub passthrough: bool,
}

impl Profile {
    /// Reads the page size and `/proc/sys/fs/fuse/max_pages_limit` of this machine.
    #[must_use]
    pub fn detect(kernel_cache: bool) -> Profile {
        let page_bytes = u32::try_from(rustix::param::page_size()).unwrap_or(4096);
        let limit = fs::read_to_string("/proc/sys/fs/fuse/max_pages_limit")
            .ok()
            .and_then(|text| text.trim().parse().ok());
        Profile::new(page_bytes, limit, kernel_cache)
    }

    /// * `page_bytes`: size of a page, a power of two.
    /// * `max_pages_limit`: the kernel's limit, if it names one.
    #[must_use]
    pub fn new(page_bytes: u32, max_pages_limit: Option<u32>, kernel_cache: bool) -> Profile {
        let wanted = TRANSFER_BYTES_MAX / page_bytes;
        let max_pages = wanted.min(max_pages_limit.unwrap_or(MAX_PAGES_LIMIT_DEFAULT)).max(1);
        Profile {
            page_bytes,
            max_pages: u16::try_from(max_pages).unwrap_or(u16::MAX),
            kernel_cache,
            over_io_uring: false,
            passthrough: false,
        }
    }

    /// Largest READ and WRITE, bytes. The mount option `max_read` must have this value.
    #[must_use]
    pub fn transfer_bytes(&self) -> u32 {
        u32::from(self.max_pages) * self.page_bytes
    }

    /// Bytes of a buffer that can take any request of `/dev/fuse`.
    #[must_use]
    pub fn request_bytes_max(&self) -> usize {
        (self.transfer_bytes() as usize + WRITE_DATA_OFFSET).max(MIN_READ_BUFFER)
    }

    /// Flags for the reply to OPEN.
    ///
    /// A descriptor that cannot write has nothing to flush when it is closed.
    #[must_use]
    pub fn open_flags(&self, can_write: bool) -> u32 {
        let cache = if self.passthrough {
            // Direct I/O would come to us again, and other flags exclude it.
            FOPEN_PASSTHROUGH
        } else if self.kernel_cache {
            FOPEN_KEEP_CACHE
        } else {
            FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES
        };
        let flush = if can_write { 0 } else { FOPEN_NOFLUSH };
        cache | flush
    }
}

/// What both sides agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Protocol minor version in use (major is 7).
    pub minor: u32,
    /// All flags in use.
    pub flags: u64,
    /// All flags that the kernel offered.
    pub offered: u64,
    /// Largest WRITE that will come, bytes; READs are bounded by the mount option `max_read`, and
    /// must be clamped.
    pub max_write: u32,
}

impl Negotiated {
    /// Whether all bits of `flag` are in use.
    #[must_use]
    pub fn has(&self, flag: u64) -> bool {
        self.flags & flag == flag
    }
}

/// The answer to an INIT request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitAnswer {
    /// Send this, then serve.
    Ready(InitOut, Negotiated),
    /// The kernel speaks a newer major version: send this and wait for a second INIT.
    Again(InitOut),
}

/// The kernel's protocol is too old for us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooOld {
    /// Major version of the kernel.
    pub major: u32,
    /// Minor version of the kernel.
    pub minor: u32,
    /// Whether the version would do but asynchronous direct I/O is missing.
    pub without_async_dio: bool,
}

impl fmt::Display for TooOld {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.without_async_dio {
            return write!(
                formatter,
                "the kernel's FUSE {}.{} does not offer asynchronous direct I/O",
                self.major, self.minor
            );
        }
        write!(
            formatter,
            "the kernel speaks FUSE {}.{}, ringdisk needs \
             {KERNEL_VERSION}.{KERNEL_MINOR_VERSION_MIN} or newer",
            self.major, self.minor
        )
    }
}

impl std::error::Error for TooOld {}

/// Answers INIT.
///
/// Errors: [`TooOld`]; reply with EPROTO then, the mount cannot work.
pub fn negotiate(init: &InitIn, profile: &Profile) -> Result<InitAnswer, TooOld> {
    if init.major > KERNEL_VERSION {
        return Ok(InitAnswer::Again(InitOut {
            major: KERNEL_VERSION,
            minor: KERNEL_MINOR_VERSION,
            ..InitOut::default()
        }));
    }
    let too_old = TooOld { major: init.major, minor: init.minor, without_async_dio: false };
    if init.major < KERNEL_VERSION || init.minor < KERNEL_MINOR_VERSION_MIN {
        return Err(too_old);
    }

    let offered_low = u64::from(init.flags);
    let has_ext = offered_low & INIT_EXT != 0;
    let offered = if has_ext { offered_low | u64::from(init.flags2) << 32 } else { offered_low };
    if offered & INIT_ASYNC_DIO == 0 {
        return Err(TooOld { without_async_dio: true, ..too_old });
    }
    let flags = offered & wanted_flags(profile);

    let max_write = if flags & INIT_MAX_PAGES != 0 {
        profile.transfer_bytes()
    } else {
        profile.transfer_bytes().min(MAX_PAGES_OLD * profile.page_bytes)
    };
    let minor = init.minor.min(KERNEL_MINOR_VERSION);
    let out = InitOut {
        major: KERNEL_VERSION,
        minor,
        max_readahead: init.max_readahead,
        flags: low_half(flags),
        max_background: MAX_BACKGROUND,
        congestion_threshold: CONGESTION_THRESHOLD,
        max_write,
        time_gran: 1,
        max_pages: if flags & INIT_MAX_PAGES != 0 { profile.max_pages } else { 0 },
        flags2: low_half(flags >> 32),
        // The file of a plain file system, nothing stacked below it.
        max_stack_depth: u32::from(flags & INIT_PASSTHROUGH != 0),
        ..InitOut::default()
    };
    Ok(InitAnswer::Ready(out, Negotiated { minor, flags, offered, max_write }))
}

/// Flags we would like; see the module text for those that we leave out on purpose.
fn wanted_flags(profile: &Profile) -> u64 {
    let always = INIT_ASYNC_READ
        | INIT_BIG_WRITES
        | INIT_ASYNC_DIO
        | INIT_PARALLEL_DIROPS
        | INIT_ABORT_ERROR
        | INIT_MAX_PAGES
        | INIT_HANDLE_KILLPRIV_V2
        | INIT_EXT
        | INIT_HAS_RESEND;
    let mmap = if profile.kernel_cache { 0 } else { INIT_DIRECT_IO_ALLOW_MMAP };
    let rings = if profile.over_io_uring { INIT_OVER_IO_URING } else { 0 };
    let passthrough = if profile.passthrough { INIT_PASSTHROUGH } else { 0 };
    always | mmap | rings | passthrough
}

#[allow(clippy::cast_possible_truncation, reason = "the upper half travels in its own field")]
fn low_half(flags: u64) -> u32 {
    flags as u32
}

#[cfg(test)]
mod tests;
