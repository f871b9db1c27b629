//! `ringdisk backup` and `restore`: rounds of mounts and of images that nobody serves, under load;
//! and what becomes of a round that fails.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringdisk_testkit::images::{self, assert_clean, qemu_io};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, ok_words, patient, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::tools::{names, qemu_img, ringdisk};
use crate::common::{BLOCK, open, program, serve};

fn write(disk: &Path, byte: u8, offset: u64, len: usize) {
    open(disk).write_all_at(&vec![byte; len], offset).expect("write");
}

/// Names of the bitmaps of a disk that is served.
fn bitmaps(disk: &Path) -> Vec<String> {
    let words = ["ctl", text(disk), "checkpoint", "--list", "--json"];
    let list = ringdisk(Path::new("/"), &words).ok().json();
    assert_eq!(list["checkpoints"], Value::Array(Vec::new()), "a checkpoint is left");
    let all = list["image"]["bitmaps"].as_array().expect("a list").clone();
    all.iter().filter_map(|bitmap| bitmap["name"].as_str().map(str::to_owned)).collect()
}

fn mounted(directory: &Path, name: &str) -> Mounted {
    let image = directory.join(name);
    images::qcow2(&image, "8M", "");
    serve(&image, &["--sandbox", "on"])
}

#[test]
fn a_directory_holds_a_chain_of_which_each_link_can_be_restored() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let disk = mounted(d, "disk.qcow2");
    let path = disk.path();
    let mut states = Vec::new();
    for round in 0..3_u8 {
        write(path, round + 1, u64::from(round) << 20, 2 << 20);
        // Zeroes over data that a link below holds.
        if round == 2 {
            write(path, 0, 1 << 20, 1 << 16);
        }
        states.push(fs::read(path).expect("read"));
        let words: &[&str] = if round == 1 { &["--compress"] } else { &[] };
        ringdisk(d, &[&["backup", text(path), "backups/"], words].concat()).ok();
    }
    let all = names(&d.join("backups"));
    let kinds: Vec<&str> = all.iter().filter_map(|name| name.split('-').next()).collect();
    assert_eq!(kinds, ["FULL", "INC", "INC"], "{all:?}");
    assert_eq!(bitmaps(path).len(), 1, "the last one goes on");
    // The directory may be moved as a whole.
    fs::rename(d.join("backups"), d.join("moved")).expect("rename");
    let mut times: Vec<&str> = all.iter().map(|name| stamp(name)).collect();
    times.sort_unstable();
    for (time, state) in times.iter().zip(&states) {
        let words = ["restore", "moved", "restored.img", "--at", time, "--force"];
        ringdisk(d, &words).ok();
        assert!(fs::read(d.join("restored.img")).unwrap() == *state, "{time}");
    }
    ringdisk(d, &["restore", "moved", "restored.qcow2"]).ok();
    let same = ["compare", "restored.qcow2", "restored.img"];
    qemu_img(d, &same).ok();
    ringdisk(d, &["restore", "moved", "restored.qcow2"]).ends(2).says("--force");
    ringdisk(d, &["restore", "moved", "x.img", "--at", "20200101T000000Z"]).ends(3).says("so old");
    // A link that is missing is noticed before anything is made.
    let full = all.iter().find(|name| name.starts_with("FULL")).expect("a full backup");
    fs::rename(d.join("moved").join(full), d.join("elsewhere")).expect("rename");
    ringdisk(d, &["restore", "moved", "x.img"]).ends(3).says(full);
    assert!(!d.join("x.img").exists());
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&d.join("disk.qcow2"));
}

/// The time in the name of a backup.
pub(super) fn stamp(name: &str) -> &str {
    name.split_once('-').and_then(|(_, rest)| rest.strip_suffix(".qcow2")).expect("a name")
}

/// Blocks that a writer fills one after the other with a number that grows.
pub(super) const BLOCKS: u64 = 256;

/// Writes the numbers 1, 2, 3… to the blocks in turn until it is told to end.
fn count(disk: &Path, is_done: &AtomicBool) {
    let file = open(disk);
    let mut number = 0_u64;
    while !is_done.load(Ordering::Relaxed) {
        number += 1;
        let mut block = vec![0; BLOCK];
        block[..8].copy_from_slice(&number.to_le_bytes());
        file.write_all_at(&block, number % BLOCKS * BLOCK as u64).expect("write");
    }
}

