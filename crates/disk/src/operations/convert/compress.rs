//! Compressed targets of a conversion.
//!
//! Promises: clusters are compressed in parallel on helper threads and written in order.

use ringdisk_qcow2::{Bytes, CompressionType, GuestOffset, compress};
use ringdisk_ring::{Errno, IoBuf};

use super::scan::is_zero;
use super::walk::Piece;
use super::{Conversion, ConvertOptions, Doing, Failure, name};
use crate::{Cause, Disk, Error, ErrorKind};

/// Compression of the target.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packing {
    kind: CompressionType,
    level: Option<i32>,
    cluster: usize,
    /// Clusters of zeroes are left out.
    is_sparse: bool,
}

/// Result of compressing a cluster on a helper thread.
enum Packed {
    Zero,
    Compressed(Vec<u8>),
    /// It does not get smaller.
    Plain,
}

impl Packing {
    /// Errors: `Unsupported` unless the target is a qcow2 image that keeps its data itself.
    pub(super) fn of(target: &Disk, options: &ConvertOptions) -> Result<Packing, Error> {
        let layers = target.layers();
        let image = layers.first().and_then(|layer| layer.qcow2());
        let Some(info) = image.map(|image| image.info()).filter(|info| !info.external_data_file)
        else {
            let message = format!(
                "'{}' cannot hold compressed clusters; only qcow2 images without an external data \
                 file can",
                name(target)
            );
            let error = Error::new(ErrorKind::Unsupported, message);
            return Err(error.because(Cause::NotCompressible));
        };
        let cluster = usize::try_from(info.cluster_size()).unwrap_or(usize::MAX);
        let is_sparse = !options.sparse_bytes.is_zero();
        Ok(Packing { kind: info.compression, level: options.level, cluster, is_sparse })
    }

    /// Bytes of a cluster.
    pub(super) fn cluster_bytes(&self) -> Bytes {
        Bytes::of(self.cluster)
    }

    /// Copies a cluster, which may end early at the end of the disk, for a helper thread.
    ///
    /// * `bytes`: a buffer to use again, or an empty one.
    fn take(&self, part: &IoBuf, mut bytes: Vec<u8>) -> Vec<u8> {
        bytes.resize(self.cluster, 0);
        part.copy_to_slice(0, &mut bytes[..part.len()]);
        bytes[part.len()..].fill(0);
        bytes
    }

    fn pack(self, bytes: &[u8]) -> Packed {
        if self.is_sparse && is_zero(bytes) {
            return Packed::Zero;
        }
        compress(self.kind, self.level, bytes).map_or(Packed::Plain, Packed::Compressed)
    }
}

impl Conversion<'_> {
    /// Compresses and writes a piece, which begins at the start of a cluster.
    pub(super) async fn pack(
        &self,
        packing: &Packing,
        piece: &Piece,
        buf: &IoBuf,
    ) -> Result<(), Failure> {
        let packing = *packing;
        let mut running = Vec::new();
        for start in (0..buf.len()).step_by(packing.cluster) {
            let part = buf.slice(start..buf.len().min(start + packing.cluster));
            let spare = self.spare.borrow_mut().pop().unwrap_or_default();
            let bytes = packing.take(&part, spare);
            // Begins at once.
            running.push((part, self.ring.offload(move || (packing.pack(&bytes), bytes))));
        }
        let mut packed = Vec::with_capacity(running.len());
        for (part, work) in running {
            let (result, bytes) = work.await;
            self.spare.borrow_mut().push(bytes);
            packed.push((part, result));
        }
        self.order.turn(piece.number).await;
        let last = packed.len().saturating_sub(1);
        let mut at = piece.offset;
        for (number, (part, packed)) in packed.into_iter().enumerate() {
            let put = self.put_packed(at, &part, packed);
            if number == last {
                self.order.pass_when_begun(piece.number, put).await?;
            } else {
                put.await?;
            }
            at += Bytes::of(part.len());
        }
        Ok(())
    }

    async fn put_packed(
        &self,
        at: GuestOffset,
        part: &IoBuf,
        packed: Packed,
    ) -> Result<(), Failure> {
        match packed {
            Packed::Zero => self.zero(at, Bytes::of(part.len())).await,
            Packed::Plain => self.write(at, part).await,
            Packed::Compressed(bytes) => {
                match self.target.write_compressed(self.ring, at.0, &bytes).await {
                    Ok(()) => {
                        self.report.borrow_mut().written_bytes += Bytes::of(part.len());
                        Ok(())
                    }
                    // An existing target may have the cluster already.
                    Err(Errno::EXIST) => self.write(at, part).await,
                    Err(errno) => Err(Failure::new(Doing::Writing, at, errno)),
                }
            }
        }
    }
}
