//! An NBD export as storage: a client of the NBD protocol on the ring of each thread.
//!
//! Promises: a server that is slow, dead or hostile delays or fails the requests to it, and nothing
//! else: no thread waits for it, and what it sends can fill no memory but a buffer of fixed size
//! and that of the requests. Requests of a ring go over a connection that this ring has for itself
//! while they are in flight, in batches, without a lock and without an allocation.
//!
//! | module | promises |
//! |---|---|
//! | `address`, `connect`, `handshake` | names, sockets and the handshake: bounded in time |
//! | `link`, `turns`, `shared`, `opening` | connections, and which ring has which |
//! | `slots`, `output`, `input`, `driver` | requests of one ring: sent, answered, repeated |
//! | `blocks` | requests that do not fit the server's blocks |
//! | `status` | what is a hole |
//!
//! **Several connections.** Where the server says that a flush on one connection covers the others
//! (CAN_MULTI_CONN), each ring gets one of its own as soon as it needs one, up to 16. Otherwise
//! there is one connection, and rings take turns.
//!
//! **Lost connections.** Requests wait for a new connection for as long as the options say, then
//! fail with `EIO`, and so do later ones until the server is back. Reads and flushes are sent again
//! over the new connection. Writes, zeroes and discards are sent again only if the server ended the
//! old connection, since then it takes no further request from it: a repeated write then comes
//! after the first one. After an error of the network, or of the protocol, the server may still
//! carry out the first one at any later time, over what was written since, so these fail. What was
//! answered and not flushed when the connection was lost is the server's to keep.

mod address;
mod blocks;
mod buffers;
mod connect;
mod driver;
mod handshake;
mod input;
mod link;
mod lost;
mod opening;
mod output;
mod shared;
mod slots;
mod status;
mod turns;

use std::sync::Arc;
use std::time::Duration;

use ringdisk_nbd_protocol::numbers::{command, command_flags, export_flags};
use ringdisk_nbd_protocol::request::Request;
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_tls::{ClientTls, Source};

pub use address::{BadAddress, NBD_PORT, NbdAddress, NbdServer, NbdTls};
use handshake::Refusal;
use shared::{CONNECT_LIMIT, Shared, open_link};

use crate::block_locks::BlockLocks;
use crate::endpoint::NbdEndpoint;
use crate::error::{Error, ErrorKind, words};
use crate::file::end_of;
use crate::kinds::{Limits, Zeroing};
use crate::opener::Opener;

/// Time that requests wait for a lost connection, where the user does not say.
pub const NBD_RECONNECT_DEFAULT: Duration = Duration::from_secs(30);

/// Longest range of one request without a payload, bytes: a server that writes zeroes for want of
/// something better answers in time.
const RANGE_MAX: u64 = 1 << 30;
/// Zeroes are written in pieces of this many bytes where the server has no command for them.
const ZEROES_BYTES: usize = 1 << 20;

/// How to open an export.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// Nothing is ever written.
    pub read_only: bool,
    /// Flushes do nothing.
    pub no_flush: bool,
    /// How long requests wait for a lost connection.
    pub reconnect: Duration,
    /// Connects where this process may not do it itself.
    pub opener: Option<Arc<dyn Opener>>,
}

impl Default for NbdOptions {
    fn default() -> Self {
        NbdOptions {
            read_only: false,
            no_flush: false,
            reconnect: NBD_RECONNECT_DEFAULT,
            opener: None,
        }
    }
}

/// Ends the connections when the last storage of an export is dropped.
#[derive(Debug)]
struct Closer(Arc<Shared>);

