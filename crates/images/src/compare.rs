//! Whether two images hold the same.
//!
//! Promises: words and exit codes are those of `qemu-img compare`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_console::operation::{Operation, Showing};
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::terminal;
use ringdisk_disk::operations::{self, CompareOptions, Comparison, Difference};
use ringdisk_disk::{Cache, Cause, Disk, Format, ImageOptions};
use ringdisk_ring::Runtime;

use crate::inspect;
use crate::named::{Named, Pool, of_pool};

/// qemu-img's codes.
const DIFFERENT: u8 = 1;
const CANNOT_OPEN: u8 = 2;
const CANNOT_LOOK_UP: u8 = 3;
const CANNOT_READ: u8 = 4;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// One image.
    pub first: PathBuf,
    /// `None`: it is probed.
    pub format: Option<Format>,
    /// The other.
    pub second: PathBuf,
    /// `None`: it is probed.
    pub second_format: Option<Format>,
    /// Their names are lists of options.
    pub image_opts: bool,
    /// The sizes, and what is allocated, must be the same too.
    pub strict: bool,
    /// How both are opened.
    pub cache: Cache,
    /// Other programs may write them meanwhile.
    pub force_share: bool,
    /// Where the names inside images may lead.
    pub pool: Pool,
}

/// Compares, says what differs, and gives the exit code: 0 or 1.
///
/// Errors: with code 2: an image cannot be opened; 3, 4: it cannot be read.
pub fn run(request: &Request, showing: Showing) -> Result<u8, Failure> {
    let with = |code: u8| move |failure: Failure| failure.with_code(code);
    let mut runtime = inspect::runtime().map_err(with(CANNOT_OPEN))?;
    let mut open = |image: &Path, format| {
        open(&mut runtime, request, image, format).map_err(with(CANNOT_OPEN))
    };
    let first = open(&request.first, request.format)?;
    let second = open(&request.second, request.second_format)?;
    let ring = runtime.ring().clone();
    let options = CompareOptions { strict: request.strict };
    let operation = Operation::start("compare", showing).map_err(with(CANNOT_OPEN))?;
    let compare = operations::compare(&ring, &first, &second, options, operation.progress());
    let compared = runtime.block_on(compare).map_err(|error| {
        let code = match error.cause() {
            Some(Cause::BadTables) => CANNOT_LOOK_UP,
            _ => CANNOT_READ,
        };
        Failure::from(error).with_code(code)
    });
    let compared = operation.end(compared, "nothing was changed")?;
    let say = |text: &dyn std::fmt::Display| {
        if !showing.quiet {
            terminal::say(text);
        }
    };
    // It is only found when all before it is the same.
    let common = first.size().min(second.size());
    let meets_end = match compared {
        Comparison::Different(Difference::Content { offset }) => offset.from_start() >= common,
        _ => true,
    };
    if first.size() != second.size() && !request.strict && meets_end {
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
    request: &Request,
    image: &Path,
    format: Option<Format>,
) -> Result<Arc<Disk>, Failure> {
    let options = ImageOptions {
        format,
        read_only: true,
        cache: request.cache,
        force_share: request.force_share,
        ..of_pool(&request.pool)
    };
    Named::read(request.image_opts, image)?.open(runtime, options)
}
