//! Jobs whose target is full: they wait for space, say so once, and go on by themselves.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringdisk_testkit::images::{self, assert_clean};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{FileSystem, Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, until};
use tempfile::TempDir;

use super::jobs::{
    WRITTEN, assert_pattern, ctl, following, here, job, layers, overlaid, seen, until_state, write,
};
use crate::common::MIB;

/// Longer than a job waits before it tries again (3 s).
const TRIED_AGAIN: Duration = Duration::from_secs(5);

/// A disk, and a job of it whose target has no space.
struct Case {
    kind: &'static str,
    disk: Mounted,
    target: PathBuf,
    /// Takes the space.
    filler: PathBuf,
    /// The images before the job.
    chain: Vec<String>,
    file_system: FileSystem,
    directory: TempDir,
}

impl Case {
    /// A disk of two images, of which the job writes one, or a copy beside them, on a file system
    /// with 8 MiB left for [`WRITTEN`] bytes.
    fn of(kind: &'static str) -> Case {
        let directory = scratch();
        let small = directory.path().join("small");
        let file_system = FileSystem::tmpfs(&small, 64 * MIB);
        let at = |is_small: bool| if is_small { &small } else { directory.path() };
        let base = at(kind == "commit").join("base.qcow2");
        let over = at(kind == "stream").join("over.qcow2");
        let words = ["--allow-path", text(directory.path()), "--allow-path", text(&small)];
        let disk = match kind {
            "stream" => below(&base, &over, &words),
            _ => overlaid(&base, &over, &words),
        };
        let target = match kind {
            "commit" => base,
            "stream" => over,
            _ => small.join("copy.qcow2"),
        };
        let filler = small.join("filler");
        let free = rustix::fs::statvfs(&small).expect("statvfs");
        let size = free.f_bavail * free.f_frsize - 8 * MIB;
        fs::write(&filler, vec![1; usize::try_from(size).expect("small")]).expect("a filler");
        let chain = layers(&disk);
        Case { kind, disk, target, filler, chain, file_system, directory }
    }

    /// The command that begins the job under a name.
    fn words<'a>(&'a self, name: &'a str, terms: &[&'a str]) -> Vec<&'a str> {
        let target: &[&str] = match self.kind {
            "mirror" | "backup" => &[text(&self.target)],
            _ => &[],
        };
        [&[self.kind, "--background", "--name", name], terms, target].concat()
    }

    /// Begins the job, and waits until it says that it waits.
    fn waits(&self) {
        ctl(&self.disk, &self.words("full", &[])).ok();
        let why = until_state(&self.disk, "full", "paused")["why"].to_string();
        let expected = "waiting for space on the target: No space left on device";
        assert_eq!(why, format!("\"{expected}\""), "{}", self.kind);
        let shown = job(&self.disk, "list", &[]).ok().out;
        assert!(shown.contains(&format!("full  paused: {expected}")), "{shown}");
        // What the file system had counted as used for a moment.
        let mut rest = fs::File::options().append(true).open(&self.filler).expect("the filler");
        while rest.write_all(&[1; 4096]).is_ok() {}
        self.is_as_it_was();
    }

    /// The disk reads as ever.
    fn is_as_it_was(&self) {
        assert_eq!(layers(&self.disk), self.chain, "{}", self.kind);
        assert_pattern(self.disk.path(), 2, 0, WRITTEN);
    }
}

/// A disk whose lower image has [`WRITTEN`] bytes of pattern 2, and the upper one nothing.
fn below(base: &Path, over: &Path, words: &[&str]) -> Mounted {
    images::qcow2(base, "64M", "cluster_size=64k");
    let disk = crate::common::serve(base, words);
    write(&disk, 2, 0, WRITTEN);
    ctl(&disk, &["snapshot", text(over)]).ok();
    disk
}

/// How often a text is in another one.
fn count(text: &str, word: &str) -> usize {
    text.matches(word).count()
}

/// The states of the job that a follower was told.
fn states(events: &Process) -> Vec<String> {
    let output = events.output();
    let values = output.lines().filter_map(|line| serde_json::from_str(line).ok());
    let of_job = |event: &serde_json::Value| event["event"] == "job" && event["id"] == "full";
    let states = values.filter(of_job).map(|event| event["state"].to_string());
    states.collect()
}

