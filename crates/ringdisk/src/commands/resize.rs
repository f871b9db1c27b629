//! `ringdisk resize`: another size for the disk inside an image.

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::terminal;
use ringdisk_disk::{Format, ImageOptions, ResizeOptions};
use ringdisk_qcow2::Preallocation;
use ringdisk_qcow2::limits::SECTOR;

use crate::cli::{ProgressArgs, ResizeArgs};
use crate::commands::look;
use crate::commands::named::{Named, of_pool};
use crate::commands::operation::Operation;

/// Changes the size.
///
/// Errors: those of opening the image; a size that it cannot have; smaller without `--shrink`.
pub(crate) fn run(args: &ResizeArgs) -> Result<(), Failure> {
    let mut runtime = look::runtime()?;
    let ring = runtime.ring().clone();
    let options = ImageOptions { format: args.format, ..of_pool(&args.pool) };
    let image = Named::of(args.name, &args.file)?;
    let disk = image.open(&mut runtime, options)?;
    let old = disk.size();
    let size = args.size.apply(old).map_err(|text| Failure::new(Exit::Usage, text))?;
    if size < old && !args.shrink {
        return Err(Failure::new(
            Exit::Usage,
            format!("the disk has {old} bytes; what lies past byte {size} would be lost"),
        )
        .hint("add --shrink if that is meant"));
    }
    let is_raw = disk.layers().first().and_then(|top| top.format()) == Some(Format::Raw);
    if is_raw && args.preallocation == Preallocation::Metadata {
        return Err(Failure::new(
            Exit::Usage,
            "a raw image has no metadata that could be prepared; write off, falloc or full",
        ));
    }
    if !is_raw && !size.is_multiple_of(SECTOR) {
        return Err(Failure::new(
            Exit::Usage,
            format!("the new size of {size} bytes is not a multiple of 512"),
        ));
    }
    let options = ResizeOptions { shrink: args.shrink, preallocation: args.preallocation };
    let job = Operation::start("resize", ProgressArgs { progress: false, quiet: true })?;
    let resize = disk.resize_unless_cancelled(&ring, size, options, job.progress());
    let resized = runtime.block_on(resize).map_err(Failure::of_change);
    let closed = look::close(&mut runtime, &disk, image.path(), resized);
    job.end(closed, "the image is sound and has its old size")?;
    if !args.quiet {
        terminal::say("Image resized.");
    }
    Ok(())
}