/// Looks whether a disk shows one instant of [`count`]. Gives the number of that instant.
pub(super) fn instant(bytes: &[u8]) -> u64 {
    let at = |slot: u64| {
        let start = usize::try_from(slot).expect("small") * BLOCK;
        u64::from_le_bytes(bytes[start..start + 8].try_into().expect("8 bytes"))
    };
    let last = (0..BLOCKS).map(at).max().expect("blocks");
    for slot in 0..BLOCKS {
        let back = (last + BLOCKS - slot) % BLOCKS;
        assert_eq!(at(slot), last.saturating_sub(back), "slot {slot} at {last}");
    }
    last
}

#[test]
fn each_round_under_load_is_one_instant() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let disk = mounted(d, "disk.qcow2");
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| count(disk.path(), &is_done));
        for _ in 0..3 {
            ringdisk(d, &["backup", disk.text(), "backups/"]).ok();
        }
        is_done.store(true, Ordering::Relaxed);
        writer.join().expect("no panic");
    });
    let mut seen = Vec::new();
    for name in names(&d.join("backups")) {
        let words = ["restore", "backups", "restored.img", "--force", "--at", stamp(&name)];
        ringdisk(d, &words).ok();
        seen.push((stamp(&name).to_owned(), instant(&fs::read(d.join("restored.img")).unwrap())));
    }
    seen.sort();
    let numbers: Vec<u64> = seen.iter().map(|(_, number)| *number).collect();
    assert!(numbers.is_sorted() && numbers.len() == 3, "{seen:?}");
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&d.join("disk.qcow2"));
}

#[test]
fn files_and_bitmaps_of_the_users_choice_make_a_chain() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let disk = mounted(d, "disk.qcow2");
    let path = text(disk.path());
    write(disk.path(), 1, 0, 1 << 20);
    ringdisk(d, &["backup", path, "full.qcow2", "--bitmap", "monday"]).ok();
    write(disk.path(), 2, 4 << 20, 1 << 16);
    let state = fs::read(path).unwrap();
    let since = ["--since", "monday", "--bitmap", "tuesday", "--backing", "full.qcow2"];
    ringdisk(d, &[&["backup", path, "inc.qcow2"], &since[..]].concat()).ok();
    assert_eq!(bitmaps(disk.path()), ["tuesday"]);
    let map = qemu_img(d, &["map", "--output=json", "inc.qcow2"]).ok().json();
    let own: Vec<u64> = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|run| run["depth"] == 0 && run["data"] == true)
        .map(|run| run["length"].as_u64().unwrap())
        .collect();
    assert_eq!(own, [1 << 16], "only what has changed: {map}");
    ringdisk(d, &["restore", "inc.qcow2", "restored.img"]).ok();
    assert!(fs::read(d.join("restored.img")).unwrap() == state);
    ringdisk(d, &["backup", path, "copy.raw", "--format", "raw"]).ok();
    assert!(fs::read(d.join("copy.raw")).unwrap() == state);
    // Nothing is overwritten.
    ringdisk(d, &["backup", path, "copy.raw"]).ends(2).says("is there already");
    ringdisk(d, &["backup", path, "x.qcow2", "--since", "nope"]).ends(3).says("nope");
    ringdisk(d, &["backup", path, "x", "--format", "raw", "--compress"]).ends(2);
    assert_eq!(names(d), ["copy.raw", "disk.qcow2", "full.qcow2", "inc.qcow2", "restored.img"]);
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn an_image_that_nobody_serves_is_backed_up_under_its_lock() {
    let directory = scratch();
    let d = directory.path();
    images::qcow2(&d.join("disk.qcow2"), "8M", "");
    qemu_io(&d.join("disk.qcow2"), "qcow2", &["write -P 1 0 1M"]);
    ringdisk(d, &["backup", "disk.qcow2", "backups/"]).ok();
    qemu_io(&d.join("disk.qcow2"), "qcow2", &["write -P 2 2M 64k"]);
    ringdisk(d, &["backup", "disk.qcow2", "backups/"]).ok();
    let kinds = names(&d.join("backups"));
    assert!(kinds[0].starts_with("FULL") && kinds[1].starts_with("INC"), "{kinds:?}");
    ringdisk(d, &["restore", "backups", "restored.qcow2"]).ok();
    qemu_img(d, &["compare", "disk.qcow2", "restored.qcow2"]).ok();
    assert_clean(&d.join("disk.qcow2"));
    // A raw image has no bitmaps: each backup is a full one.
    images::raw(&d.join("disk.img"), 1 << 20, 1);
    for _ in 0..2 {
        ringdisk(d, &["backup", "disk.img", "raw/"]).ok().says("no bitmaps");
    }
    assert!(names(&d.join("raw")).iter().all(|name| name.starts_with("FULL")));
    ringdisk(d, &["restore", "raw", "again.img"]).ok();
    qemu_img(d, &["compare", "-f", "raw", "-F", "raw", "disk.img", "again.img"]).ok();
    ringdisk(d, &["backup", "nothing.qcow2", "x.qcow2"]).ends(4);
}

