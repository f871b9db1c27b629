//! `ringdisk info`: what an image is.

use std::io::{self, Write};

use ringdisk_disk::{Layer, describe};
use ringdisk_qcow2::Info;
use crate::cli::InfoArgs;
use crate::commands::{look, snapshot};
use crate::commands::output::json;
use crate::report::Failure;
use crate::size::{human_size, human_size_exact};
use crate::terminal::{self, Results, visible};

/// Prints what an image is.
///
/// Errors: those of opening the image.
pub(crate) fn run(args: &InfoArgs) -> Result<(), Failure> {
    let mut runtime = look::runtime()?;
    let disk = look::open(&mut runtime, &args.look)?;
    let all = disk.layers();
    let layers = if args.backing_chain { &all[..] } else { all.get(..1).unwrap_or_default() };
    let mut out = Results::new();
    let written = if args.look.output.is_json() {
        let value = match layers {
            [layer] if !args.backing_chain => describe::layer(layer),
            _ => describe::chain(&disk),
        };
        json(&mut out, &value)
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

/// The lines that qemu-img prints too, in its words, so that what reads those reads these.
fn human(out: &mut impl Write, layer: &Layer) -> io::Result<()> {
    writeln!(out, "image: {}", layer.name().display())?;
    if let Some(format) = layer.format() {
        writeln!(out, "file format: {format}")?;
    }
    writeln!(out, "virtual size: {}", human_size_exact(layer.size()))?;
    if let Some(file) = layer.file() {
        writeln!(out, "disk size: {}", human_size(file.allocated_bytes()))?;
    }
    let Some(image) = layer.qcow2() else { return Ok(()) };
    let info = image.info();
    writeln!(out, "cluster_size: {}", info.cluster_size())?;
    if info.dirty {
        writeln!(out, "cleanly shut down: no")?;
    }
    if let Some(name) = &info.backing_file {
        backing(out, &String::from_utf8_lossy(name), layer.full_backing_name())?;
    }
    if let Some(format) = &info.backing_format {
        writeln!(out, "backing file format: {}", visible(format))?;
    }
    if !info.snapshots.is_empty() {
        snapshot::list(out, &info.snapshots)?;
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
    for bitmap in &info.bitmaps {
        writeln!(
            out,
            "    bitmap: {} (granularity {}{}{})",
            visible(&bitmap.name),
            human_size(bitmap.granularity_bytes),
            if bitmap.auto { ", auto" } else { "" },
            if bitmap.in_use { ", in use" } else { "" },
        )?;
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
