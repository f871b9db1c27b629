//! A directory of backups of one disk.
//!
//! Promises: names sort by time; a file that is not whole has another name and is never listed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::timestamp::calendar;
use ringdisk_disk::Format;

/// What the names of complete backups, and of those with changes only, begin with.
const FULL: &str = "FULL-";
const PART: &str = "INC-";
/// What the names of bitmaps begin with.
const BITMAP: &str = "ringdisk-";

/// A backup in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its name.
    pub file: PathBuf,
    /// When it was made (UTC), as in its name: `20261127T183000.123Z`.
    pub stamp: String,
    /// By the end of its name.
    pub format: Format,
}

impl Stored {
    /// One that is to be made.
    pub fn new(directory: &Path, is_part: bool, stamp: &str, format: Format) -> Stored {
        let kind = if is_part { PART } else { FULL };
        let file = directory.join(format!("{kind}{stamp}.{}", format.name()));
        Stored { file, stamp: stamp.to_owned(), format }
    }

    /// One that is there; `None`: the name says something else.
    fn read(file: &Path) -> Option<Stored> {
        let name = file.file_name()?.to_str()?;
        let rest = name.strip_prefix(FULL).or_else(|| name.strip_prefix(PART))?;
        let (stamp, end) = rest.rsplit_once('.')?;
        let format = end.parse().ok()?;
        is_stamp(stamp).then(|| Stored { file: file.to_owned(), stamp: stamp.to_owned(), format })
    }

    /// The bitmap that records what changes after it.
    pub fn bitmap(&self) -> String {
        format!("{BITMAP}{}", self.stamp)
    }
}

/// All backups of a directory, the oldest one first.
///
/// Errors: the directory cannot be read.
pub fn stored(directory: &Path) -> Result<Vec<Stored>, Failure> {
    let entries = fs::read_dir(directory).map_err(|error| {
        let doing = format!("cannot read the directory '{}'", directory.display());
        Failure::system(doing, &error, Exit::Image)
    })?;
    let mut all: Vec<Stored> =
        entries.flatten().filter_map(|entry| Stored::read(&entry.path())).collect();
    all.sort_by(|one, other| one.stamp.cmp(&other.stamp));
    Ok(all)
}

/// Whether a text is a time as in the names, or the beginning of one.
pub fn is_stamp(text: &str) -> bool {
    let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let whole = text.strip_suffix('Z').and_then(|text| text.split_once('T'));
    whole.is_some_and(|(day, time)| {
        let (seconds, rest) = time.split_once('.').unwrap_or((time, "0"));
        day.len() == 8 && seconds.len() == 6 && [day, seconds, rest].into_iter().all(is_digits)
    })
}

/// The time now, as in the names.
pub fn now() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    stamp(now.as_secs(), now.subsec_millis())
}

/// * `seconds`: since 1970, UTC.
fn stamp(seconds: u64, millis: u32) -> String {
    let [year, month, day, hours, minutes, seconds] = calendar(seconds);
    format!("{year:04}{month:02}{day:02}T{hours:02}{minutes:02}{seconds:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        // `date -u -d @SECONDS +%Y%m%dT%H%M%S`
        for (seconds, text) in [
            (0, "19700101T000000.000Z"),
            (951_782_399, "20000228T235959.000Z"),
            (951_782_400, "20000229T000000.000Z"),
            (1_709_251_199, "20240229T235959.000Z"),
            (1_795_806_600, "20261127T191000.000Z"),
            (4_107_542_400, "21000301T000000.000Z"),
        ] {
            assert_eq!(stamp(seconds, 0), text);
            assert!(is_stamp(text));
        }
        assert!(is_stamp(&now()));
    }

    #[test]
    fn only_whole_backups_are_listed_in_the_order_of_their_times() {
        let directory = tempfile::tempdir().expect("a directory");
        let names = [
            "INC-20260102T000000.000Z.qcow2",
            "FULL-20260101T000000.000Z.qcow2",
            "FULL-20260103T000000.000Z.raw",
            "FULL-20260104T000000.000Z.qcow2.part",
            "FULL-yesterday.qcow2",
            "notes.txt",
        ];
        for name in names {
            fs::write(directory.path().join(name), "").expect("a file");
        }
        let all = stored(directory.path()).expect("a list");
        let names: Vec<_> = all.iter().map(|stored| stored.file.file_name().unwrap()).collect();
        assert_eq!(
            names,
            [
                "FULL-20260101T000000.000Z.qcow2",
                "INC-20260102T000000.000Z.qcow2",
                "FULL-20260103T000000.000Z.raw"
            ]
        );
        assert_eq!(all[0].bitmap(), "ringdisk-20260101T000000.000Z");
    }
}
