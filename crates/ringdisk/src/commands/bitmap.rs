//! `ringdisk bitmap`: changes of the bitmaps inside an image.

use std::path::Path;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_qcow2::{BitmapContents, Qcow2};
use ringdisk_ring::Runtime;

use crate::cli::{BitmapArgs, BitmapWork};
use crate::commands::create::is_same;
use crate::commands::look;
use crate::commands::named::Named;
use crate::commands::own_image::OwnImage;

/// Does the actions, one after the other; the first that fails ends it, and those before it are
/// done.
///
/// Errors: those of opening the image, and what an action is refused for.
pub(crate) fn run(args: &BitmapArgs, works: &[BitmapWork]) -> Result<(), Failure> {
    let mut runtime = look::runtime()?;
    let what = OwnImage { format: args.format, writable: true, force_share: false };
    let file = Named::of(args.name, &args.file)?;
    let mut image = what.open(&mut runtime, &file, &args.pool, "bitmaps")?;
    let name = args.bitmap.as_deref().unwrap_or_default();
    let mut result = Ok(());
    for work in works {
        result = one(&mut runtime, &mut image, (args, file.path()), (work, works), name);
        if result.is_err() {
            break;
        }
    }
    let ring = runtime.ring().clone();
    let closed = runtime.block_on(image.close(&ring)).map_err(|errno| {
        let doing = format!("cannot write '{}' to the end", args.file.display());
        Failure::system(doing, &errno.into(), Exit::Storage)
    });
    result.and(closed)
}

fn one(
    runtime: &mut Runtime,
    image: &mut Qcow2,
    (args, own): (&BitmapArgs, &Path),
    (work, works): (&BitmapWork, &[BitmapWork]),
    name: &str,
) -> Result<(), Failure> {
    let ring = runtime.ring().clone();
    match work {
        BitmapWork::Merge(source) => {
            let contents = contents(runtime, image, (args, own), source)?;
            runtime.block_on(image.bitmap_merge(&ring, name, &contents))?;
        }
        // One that never records takes no memory.
        BitmapWork::Add if works.contains(&BitmapWork::Disable) => {
            runtime.block_on(image.bitmap_add_disabled(&ring, name, args.granularity))?;
        }
        BitmapWork::Add => {
            runtime.block_on(image.bitmap_add(&ring, name, args.granularity))?;
        }
        BitmapWork::Remove => runtime.block_on(image.bitmap_remove(&ring, name))?,
        BitmapWork::RemoveAll => runtime.block_on(image.bitmap_remove_all(&ring))?,
        BitmapWork::Clear => runtime.block_on(image.bitmap_clear(&ring, name))?,
        BitmapWork::Enable => runtime.block_on(image.bitmap_enable(&ring, name))?,
        BitmapWork::Disable => runtime.block_on(image.bitmap_disable(&ring, name))?,
    }
    Ok(())
}

/// What a bitmap of the image, or of another, has recorded.
fn contents(
    runtime: &mut Runtime,
    image: &Qcow2,
    (args, own): (&BitmapArgs, &Path),
    name: &str,
) -> Result<BitmapContents, Failure> {
    let ring = runtime.ring().clone();
    let other = args.source_file.as_deref().filter(|file| !is_same(file, own));
    let Some(file) = other else {
        return Ok(runtime.block_on(image.bitmap_contents(&ring, name))?);
    };
    let what = OwnImage { format: args.source_format, writable: false, force_share: false };
    let file = Named::read(false, file)?;
    let source = what.open(runtime, &file, &args.pool, "bitmaps")?;
    Ok(runtime.block_on(source.bitmap_contents(&ring, name))?)
}
