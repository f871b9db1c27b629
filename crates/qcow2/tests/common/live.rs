//! Writable images in tests: bytes below them, reading while others write, opening over the
//! simulated storage.

// Each test binary uses its own part.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::sync::Arc;

use ringdisk_qcow2::{Below, Bytes, ExtentKind, GuestOffset, OpenOptions, Qcow2};
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_testkit::oracle;
use ringdisk_testkit::sim::SimStorage;

/// A backing file that is nothing but stamps.
#[derive(Clone, Copy, Debug)]
pub struct Base(pub oracle::Below);

impl Below for Base {
    async fn read(&self, _: &Ring, offset: GuestOffset, buf: &IoBuf) -> Result<(), Errno> {
        let mut bytes = vec![0; buf.len()];
        self.0.fill(offset.0, &mut bytes);
        buf.copy_from_slice(0, &bytes);
        Ok(())
    }

    fn has_data(&self, offset: GuestOffset, _: Bytes) -> bool {
        offset < GuestOffset(self.0.len)
    }
}

/// A buffer with these bytes.
pub fn buffer(bytes: &[u8]) -> IoBuf {
    let buf = IoBuf::new(bytes.len(), 512);
    buf.copy_from_slice(0, bytes);
    buf
}

/// Opens an image over simulated storage.
pub async fn open(
    ring: &Ring,
    file: &SimStorage,
    data: Option<&SimStorage>,
    options: &OpenOptions,
) -> Result<Qcow2, String> {
    let image = Qcow2::open(ring, file.storage(), options).await;
    let mut image = image.map_err(|error| error.to_string())?;
    if let Some(data) = data {
        image.set_data_file(data.storage()).map_err(|error| error.to_string())?;
    }
    Ok(image)
}

/// Options of a writable image.
pub fn writable() -> OpenOptions {
    OpenOptions { writable: true, ..OpenOptions::default() }
}

/// Reads inside the disk, while others may write.
pub async fn read<B: Below>(
    ring: &Ring,
    image: &Qcow2,
    base: &B,
    offset: u64,
    bytes: &mut [u8],
) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        let at = offset + done as u64;
        let left = bytes.len() - done;
        let grace = image.enter();
        let extent = image.map(ring, GuestOffset(at), Bytes::of(left)).await?;
        let len = usize::try_from(extent.len).expect("no longer than asked for");
        let buf = IoBuf::new(len, 512);
        match extent.kind {
            ExtentKind::Data { offset } => {
                // A file may end inside its last cluster: the rest is zeroes.
                image.data_storage().read(ring, offset.0, &buf).await?;
            }
            ExtentKind::Zero { .. } => {}
            ExtentKind::Compressed(cluster) => {
                image.read_compressed(ring, cluster, GuestOffset(at), &buf).await?;
            }
            ExtentKind::Unallocated => base.read(ring, GuestOffset(at), &buf).await?,
        }
        drop(grace);
        buf.copy_to_slice(0, &mut bytes[done..done + len]);
        done += len;
    }
    Ok(())
}

/// One whole cluster, packed as the image wants it; `None`: it does not get smaller.
pub fn pack(image: &Qcow2, cluster: &[u8]) -> Option<Vec<u8>> {
    ringdisk_qcow2::compress(image.info().compression, Some(1), cluster)
}

/// An image in an `Arc`, for tasks.
pub type Shared = Arc<Qcow2>;
