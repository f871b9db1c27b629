//! Changes of the bitmaps inside an image.
//!
//! Promises: actions are done in their order; the first that fails ends it, those before it are
//! done, and the image is closed in any case.

use std::path::{Path, PathBuf};

use ringdisk_daemon::failure::Failure;
use ringdisk_disk::{Bytes, Format};
use ringdisk_qcow2::{BitmapContents, Qcow2};
use ringdisk_ring::Runtime;

use crate::create::is_same;
use crate::inspect;
use crate::named::{Named, Pool};
use crate::own_image::{self, Inside, OwnImage};

/// One action on a bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Makes it.
    Add,
    /// Removes it.
    Remove,
    /// Removes all bitmaps of the image.
    RemoveAll,
    /// Forgets what it has recorded.
    Clear,
    /// Records writes from now on.
    Enable,
    /// Records them no longer.
    Disable,
    /// Adds what the bitmap of this name has recorded.
    Merge(String),
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The image.
    pub file: PathBuf,
    /// Its name is a list of options.
    pub image_opts: bool,
    /// `None`: it is probed.
    pub format: Option<Format>,
    /// The bitmap; empty where none is needed.
    pub bitmap: String,
    /// What is done, in this order.
    pub works: Vec<Work>,
    /// Bytes of the disk for each bit of a new bitmap; `None`: 64 KiB.
    pub granularity: Option<u64>,
    /// The image with the source of a merge; `None`: `file`.
    pub source_file: Option<PathBuf>,
    /// `None`: it is probed.
    pub source_format: Option<Format>,
    /// Where the names inside images may lead.
    pub pool: Pool,
}

/// Does the actions, one after the other; the first that fails ends it, and those before it are
/// done.
///
/// Errors: those of opening the image, and what an action is refused for.
pub fn run(request: &Request) -> Result<(), Failure> {
    let mut runtime = inspect::runtime()?;
    let what = OwnImage { format: request.format, writable: true, force_share: false };
    let file = Named::read(request.image_opts, &request.file)?;
    let mut image = what.open(&mut runtime, &file, &request.pool, Inside::Bitmaps)?;
    let mut works = request.works.iter();
    let result =
        works.try_for_each(|work| one(&mut runtime, &mut image, (request, file.path()), work));
    let closed = own_image::close(&mut runtime, &image, &request.file);
    result.and(closed)
}

fn one(
    runtime: &mut Runtime,
    image: &mut Qcow2,
    (request, own): (&Request, &Path),
    work: &Work,
) -> Result<(), Failure> {
    let ring = runtime.ring().clone();
    let (name, granularity) = (request.bitmap.as_str(), request.granularity.map(Bytes));
    match work {
        Work::Merge(source) => {
            let contents = contents(runtime, image, (request, own), source)?;
            runtime.block_on(image.bitmap_merge(&ring, name, &contents))?;
        }
        // One that never records takes no memory.
        Work::Add if request.works.contains(&Work::Disable) => {
            runtime.block_on(image.bitmap_add_disabled(&ring, name, granularity))?;
        }
        Work::Add => {
            runtime.block_on(image.bitmap_add(&ring, name, granularity))?;
        }
        Work::Remove => runtime.block_on(image.bitmap_remove(&ring, name))?,
        Work::RemoveAll => runtime.block_on(image.bitmap_remove_all(&ring))?,
        Work::Clear => runtime.block_on(image.bitmap_clear(&ring, name))?,
        Work::Enable => runtime.block_on(image.bitmap_enable(&ring, name))?,
        Work::Disable => runtime.block_on(image.bitmap_disable(&ring, name))?,
    }
    Ok(())
}

/// What a bitmap of the image, or of another, has recorded.
fn contents(
    runtime: &mut Runtime,
    image: &Qcow2,
    (request, own): (&Request, &Path),
    name: &str,
) -> Result<BitmapContents, Failure> {
    let ring = runtime.ring().clone();
    let other = request.source_file.as_deref().filter(|file| !is_same(file, own));
    let Some(file) = other else {
        return Ok(runtime.block_on(image.bitmap_contents(&ring, name))?);
    };
    let what = OwnImage { format: request.source_format, writable: false, force_share: false };
    let file = Named::read(false, file)?;
    let source = what.open(runtime, &file, &request.pool, Inside::Bitmaps)?;
    Ok(runtime.block_on(source.bitmap_contents(&ring, name))?)
}