impl Drop for Closer {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// An open export.
#[derive(Debug)]
pub(crate) struct Nbd {
    shared: Arc<Shared>,
    closer: Arc<Closer>,
    pub(crate) read_only: bool,
    no_flush: bool,
    pub(crate) limits: Limits,
    /// For blocks of more than a byte.
    gate: Option<BlockLocks>,
    status: status::Cache,
}

/// Opens an export. Blocks, for at most 10 s and the look-up of the host's name.
///
/// Errors: kind `NotFound`: no such host, socket or export; `ReadOnly`; `Io` for anything else.
pub(crate) fn open(address: &NbdAddress, options: &NbdOptions) -> Result<Nbd, Error> {
    let name = address.to_string();
    check_bitmap(address, options.read_only)?;
    let endpoints = address.server.look_up().map_err(|error| {
        let why = format!("no address of its host: {error}");
        Error::not_opened(ErrorKind::NotFound, &name, &why)
    })?;
    let opener = options.opener.as_ref();
    let tls = address.tls.as_ref().map(|tls| certificates(address, tls)).transpose()?;
    let first = open_link(&endpoints, opener, address, tls.as_ref(), CONNECT_LIMIT)
        .map_err(|why| refused(&name, &address.server, &why))?;
    let agreed = first.1.clone();
    if agreed.has(export_flags::READ_ONLY) && !options.read_only {
        return Err(read_only(&name));
    }
    let (endpoints, opener) = (endpoints.clone(), options.opener.clone());
    let shared = Shared::new(address.clone(), endpoints, opener, tls, options.reconnect, first);
    let shared = Arc::new(shared);
    let closer = Arc::new(Closer(Arc::clone(&shared)));
    Ok(Nbd::new(shared, closer, options.read_only, options.no_flush))
}

/// Reads the certificates that an address names. They are kept for connecting again.
fn certificates(address: &NbdAddress, tls: &NbdTls) -> Result<ClientTls, Error> {
    let host = tls.hostname.as_deref().or(address.server.host()).unwrap_or("localhost");
    let source = Source::Directory(tls.certificates.clone());
    ClientTls::open(&source, host).map_err(|error| {
        let name = address.to_string();
        Error::not_opened(ErrorKind::InvalidInput, &name, &error.to_string())
    })
}

/// Refuses to write what is opened to look at a bitmap.
///
/// Errors: kind `ReadOnly`.
fn check_bitmap(address: &NbdAddress, read_only: bool) -> Result<(), Error> {
    if read_only || address.dirty_bitmap.is_none() {
        return Ok(());
    }
    let context = format!(
        "cannot open '{address}' for writing: with `x-dirty-bitmap` it shows a bitmap in place of \
         holes; open it read-only, or leave the bitmap out"
    );
    Err(Error::new(ErrorKind::ReadOnly, context))
}

fn read_only(name: &str) -> Error {
    let context = format!("cannot open '{name}' for writing: the server offers it read-only");
    Error::new(ErrorKind::ReadOnly, context)
}

fn refused(name: &str, server: &NbdServer, why: &Refusal) -> Error {
    let text = match why {
        Refusal::Broken(Errno::CONNREFUSED | Errno::NOENT) => {
            format!("no server listens at {server}; start it, or correct the name")
        }
        Refusal::Broken(errno) if !matches!(*errno, Errno::TIMEDOUT | Errno::CONNRESET) => {
            words(&(*errno).into())
        }
        why => why.to_string(),
    };
    let kind = match why {
        Refusal::Broken(Errno::CONNREFUSED) | Refusal::Unknown(_) | Refusal::NoBitmap(_) => {
            ErrorKind::NotFound
        }
        Refusal::Broken(errno) => return Error::not_opened_since(name, &text, *errno),
        Refusal::Refused(_) | Refusal::Tls(_) => ErrorKind::PermissionDenied,
        Refusal::Malformed(_) => ErrorKind::Io,
    };
    Error::not_opened(kind, name, &text)
}

impl Nbd {
    fn new(shared: Arc<Shared>, closer: Arc<Closer>, read_only: bool, no_flush: bool) -> Nbd {
        let agreed = &shared.agreed;
        let limits = Limits {
            memory_align: 1,
            offset_align: agreed.block,
            direct: false,
            optimal_transfer: agreed.preferred,
            discard_align: agreed.block,
        };
        let gate = (agreed.block > 1).then(BlockLocks::new);
        let status = status::Cache::default();
        Nbd { shared, closer, read_only, no_flush, limits, gate, status }
    }

