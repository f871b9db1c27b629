//! What commands say where a stranger goes wrong: what is the matter, and a command or an option
//! that exists and helps.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use ringdisk_testkit::images::{self, qemu_io};
use ringdisk_testkit::limits::{is_root, mount_at, needs_root};
use ringdisk_testkit::mount::{Mounted, for_user, scratch, text, unmount};
use ringdisk_testkit::process::{LIMIT, command, run, until};
use rustix::process::Signal;

use crate::common::tools::{Ran, ringdisk};
use crate::common::{program, serve};

const NOBODY: u32 = 65534;

fn qcow2(directory: &Path, name: &str) -> std::path::PathBuf {
    let image = directory.join(name);
    images::qcow2(&image, "16M", "");
    image
}

#[test]
fn umount_of_nothing_says_so_and_recommends_nothing_that_is_not_there() {
    let directory = scratch();
    fs::write(directory.path().join("file"), "").expect("write");
    let ran = ringdisk(directory.path(), &["umount", "file"]).ends(4);
    assert!(ran.err.contains("nothing is mounted on"), "{}", ran.err);
    assert!(!ran.err.contains("try: no ringdisk"), "{}", ran.err);
    ringdisk(directory.path(), &["umount"]).ends(2);
    ringdisk(directory.path(), &["umount", "--all", "file"]).ends(2);
}

#[test]
fn a_mount_of_another_user_is_called_so() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
    let image = qcow2(directory.path(), "disk.qcow2");
    let disk = serve(&image, &["--allow-other"]);
    let (_place, program) = for_user(&program(), NOBODY);
    let parent = disk.path().parent().expect("a directory");
    fs::set_permissions(parent, fs::Permissions::from_mode(0o755)).expect("chmod");
    let ids = [format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")];
    let mut other = command(&["setpriv", &ids[0], &ids[1], "--clear-groups"]);
    let finished = run(other.arg(&program).args(["umount", disk.text()]));
    assert_eq!(finished.code(), Some(6), "{}", finished.output());
    assert!(finished.stderr.contains("is a mount of user root, not yours"), "{}", finished.stderr);
    assert!(!finished.stderr.contains("--lazy"), "{}", finished.stderr);
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn a_mount_whose_server_was_killed_is_dead_and_umount_clears_it() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = qcow2(d, "disk.qcow2");
    let mut disk = serve(&image, &[]);
    let path = disk.path().to_owned();
    disk.process().signal(Signal::KILL);
    let ended = until(LIMIT, || disk.process().ended().map(|_| ()));
    assert_eq!(ended, Some(()));
    // Its sockets may live a moment longer: its rings have them.
    let is_told = |ran: &Ran| ran.code == 4 && ran.err.contains("started");
    let asked = || Some(ringdisk(d, &["ctl", text(&path), "stats"])).filter(is_told);
    let ran = until(LIMIT, asked).expect("it is told that the server is dead");
    for words in ["is dead", "started 20", "`ringdisk umount "] {
        assert!(ran.err.contains(words), "{words}: {}", ran.err);
    }
    assert!(!ran.err.contains("XDG_RUNTIME_DIR"), "{}", ran.err);
    let listed = ringdisk(d, &["ps"]).ok();
    let line = listed.out.lines().find(|line| line.contains(text(&path))).expect("it is listed");
    assert!(line.contains(" dead "), "{line}");
    assert!(listed.err.contains(&format!("`ringdisk umount {}`", text(&path))), "{}", listed.err);
    let ran = ringdisk(d, &["umount", text(&path)]).ok();
    assert!(ran.err.contains("the empty file below it is left"), "{}", ran.err);
    assert_eq!(mount_at(&path), None);
    assert!(!ringdisk(d, &["ps"]).ok().out.contains(text(&path)));
}

#[test]
fn tables_that_are_damaged_are_called_so() {
    let directory = scratch();
    let d = directory.path();
    let image = qcow2(d, "disk.qcow2");
    qemu_io(&image, "qcow2", &["write -P 0x11 0 1M"]);
    let file = fs::OpenOptions::new().read(true).write(true).open(&image).expect("open");
    let mut place = [0; 8];
    // The first entry of the L1 table (its place is at byte 40 of the header): no multiple of a
    // cluster.
    file.read_exact_at(&mut place, 40).expect("the header");
    let entry = (1_u64 << 63 | 0x5_0200).to_be_bytes();
    file.write_all_at(&entry, u64::from_be_bytes(place)).expect("write");
    for words in
        [&["convert", "disk.qcow2", "copy.img"][..], &["compare", "disk.qcow2", "disk.qcow2"]]
    {
        let ran = ringdisk(d, words);
        assert_ne!(ran.code, 0);
        assert!(ran.err.contains("its tables are damaged, or cannot be read"), "{}", ran.err);
        assert!(ran.err.contains("try: `ringdisk check`"), "{}", ran.err);
    }
    let ran = ringdisk(d, &["convert", "disk.qcow2", "copy.img"]);
    assert!(ran.err.contains("--salvage"), "{}", ran.err);
}

