//! What an image holds goes into its backing file.
//!
//! Promises: ended early, all images of the chain are sound and hold what they held.

use std::path::PathBuf;

use ringdisk_console::operation::{Operation, Showing};
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::terminal;
use ringdisk_disk::{Cache, Format, ImageOptions, operations};

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
    /// How the images are opened.
    pub cache: Cache,
    /// The image of the chain to write into; `None`: the backing file.
    pub base: Option<PathBuf>,
    /// Its format: another one is an error, and `raw` is believed.
    pub base_format: Option<Format>,
    /// The images above the base are not emptied.
    pub keep: bool,
    /// Where the names inside images may lead.
    pub pool: Pool,
}

/// Commits.
///
/// Errors: those of opening the chain; no such base; stopped by a signal.
pub fn run(request: &Request, showing: Showing) -> Result<(), Failure> {
    let mut runtime = inspect::runtime()?;
    let ring = runtime.ring().clone();
    let options = ImageOptions {
        format: request.format,
        trust_base_format: request.base_format == Some(Format::Raw),
        cache: request.cache,
        ..of_pool(&request.pool)
    };
    let disk = Named::read(request.image_opts, &request.file)?.open(&mut runtime, options)?;
    let commit = operations::Commit {
        base: request.base.clone(),
        base_format: request.base_format,
        keep: request.keep,
    };
    let operation = Operation::start("commit", showing)?;
    let result = runtime.block_on(operations::commit(&ring, &disk, &commit, operation.progress()));
    operation
        .end(result.map_err(Failure::of_change), "the images are sound and hold what they held")?;
    if !showing.quiet {
        terminal::say("Image committed.");
    }
    Ok(())
}
