//! The snapshots inside an image: listed, made, applied, deleted.
//!
//! Promises: a raw image has none, and to list these is no error; an image that was open for
//! writing is closed however the work on it went.

use std::path::PathBuf;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::terminal::{self, Results};
use ringdisk_disk::Format;

use crate::inspect;
use crate::named::{Named, Pool};
use crate::own_image::{self, Inside, OwnImage};
use crate::snapshot_list::list;

/// What is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Lists all.
    List,
    /// Makes one of this name.
    Create(String),
    /// Goes back to it.
    Apply(String),
    /// Deletes it.
    Delete(String),
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
    /// What is done.
    pub work: Work,
    /// Other programs may write the image while its snapshots are listed.
    pub force_share: bool,
    /// Print nothing but errors.
    pub quiet: bool,
    /// Where the names inside images may lead.
    pub pool: Pool,
}

/// Does it.
///
/// Errors: those of opening the image; there is no such snapshot; the image cannot have any.
pub fn run(request: &Request) -> Result<(), Failure> {
    let mut runtime = inspect::runtime()?;
    let what = OwnImage {
        format: request.format,
        writable: request.work != Work::List,
        force_share: request.force_share,
    };
    let file = Named::read(request.image_opts, &request.file)?;
    let opened = what.open(&mut runtime, &file, &request.pool, Inside::Snapshots);
    let mut image = match opened {
        // There is nothing to list, and that is no error, as for qemu-img.
        Err(failure) if failure.exit == Exit::Unsupported && !what.writable => {
            tracing::info!("{}", failure.message());
            return Ok(());
        }
        result => result?,
    };
    let ring = runtime.ring().clone();
    let result = match &request.work {
        Work::List => {
            let snapshots = &image.info().snapshots;
            if !snapshots.is_empty() && !request.quiet {
                let mut out = Results::lock();
                terminal::ended(list(&mut out, snapshots))?;
                out.finish()?;
            }
            return Ok(());
        }
        Work::Create(name) => runtime.block_on(image.snapshot_create(&ring, name)).map(|_| ()),
        Work::Apply(name) => runtime.block_on(image.snapshot_apply(&ring, name)),
        Work::Delete(name) => runtime.block_on(image.snapshot_delete(&ring, name)),
    };
    let closed = own_image::close(&mut runtime, &image, &request.file);
    Ok(result?).and(closed)
}
