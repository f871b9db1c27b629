//! Another size for the disk inside an image.
//!
//! Promises: nothing is lost unless the user says so; ended early, the image is sound and has its
//! old size.

use std::path::PathBuf;

use ringdisk_console::operation::{Operation, Showing};
use ringdisk_daemon::failure::{Cause, Exit, Failure};
use ringdisk_daemon::size::SizeChange;
use ringdisk_daemon::terminal;
use ringdisk_disk::{Bytes, Format, ImageOptions, ResizeOptions};
use ringdisk_qcow2::Preallocation;
use ringdisk_qcow2::limits::SECTOR;

use crate::inspect;
use crate::named::{Named, Pool, of_pool};

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The image.
    pub file: PathBuf,
    /// Its name is a list of options.
    pub image_opts: bool,
    /// `None`: it is probed.
    pub format: Option<Format>,
    /// The new size.
    pub size: SizeChange,
    /// The disk may become smaller.
    pub shrink: bool,
    /// What is prepared in the new part.
    pub preallocation: Preallocation,
    /// Print nothing but errors.
    pub quiet: bool,
    /// Where the names inside images may lead.
    pub pool: Pool,
}

/// Changes the size.
///
/// Errors: those of opening the image; a size that it cannot have; smaller, and that is not
/// allowed.
pub fn run(request: &Request) -> Result<(), Failure> {
    let usage = |text: String| Failure::new(Exit::Usage, text);
    let mut runtime = inspect::runtime()?;
    let ring = runtime.ring().clone();
    let options = ImageOptions { format: request.format, ..of_pool(&request.pool) };
    let image = Named::read(request.image_opts, &request.file)?;
    let disk = image.open(&mut runtime, options)?;
    let old = disk.size();
    let size = Bytes(request.size.apply(old.0)?);
    if size < old && !request.shrink {
        let text = format!("the disk has {old} bytes; what lies past byte {size} would be lost");
        return Err(usage(text).because(Cause::WouldShrink).hint("add --shrink if that is meant"));
    }
    let is_raw = disk.layers().first().and_then(|top| top.format()) == Some(Format::Raw);
    if is_raw && request.preallocation == Preallocation::Metadata {
        return Err(usage(String::from(
            "a raw image has no metadata that could be prepared; write off, falloc or full",
        )));
    }
    if !is_raw && !size.is_multiple_of(SECTOR) {
        return Err(usage(format!("the new size of {size} bytes is not a multiple of 512")));
    }
    let options = ResizeOptions { shrink: request.shrink, preallocation: request.preallocation };
    let operation = Operation::start("resize", Showing::QUIET)?;
    let resize = disk.resize_unless_cancelled(&ring, size, options, operation.progress());
    let resized = runtime.block_on(resize).map_err(Failure::of_change);
    let closed = inspect::close(&mut runtime, &disk, image.path(), resized);
    operation.end(closed, "the image is sound and has its old size")?;
    if !request.quiet {
        terminal::say("Image resized.");
    }
    Ok(())
}
