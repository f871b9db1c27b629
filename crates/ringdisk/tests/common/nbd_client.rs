//! An NBD client that sends what a test wants, when it wants it, in the oldest style of the
//! protocol (`EXPORT_NAME`, simple replies), written from its text and not with code of ours.
//!
//! Promises: nothing waits for longer than [`LIMIT`]; the client judges nothing itself.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use ringdisk_testkit::process::LIMIT;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Commands.
pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const FLUSH: u16 = 3;

/// First number of a request, and of a reply.
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;

/// A connection that is past its handshake.
pub(crate) struct NbdClient {
    pub(crate) stream: UnixStream,
    next: u64,
}

impl NbdClient {
    /// * `name`: of the export.
    pub(crate) fn connect(socket: &Path, name: &str) -> NbdClient {
        let mut stream = UnixStream::connect(socket).expect("connect");
        stream.set_read_timeout(Some(LIMIT)).expect("a limit");
        stream.set_write_timeout(Some(LIMIT)).expect("a limit");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("a greeting");
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        // Flags: fixed newstyle, no zeroes; then EXPORT_NAME.
        let len = u32::try_from(name.len()).expect("a short name").to_be_bytes();
        let option = [&3_u32.to_be_bytes()[..], b"IHAVEOPT", &1_u32.to_be_bytes(), &len];
        stream.write_all(&[&option.concat()[..], name.as_bytes()].concat()).expect("sent");
        // Size and flags.
        stream.read_exact(&mut [0; 10]).expect("an export");
        NbdClient { stream, next: 0 }
    }

    /// Sends a request. Gives its cookie; each is one more than the last.
    ///
    /// Errors: the server is gone.
    pub(crate) fn ask(
        &mut self,
        command: u16,
        offset: u64,
        len: u32,
        payload: &[u8],
    ) -> io::Result<u64> {
        let cookie = self.next;
        self.next += 1;
        let (magic, command) = (REQUEST.to_be_bytes(), u32::from(command).to_be_bytes());
        let (cookie_bytes, offset) = (cookie.to_be_bytes(), offset.to_be_bytes());
        let head = [&magic[..], &command, &cookie_bytes, &offset, &len.to_be_bytes()];
        self.stream.write_all(&[&head.concat()[..], payload].concat())?;
        Ok(cookie)
    }

    /// The next reply, of a request that gives no data: its cookie, and its error or 0.
    ///
    /// Errors: the server is gone.
    pub(crate) fn answer(&mut self) -> io::Result<(u64, u32)> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("4 bytes"));
        assert_eq!(number(0), REPLY);
        let cookie = u64::from_be_bytes(head[8..].try_into().expect("8 bytes"));
        Ok((cookie, number(4)))
    }

    /// Whether a reply, or the end of the connection, comes within this time.
    pub(crate) fn hears(&self, limit: Duration) -> bool {
        let limit = Timespec::try_from(limit).expect("a short time");
        poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], Some(&limit)) == Ok(1)
    }

    /// Writes, as the only request in flight.
    ///
    /// Errors: the server is gone.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let len = u32::try_from(bytes.len()).expect("a short write");
        let cookie = self.ask(WRITE, offset, len, bytes)?;
        assert_eq!(self.answer()?, (cookie, 0));
        Ok(())
    }
}
