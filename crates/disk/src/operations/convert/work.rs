//! Copies one piece of a conversion.
//!
//! Promises: a piece whose read fails is an error, unless the options salvage it.

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf};

use super::scan::{Part, scan};
use super::walk::{Action, Piece};
use super::{Conversion, Doing, Failure};

impl Conversion<'_> {
    /// Copies or zeroes a piece.
    ///
    /// * `buf`: has room for it.
    pub(super) async fn copy(&self, piece: &Piece, buf: &IoBuf) -> Result<(), Failure> {
        let sparse = self.options.sparse_bytes;
        if piece.action == Action::Zero && sparse > Bytes::ZERO {
            self.order.turn(piece.number).await;
            let zero = self.zero(piece.offset, piece.len);
            return self.order.pass_when_begun(piece.number, zero).await;
        }
        let copied = match piece.action {
            Action::Copy => self.copy_range(piece.offset, piece.len).await,
            _ => Bytes::ZERO,
        };
        if copied == piece.len {
            return Ok(());
        }
        let rest = Piece { offset: piece.offset + copied, len: piece.len - copied, ..*piece };
        let piece = &rest;
        let len = usize::try_from(piece.len).unwrap_or(usize::MAX).min(buf.len());
        let buf = buf.slice(0..len);
        if piece.action == Action::Zero {
            buf.fill(0);
        } else {
            self.read(piece.offset, &buf).await?;
        }
        if let Some(packing) = &self.packing {
            return self.pack(packing, piece, &buf).await;
        }
        let mut parts = Vec::new();
        scan(&buf, usize::try_from(sparse).unwrap_or(usize::MAX), &mut parts);
        self.order.turn(piece.number).await;
        let last = parts.pop();
        for part in &parts {
            self.put(piece.offset, &buf, part).await?;
        }
        if let Some(last) = last {
            let put = self.put(piece.offset, &buf, &last);
            self.order.pass_when_begun(piece.number, put).await?;
        }
        Ok(())
    }

    async fn put(&self, offset: GuestOffset, buf: &IoBuf, part: &Part) -> Result<(), Failure> {
        let at = offset + Bytes::of(part.range.start);
        if part.is_zero {
            return self.zero(at, Bytes::of(part.range.len())).await;
        }
        self.write(at, &buf.slice(part.range.clone())).await
    }

    /// Fills `buf` from the source.
    async fn read(&self, offset: GuestOffset, buf: &IoBuf) -> Result<(), Failure> {
        self.report.borrow_mut().read_bytes += Bytes::of(buf.len());
        match self.source.read(self.ring, offset, buf).await {
            Ok(()) => Ok(()),
            Err(_) if self.options.salvage => self.salvage(offset, buf).await,
            Err(errno) => Err(Failure::new(Doing::Reading, offset, errno)),
        }
    }

    /// Makes a range of the target read as zeroes.
    pub(super) async fn zero(&self, offset: GuestOffset, len: Bytes) -> Result<(), Failure> {
        if self.options.target_is_zero {
            return Ok(());
        }
        let zeroed = self.target.write_zeroes(self.ring, offset.0, len, true).await;
        zeroed.map_err(|errno| Failure::new(Doing::Writing, offset, errno))
    }

    /// Writes all of `buf`.
    pub(super) async fn write(&self, offset: GuestOffset, buf: &IoBuf) -> Result<(), Failure> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + Bytes::of(done);
            let rest = buf.slice(done..buf.len());
            match self.target.write(self.ring, at.0, &rest).await {
                Ok(0) => return Err(Failure::new(Doing::Writing, at, Errno::IO)),
                Ok(count) => done += count,
                Err(errno) => return Err(Failure::new(Doing::Writing, at, errno)),
            }
        }
        self.report.borrow_mut().written_bytes += Bytes::of(buf.len());
        Ok(())
    }
}
