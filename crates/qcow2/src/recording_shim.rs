//! Until the bitmaps land.
use crate::bitmaps as _;
use crate::error::Error;
use crate::header::{self, Header};
use crate::image::Qcow2;
use crate::info::Bitmap;
use ringdisk_ring::Ring;
use ringdisk_storage::Storage;
use rustix::io::Errno;
pub(crate) struct Recording(bool);
impl Recording {
    pub(crate) async fn load(_: &Ring, _: &Storage, h: &Header, _: &[Bitmap]) -> Result<Recording, Error> {
        Ok(Recording(h.autoclear & header::BITMAPS == 0))
    }
    pub(crate) fn all_readable(&self) -> bool { self.0 }
    pub(crate) fn record(&self, _: u64, _: u64) {}
    pub(crate) async fn begin(&self, _: &Ring, _: &Storage) -> Result<(), Errno> { Ok(()) }
    pub(crate) async fn save(&self, _: &Qcow2, _: &Ring) -> Result<(), Errno> { Ok(()) }
}
