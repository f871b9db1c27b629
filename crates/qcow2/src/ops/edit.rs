//! Sets or removes the backing file name.
//!
//! Promises: atomic, as all changes; nothing is opened or copied.

use ringdisk_ring::Ring;

use crate::engine::Qcow2;
use crate::error::Error;
use crate::limits::FILE_NAME_BYTES_MAX;

use super::transaction::Transaction;

/// Longest name of a backing format: QEMU reads no more.
const FORMAT_BYTES_MAX: usize = 15;

impl Qcow2 {
    /// Sets the name and the format of the backing file as they are in the header, or removes them.
    /// Nothing is opened, nothing is copied.
    ///
    /// * `name`: 1 to 1023 bytes without NUL.
    /// * `format`: 1 to 15 bytes.
    ///
    /// Errors: `InvalidRequest` for names that do not fit, or when the image has a raw external
    /// data file; `Io`.
    pub async fn set_backing(
        &mut self,
        ring: &Ring,
        name: Option<&[u8]>,
        format: Option<&str>,
    ) -> Result<(), Error> {
        if let Some(name) = name
            && (name.is_empty() || name.len() > FILE_NAME_BYTES_MAX || name.contains(&0))
        {
            return Err(self.refused(
                format!("the name of a backing file cannot have {} bytes, or a NUL", name.len()),
                "choose a name of 1 to 1023 bytes",
            ));
        }
        if format.is_some_and(|format| format.is_empty() || format.len() > FORMAT_BYTES_MAX) {
            return Err(self.refused(
                "the name of the format of a backing file has 1 to 15 bytes",
                "name a format, such as qcow2 or raw",
            ));
        }
        if name.is_some() && self.info.data_file_raw {
            return Err(self.refused(
                "the data file is the plain contents of the disk, so there can be no backing file",
                "use an image without data_file_raw",
            ));
        }
        self.finish_use(ring).await?;
        let result = set_backing(ring, self, name, format).await;
        self.reopen(ring, result).await
    }
}

async fn set_backing(
    ring: &Ring,
    image: &mut Qcow2,
    name: Option<&[u8]>,
    format: Option<&str>,
) -> Result<(), Error> {
    let mut tx = Transaction::begin(ring, image)?;
    tx.header.set_backing_file(name, format)?;
    tx.commit().await
}
