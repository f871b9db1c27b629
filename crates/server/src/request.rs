//! What a server is asked for, as plain values: the image or the null disk that it serves.
//!
//! Promises: nothing is looked at; names are as the user wrote them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ringdisk_disk::{AllowedHost, Cache, DetectZeroes, Discard, Format, SnapshotChoice};
use ringdisk_images::new_image::is_named_qcow2;

use crate::limits::LimitWords;

/// An image with its options, or a null disk. The name of the image is apart
/// ([`crate::open::ImagePlan::image`]).
#[derive(Clone, Debug, Default)]
pub struct ImageRequest {
    /// Never write to the image.
    pub read_only: bool,
    /// Make an image of so many bytes where there is none.
    pub create: Option<u64>,
    /// Options of the image that is made, as `NAME=VALUE,…`.
    pub options: Vec<String>,
    /// What is written goes to an overlay that ends with the process.
    pub snapshot: bool,
    /// What is written goes to this overlay.
    pub overlay: Option<PathBuf>,
    /// `None`: the image is probed.
    pub format: Option<Format>,
    /// The number of a partition, from 1 on.
    pub partition: Option<u32>,
    /// How the page cache and flushes are used.
    pub cache: Cache,
    /// An internal snapshot in place of the disk.
    pub load_snapshot: Option<SnapshotChoice>,
    /// The backing file of the image does not count.
    pub without_backing: bool,
    /// First byte of the disk that is served.
    pub offset: Option<u64>,
    /// Length of the part that is served, bytes; `None`: to the end.
    pub size: Option<u64>,
    /// Directories and files that names inside images may lead to.
    pub allow_path: Vec<PathBuf>,
    /// Servers that names inside images may lead to.
    pub allow_host: Vec<AllowedHost>,
    /// How long requests wait for the server of an NBD export that is gone.
    pub reconnect: Option<Duration>,
    /// Other programs may write the image meanwhile.
    pub force_share: bool,
    /// What a discard does.
    pub discard: Discard,
    /// What is discarded keeps its place in a qcow2.
    pub discard_no_unref: bool,
    /// What is done with zeroes that are written.
    pub detect_zeroes: DetectZeroes,
    /// What is read of backing files is kept in the image.
    pub copy_on_read: bool,
    /// Limits of requests and bytes in a second.
    pub limit: Vec<LimitWords>,
    /// Reference counts are written late; `None`: as the image says.
    pub lazy_refcounts: Option<bool>,
    /// Most memory for tables of each layer, bytes; `None`: as the image needs it.
    pub metadata_cache: Option<u64>,
    /// Size of a null disk, bytes; `None`: an image is served.
    pub null: Option<u64>,
    /// How long each request to a null disk takes.
    pub latency: Option<Duration>,
    /// Reads of a null disk give zeroes.
    pub read_zeroes: bool,
}

impl From<&ImageRequest> for ImageRequest {
    fn from(request: &ImageRequest) -> ImageRequest {
        request.clone()
    }
}

impl ImageRequest {
    /// Format of an image that is made under this name.
    pub fn new_format(&self, image: &Path) -> Format {
        match self.format {
            Some(format) => format,
            None if is_named_qcow2(image) => Format::Qcow2,
            None => Format::Raw,
        }
    }
}