#[test]
fn a_locked_image_recommends_only_what_the_command_has() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = qcow2(d, "disk.qcow2");
    let disk = serve(&image, &[]);
    for words in [
        &["resize", "disk.qcow2", "+1M"][..],
        &["commit", "disk.qcow2"],
        &["check", "-r", "all", "disk.qcow2"],
        &["create", "-b", "disk.qcow2", "-F", "qcow2", "top.qcow2"],
    ] {
        let ran = ringdisk(d, words);
        assert!([1, 5].contains(&ran.code), "{words:?}: {}", ran.err);
        assert!(ran.err.contains("is in use for writing by"), "{words:?}: {}", ran.err);
        for option in ["--read-only", "--force-share", " -U"] {
            assert!(!ran.err.contains(option), "{words:?}: {}", ran.err);
        }
    }
    ringdisk(d, &["info", "disk.qcow2"]).ends(5).says("try: -U reads it nevertheless");
    ringdisk(d, &["mount", "disk.qcow2", "m"]).ends(5).says("try: --read-only --force-share");
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn words_of_mount_8_are_translated() {
    let directory = scratch();
    let d = directory.path();
    let ran = ringdisk(d, &["mount", "-o", "ro", "disk.qcow2", "m"]).ends(2).says("--read-only");
    assert!(!ran.err.contains("required arguments"), "{}", ran.err);
    ringdisk(d, &["mount", "-o", "allow_other", "a", "m"]).ends(2).says("--allow-other");
    let ran = ringdisk(d, &["mount", "--read-only", "missing.qcow2", "m"]).ends(3);
    assert!(!ran.err.contains("--create") && ran.err.contains("must be there"), "{}", ran.err);
    ringdisk(d, &["mount", "missing.qcow2", "m"]).ends(3).says("--create 10G");
    for word in ["ls", "list", "status"] {
        ringdisk(d, &[word]).ends(2).says("'ps'");
    }
}

#[test]
fn a_file_of_three_bytes_has_three_bytes() {
    let directory = scratch();
    fs::write(directory.path().join("three"), "abc").expect("write");
    let ran = ringdisk(directory.path(), &["info", "three"]).ok();
    assert!(
        ran.out.contains("virtual size: 3 B") && ran.out.contains("file length: 3 B"),
        "{}",
        ran.out
    );
}

#[test]
fn a_backing_file_out_of_reach_is_named_with_the_option_that_allows_it() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    qcow2(d, "base.qcow2");
    ringdisk(d, &["create", "-q", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
    let disk = serve(&d.join("top.qcow2"), &[]);
    fs::copy(d.join("top.qcow2"), d.join("copy.qcow2")).expect("copy");
    let path = text(disk.path()).to_owned();
    let ran = ringdisk(d, &["ctl", &path, "backing", "-F", "qcow2", "copy.qcow2"]);
    assert_ne!(ran.code, 0);
    let option =
        format!("--allow-path {}", d.canonicalize().expect("d").join("copy.qcow2").display());
    assert!(ran.err.contains(&option), "{}", ran.err);
    assert!(!ran.err.contains("of its chain"), "{}", ran.err);
    let ran = ringdisk(d, &["ctl", &path, "backing", "-F", "qcow2", "top.qcow2"]);
    assert!(ran.err.contains("is one of the images of this disk already"), "{}", ran.err);
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn a_commit_says_what_it_leaves_behind() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = qcow2(d, "disk.qcow2");
    let disk = serve(&image, &[]);
    ringdisk(d, &["ctl", disk.text(), "snapshot", "monday.qcow2"]).ok();
    let ran = ringdisk(d, &["ctl", disk.text(), "commit"]).ok();
    assert!(ran.out.contains("Image committed."), "{}", ran.out);
    assert!(ran.err.contains("disk.qcow2 now") && ran.err.contains("monday.qcow2"), "{}", ran.err);
    assert!(ran.err.contains("Left behind, empty"), "{}", ran.err);
    ringdisk(d, &["ctl", disk.text(), "snapshot", "tuesday.qcow2"]).ok();
    assert!(ringdisk(d, &["ctl", disk.text(), "commit", "-q"]).ok().err.is_empty());
    assert_eq!(disk.stop().code(), Some(0));
}

/// Waits until a mount has said all of this; it answers before it speaks.
fn said(disk: &Mounted, words: &[&str]) {
    let has_said = || words.iter().all(|word| disk.output().contains(word)).then_some(());
    assert_eq!(until(LIMIT, has_said), Some(()), "{words:?}: {}", disk.output());
}

#[test]
fn a_mount_in_the_foreground_says_how_it_ends_and_where_writes_go() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = qcow2(d, "disk.qcow2");
    let overlay = d.join("work.qcow2");
    let disk = serve(&image, &["--overlay", text(&overlay)]);
    said(&disk, &["Ctrl-C", "`ringdisk umount "]);
    said(&disk, &[&format!("what is written goes to {}", overlay.display())]);
    assert_eq!(disk.stop().code(), Some(0));
    let disk = serve(&image, &["--snapshot"]);
    said(&disk, &["what is written is lost at the end"]);
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn messages_of_a_mount_in_the_background_go_to_its_log_file() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    qcow2(d, "disk.qcow2");
    let words =
        ["mount", "--daemonize", "--log-file", "log", "--pidfile", "pid", "disk.qcow2", "disk"];
    let ran = ringdisk(d, &words).ok();
    assert!(!ran.out.contains("Ctrl-C"), "{}", ran.out);
    let log = || fs::read_to_string(d.join("log")).unwrap_or_default();
    assert_eq!(log(), "", "the start is said on standard output");
    let pid = fs::read_to_string(d.join("pid")).expect("a pid file");
    let pid = rustix::process::Pid::from_raw(pid.trim().parse().expect("a number")).expect("a pid");
    rustix::process::kill_process(pid, Signal::USR1).expect("a signal");
    let told = until(LIMIT, || log().contains("disk.qcow2 after").then_some(()));
    assert_eq!(told, Some(()), "{}", log());
    ringdisk(d, &["umount", "disk"]).ok();
    let words = ["mount", "--log-file", "no/such/log", "disk.qcow2", "disk"];
    ringdisk(d, &words).ends(1).says("cannot write the log file");
    unmount(&d.join("disk"));
}

