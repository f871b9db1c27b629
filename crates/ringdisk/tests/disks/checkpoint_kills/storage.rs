//! Kills at each operation of the storage: the image is an export that stands still after a number
//! of writes and flushes, and the server is killed then. A part of these places runs each time, all
//! of them with `RINGDISK_FULL=1`.

use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use ringdisk_testkit::limits::full;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, Process, until};
use tempfile::TempDir;

use super::judge::{BLOCK, Base, Known, judge};
use super::{BEGIN, NEW, Template, serve};
use crate::common::nbd_client::{NbdClient, WRITE};
use crate::common::nbd_storage::{NbdStorage, with_room};
use crate::common::program;
use crate::common::serving::Daemon;

/// Bytes of the export: the image, and room for what it gets.
const EXPORT: usize = 8 << 20;
/// Places of a range that run each time.
const PLACES: usize = 5;

/// The operations of the storage since the begin of the checkpoint, when it had begun, when its end
/// began, and when that had ended.
#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    begun: usize,
    ending: usize,
    ended: usize,
}

/// What happens while the storage goes on.
#[derive(Clone, Copy, Debug)]
struct Case {
    end: &'static [&'static str],
    /// A client writes before, during and after the checkpoint; else nobody writes.
    is_written: bool,
}

/// A server whose storage stands still at some time.
struct Run {
    storage: NbdStorage,
    daemon: Daemon,
    socket: PathBuf,
    client: NbdClient,
    /// The command that stands still with the storage.
    command: Option<Process>,
    known: Known,
    bases: Vec<Base>,
    directory: TempDir,
}

impl Run {
    fn new(template: &Template) -> Run {
        let storage = NbdStorage::new(with_room(&template.path("disk.qcow2"), EXPORT));
        let (directory, bases) = template.copy();
        let socket = directory.path().join("disk.sock");
        let daemon = serve(&storage.uri(), &socket);
        let client = NbdClient::connect(&socket, "");
        let (known, command) = (template.known.clone(), None);
        Run { storage, daemon, socket, client, command, known, bases, directory }
    }

    /// Waits for something, or until the storage stands still. Whether it came.
    fn comes(storage: &NbdStorage, mut has_come: impl FnMut() -> bool) -> bool {
        let come = until(LIMIT, || match has_come() {
            true => Some(true),
            false => storage.has_stopped().then_some(false),
        });
        come.expect("neither an end nor a stop")
    }

    /// Writes blocks, one after the other. Whether all were answered.
    fn write(&mut self, is_written: bool, blocks: &[usize], byte: u8) -> bool {
        if !is_written {
            return true;
        }
        blocks.iter().all(|&block| {
            let len = u32::try_from(BLOCK).expect("small");
            let offset = (block * BLOCK) as u64;
            let cookie = self.client.ask(WRITE, offset, len, &[byte; BLOCK]).expect("a server");
            self.known.in_flight.insert(block, byte);
            let is_answered =
                Run::comes(&self.storage, || self.client.hears(Duration::from_millis(2)));
            if is_answered {
                assert_eq!(self.client.answer().expect("a server"), (cookie, 0));
                self.known.answered(block, byte);
            }
            is_answered
        })
    }

    /// `ringdisk ctl SOCKET WORDS…`. Whether it ended, which is with success.
    fn ctl(&mut self, words: &[&str]) -> bool {
        let mut command = Command::new(program());
        command.args(["ctl", text(&self.socket)]).args(words).env_remove("NOTIFY_SOCKET");
        let mut process = Process::spawn(&mut command);
        let has_ended = Run::comes(&self.storage, || process.ended().is_some());
        match has_ended {
            true => assert_eq!(process.ended().and_then(|it| it.code()), Some(0), "{words:?}"),
            false => self.command = Some(process),
        }
        has_ended
    }

