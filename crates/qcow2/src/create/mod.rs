//! Makes new images.
//!
//! Promises: the header is written last, after a barrier; until then the file is no qcow2 image,
//! whatever it was before. Options that no image can have are refused before anything is touched.
//! Runs on a ring thread; memory stays below two pieces of [`PIECE_BYTES`].

mod plan;
#[cfg(test)]
mod tests;

use std::ops::Range;

use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Storage;

use self::plan::Plan;
use crate::error::{Error, ErrorKind};
use crate::header::{self, HeaderImage, NewHeader};
use crate::info::CompressionType;
use crate::limits::SECTOR_LEN;
use crate::sync::Arc;
use crate::units::{Bytes, HostCluster, HostOffset};

/// Tables are made and written in pieces of this size.
const PIECE_BYTES: Bytes = Bytes(1 << 20);

/// What is prepared before the first write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Nothing: space is taken when it is written.
    #[default]
    Off,
    /// All tables, so that no write has to allocate; the space of the data stays a hole.
    Metadata,
    /// As `Metadata`, and the file system reserves the space of the data.
    Falloc,
    /// As `Metadata`, and zeroes are written as data.
    Full,
}

impl Preallocation {
    /// The mode of that name; `None`: there is none.
    pub fn of_word(word: &str) -> Option<Preallocation> {
        Some(match word {
            "off" => Preallocation::Off,
            "metadata" => Preallocation::Metadata,
            "falloc" => Preallocation::Falloc,
            "full" => Preallocation::Full,
            _ => return None,
        })
    }

    /// What it means for the space of the data.
    pub fn of_data(self) -> ringdisk_storage::Preallocation {
        use ringdisk_storage::Preallocation as Mode;
        match self {
            Preallocation::Off | Preallocation::Metadata => Mode::Off,
            Preallocation::Falloc => Mode::Falloc,
            Preallocation::Full => Mode::Full,
        }
    }
}

/// What a new image shall be like. `Default`: an empty disk with what `qemu-img create` chooses.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Size of the disk in bytes, rounded up to 512.
    pub size: Bytes,
    /// Bytes of a cluster: a power of two from 512 to 2 MiB.
    pub cluster_size: Bytes,
    /// Width of a reference count: 1, 2, 4, … 64; 16 in version 2.
    pub refcount_bits: u32,
    /// 3 (`compat=1.1`) or 2 (`compat=0.10`).
    pub version: u32,
    /// Name of the backing file as it goes into the header. It is not opened.
    pub backing_file: Option<Vec<u8>>,
    /// Its format.
    pub backing_format: Option<String>,
    /// Name of the external data file as it goes into the header.
    pub data_file: Option<Vec<u8>>,
    /// The data file is the plain contents of the disk.
    pub data_file_raw: bool,
    /// The data file has the contents of the disk already: it is not emptied, and only made longer
    /// where it is shorter than the disk. Needs `data_file_raw` or preallocated metadata.
    pub keep_data_file: bool,
    /// L2 entries with 32 subclusters.
    pub extended_l2: bool,
    /// How compressed clusters are compressed.
    pub compression: CompressionType,
    /// Reference counts may lag behind.
    pub lazy_refcounts: bool,
    /// What is prepared. `Off` becomes `Metadata` with `data_file_raw`.
    pub preallocation: Preallocation,
}

impl Default for CreateOptions {
    fn default() -> CreateOptions {
        CreateOptions {
            size: Bytes::ZERO,
            cluster_size: Bytes(64 << 10),
            refcount_bits: 16,
            version: 3,
            backing_file: None,
            backing_format: None,
            data_file: None,
            data_file_raw: false,
            keep_data_file: false,
            extended_l2: false,
            compression: CompressionType::Zlib,
            lazy_refcounts: false,
            preallocation: Preallocation::Off,
        }
    }
}

/// Checks the options without touching any storage, for callers that make the file themselves.
///
/// * `file`: name of the image, for messages.
///
/// Returns the size of the disk in bytes, rounded up as it will be.
///
/// Errors: `InvalidRequest` for options that no image can have, `TooLarge` for a size that the
/// tables cannot describe.
pub fn check_options(file: &str, options: &CreateOptions) -> Result<Bytes, Error> {
    let plan = Plan::new(file, options)?;
    prepare_header(file, options, &plan).map(|_| plan.size)
}

/// Checks cluster size, refcount width, version and extended L2 only: what sizes depend on.
///
/// Errors: `InvalidRequest`.
pub(crate) fn check_layout(file: &str, options: &CreateOptions) -> Result<(), Error> {
    plan::check_layout(options)
        .map_err(|(reason, advice)| Error::new(ErrorKind::InvalidRequest, file, reason, advice))
}