    /// The same export over the same connections, in another mode. The old storage is not written
    /// any more.
    ///
    /// Errors: kind `ReadOnly`.
    pub(crate) fn reopen(&self, options: &crate::options::OpenOptions) -> Result<Nbd, Error> {
        if self.has(export_flags::READ_ONLY) && !options.read_only {
            return Err(read_only(self.name()));
        }
        check_bitmap(self.address(), options.read_only)?;
        let (shared, closer) = (Arc::clone(&self.shared), Arc::clone(&self.closer));
        Ok(Nbd::new(shared, closer, options.read_only, options.no_flush))
    }

    pub(crate) fn name(&self) -> &str {
        &self.shared.name
    }

    pub(crate) fn address(&self) -> &NbdAddress {
        &self.shared.address
    }

    /// Where its server is, with the host's name looked up.
    pub(crate) fn endpoints(&self) -> &[NbdEndpoint] {
        self.shared.endpoints()
    }

    pub(crate) fn len(&self) -> u64 {
        self.shared.agreed.size
    }

    /// A number that differs between exports, and is the same for the same one.
    pub(crate) fn identity(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        // However it is reached, and whatever of it is looked at.
        let address = &self.shared.address;
        (&address.server, &address.export).hash(&mut hasher);
        hasher.finish()
    }

    /// Number of connections.
    pub(crate) fn connections(&self) -> usize {
        self.shared.link_count()
    }

    pub(crate) fn can_discard(&self) -> bool {
        !self.read_only && self.has(export_flags::TRIM)
    }

    fn has(&self, flags: u16) -> bool {
        self.shared.agreed.has(flags)
    }

    fn check_writable(&self) -> Result<(), Errno> {
        if self.read_only { Err(Errno::ROFS) } else { Ok(()) }
    }

    /// Bytes from `offset` on up to the end of a range or of the export.
    fn clipped(&self, offset: u64, len: u64) -> u64 {
        len.min(self.len().saturating_sub(offset))
    }

    /// As [`crate::Storage::read`].
    pub(crate) async fn read(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        end_of(offset, buf.len() as u64)?;
        let len = self.clipped(offset, buf.len() as u64);
        let max = self.shared.agreed.payload_max;
        if len > u64::from(max) || !self.fits(offset, len) || !buf.is_ours() {
            return Box::pin(self.read_in_pieces(ring, offset, buf)).await;
        }
        let len = usize::try_from(len).map_err(|_| Errno::INVAL)?;
        match len {
            0 => Ok(0),
            _ if len == buf.len() => self.read_one(ring, offset, buf).await,
            _ => self.read_one(ring, offset, &buf.slice(0..len)).await,
        }
    }

    /// One request, of whole blocks.
    async fn read_one(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        let len = buf.len() as u64;
        let request = Request { command: command::READ, offset, len, ..Request::default() };
        driver::of(&self.shared, ring).request(request, Some(buf)).await?;
        Ok(buf.len())
    }

    /// As [`crate::Storage::write`].
    pub(crate) async fn write(
        &self,
        ring: &Ring,
        offset: u64,
        buf: &IoBuf,
    ) -> Result<usize, Errno> {
        self.check_writable()?;
        let end = end_of(offset, buf.len() as u64)?;
        let len = self.clipped(offset, buf.len() as u64);
        if len == 0 {
            return if buf.is_empty() { Ok(0) } else { Err(Errno::NOSPC) };
        }
        let max = self.shared.agreed.payload_max;
        let is_whole = len == buf.len() as u64;
        if len > u64::from(max) || !is_whole || !self.fits(offset, len) || !buf.is_ours() {
            return Box::pin(self.write_in_pieces(ring, offset, buf)).await;
        }
        let _pass = match &self.gate {
            None => None,
            Some(gate) => match gate.try_shared() {
                Some(pass) => Some(pass),
                None => Some(Box::pin(gate.shared(offset, end)).await),
            },
        };
        self.write_one(ring, offset, buf).await
    }

    /// One request, of whole blocks.
    async fn write_one(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        let len = buf.len() as u64;
        let request = Request { command: command::WRITE, offset, len, ..Request::default() };
        driver::of(&self.shared, ring).request(request, Some(buf)).await?;
        Ok(buf.len())
    }

