//! `ringdisk info`: what an image is.

use std::io::{self, Write};

use ringdisk_disk::{Layer, describe};
use ringdisk_qcow2::{Info, Snapshot};
use crate::cli::InfoArgs;
use crate::commands::look;
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
        writeln!(out, "Snapshot list:")?;
        writeln!(
            out,
            "{:<8}{:<18}{:>8}{:>21}{:>16}",
            "ID", "TAG", "VM_SIZE", "DATE (UTC)", "VM_CLOCK"
        )?;
        info.snapshots.iter().try_for_each(|snapshot| snapshot_line(out, snapshot))?;
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

fn snapshot_line(out: &mut impl Write, snapshot: &Snapshot) -> io::Result<()> {
    let clock = snapshot.vm_clock_nanoseconds / 1_000_000;
    let (hours, minutes) = (clock / 3_600_000, clock / 60_000 % 60);
    let (seconds, thousandths) = (clock / 1000 % 60, clock % 1000);
    writeln!(
        out,
        "{:<8}{:<18}{:>8}{:>21}{:>16}",
        visible(&snapshot.id),
        visible(&snapshot.name),
        human_size(snapshot.vm_state_bytes),
        date(snapshot.date_seconds),
        format!("{hours:04}:{minutes:02}:{seconds:02}.{thousandths:03}"),
    )
}

/// Seconds since 1970 as a date and time in UTC.
fn date(seconds: u32) -> String {
    const DAY: u32 = 86400;
    let (mut year, mut day) = (1970, seconds / DAY);
    let is_leap = |year: u32| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    while day >= 365 + u32::from(is_leap(year)) {
        day -= 365 + u32::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u32::from(is_leap(year));
    let mut month = 1;
    for len in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if day < len {
            break;
        }
        day -= len;
        month += 1;
    }
    let time = seconds % DAY;
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    format!("{year}-{month:02}-{:02} {hour:02}:{minute:02}:{second:02}", day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (951_868_800, "2000-03-01 00:00:00"),
            (1_735_689_599, "2024-12-31 23:59:59"),
            (1_795_263_213, "2026-11-21 12:13:33"),
            (u32::MAX, "2106-02-07 06:28:15"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }
}
