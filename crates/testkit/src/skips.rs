//! Tests, and parts of tests, that this machine cannot run.
//!
//! Promises: nothing is left out in silence. A line goes to the real standard error, past the test
//! runner's capture, for a person; and one to the file that `RINGDISK_TEST_SKIPS` names, where it
//! is set, for `./test` and `tests/vm/run`, which count and list them (`tests/tally`). Called on
//! the thread of the test, whose name is the test's.

use std::fs::File;
use std::io::Write;
use std::panic::Location;

/// The file to which each skip is appended, as fields with tabs between them: `whole` or `part`,
/// program, test, what is missing.
const FILE: &str = "RINGDISK_TEST_SKIPS";

/// How much of a test is left out.
#[derive(Clone, Copy, Debug)]
enum Extent {
    Whole,
    Part,
}

/// True when the test may go on. Else the caller returns at once, and the test is counted as
/// skipped.
///
/// * `what`: what the test cannot do without, such as `second NUMA node`.
#[must_use]
#[track_caller]
pub fn needs(what: &str, there: bool) -> bool {
    if !there {
        note(Extent::Whole, what);
    }
    there
}

/// As [`needs`], when the test does what it can without: it is counted as passed, and the part is
/// listed.
#[must_use]
#[track_caller]
pub fn part_needs(what: &str, there: bool) -> bool {
    if !there {
        note(Extent::Part, what);
    }
    there
}

#[track_caller]
fn note(extent: Extent, what: &str) {
    let (program, test) = (program(), test(Location::caller()));
    let (word, remark) = match extent {
        Extent::Whole => ("whole", "SKIPPED"),
        Extent::Part => ("part", "SKIPPED IN PART"),
    };
    let shown = program.rsplit_once('-').map_or(program.as_str(), |(name, _)| name);
    // Only the printing macros are captured.
    let line = format!("{remark}: {shown}::{test}: this machine has no {what}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
    let Some(path) = std::env::var_os(FILE) else { return };
    // One write to a file that is open for appending: lines of several processes do not mix.
    let line = format!("{word}\t{program}\t{test}\t{what}\n");
    let file = File::options().create(true).append(true).open(&path);
    let noted = file.and_then(|mut file| file.write_all(line.as_bytes()));
    noted.unwrap_or_else(|error| panic!("{FILE}={}: {error}", path.display()));
}

/// The running program of tests, as Cargo calls it: its name and a hash.
fn program() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The name of the test; that of the caller's place where the thread has none.
fn test(caller: &Location<'_>) -> String {
    match std::thread::current().name() {
        Some(name) if name != "main" => name.to_owned(),
        _ => format!("{}:{}", caller.file(), caller.line()),
    }
}
