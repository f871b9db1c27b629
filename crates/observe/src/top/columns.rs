//! The table of `ringdisk top` for any width.
//!
//! Promises: pure; no line is wider than was asked for; nothing in it controls a terminal.

use ringdisk_daemon::rates::Rates;
use ringdisk_daemon::size::{human_size, human_time};
use ringdisk_daemon::terminal::visible;

/// Headings and widths of the numbers, the most important first.
const NUMBERS: [(&str, usize); 10] = [
    ("READS/s", 8),
    ("WRITES/s", 8),
    ("READ/s", 9),
    ("WRITE/s", 9),
    ("p50", 8),
    ("p99", 8),
    ("DEPTH", 5),
    ("CPU", 5),
    ("LIMIT", 5),
    ("HITS", 5),
];
/// Least width of the name of a disk.
const TARGET_MIN: usize = 10;

/// A heading, and a line for each disk.
pub(super) fn lines(rows: &[Rates], width: usize) -> Vec<String> {
    let mut shown = 0;
    let mut taken = 0;
    for (_, columns) in NUMBERS {
        if taken + columns + 1 + TARGET_MIN > width {
            break;
        }
        taken += columns + 1;
        shown += 1;
    }
    let target = width.saturating_sub(taken);
    let headings = NUMBERS.map(|(heading, _)| heading.to_owned());
    let mut lines = vec![line(&headings[..shown], "DISK", target)];
    lines.extend(rows.iter().map(|row| {
        let mark = if row.is_healthy { "" } else { "! " };
        let name = format!("{mark}{}", visible(&row.target));
        line(&numbers(row)[..shown], &name, target)
    }));
    lines
}

fn line(numbers: &[String], target: &str, target_width: usize) -> String {
    let mut text = String::new();
    for (number, (_, width)) in numbers.iter().zip(NUMBERS) {
        let number: String = number.chars().take(width).collect();
        text.push_str(&format!("{number:>width$} "));
    }
    // The end of a path says more than its beginning.
    let count = target.chars().count();
    let skipped = count.saturating_sub(target_width);
    text.extend(target.chars().skip(skipped));
    text
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Never negative, and rounded.
fn numbers(row: &Rates) -> [String; NUMBERS.len()] {
    let time =
        |time: Option<std::time::Duration>| time.map_or_else(|| String::from("-"), human_time);
    [
        format!("{:.0}", row.reads),
        format!("{:.0}", row.writes),
        human_size(row.read_bytes.round() as u64),
        human_size(row.written_bytes.round() as u64),
        time(row.p50),
        time(row.p99),
        format!("{:.0}", row.in_flight),
        format!("{:.2}", row.cpus),
        format!("{:.0}", row.limited),
        hits(row),
    ]
}

/// Hits of the cache of tables, percent.
pub(super) fn hits(row: &Rates) -> String {
    row.cache_hits.map_or_else(|| String::from("-"), |part| format!("{:.1}", part * 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_fits_every_width_and_names_keep_their_ends() {
        let row = Rates {
            target: String::from("/srv/disks/of/somebody/\u{1b}[2Jdisk.raw"),
            reads: 123_456.0,
            read_bytes: 505_675_776.0,
            p99: Some(std::time::Duration::from_micros(1234)),
            is_healthy: true,
            ..Rates::default()
        };
        for width in 1..200 {
            for line in lines(std::slice::from_ref(&row), width) {
                assert!(line.chars().count() <= width, "{width}: {line:?}");
                assert!(!line.contains('\u{1b}'));
            }
        }
        let wide = lines(std::slice::from_ref(&row), 120);
        assert!(wide[0].contains("READS/s") && wide[0].contains("CPU"), "{}", wide[0]);
        assert!(wide[1].contains("123456") && wide[1].ends_with("disk.raw"), "{}", wide[1]);
        let narrow = lines(&[Rates { is_healthy: false, ..row }], 22);
        assert!(narrow[0].ends_with("DISK") && narrow[1].ends_with("disk.raw"), "{narrow:?}");
    }
}