#[test]
fn a_round_that_fails_or_is_stopped_leaves_nothing() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let disk = mounted(d, "disk.qcow2");
    write(disk.path(), 1, 0, 8 << 20);
    ringdisk(d, &["backup", disk.text(), "backups/"]).ok();
    let before = bitmaps(disk.path());
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| count(disk.path(), &is_done));
        // There is no room for what the writer overwrites, so the backup fails, not the writer.
        let words = ["backup", disk.text(), "backups/", "--full", "--fleece-max", "0"];
        ringdisk(d, &words).ends(12).says("the backup failed");
        is_done.store(true, Ordering::Relaxed);
        writer.join().expect("no panic");
    });
    assert_eq!(names(&d.join("backups")).len(), 1);
    assert_eq!(bitmaps(disk.path()), before);
    // Stopped by Ctrl-C, and killed, in the middle: its server stands still meanwhile.
    for signal in [Signal::INT, Signal::KILL] {
        let mut command = Command::new(program());
        command.current_dir(d).args(["backup", disk.text(), "backups/", "--full"]);
        signal_to(&disk, Signal::STOP);
        let mut client = Process::spawn(&mut command);
        ringdisk_testkit::process::pause(std::time::Duration::from_millis(300));
        client.signal(signal);
        signal_to(&disk, Signal::CONT);
        client.wait(LIMIT).expect("it ends");
        let is_quiet = || (bitmaps_if_quiet(disk.path())? == before).then_some(());
        until(LIMIT, is_quiet).expect("the bitmaps are as they were");
    }
    write(disk.path(), 3, 1 << 20, 1 << 16);
    let state = fs::read(disk.path()).unwrap();
    ringdisk(d, &["backup", disk.text(), "backups/"]).ok();
    ringdisk(d, &["restore", "backups", "restored.img"]).ok();
    assert!(fs::read(d.join("restored.img")).unwrap() == state);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&d.join("disk.qcow2"));
}

/// As [`bitmaps`]; `None` while a checkpoint is there.
fn bitmaps_if_quiet(disk: &Path) -> Option<Vec<String>> {
    let words = ["ctl", text(disk), "checkpoint", "--list", "--json"];
    let list = ringdisk(Path::new("/"), &words).ok().json();
    list["checkpoints"].as_array()?.is_empty().then(|| bitmaps(disk))
}

/// Sends a signal to the server of a mount.
fn signal_to(disk: &Mounted, signal: Signal) {
    let pid = i32::try_from(disk.pid()).ok().and_then(Pid::from_raw);
    kill_process(pid.expect("a pid"), signal).expect("a signal");
}

#[test]
fn several_disks_are_backed_up_at_one_instant() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let (a, b) = (mounted(d, "a.qcow2"), mounted(d, "b.qcow2"));
    let name = |disk: &Mounted| disk.path().file_name().unwrap().to_str().unwrap().to_owned();
    write(a.path(), 1, 0, 1 << 20);
    write(b.path(), 2, 0, 1 << 20);
    ringdisk(d, &["backup", a.text(), "x.qcow2", "--with", b.text()]).ends(2).says("directory");
    for _ in 0..2 {
        ringdisk(d, &["backup", a.text(), "backups/", "--with", b.text()]).ok();
    }
    // Mountpoints of tests may have the same last part.
    let second = if name(&a) == name(&b) { format!("{}-2", name(&b)) } else { name(&b) };
    for (disk, place) in [(&a, name(&a)), (&b, second)] {
        let place = d.join("backups").join(place);
        assert_eq!(names(&place).len(), 2, "{}", place.display());
        ringdisk(d, &["restore", text(&place), "restored.img", "--force"]).ok();
        assert!(fs::read(d.join("restored.img")).unwrap() == fs::read(disk.path()).unwrap());
    }
    assert_eq!((a.stop().code(), b.stop().code()), (Some(0), Some(0)));
}

