//! From results to the bytes of a reply.
//!
//! Promises: every frame written here has a length that matches its header and an error that the
//! kernel accepts. Called by queue threads for each request: no allocation, no lock, no panic. A
//! [`ReplyBuf`] belongs to its entry and is used again.

use rustix::io::Errno;
use zerocopy::{Immutable, IntoBytes};

use crate::abi::flags::{NOTIFY_INVAL_INODE, NOTIFY_RESEND};
use crate::abi::{
    AttrOut, NotifyInvalInodeOut, OUT_HEADER_BYTES, OpenOut, OutHeader, ROOT_ID, WriteOut,
};

/// Bytes of the largest reply without data: header and attributes (16 + 104).
pub const REPLY_BYTES_MAX: usize = OUT_HEADER_BYTES + size_of::<AttrOut>();
/// Errors must be smaller than this; the kernel turns a larger one into EINVAL and wakes nobody.
const ERROR_LIMIT: i32 = 512;
/// Bytes of a NOTIFY_INVAL_INODE frame.
pub const NOTIFY_INVAL_INODE_BYTES: usize = OUT_HEADER_BYTES + size_of::<NotifyInvalInodeOut>();

/// One reply without data, ready to be written: out header and body, contiguous.
#[derive(Clone, Copy, Debug)]
pub struct ReplyBuf {
    bytes: [u8; REPLY_BYTES_MAX],
    len: usize,
}

impl Default for ReplyBuf {
    fn default() -> Self {
        ReplyBuf::new()
    }
}

impl ReplyBuf {
    /// An empty reply; something must be put in before it is sent.
    #[must_use]
    pub const fn new() -> ReplyBuf {
        ReplyBuf { bytes: [0; REPLY_BYTES_MAX], len: 0 }
    }

    /// Whether nothing was put in: the request has no reply.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes the content away.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// The frame: header and body.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// The bytes after the header (what a ring entry carries as its payload).
    #[must_use]
    pub fn body(&self) -> &[u8] {
        &self.bytes[OUT_HEADER_BYTES.min(self.len)..self.len]
    }

    /// The errno of this reply, 0 for success.
    #[must_use]
    pub fn error_number(&self) -> i32 {
        if self.is_empty() {
            return 0;
        }
        -i32::from_ne_bytes([self.bytes[4], self.bytes[5], self.bytes[6], self.bytes[7]])
    }

    /// Whether a client hears of an error. ENOSYS is for the kernel, which then does not ask again.
    #[must_use]
    pub fn is_failure(&self) -> bool {
        let number = self.error_number();
        number != 0 && number != Errno::NOSYS.raw_os_error()
    }

    /// A failure.
    pub fn set_error(&mut self, unique: u64, errno: Errno) {
        self.put(header(unique, wire_error(errno), 0), &[]);
    }

    /// A success that carries nothing.
    pub fn set_empty(&mut self, unique: u64) {
        self.put(header(unique, 0, 0), &[]);
    }

    /// A success that carries one structure of [`crate::abi`], at most [`REPLY_BYTES_MAX`] bytes
    /// with its header.
    pub fn set_body<T: IntoBytes + Immutable>(&mut self, unique: u64, body: &T) {
        const { assert!(size_of::<T>() + OUT_HEADER_BYTES <= REPLY_BYTES_MAX) };
        self.put(header(unique, 0, size_of::<T>()), body.as_bytes());
    }

    /// The reply to a WRITE of which `written` bytes were taken.
    pub fn set_written(&mut self, unique: u64, written: usize) {
        let size = u32::try_from(written).unwrap_or(u32::MAX);
        self.set_body(unique, &WriteOut { size, padding: 0 });
    }

    /// Sets more flags in the reply to OPEN.
    pub fn add_open_flags(&mut self, flags: u32) {
        const AT: usize = OUT_HEADER_BYTES + std::mem::offset_of!(OpenOut, open_flags);
        let bytes = &mut self.bytes[AT..AT + size_of::<u32>()];
        for (byte, more) in bytes.iter_mut().zip(flags.to_ne_bytes()) {
            *byte |= more;
        }
    }

    fn put(&mut self, header: [u8; OUT_HEADER_BYTES], body: &[u8]) {
        self.bytes[..OUT_HEADER_BYTES].copy_from_slice(&header);
        self.bytes[OUT_HEADER_BYTES..][..body.len()].copy_from_slice(body);
        self.len = OUT_HEADER_BYTES + body.len();
    }
}

/// Header of a successful READ reply; `data_len` bytes of data must follow it in the same write.
#[must_use]
pub fn data_header(unique: u64, data_len: usize) -> [u8; OUT_HEADER_BYTES] {
    header(unique, 0, data_len)
}

/// A whole reply that reports a failure.
#[must_use]
pub fn error_frame(unique: u64, errno: Errno) -> [u8; OUT_HEADER_BYTES] {
    header(unique, wire_error(errno), 0)
}

/// Notification that the attributes of the file are no longer known, and with `pages` neither are
/// its cached pages.
///
/// Written to any descriptor of the connection. Never from a thread that serves requests: the
/// kernel waits for locked pages, which wait for replies.
#[must_use]
pub fn notify_inval_inode(pages: bool) -> [u8; NOTIFY_INVAL_INODE_BYTES] {
    let mut frame = [0; NOTIFY_INVAL_INODE_BYTES];
    let body = NotifyInvalInodeOut { ino: ROOT_ID, off: if pages { 0 } else { -1 }, len: 0 };
    frame[..OUT_HEADER_BYTES].copy_from_slice(&header(
        0,
        NOTIFY_INVAL_INODE,
        size_of::<NotifyInvalInodeOut>(),
    ));
    frame[OUT_HEADER_BYTES..].copy_from_slice(body.as_bytes());
    frame
}

/// Notification that asks the kernel to send all requests again that were read but not answered
/// (with INIT_HAS_RESEND).
#[must_use]
pub fn notify_resend() -> [u8; OUT_HEADER_BYTES] {
    header(0, NOTIFY_RESEND, 0)
}

/// Negated errno, in the range that the kernel accepts; what lies outside becomes EIO.
fn wire_error(errno: Errno) -> i32 {
    match errno.raw_os_error() {
        number @ 1..ERROR_LIMIT => -number,
        _ => -Errno::IO.raw_os_error(),
    }
}

fn header(unique: u64, error: i32, body_len: usize) -> [u8; OUT_HEADER_BYTES] {
    // A body is at most max_write (1 MiB), so the sum fits; a wrong length would be refused by the
    // kernel with EINVAL.
    let len = u32::try_from(OUT_HEADER_BYTES + body_len).unwrap_or(u32::MAX);
    let mut bytes = [0; OUT_HEADER_BYTES];
    bytes.copy_from_slice(OutHeader { len, error, unique }.as_bytes());
    bytes
}

#[cfg(test)]
mod tests;