    /// As [`crate::Storage::flush`]. A server without the command has nothing to flush, as far as
    /// it says.
    pub(crate) async fn flush(&self, ring: &Ring) -> Result<(), Errno> {
        if self.no_flush || self.read_only || !self.has(export_flags::FLUSH) {
            return Ok(());
        }
        let request = Request { command: command::FLUSH, ..Request::default() };
        driver::of(&self.shared, ring).request(request, None).await
    }

    /// As [`crate::Storage::discard`]: of whole blocks.
    pub(crate) async fn discard(&self, ring: &Ring, offset: u64, len: u64) -> Result<(), Errno> {
        self.check_writable()?;
        let end = end_of(offset, len)?.min(self.len());
        if !self.has(export_flags::TRIM) {
            return Err(Errno::OPNOTSUPP);
        }
        let block = u64::from(self.shared.agreed.block);
        let (start, end) = (offset.next_multiple_of(block), end / block * block);
        self.ranges(ring, command::TRIM, 0, start, end).await
    }

    /// A command for a range of whole blocks, in pieces.
    async fn ranges(
        &self,
        ring: &Ring,
        command: u16,
        flags: u16,
        start: u64,
        end: u64,
    ) -> Result<(), Errno> {
        let mut offset = start;
        while offset < end {
            let len = (end - offset).min(RANGE_MAX);
            let _pass = match &self.gate {
                None => None,
                Some(gate) => Some(Box::pin(gate.shared(offset, offset + len)).await),
            };
            let request = Request { command, flags, offset, len, ..Request::default() };
            driver::of(&self.shared, ring).request(request, None).await?;
            offset += len;
        }
        Ok(())
    }

    /// As [`crate::Storage::write_zeroes`].
    pub(crate) async fn write_zeroes(
        &self,
        ring: &Ring,
        offset: u64,
        len: u64,
        Zeroing { may_unmap, fallback }: Zeroing,
    ) -> Result<(), Errno> {
        self.check_writable()?;
        let end = end_of(offset, len)?;
        if end > self.len() {
            return Err(Errno::NOSPC);
        }
        if !self.has(export_flags::WRITE_ZEROES) {
            return match fallback {
                true => Box::pin(self.write_zero_bytes(ring, offset, end)).await,
                false => Err(Errno::OPNOTSUPP),
            };
        }
        let block = u64::from(self.shared.agreed.block);
        let (start, stop) = (offset.next_multiple_of(block).min(end), end / block * block);
        let is_fast = !fallback && self.has(export_flags::FAST_ZERO);
        let flags = if may_unmap { 0 } else { command_flags::NO_HOLE }
            | if is_fast { command_flags::FAST_ZERO } else { 0 };
        if start < stop {
            self.ranges(ring, command::WRITE_ZEROES, flags, start, stop).await?;
            Box::pin(self.write_zero_bytes(ring, offset, start)).await?;
            return Box::pin(self.write_zero_bytes(ring, stop, end)).await;
        }
        Box::pin(self.write_zero_bytes(ring, offset, end)).await
    }

    /// Writes zeroes as data.
    async fn write_zero_bytes(&self, ring: &Ring, offset: u64, end: u64) -> Result<(), Errno> {
        let mut at = offset;
        if at >= end {
            return Ok(());
        }
        let most = usize::try_from(end - at).unwrap_or(ZEROES_BYTES).min(ZEROES_BYTES);
        let zeroes = IoBuf::new(most, 1);
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(most).min(most);
            match self.write(ring, at, &zeroes.slice(0..len)).await? {
                0 => return Err(Errno::IO),
                count => at += count as u64,
            }
        }
        Ok(())
    }

    /// As [`crate::Storage::set_len`]: an export keeps its size.
    pub(crate) fn set_len(&self, len: u64) -> Result<(), Errno> {
        if len == self.len() { Ok(()) } else { Err(Errno::OPNOTSUPP) }
    }

    /// As [`crate::Storage::extend`] and [`crate::Storage::preallocate`]: all of it is there.
    pub(crate) fn reach(&self, end: u64) -> Result<(), Errno> {
        if end <= self.len() { Ok(()) } else { Err(Errno::NOSPC) }
    }
}
