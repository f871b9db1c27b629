//! `ringdisk snapshot`: the snapshots inside an image.

use std::io::{self, Write};

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::size::human_size;
use ringdisk_daemon::terminal::{self, Results, visible};
use ringdisk_qcow2::Snapshot;

use crate::cli::{SnapshotArgs, SnapshotWork};
use crate::commands::look;
use crate::commands::named::Named;
use crate::commands::own_image::OwnImage;

/// Lists the snapshots, or makes, applies or deletes one.
///
/// Errors: those of opening the image; there is no such snapshot; the image cannot have any.
pub(crate) fn run(args: &SnapshotArgs) -> Result<(), Failure> {
    let mut runtime = look::runtime()?;
    let work = args.work();
    let what = OwnImage {
        format: args.format,
        writable: work != SnapshotWork::List,
        force_share: args.force_share,
    };
    let file = Named::of(args.name, &args.file)?;
    let opened = what.open(&mut runtime, &file, &args.pool, "snapshots");
    let mut image = match opened {
        // There is nothing to list, and that is no error, as for qemu-img.
        Err(failure) if failure.exit == Exit::Unsupported && !what.writable => {
            tracing::info!("{}", failure.message());
            return Ok(());
        }
        result => result?,
    };
    let ring = runtime.ring().clone();
    let result = match work {
        SnapshotWork::List => {
            let snapshots = &image.info().snapshots;
            if !snapshots.is_empty() && !args.quiet {
                let mut out = Results::lock();
                terminal::ended(list(&mut out, snapshots))?;
                out.finish()?;
            }
            return Ok(());
        }
        SnapshotWork::Create(name) => {
            runtime.block_on(image.snapshot_create(&ring, name)).map(|_| ())
        }
        SnapshotWork::Apply(name) => runtime.block_on(image.snapshot_apply(&ring, name)),
        SnapshotWork::Delete(name) => runtime.block_on(image.snapshot_delete(&ring, name)),
    };
    let closed = runtime.block_on(image.close(&ring)).map_err(|errno| {
        let doing = format!("cannot write '{}' to the end", args.file.display());
        Failure::system(doing, &errno.into(), Exit::Storage)
    });
    Ok(result?).and(closed)
}

/// The list of qemu-img.
pub(crate) fn list(out: &mut impl Write, snapshots: &[Snapshot]) -> io::Result<()> {
    writeln!(out, "Snapshot list:")?;
    line(out, ["ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"])?;
    for snapshot in snapshots {
        let clock = snapshot.vm_clock_nanoseconds / 1_000_000;
        let (hours, minutes) = (clock / 3_600_000, clock / 60_000 % 60);
        let (seconds, thousandths) = (clock / 1000 % 60, clock % 1000);
        line(
            out,
            [
                &visible(&snapshot.id),
                &visible(&snapshot.name),
                &human_size(snapshot.vm_state_bytes),
                &local_date(snapshot.date_seconds),
                &format!("{hours:04}:{minutes:02}:{seconds:02}.{thousandths:03}"),
                &snapshot.instruction_count.map_or(String::from("--"), |count| count.to_string()),
            ],
        )?;
    }
    Ok(())
}

fn line(out: &mut impl Write, [id, name, size, date, clock, count]: [&str; 6]) -> io::Result<()> {
    let text = format!("{id:<7} {name:<16} {size:>8} {date:>19} {clock:>15} {count:>10}");
    writeln!(out, "{}", text.trim_end())
}

/// Seconds since 1970 as a date and time of the place where the program runs.
fn local_date(seconds: u32) -> String {
    let local = i64::from(seconds) + ringdisk_storage::local_offset(i64::from(seconds));
    date(u32::try_from(local.max(0)).unwrap_or(u32::MAX))
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