/// Makes a new image in `file`, whose content is lost. A regular file gets the length that it
/// needs; on a block device the data starts out as zeroes too.
///
/// * `data_file`: the external data file, exactly when `options.data_file` names one. A regular
///   file is emptied and gets the length of the disk. A device keeps its content if it is raw.
///
/// Durable when it returns. Errors: those of [`check_options`], and `Io`: the file is no image
/// then.
pub async fn create(
    ring: &Ring,
    file: &Arc<Storage>,
    data_file: Option<&Arc<Storage>>,
    options: &CreateOptions,
) -> Result<(), Error> {
    let plan = Plan::new(file.name(), options)?;
    let mut header = prepare_header(file.name(), options, &plan)?;
    if data_file.is_some() != options.data_file.is_some() {
        return Err(Error::new(
            ErrorKind::InvalidRequest,
            file.name(),
            "the external data file and its name must be given together",
            "name the data file and open it, or leave both out",
        ));
    }
    let failed = |storage: &Storage, doing: &'static str| {
        let name = storage.name().to_owned();
        move |errno| Error::io(&name, doing, errno)
    };
    let maker = Maker { ring, file, plan: &plan };
    maker.clear().await.map_err(failed(file, "making room for a new image"))?;
    if let Some(data) = data_file {
        maker
            .prepare_data_file(data, options)
            .await
            .map_err(failed(data, "preparing the data file"))?;
    }
    maker.write_tables().await.map_err(failed(file, "writing the tables of a new image"))?;
    let publish = async {
        file.flush(ring).await?;
        header.write_new(ring, file).await?;
        file.flush(ring).await
    };
    publish.await.map_err(failed(file, "writing the header of a new image"))
}

/// The header as it will be.
///
/// Errors: `InvalidRequest` when names do not fit into the first cluster.
fn prepare_header(file: &str, options: &CreateOptions, plan: &Plan) -> Result<HeaderImage, Error> {
    let mut header = HeaderImage::new(&NewHeader {
        file,
        version: options.version,
        cluster_bits: plan.cluster_bits,
        refcount_order: plan.refcount_order,
        compression: options.compression,
    });
    let bit = |set: bool, bit: u64| if set { bit } else { 0 };
    header.set_size(plan.size);
    header.set_incompatible(
        header.incompatible()
            | bit(plan.external, header::EXTERNAL_DATA)
            | bit(options.extended_l2, header::EXTENDED_L2),
    );
    header.set_compatible(bit(options.lazy_refcounts, header::LAZY_REFCOUNTS));
    header.set_autoclear(bit(options.data_file_raw, header::RAW_EXTERNAL));
    // Both are bounded by the limits of their tables, which `Plan` checked.
    let table_clusters = u32::try_from(plan.refcount_table_clusters).unwrap_or(u32::MAX);
    let l1_entries = u32::try_from(plan.l1_entries).unwrap_or(u32::MAX);
    header.set_refcount_table(HostCluster(1) << plan.cluster_bits, table_clusters);
    if l1_entries > 0 {
        header.set_l1_table(plan.l1_start() << plan.cluster_bits, l1_entries);
    }
    if options.data_file.is_some() {
        header.set_data_file(options.data_file.as_deref())?;
    }
    if options.backing_file.is_some() {
        header
            .set_backing_file(options.backing_file.as_deref(), options.backing_format.as_deref())?;
    }
    Ok(header)
}

/// The work on the files.
struct Maker<'a> {
    ring: &'a Ring,
    file: &'a Storage,
    plan: &'a Plan,
}