/// A bitmap that a killed server did not save knows nothing: no backup may count on it.
#[test]
fn a_bitmap_that_was_not_saved_or_is_in_use_begins_no_round() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = d.join("disk.qcow2");
    images::qcow2(&image, "8M", "");
    qemu_img(d, &["bitmap", "--add", "disk.qcow2", "old"]).ok();
    let disk = serve(&image, &["--sandbox", "on"]);
    write(disk.path(), 1, 0, 1 << 20);
    let path = disk.path().to_owned();
    signal_to(&disk, Signal::KILL);
    ringdisk(d, &["umount", text(&path)]).ok();
    drop(disk);

    let disk = serve(&image, &["--sandbox", "on"]);
    let path = text(disk.path());
    let begun = Instant::now();
    let unusable = "'old' is inconsistent: the program that used it last did not save it";
    for words in [
        &["ctl", path, "checkpoint", "c", "--since", "old"][..],
        &["backup", path, "part.qcow2", "--since", "old"],
    ] {
        ringdisk(d, words).ends(3).says(unusable);
    }
    // A refusal has no time limit to wait for: a second one of those takes 4 s.
    let took = begun.elapsed();
    assert!(took < patient(Duration::from_secs(4)), "two refusals took {took:?}");
    assert!(!d.join("part.qcow2").exists() && bitmaps(disk.path()) == ["old"]);

    // A checkpoint has its bitmap for itself.
    ringdisk(d, &["ctl", path, "checkpoint", "one", "--bitmap", "new"]).ok();
    for words in [
        &["ctl", path, "checkpoint", "two", "--since", "new"][..],
        &["backup", path, "part.qcow2", "--since", "new"],
    ] {
        ringdisk(d, words).ends(5).says("end the checkpoint first");
    }
    write(disk.path(), 2, 1 << 20, 1 << 20);
    ringdisk(d, &["ctl", path, "checkpoint", "--end", "one"]).ok();
    assert!(!d.join("part.qcow2").exists());
    ringdisk(d, &["backup", path, "part.qcow2", "--since", "new"]).ok();
    let finished = disk.stop();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert_clean(&image);
    let map = qemu_img(d, &["map", "--output=json", "part.qcow2"]).ok().json();
    let data = map.as_array().expect("a list").iter().filter(|run| run["data"] == true);
    let ranges: Vec<_> = data.map(|run| (run["start"].as_u64(), run["length"].as_u64())).collect();
    assert_eq!(ranges, [(Some(1 << 20), Some(1 << 20))], "what changed since, and nothing else");
}

/// A client that reads back what it wrote, while checkpoints begin and end; what they show stands
/// still.
#[test]
fn checkpoints_change_no_byte_of_a_client_and_stand_still() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = d.join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    let disk = serve(&image, &["--sandbox", "on"]);
    let path = text(disk.path());
    let mut words = vec!["fio", "--name=load", "--ioengine=libaio", "--direct=1", "--iodepth=16"];
    words.extend(["--rw=randwrite", "--bsrange=4k-64k", "--blockalign=4k", "--size=16m"]);
    words.extend(["--thread", "--loops=100000", "--time_based", "--runtime=5"]);
    words.extend(["--serialize_overlap=1", "--verify=crc32c", "--verify_fatal=1"]);
    words.extend(["--verify_backlog=64", "--verify_state_save=0"]);
    let file = format!("--filename={path}");
    words.push(&file);
    let mut fio = Process::spawn(&mut command(&words));
    let mut rounds = 0;
    while fio.ended().is_none() {
        let name = format!("c{rounds}");
        let begun = ringdisk(d, &["ctl", path, "checkpoint", &name, "--json"]).ok().json();
        let uri = begun["disks"][0]["uri"].as_str().expect("an address").to_owned();
        for copy in ["first", "second"] {
            ok_words(&["nbdcopy", &uri, text(&d.join(copy))]);
        }
        ringdisk(d, &["ctl", path, "checkpoint", "--end", &name]).ok();
        let read = |copy: &str| fs::read(d.join(copy)).expect("read");
        assert!(read("first") == read("second"), "round {rounds}: the state has moved");
        rounds += 1;
    }
    let finished = fio.finish(LIMIT);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert!(rounds > 1, "fio ended before the second round");
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&image);
}
