//! The list of the snapshots inside an image, as qemu-img prints it.
//!
//! Promises: the columns and the local time of `qemu-img snapshot -l`; names in it cannot control a
//! terminal.

use std::io::{self, Write};

use ringdisk_daemon::size::human_size;
use ringdisk_daemon::terminal::visible;
use ringdisk_qcow2::Snapshot;

/// Writes the list.
///
/// Errors: those of writing.
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
                &human_size(snapshot.vm_state_bytes.0),
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
