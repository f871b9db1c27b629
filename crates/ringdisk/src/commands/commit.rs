//! `ringdisk commit`: what an image holds goes into its backing file.

use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::terminal;
use ringdisk_disk::{Format, ImageOptions, jobs};

use crate::cli::CommitArgs;
use crate::commands::look;
use crate::commands::named::{Named, of_pool};
use crate::commands::operation::Operation;

/// Commits.
///
/// Errors: those of opening the chain; no such base; stopped by a signal.
pub(crate) fn run(args: &CommitArgs) -> Result<(), Failure> {
    let mut runtime = look::runtime()?;
    let ring = runtime.ring().clone();
    let options = ImageOptions {
        format: args.format,
        trust_base_format: args.base_format == Some(Format::Raw),
        cache: args.cache,
        ..of_pool(&args.pool)
    };
    let disk = Named::of(args.name, &args.file)?.open(&mut runtime, options)?;
    let commit =
        jobs::Commit { base: args.base.clone(), base_format: args.base_format, keep: args.drop };
    let job = Operation::start("commit", args.show)?;
    let result = runtime.block_on(jobs::commit(&ring, &disk, &commit, job.progress()));
    job.end(result.map_err(Failure::of_change), "the images are sound and hold what they held")?;
    if !args.show.quiet {
        terminal::say("Image committed.");
    }
    Ok(())
}
