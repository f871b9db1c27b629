//! What an image is.
//!
//! Promises: the image is not written, and its backing files are opened only for the whole chain.
//! Names in it cannot control a terminal.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use ringdisk_console::output::json;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::size::{human_size, human_size_exact};
use ringdisk_daemon::terminal::{self, Results, visible};
use ringdisk_disk::name::FileName;
use ringdisk_disk::{Disk, ImageOptions, Layer, describe};
use ringdisk_qcow2::Info;
use ringdisk_ring::Runtime;
use ringdisk_storage::Kind;
use serde_json::{Map, Value};

use crate::inspect::{self, Look};
use crate::named::{Named, of_pool};
use crate::snapshot_list;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The image.
    pub look: Look,
    /// All images of the chain are shown.
    pub backing_chain: bool,
    /// The result is JSON.
    pub json: bool,
}

/// Prints what an image is.
///
/// Errors: those of opening the image; with `--backing-chain` those of opening its backing files.
pub fn run(request: &Request) -> Result<(), Failure> {
    let mut runtime = inspect::runtime()?;
    if request.backing_chain {
        let disk = request.look.open(&mut runtime)?;
        let layers = disk.layers();
        return print(request, &layers, || describe::chain(&disk));
    }
    let disk = alone(&mut runtime, request)?;
    let layers = disk.layers();
    let one = || layers.first().map_or(Value::Null, |layer| with_full_name(layer));
    print(request, &layers, one)
}

/// Opens the image without its backing files, which may be gone.
fn alone(runtime: &mut Runtime, request: &Request) -> Result<Arc<Disk>, Failure> {
    let look = &request.look;
    let options = ImageOptions {
        format: look.format,
        read_only: true,
        force_share: look.force_share,
        without_backing: true,
        ..of_pool(&look.pool)
    };
    Named::read(look.image_opts, &look.image)?.open(runtime, options)
}

fn print(
    request: &Request,
    layers: &[Arc<Layer>],
    value: impl FnOnce() -> Value,
) -> Result<(), Failure> {
    let mut out = Results::lock();
    let written = if request.json {
        json(&mut out, &value())
    } else {
        layers.iter().enumerate().try_for_each(|(number, layer)| {
            if number > 0 {
                writeln!(out)?;
            }
            human(&mut out, layer)
        })
    };
    terminal::ended(written)?;
    out.finish()
}

/// The name of the backing file as seen from here, also where that was not opened.
fn full_backing_name(layer: &Layer) -> Option<String> {
    if let Some(name) = layer.full_backing_name() {
        return Some(name.to_owned());
    }
    let name = layer.qcow2()?.info().backing_file.as_ref()?;
    let text = String::from_utf8_lossy(name).into_owned();
    match FileName::parse(name) {
        Ok(parsed) if !text.starts_with("json:") => {
            let directory = layer.name().parent().unwrap_or(Path::new(""));
            Some(parsed.seen_from(directory).to_string_lossy().into_owned())
        }
        _ => Some(text),
    }
}

/// What is known about one layer, with the full name of its backing file in the place that qemu-img
/// gives it.
fn with_full_name(layer: &Layer) -> Value {
    const FULL: &str = "full-backing-filename";
    let (Value::Object(object), Some(full)) = (describe::layer(layer), full_backing_name(layer))
    else {
        return describe::layer(layer);
    };
    let mut result = Map::new();
    for (key, value) in object {
        if key == "backing-filename" {
            result.insert(FULL.to_owned(), full.clone().into());
        }
        if key != FULL {
            result.insert(key, value);
        }
    }
    Value::Object(result)
}