#[test]
fn a_job_goes_on_by_itself_when_its_target_has_space_and_says_each_once() {
    if !needs_root() {
        return;
    }
    for kind in ["mirror", "backup", "commit", "stream"] {
        let mut case = Case::of(kind);
        let events = following(&case.disk);
        case.waits();
        // It has tried again meanwhile, and nobody has heard of it.
        std::thread::sleep(TRIED_AGAIN);
        // The disk takes what clients write, but where it is on the full file system itself.
        let write_more = || write(&case.disk, 5, 48 * MIB, MIB);
        if kind != "stream" {
            write_more();
        }
        assert_eq!(seen(&case.disk, "full")["state"], "paused", "{kind}");
        fs::remove_file(&case.filler).expect("a filler");
        if kind == "stream" {
            write_more();
        }
        if kind == "mirror" {
            until_state(&case.disk, "full", "ready");
            job(&case.disk, "complete", &["full"]).ok();
        }
        job(&case.disk, "wait", &["full"]).ok();
        until(LIMIT, || states(&events).last().filter(|it| *it == "\"concluded\"").map(drop))
            .unwrap_or_else(|| panic!("{kind}: {}", events.output()));
        assert_eq!(count(&states(&events).concat(), "paused"), 1, "{kind}: {}", events.output());
        let log = case.disk.output();
        assert_eq!(count(&log, "waiting for space on the target"), 1, "{kind}: {log}");
        assert_eq!(count(&log, "the target has space again"), 1, "{kind}: {log}");
        let why = "\"why\":\"the target has space again\"";
        assert_eq!(count(&events.output(), why), 1, "{kind}: {}", events.output());
        let name = case.target.file_name().and_then(|name| name.to_str()).expect("a name");
        if kind != "backup" {
            assert_eq!(layers(&case.disk), [name], "{kind}");
        }
        assert_pattern(case.disk.path(), 2, 0, WRITTEN);
        assert_pattern(case.disk.path(), 5, 48 * MIB, MIB);
        let copy = std::mem::take(&mut case.target);
        assert_eq!(case.disk.stop().code(), Some(0));
        assert_clean(&copy);
        assert_pattern(&images::reference(&copy, "qcow2"), 2, 0, WRITTEN);
        case.file_system.unmount();
    }
}

#[test]
fn a_job_that_waits_for_space_ends_when_it_is_cancelled_or_its_disk_ends() {
    if !needs_root() {
        return;
    }
    for kind in ["mirror", "backup", "commit", "stream"] {
        let case = Case::of(kind);
        case.waits();
        // There is no space all the time.
        job(&case.disk, "cancel", &["full"]).ok();
        job(&case.disk, "wait", &["full"]).ends(1).says("cancelled");
        case.is_as_it_was();
        if matches!(kind, "mirror" | "backup") {
            fs::remove_file(&case.target).expect("the target");
        }
        ctl(&case.disk, &case.words("again", &[])).ok();
        until_state(&case.disk, "again", "paused");
        if kind == "stream" {
            // The disk is on the full file system itself: it could not be flushed.
            fs::remove_file(&case.filler).expect("a filler");
        }
        here(&["umount", "--timeout", "60s", case.disk.text()]).ok();
        let ended = case.disk.finish();
        assert_eq!(ended.code(), Some(0), "{kind}: {}", ended.output());
        let over = match kind {
            "stream" => case.target.clone(),
            _ => case.directory.path().join("over.qcow2"),
        };
        assert_clean(&over);
        assert_pattern(&images::reference(&over, "qcow2"), 2, 0, WRITTEN);
        case.file_system.unmount();
    }
}

#[test]
fn a_job_that_is_to_report_errors_ends_when_its_target_is_full() {
    if !needs_root() {
        return;
    }
    for kind in ["mirror", "commit"] {
        let case = Case::of(kind);
        ctl(&case.disk, &case.words("full", &["--on-error", "report"])).ok();
        let why = until_state(&case.disk, "full", "concluded")["why"].to_string();
        assert!(why.contains("No space left"), "{kind}: {why}");
        case.is_as_it_was();
        assert_eq!(case.disk.stop().code(), Some(0));
        case.file_system.unmount();
    }
}

#[test]
fn a_job_that_waits_for_space_tries_at_once_when_a_user_resumes_it() {
    if !needs_root() {
        return;
    }
    let case = Case::of("commit");
    case.waits();
    // Without space it waits on, and nobody hears of the try.
    for _ in 0..3 {
        let resumed = job(&case.disk, "resume", &["full"]).ok().out;
        assert!(resumed.starts_with("full  paused: waiting for space"), "{resumed}");
    }
    assert_eq!(count(&case.disk.output(), "waiting for space"), 1, "{}", case.disk.output());
    // A user's pause goes first: there is space, and it rests all the same.
    job(&case.disk, "pause", &["full"]).ok();
    fs::remove_file(&case.filler).expect("a filler");
    std::thread::sleep(TRIED_AGAIN);
    let paused = seen(&case.disk, "full");
    assert_eq!((paused["state"].as_str(), &paused["why"]), (Some("paused"), &().into()));
    job(&case.disk, "resume", &["full"]).ok();
    job(&case.disk, "wait", &["full"]).ok();
    assert_pattern(case.disk.path(), 2, 0, WRITTEN);
    assert_eq!(case.disk.stop().code(), Some(0));
    assert_clean(&case.target);
    case.file_system.unmount();
}
