//! Bars of jobs in a pseudo-terminal: in `ringdisk top`, and of a command that waits for its job.

use std::os::unix::fs::FileExt;
use std::path::Path;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, until};
use serde_json::Value;

use super::top::Terminal;
use crate::common::tools::{Ran, ringdisk};
use crate::common::{MIB, open, serve};

/// A disk with so much to copy that a job at 1 MiB/s runs all the time.
fn disk(directory: &Path) -> Mounted {
    let image = directory.join("disk.qcow2");
    images::qcow2(&image, "64M", "");
    let disk = serve(&image, &[]);
    let data = images::pattern(3, 0, usize::try_from(64 * MIB).expect("small"));
    open(disk.path()).write_all_at(&data, 0).expect("write");
    disk
}

fn job(disk: &Mounted, words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["job", words[0], disk.text()], &words[1..]].concat())
}

/// The line of the screen that begins so.
fn line<'a>(lines: &'a [String], begin: &str) -> Option<&'a str> {
    lines.iter().find(|line| line.starts_with(begin)).map(|line| line.trim_end())
}

/// The percentage of such a line.
fn percent(line: &str) -> Option<u32> {
    let before = line.split(" %").next()?;
    before.rsplit(' ').next()?.parse().ok()
}

#[test]
fn top_shows_how_a_job_moves_at_20_and_80_columns_while_it_is_resized() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let disk = disk(directory.path());
    let copy = directory.path().join("copy.qcow2");
    let begin = ["mirror", "--background", "--name", "m", "--speed", "2M", text(&copy)];
    ringdisk(Path::new("/"), &[&["ctl", disk.text()], &begin[..]].concat()).ok();
    let mut terminal = Terminal::start(80, &format!("top --every 200ms --filter {}", disk.text()));
    let shown = terminal.shows("a bar", |lines| line(lines, "m running [").is_some());
    let bar = line(&shown, "m running [").expect("a bar");
    assert!(bar.contains('%') && bar.contains(" of 64 MiB"), "{bar}");
    let before = percent(bar).expect("a number");
    terminal.shows("it moves", |lines| {
        line(lines, "m running [#").and_then(percent).is_some_and(|now| now >= before + 3)
    });
    terminal.resize(20);
    let narrow = terminal.shows("a narrow bar", |lines| {
        line(lines, "m running [#").is_some_and(|bar| !bar.contains('%'))
    });
    assert!(narrow[0].starts_with("1 disk") && narrow[1].contains("READS/s"), "{narrow:#?}");
    terminal.resize(120);
    terminal.shows("all of it", |lines| {
        line(lines, "m running [#").is_some_and(|bar| bar.contains("(limit 2 MiB/s)"))
    });
    terminal.resize(80);
    job(&disk, &["pause", "m"]).ok();
    terminal.shows("it rests", |lines| line(lines, "m paused [#").is_some());
    job(&disk, &["cancel", "m"]).ok();
    terminal.shows("it is gone", |lines| line(lines, "m ").is_none());
    terminal.press("q");
    assert_eq!(terminal.ends(), "0");
    assert_eq!(disk.stop().code(), Some(0));
}

/// The state of the only job of the disk.
fn state(disk: &Mounted) -> Option<String> {
    let jobs = job(disk, &["list", "--json"]).ok().json();
    let job: &Value = jobs.as_array()?.last()?;
    job["state"].as_str().map(str::to_owned)
}

#[test]
fn a_command_shows_the_bar_of_its_job_and_gives_it_up_when_its_terminal_is_gone() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let disk = disk(directory.path());
    let command = |name: &str| {
        let copy = directory.path().join(name);
        format!("ctl {} mirror --complete --name {name} --speed 2M {}", disk.text(), text(&copy))
    };
    let has_bar = |lines: &[String]| lines.iter().any(|it| it.contains('[') && it.contains('%'));
    let terminal = Terminal::start(80, &command("one"));
    terminal.shows("a bar", has_bar);
    // The bar goes on in a terminal that has become narrow, and is not left behind.
    terminal.resize(20);
    terminal.resize(80);
    terminal.shows("a bar", has_bar);
    job(&disk, &["cancel", "one"]).ok();
    let shown = terminal.shows_words("the-shell-goes-on");
    assert!(!has_bar(&shown) && shown.iter().any(|it| it.contains("cancelled")), "{shown:#?}");
    assert_eq!(terminal.ends(), "1");
    // A terminal that has gone: nobody waits for the job any more.
    let mut terminal = Terminal::start(80, &command("two"));
    terminal.shows("a bar", has_bar);
    assert_eq!(state(&disk).as_deref(), Some("running"));
    terminal.hang_up();
    let ended = until(LIMIT, || (state(&disk).as_deref() == Some("concluded")).then_some(()));
    ended.unwrap_or_else(|| panic!("it goes on: {:?}", state(&disk)));
    assert_eq!(disk.stop().code(), Some(0));
}