/// The lines that qemu-img prints too, in its words, so that what reads those reads these.
fn human(out: &mut impl Write, layer: &Layer) -> io::Result<()> {
    writeln!(out, "image: {}", visible(&layer.name().to_string_lossy()))?;
    if let Some(format) = layer.format() {
        writeln!(out, "file format: {format}")?;
    }
    writeln!(out, "virtual size: {}", human_size_exact(layer.size().0))?;
    if let Some(file) = layer.file() {
        writeln!(out, "disk size: {}", human_size(file.allocated_bytes()))?;
    }
    if let Some(image) = layer.qcow2() {
        qcow2(out, image.info(), layer)?;
    }
    child(out, layer)
}

/// The file below the format.
fn child(out: &mut impl Write, layer: &Layer) -> io::Result<()> {
    let Some(file) = layer.file() else { return Ok(()) };
    let kind = match file.kind() {
        _ if file.nbd_address().is_some() => "nbd",
        Kind::BlockDevice => "host_device",
        Kind::Regular | Kind::Custom => "file",
    };
    writeln!(out, "Child node '/file':")?;
    writeln!(out, "    filename: {}", visible(&layer.name().to_string_lossy()))?;
    writeln!(out, "    protocol type: {kind}")?;
    writeln!(out, "    file length: {}", human_size_exact(file.len()))?;
    writeln!(out, "    disk size: {}", human_size(file.allocated_bytes()))
}

/// What qcow2 has besides.
fn qcow2(out: &mut impl Write, info: &Info, layer: &Layer) -> io::Result<()> {
    writeln!(out, "cluster_size: {}", info.cluster_size())?;
    if info.dirty {
        writeln!(out, "cleanly shut down: no")?;
    }
    if let Some(name) = &info.backing_file {
        backing(out, &String::from_utf8_lossy(name), full_backing_name(layer).as_deref())?;
    }
    if let Some(format) = &info.backing_format {
        writeln!(out, "backing file format: {}", visible(format))?;
    }
    if !info.snapshots.is_empty() {
        snapshot_list::list(out, &info.snapshots)?;
    }
    specific(out, info, layer)
}

fn backing(out: &mut impl Write, name: &str, full: Option<&str>) -> io::Result<()> {
    match full {
        Some(full) if full != name => {
            writeln!(out, "backing file: {} (actual path: {})", visible(name), visible(full))
        }
        _ => writeln!(out, "backing file: {}", visible(name)),
    }
}

/// What only qcow2 has.
fn specific(out: &mut impl Write, info: &Info, layer: &Layer) -> io::Result<()> {
    writeln!(out, "Format specific information:")?;
    writeln!(out, "    compat: {}", info.compat())?;
    writeln!(out, "    compression type: {}", info.compression.name())?;
    if info.version >= 3 {
        writeln!(out, "    lazy refcounts: {}", info.lazy_refcounts)?;
    }
    if !info.bitmaps.is_empty() {
        writeln!(out, "    bitmaps:")?;
    }
    for (number, bitmap) in info.bitmaps.iter().enumerate() {
        writeln!(out, "        [{number}]:\n            flags:")?;
        let flags = [(bitmap.in_use, "in-use"), (bitmap.auto, "auto")];
        for (at, (_, flag)) in flags.iter().filter(|(set, _)| *set).enumerate() {
            writeln!(out, "                [{at}]: {flag}")?;
        }
        writeln!(out, "            name: {}", visible(&bitmap.name))?;
        writeln!(out, "            granularity: {}", bitmap.granularity_bytes)?;
    }
    writeln!(out, "    refcount bits: {}", info.refcount_bits)?;
    if info.version < 3 {
        return Ok(());
    }
    if info.external_data_file {
        let name = match (&info.data_file, layer.data_name()) {
            (Some(name), _) => String::from_utf8_lossy(name).into_owned(),
            (None, Some(name)) => name.to_string_lossy().into_owned(),
            (None, None) => String::from("(not recorded)"),
        };
        writeln!(out, "    data file: {}", visible(&name))?;
        writeln!(out, "    data file raw: {}", info.data_file_raw)?;
    }
    writeln!(out, "    corrupt: {}", info.corrupt)?;
    writeln!(out, "    extended l2: {}", info.extended_l2)
}