#[test]
fn several_mounts_are_ended_by_one_command() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    for name in ["a", "b"] {
        qcow2(d, &format!("{name}.qcow2"));
        ringdisk(d, &["mount", "--daemonize", &format!("{name}.qcow2"), name]).ok();
    }
    let ran = ringdisk(d, &["umount", "a", "nothing", "b"]).ends(4);
    assert!(ran.err.contains("nothing is mounted on"), "{}", ran.err);
    assert_eq!((mount_at(&d.join("a")), mount_at(&d.join("b"))), (None, None));
}

#[test]
fn the_help_of_mount_begins_with_what_people_need_and_ends_with_what_tests_need() {
    let ran = ringdisk(Path::new("."), &["mount", "--help"]).ok();
    let at = |words: &str| ran.out.find(words).unwrap_or_else(|| panic!("no {words}"));
    let first = ["--daemonize", "--read-only", "--create", "--overlay", "--partition"];
    let rest = ["--queue-depth", "--metadata-cache", "--null <SIZE>", "--latency", "--read-zeroes"];
    for word in first {
        assert!(
            rest.iter().all(|later| at(&format!("{word} ")).min(at(word)) < at(later)),
            "{word}"
        );
    }
    let headings: Vec<&str> =
        ran.out.lines().filter(|line| line.ends_with(':') && !line.starts_with(' ')).collect();
    let order =
        ["Options:", "File options:", "Serving options:", "Image options:", "Test options:"];
    let place = |heading: &&str| headings.iter().position(|it| it == heading).expect("a heading");
    assert!(order.iter().map(place).is_sorted(), "{headings:?}");
    for heading in ["A disk to work with:", "Look inside, or try something:"] {
        assert!(headings.contains(&heading), "{headings:?}");
    }
}

#[test]
fn completions_offer_what_is_served() {
    let of = |shell: &str| ringdisk(Path::new("."), &["completions", shell]).ok().out;
    assert!(of("zsh").contains(":_ringdisk_served' \\"), "zsh");
    assert!(of("fish").contains("(ringdisk ps --targets"), "fish");
    if !is_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = qcow2(d, "disk.qcow2");
    let disk = serve(&image, &[]);
    fs::write(d.join("completions"), of("bash")).expect("write");
    let script = format!(
        "ringdisk() {{ {} \"$@\"; }}; . ./completions; COMP_WORDS=(ringdisk ctl {}); COMP_CWORD=2; \
         _ringdisk_served ringdisk '' ctl; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        program(),
        disk.text().strip_suffix("isk").expect("its name")
    );
    let mut bash = Command::new("bash");
    bash.args(["-c", &script]).current_dir(d).stdin(Stdio::null());
    let output = bash.output().expect("bash");
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(words.lines().any(|line| line == disk.text()), "{words}");
    assert_eq!(disk.stop().code(), Some(0));
}