impl Maker<'_> {
    /// Empties the file and gives it its length. Everything reads as zeroes afterwards.
    async fn clear(&self) -> Result<(), Errno> {
        let (ring, plan) = (self.ring, self.plan);
        let metadata_end = plan.data_start() << plan.cluster_bits;
        let end = plan.clusters() << plan.cluster_bits;
        match self.file.set_len(ring, 0).await {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => {
                // A device: the old image goes first, then what the new one will read.
                self.file.write_zeroes(ring, 0, plan.cluster_size().0, false, true).await?;
                self.file.flush(ring).await?;
                let unmap = plan.preallocation == Preallocation::Metadata;
                return self.file.write_zeroes(ring, 0, end.0, unmap, true).await;
            }
            Err(errno) => return Err(errno),
        }
        self.file.set_len(ring, metadata_end.0).await?;
        self.reserve(self.file, metadata_end, end - metadata_end).await
    }

    /// Lets `storage` grow by `len` zero bytes from its end at `offset`, prepared as asked.
    async fn reserve(
        &self,
        storage: &Storage,
        offset: HostOffset,
        len: Bytes,
    ) -> Result<(), Errno> {
        let mode = self.plan.preallocation.of_data();
        if len == Bytes::ZERO {
            return Ok(());
        }
        storage.preallocate(self.ring, offset.0, len.0, mode).await
    }

    /// The external data file: as long as the disk, and empty unless it is kept.
    async fn prepare_data_file(
        &self,
        data: &Storage,
        options: &CreateOptions,
    ) -> Result<(), Errno> {
        let (ring, plan, raw) = (self.ring, self.plan, options.data_file_raw);
        let len = plan.size.max(Bytes::of_clusters(plan.data_clusters, plan.cluster_bits));
        if options.keep_data_file {
            if data.refresh_len()? < plan.size.0 {
                data.set_len(ring, plan.size.0).await?;
            }
            return data.flush(ring).await;
        }
        match data.set_len(ring, 0).await {
            Ok(()) => self.reserve(data, HostOffset::ZERO, len).await?,
            Err(Errno::OPNOTSUPP) => {
                // Only the last cluster may end behind the device.
                if data.refresh_len()? < plan.size.0 {
                    return Err(Errno::NOSPC);
                }
                if !raw && plan.data_clusters > 0 {
                    data.write_zeroes(ring, 0, plan.size.0, true, true).await?;
                }
            }
            Err(errno) => return Err(errno),
        }
        data.flush(ring).await
    }

    async fn write_tables(&self) -> Result<(), Errno> {
        let plan = self.plan;
        let place = |cluster: HostCluster| cluster << plan.cluster_bits;
        self.write_words(place(HostCluster(1)), plan.refcount_blocks, |at| {
            plan.refcount_table_word(at)
        })
        .await?;
        self.write_refcounts().await?;
        self.write_words(place(plan.l1_start()), plan.l2_tables, |at| plan.l1_word(at)).await?;
        let l2_words = plan.data_clusters * (plan.entry_bytes / Bytes(8));
        self.write_words(place(plan.l2_start()), l2_words, |at| plan.l2_word(at)).await
    }

    /// Writes `count` big-endian words from `offset` on.
    async fn write_words(
        &self,
        offset: HostOffset,
        count: u64,
        word: impl Fn(u64) -> u64,
    ) -> Result<(), Errno> {
        self.write_pieces(offset, Bytes(count * 8), |range, bytes| {
            for index in range.start / Bytes(8)..range.end / Bytes(8) {
                bytes.extend_from_slice(&word(index).to_be_bytes());
            }
        })
        .await
    }

    /// A count of 1 for each cluster of the file.
    async fn write_refcounts(&self) -> Result<(), Errno> {
        let plan = self.plan;
        let bits = 1u64 << plan.refcount_order;
        let len = Bytes((plan.clusters().0 * bits).div_ceil(8));
        let offset = plan.first_block() << plan.cluster_bits;
        self.write_pieces(offset, len, |range, bytes| {
            for at in range.start.0..range.end.0 {
                bytes.push(ones(at, bits, plan.clusters().0));
            }
        })
        .await
    }

    /// Writes `len` bytes from `offset` on; `fill` appends the bytes of a range (relative to
    /// `offset`).
    async fn write_pieces(
        &self,
        offset: HostOffset,
        len: Bytes,
        fill: impl Fn(Range<Bytes>, &mut Vec<u8>),
    ) -> Result<(), Errno> {
        let mut bytes = Vec::new();
        let mut start = Bytes::ZERO;
        while start < len {
            bytes.clear();
            fill(start..len.min(start + PIECE_BYTES), &mut bytes);
            // Whole sectors: what follows up to the end of the cluster is zero anyway.
            bytes.resize(bytes.len().next_multiple_of(SECTOR_LEN), 0);
            header::write_bytes(self.ring, self.file, offset + start, &bytes).await?;
            start += PIECE_BYTES;
        }
        Ok(())
    }
}

/// Byte `at` of refcount blocks in which the first `count` counts of `bits` bits are 1.
fn ones(at: u64, bits: u64, count: u64) -> u8 {
    if bits >= 8 {
        // Big-endian: the last byte of each count is 1.
        let bytes = bits / 8;
        return u8::from(at % bytes == bytes - 1 && at / bytes < count);
    }
    // Counts below a byte: the lower bits are the lower clusters.
    let each_byte = 8 / bits;
    (0..each_byte)
        .filter(|index| at * each_byte + index < count)
        .fold(0, |byte, index| byte | 1 << (index * bits))
}
