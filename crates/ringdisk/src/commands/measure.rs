//! `ringdisk measure`: how much space an image would take.

use std::path::Path;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::terminal;
use ringdisk_disk::{Format, ImageOptions, Layer};
use ringdisk_qcow2::{Measure, Measurement, measure_raw};
use serde_json::{Map, Value, json};

use crate::cli::MeasureArgs;
use crate::commands::look;
use crate::commands::named::{Named, of_pool};
use crate::commands::output::json_text;
use crate::new_image::{Described, NewImage};

/// Most of a map that is asked for at once, bytes; as long as nothing is found, it is one answer.
const STEP_BYTES: u64 = 1 << 40;

/// Prints the sizes.
///
/// Errors: options that make no sense; the source cannot be opened or read.
pub(crate) fn run(args: &MeasureArgs) -> Result<(), Failure> {
    let image = match NewImage::parse(args.target_format, &args.options)? {
        Described::Help(text) => {
            terminal::say(text);
            return Ok(());
        }
        Described::Image(image) => image,
    };
    let size = image.size(args.size)?;
    let measured = match (&args.file, size) {
        (Some(_), Some(_)) => {
            return Err(Failure::new(Exit::Usage, "give either a size or a FILE"));
        }
        (None, None) => return Err(Failure::new(Exit::Usage, "give --size SIZE or a FILE")),
        (None, Some(size)) => fresh(&image, size)?,
        (Some(file), None) => copy(args, file, &image)?,
    };
    let bitmaps = measured.bitmaps;
    if args.output.is_json() {
        let mut object = Map::new();
        object.insert(String::from("required"), json!(measured.required));
        object.insert(String::from("fully-allocated"), json!(measured.fully_allocated));
        if let Some(bytes) = bitmaps {
            object.insert(String::from("bitmaps"), json!(bytes));
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
        Format::Raw => measure_raw("the new image", size)?,
        Format::Qcow2 => Measure::new("the new image", &image.qcow2(size)?, false)?.finish(),
    })
}

/// A copy of a disk that is there.
fn copy(args: &MeasureArgs, file: &Path, image: &NewImage) -> Result<Measurement, Failure> {
    let mut runtime = look::runtime()?;
    let options = ImageOptions {
        format: args.format,
        read_only: true,
        force_share: args.force_share,
        internal_snapshot: args.snapshot.clone(),
        ..of_pool(&args.pool)
    };
    let disk = Named::of(args.name, file)?.open(&mut runtime, options)?;
    let size = disk.size();
    if image.format == Format::Raw {
        return Ok(measure_raw(&file.to_string_lossy(), size)?);
    }
    let mut measure = Measure::new(&file.to_string_lossy(), &image.qcow2(size)?, true)?;
    let layers = disk.layers();
    if let Some(source) = layers.first().and_then(|layer| Layer::qcow2(layer)) {
        measure.bitmaps(source.info());
    }
    let ring = runtime.ring().clone();
    let mut at = 0;
    while at < size {
        let step = STEP_BYTES.min(size - at);
        let status = runtime
            .block_on(disk.block_status(&ring, at, step))
            .map_err(|errno| look::unreadable(file, errno))?;
        if status.len == 0 {
            break;
        }
        if status.data && !status.zero {
            measure.data(at, status.len);
        }
        at += status.len;
    }
    Ok(measure.finish())
}
