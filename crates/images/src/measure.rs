//! How much space an image would take.
//!
//! Promises: nothing is written, and no data of the disk are read: the answer comes from the map of
//! the source, or from the size of a new disk.

use std::path::{Path, PathBuf};

use ringdisk_console::output::json_text;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::terminal;
use ringdisk_disk::{Bytes, Format, ImageOptions, Layer, SnapshotChoice};
use ringdisk_qcow2::{GuestOffset, Measure, Measurement, measure_raw};
use serde_json::{Map, Value, json};

use crate::inspect;
use crate::named::{Named, Pool, of_pool};
use crate::new_image::{Described, NewImage};

/// Most of a map that is asked for at once, bytes; as long as nothing is found, it is one answer.
const STEP_BYTES: Bytes = Bytes(1 << 40);

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The source; `None`: a new disk of `size`.
    pub file: Option<PathBuf>,
    /// Its name is a list of options.
    pub image_opts: bool,
    /// `None`: it is probed.
    pub format: Option<Format>,
    /// Of the image that is measured.
    pub target_format: Format,
    /// Its options, as `NAME=VALUE,…`.
    pub options: Vec<String>,
    /// Of a new disk, bytes.
    pub size: Option<u64>,
    /// Other programs may write the source meanwhile.
    pub force_share: bool,
    /// An internal snapshot in place of the disk.
    pub snapshot: Option<SnapshotChoice>,
    /// The result is JSON.
    pub json: bool,
    /// Where the names inside images may lead.
    pub pool: Pool,
}

/// Prints the sizes.
///
/// Errors: options that make no sense; the source cannot be opened or read.
pub fn run(request: &Request) -> Result<(), Failure> {
    let image = match NewImage::parse(request.target_format, &request.options)? {
        Described::Help(text) => {
            terminal::say(text);
            return Ok(());
        }
        Described::Image(image) => image,
    };
    let size = image.size(request.size)?;
    let measured = match (&request.file, size) {
        (Some(_), Some(_)) => {
            return Err(Failure::new(Exit::Usage, "give either a size or a FILE"));
        }
        (None, None) => return Err(Failure::new(Exit::Usage, "give --size SIZE or a FILE")),
        (None, Some(size)) => fresh(&image, size)?,
        (Some(file), None) => copy(request, file, &image)?,
    };
    let bitmaps = measured.bitmaps;
    if request.json {
        let mut object = Map::new();
        object.insert(String::from("required"), json!(measured.required.0));
        object.insert(String::from("fully-allocated"), json!(measured.fully_allocated.0));
        if let Some(bytes) = bitmaps {
            object.insert(String::from("bitmaps"), json!(bytes.0));
        }
        terminal::say(json_text(&Value::Object(object)));
    } else {
        terminal::say(format_args!("required size: {}", measured.required));
        terminal::say(format_args!("fully allocated size: {}", measured.fully_allocated));
        if let Some(bytes) = bitmaps {
            terminal::say(format_args!("bitmaps size: {bytes}"));
        }
    }
    Ok(())
}

/// A new disk.
fn fresh(image: &NewImage, size: u64) -> Result<Measurement, Failure> {
    Ok(match image.format {
        Format::Raw => measure_raw("the new image", Bytes(size))?,
        Format::Qcow2 => Measure::new("the new image", &image.qcow2(size)?, false)?.finish(),
    })
}

/// A copy of a disk that is there.
fn copy(request: &Request, file: &Path, image: &NewImage) -> Result<Measurement, Failure> {
    let mut runtime = inspect::runtime()?;
    let options = ImageOptions {
        format: request.format,
        read_only: true,
        force_share: request.force_share,
        internal_snapshot: request.snapshot.clone(),
        ..of_pool(&request.pool)
    };
    let disk = Named::read(request.image_opts, file)?.open(&mut runtime, options)?;
    let size = disk.size();
    if image.format == Format::Raw {
        return Ok(measure_raw(&file.to_string_lossy(), size)?);
    }
    let mut measure = Measure::new(&file.to_string_lossy(), &image.qcow2(size.0)?, true)?;
    let layers = disk.layers();
    if let Some(source) = layers.first().and_then(|layer| Layer::qcow2(layer)) {
        measure.bitmaps(source.info());
    }
    let ring = runtime.ring().clone();
    let (mut at, end) = (GuestOffset::ZERO, GuestOffset::after(size));
    while at < end {
        let step = STEP_BYTES.min(end - at);
        let status = runtime
            .block_on(disk.block_status(&ring, at.0, step))
            .map_err(|errno| inspect::unreadable(file, errno))?;
        if status.len == Bytes::ZERO {
            break;
        }
        if status.data && !status.zero {
            measure.data(at, status.len);
        }
        at += status.len;
    }
    Ok(measure.finish())
}
