//! Reading a file.
//!
//! Promises: a request that suits the limits is one ring operation into the caller's buffer: no
//! allocation, no lock, no copy. Any other request goes through a bounce buffer of at most
//! [`BOUNCE_MAX`] bytes at a time. Ring threads.

use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::file::{File, end_of};
use crate::retry::{Retry, is_passing, once};

/// Bytes of a bounce buffer: as much as the largest FUSE request, so one pass is the rule.
pub(crate) const BOUNCE_MAX: usize = 1 << 20;
/// Reads that bring nothing new before a file that keeps changing is given up.
const FRUITLESS_MAX: u32 = 8;

impl File {
    /// Reads up to the end of `buf` or of the file. Errors: the kernel's; `EINVAL` past the
    /// largest offset.
    pub(crate) async fn read(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        end_of(offset, buf.len() as u64)?;
        if self.suits(offset, buf) {
            match self.read_fitting(ring, offset, buf).await {
                // The device does not take the alignment of this client's pages, or of these
                // pieces.
                Err(Errno::INVAL) if !buf.is_contiguous() => {}
                other => return other,
            }
        }
        // Boxed: the rare path must not make the task of every request larger.
        Box::pin(self.read_bounced(ring, offset, buf)).await
    }

    /// Whether a transfer needs no copy.
    pub(crate) fn suits(&self, offset: u64, buf: &IoBuf) -> bool {
        if buf.is_contiguous() {
            return self.limits.suits(offset, buf.len(), buf.address());
        }
        self.limits.suits(offset, buf.len(), 0)
            && if buf.is_ours() { self.suit_pieces(buf) } else { self.takes_client_pages() }
    }

    /// Whether each piece could be a transfer of its own, which is what O_DIRECT asks for.
    fn suit_pieces(&self, buf: &IoBuf) -> bool {
        let limits = &self.limits;
        (limits.memory_align | limits.offset_align) == 1
            || buf.pieces().all(|piece| limits.suits(0, piece.len(), piece.address()))
    }

    /// `offset`, length and addresses suit the limits.
    pub(crate) async fn read_fitting(
        &self,
        ring: &Ring,
        offset: u64,
        buf: &IoBuf,
    ) -> Result<usize, Errno> {
        let len = buf.len();
        if len == 0 {
            return Ok(0);
        }
        match once(ring.read(self.fd, offset, buf)).await {
            Ok(n) if n as usize >= len => Ok(len),
            Ok(n) => Box::pin(self.read_rest(ring, offset, buf, n as usize)).await,
            Err(errno) if is_passing(errno) => {
                Box::pin(self.read_again(ring, offset, buf, errno)).await
            }
            Err(errno) => Err(errno),
        }
    }

    /// Repeats a read after a passing error.
    async fn read_again(
        &self,
        ring: &Ring,
        offset: u64,
        buf: &IoBuf,
        mut errno: Errno,
    ) -> Result<usize, Errno> {
        let mut retry = Retry::default();
        while retry.after(ring, errno).await {
            match once(ring.read(self.fd, offset, buf)).await {
                Ok(n) if n as usize >= buf.len() => return Ok(buf.len()),
                Ok(n) => return self.read_rest(ring, offset, buf, n as usize).await,
                Err(next) => errno = next,
            }
        }
        Err(errno)
    }

    /// Goes on after a short transfer of `done` bytes.
    async fn read_rest(
        &self,
        ring: &Ring,
        offset: u64,
        buf: &IoBuf,
        mut done: usize,
    ) -> Result<usize, Errno> {
        let align = self.limits.offset_align as usize;
        let mut fruitless = 0;
        let mut retry = Retry::default();
        while done < buf.len() {
            // Also notices that another process has cut the file.
            if offset + done as u64 >= self.ask_len(ring).await? {
                break;
            }
            // O_DIRECT goes on at a block boundary only; what is read twice is the same file.
            let from = done / align * align;
            let rest = buf.slice(from..buf.len());
            match once(ring.read(self.fd, offset + from as u64, &rest)).await {
                Ok(n) if from + n as usize > done => {
                    done = from + n as usize;
                    fruitless = 0;
                }
                Ok(_) if fruitless < FRUITLESS_MAX => fruitless += 1,
                Ok(_) => return Err(Errno::IO),
                Err(errno) if retry.after(ring, errno).await => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(done)
    }

    async fn read_bounced(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        let align = u64::from(self.limits.offset_align);
        let end = offset + buf.len() as u64;
        let mut done = 0;
        let mut bounce: Option<IoBuf> = None;
        while done < buf.len() {
            let at = offset + done as u64;
            let start = at / align * align;
            let stop = end.next_multiple_of(align).min(start + BOUNCE_MAX as u64);
            // At most BOUNCE_MAX.
            let want = usize::try_from(stop - start).map_err(|_| Errno::INVAL)?;
            let whole = bounce.get_or_insert_with(|| self.bounce(want));
            let piece = whole.slice(0..want.min(whole.len()));
            let got = self.read_fitting(ring, start, &piece).await?;
            let skip = usize::try_from(at - start).map_err(|_| Errno::INVAL)?;
            let useful = got.saturating_sub(skip).min(buf.len() - done);
            if useful > 0 {
                let target = buf.slice(done..done + useful);
                ring.copy(&piece.slice(skip..skip + useful), &target).await?;
            }
            done += useful;
            if got < piece.len() {
                break;
            }
        }
        Ok(done)
    }

    /// Memory for O_DIRECT, at most [`BOUNCE_MAX`] bytes.
    pub(crate) fn bounce(&self, len: usize) -> IoBuf {
        IoBuf::new(len.min(BOUNCE_MAX), self.limits.memory_align as usize)
    }
}