    /// All of it, until the storage stands still. Gives how far the storage was at each step.
    fn steps(&mut self, case: Case, stops_at: Option<usize>) -> Marks {
        let (mut marks, is_written) = (Marks::default(), case.is_written);
        assert!(self.write(is_written, &[10, 300, 700], 4), "the storage stands still too early");
        let begin = self.storage.changes();
        if let Some(stops_at) = stops_at {
            self.storage.stop_at(begin + stops_at);
        }
        let since = |storage: &NbdStorage| storage.changes() - begin;
        let instant = self.directory.path().join("instant.raw");
        std::fs::write(&instant, &self.known.bytes).expect("room");
        self.bases.push(Base { bitmap: NEW, backup: instant });
        let readers = self.directory.path().join("readers");
        if !self.ctl(&[&BEGIN[..], &["--nbd", text(&readers)]].concat()) {
            return marks;
        }
        marks.begun = since(&self.storage);
        if !self.write(is_written, &[10, 500, 701], 5) {
            return marks;
        }
        marks.ending = since(&self.storage);
        if !self.ctl(&[&["checkpoint", "--end", "c1"], case.end].concat()) {
            return marks;
        }
        marks.ended = since(&self.storage);
        self.write(is_written, &[11, 900], 6);
        marks
    }
}

/// What became of the bitmaps in some runs.
#[derive(Debug, Default)]
struct Seen {
    valid: usize,
    inconsistent: usize,
    stopped: usize,
}

/// Kills a server whose storage stands still after so many operations; `None`: when all is done.
fn kill(template: &Template, case: Case, stops_at: Option<usize>, seen: &mut Seen) -> Marks {
    let mut run = Run::new(template);
    let marks = run.steps(case, stops_at);
    let Run { storage, daemon, command, known, bases, directory, .. } = run;
    seen.stopped += usize::from(storage.has_stopped());
    daemon.kill();
    drop(command);
    // What came last may have been carried out before the death, or not.
    let bytes = match stops_at {
        Some(at) if at % 2 == 1 => storage.bytes_with_last(),
        _ => storage.bytes(),
    };
    std::fs::write(directory.path().join("disk.qcow2"), bytes).expect("room");
    let at = format!("{case:?}, after {stops_at:?} operations");
    for is_valid in judge(directory.path(), &known, &bases, &at).into_values() {
        *if is_valid { &mut seen.valid } else { &mut seen.inconsistent } += 1;
    }
    marks
}

/// The first and the last of a range, and some between them.
fn places(range: Range<usize>) -> Vec<usize> {
    let count = range.len();
    assert!(count > 0, "the step does nothing to the storage");
    if full() || count <= PLACES {
        return range.collect();
    }
    (0..PLACES).map(|number| range.start + number * (count - 1) / (PLACES - 1)).collect()
}

/// Kills while a part of the steps runs.
fn kills(case: Case, part: impl Fn(Marks) -> Range<usize>) {
    let (template, mut seen) = (Template::new(), Seen::default());
    let marks = kill(&template, case, None, &mut seen);
    assert_eq!(seen.stopped, 0);
    let places = places(part(marks));
    for at in &places {
        kill(&template, case, Some(*at), &mut seen);
    }
    // The storage stood still where it was to, but for one operation more or less.
    assert!(seen.stopped + 1 >= places.len(), "{case:?}, {marks:?}: {seen:?}");
    let (expected, other) = match case.is_written {
        true => (seen.inconsistent, seen.valid),
        false => (seen.valid, seen.inconsistent),
    };
    assert!(expected > 0, "{case:?}: {seen:?} ({other})");
}

const DROP: &[&str] = &[];
const KEEP: &[&str] = &["--keep-bitmap"];
const MERGE: &[&str] = &["--merge"];

#[test]
fn while_it_begins() {
    for is_written in [false, true] {
        kills(Case { end: DROP, is_written }, |marks| 0..marks.begun);
    }
}

#[test]
fn while_it_ends_with_success() {
    for is_written in [false, true] {
        kills(Case { end: DROP, is_written }, |marks| marks.ending..marks.ended);
    }
}

#[test]
fn while_it_ends_without_success() {
    for is_written in [false, true] {
        kills(Case { end: MERGE, is_written }, |marks| marks.ending..marks.ended);
    }
}

#[test]
fn while_it_runs_and_when_both_bitmaps_are_kept() {
    kills(Case { end: KEEP, is_written: true }, |marks| marks.begun..marks.ended + 1);
}
