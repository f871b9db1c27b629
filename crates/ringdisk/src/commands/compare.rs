//! `ringdisk compare`: whether two images hold the same.
//!
//! Promises: words and exit codes are those of `qemu-img compare`.

use std::path::Path;
use std::sync::Arc;

use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::terminal;
use ringdisk_disk::jobs::{BAD_TABLES, CompareOptions, Comparison, Difference, compare};
use ringdisk_disk::{Disk, Format, ImageOptions};
use ringdisk_ring::Runtime;

use crate::cli::CompareArgs;
use crate::commands::look;
use crate::commands::named::{Named, of_pool};
use crate::commands::operation::Operation;

/// qemu-img's codes.
const DIFFERENT: u8 = 1;
const CANNOT_OPEN: u8 = 2;
const CANNOT_LOOK_UP: u8 = 3;
const CANNOT_READ: u8 = 4;

/// Compares, and gives the exit code: 0 or 1.
///
/// Errors: with code 2: an image cannot be opened; 3, 4: it cannot be read.
pub(crate) fn run(args: &CompareArgs) -> Result<u8, Failure> {
    let with = |code: u8| move |failure: Failure| failure.with_code(code);
    let mut runtime = look::runtime().map_err(with(CANNOT_OPEN))?;
    let first = open(&mut runtime, args, &args.first, args.format).map_err(with(CANNOT_OPEN))?;
    let second =
        open(&mut runtime, args, &args.second, args.b_format).map_err(with(CANNOT_OPEN))?;
    let ring = runtime.ring().clone();
    let options = CompareOptions { strict: args.strict };
    let job = Operation::start("compare", args.show).map_err(with(CANNOT_OPEN))?;
    let result = runtime.block_on(compare(&ring, &first, &second, options, job.progress()));
    let compared = result.map_err(|error| {
        // The words of the job say which of the two it was.
        let looking = error.message().contains(BAD_TABLES);
        Failure::from(error).with_code(if looking { CANNOT_LOOK_UP } else { CANNOT_READ })
    });
    let compared = job.end(compared, "nothing was changed")?;
    let say = |text: &dyn std::fmt::Display| {
        if !args.show.quiet {
            terminal::say(text);
        }
    };
    // It is only found when all before it is the same.
    let common = first.size().min(second.size());
    let meets_end = match compared {
        Comparison::Different(Difference::Content { offset }) => offset >= common,
        _ => true,
    };
    if first.size() != second.size() && !args.strict && meets_end {
        say(&"Warning: Image size mismatch!");
    }
    let Comparison::Different(how) = compared else {
        say(&"Images are identical.");
        return Ok(0);
    };
    match how {
        Difference::Size => say(&"Strict mode: Image size mismatch!"),
        Difference::Status { offset } => {
            say(&format_args!("Strict mode: Offset {offset} block status mismatch!"));
        }
        Difference::Content { offset } => {
            say(&format_args!("Content mismatch at offset {offset}!"));
        }
    }
    Ok(DIFFERENT)
}

fn open(
    runtime: &mut Runtime,
    args: &CompareArgs,
    image: &Path,
    format: Option<Format>,
) -> Result<Arc<Disk>, Failure> {
    let options = ImageOptions {
        format,
        read_only: true,
        cache: args.cache,
        force_share: args.force_share,
        ..of_pool(&args.pool)
    };
    Named::of(args.name, image)?.open(runtime, options)
}
