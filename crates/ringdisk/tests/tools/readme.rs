//! The examples of the README, run literally: by root, and by a user who is not root; and the
//! commands of docs/backup.md, and of a day and of the jobs in docs/operations.md.
//!
//! Promises: every indented block of the page runs, in the order of the page, in one scratch
//! directory in which `vm.qcow2` is a disk with one partition. What a block says above it in a
//! comment is left out: `as root` for other users, and the command of QEMU (`QEMU is only parsed`).

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringdisk_testkit::limits::{OpenDevice, mount_at, needs, needs_root, part_needs};
use ringdisk_testkit::mount::{Cleared, for_user, text};
use ringdisk_testkit::process::{LIMIT, Process, command, has, ok, run, until};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::common::program;

/// The user and group `nobody`.
const NOBODY: u32 = 65534;
/// Programs that the examples use and that a small system may lack.
const PROGRAMS: [&str; 5] = ["fdisk", "sfdisk", "mkfs.ext4", "debugfs", "wipefs"];

/// An indented block of the page.
#[derive(Debug, PartialEq)]
struct Block {
    /// The heading above it.
    heading: String,
    /// What the comment in front of it says.
    remark: String,
    lines: Vec<String>,
}

impl Block {
    /// Its commands, without that of QEMU.
    fn without_qemu(&self) -> String {
        let mut in_qemu = false;
        let mut out = Vec::new();
        for line in &self.lines {
            in_qemu |= line.starts_with("qemu-system-");
            if !in_qemu {
                out.push(line.as_str());
            }
            in_qemu &= line.ends_with('\\');
        }
        out.join("\n")
    }
}

fn blocks(page: &str) -> Vec<Block> {
    let (mut heading, mut remark) = (String::new(), String::new());
    let mut out: Vec<Block> = Vec::new();
    let mut open = false;
    for line in page.lines() {
        if let Some(code) = line.strip_prefix("    ") {
            if !open {
                let remark = std::mem::take(&mut remark);
                out.push(Block { heading: heading.clone(), remark, lines: Vec::new() });
                open = true;
            }
            out.last_mut().expect("it was opened").lines.push(code.to_owned());
            continue;
        }
        open = false;
        if let Some(title) = line.strip_prefix("## ") {
            heading = title.to_owned();
        } else if let Some(comment) = line.strip_prefix("<!-- ") {
            remark = comment.trim_end_matches(" -->").to_owned();
        } else if !line.is_empty() {
            remark.clear();
        }
    }
    out
}

fn readme() -> (PathBuf, Vec<Block>) {
    page("README.md")
}

fn page(name: &str) -> (PathBuf, Vec<Block>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the project");
    let page = std::fs::read_to_string(root.join(name)).expect(name);
    (root.to_path_buf(), blocks(&page))
}

/// A directory with the program and the image that the examples name, and who runs them.
struct Session {
    /// Removed before the directory is.
    _mounts: Vec<Cleared>,
    directory: TempDir,
    user: u32,
}

impl Session {
    /// * `names`: files that the examples mount on.
    fn new(user: u32, names: &[&str]) -> Session {
        let (directory, _) = for_user(&program(), user);
        let _mounts = names.iter().map(|name| Cleared(directory.path().join(name))).collect();
        let session = Session { _mounts, directory, user };
        session.runs(
            "ringdisk mount --daemonize --create 64M vm.qcow2 whole
             echo ',,L' | sfdisk --quiet --label gpt whole
             ringdisk umount whole
             ringdisk mount --daemonize --partition 1 vm.qcow2 part1
             mkfs.ext4 -q part1
             ringdisk umount part1",
        );
        session
    }

    /// A shell that stops at the first command that fails.
    fn shell(&self, script: &str) -> Command {
        let (user, group) = (format!("--reuid={}", self.user), format!("--regid={}", self.user));
        let words: &[&str] = &["setpriv", &user, &group, "--clear-groups"];
        let mut out = command(if self.user == 0 { &["env"] } else { words });
        out.args(["sh", "-eu", "-c", script]).current_dir(self.directory.path());
        let path = std::env::var("PATH").unwrap_or_default();
        let own = text(self.directory.path());
        out.env("PATH", format!("{own}:{path}:/usr/sbin:/sbin")).env_remove("XDG_RUNTIME_DIR");
        out
    }

    fn runs(&self, script: &str) {
        ok(self.shell(script));
    }

    fn is_mounted(&self, name: &str) -> bool {
        mount_at(&self.directory.path().join(name)).is_some()
    }
}

/// The files that the examples serve, for clean-up after a failure.
const NAMES: [&str; 7] = ["whole", "part1", "vm", "try", "work", "data", "disk"];

fn possible() -> bool {
    needs_root() && PROGRAMS.iter().all(|name| needs(name, has(name)))
}

/// Runs all examples as one user.
fn examples_run(user: u32) {
    let session = Session::new(user, &NAMES);
    let (_, blocks) = readme();
    let examples: Vec<&Block> = blocks.iter().filter(|b| b.heading == "Examples").collect();
    assert!(examples.len() >= 8, "the examples are gone: {examples:?}");
    for block in examples {
        match block.remark.as_str() {
            "as root" if user != 0 => continue,
            "as root" if !part_needs("loop devices", has_loop()) => continue,
            "" | "as root" => session.runs(&block.lines.join("\n")),
            "QEMU is only parsed" => {
                ok(command(&["sh", "-n", "-c"]).arg(block.lines.join("\n")));
                session.runs(&block.without_qemu());
            }
            other => panic!("no such remark: {other}"),
        }
    }
    let left: Vec<&&str> = NAMES.iter().filter(|name| session.is_mounted(name)).collect();
    assert!(left.is_empty(), "an example leaves these mounted: {left:?}");
}

fn has_loop() -> bool {
    run(command(&["losetup", "--find"])).code() == Some(0)
}

#[test]
fn blocks_are_found_with_their_headings_and_remarks() {
    let page = "## One\n\ntext\n\n    a\n    b\n\n<!-- as root -->\n\n    c\n\n## Two\n\n    d\n";
    let block = |heading: &str, remark: &str, lines: &[&str]| Block {
        heading: heading.to_owned(),
        remark: remark.to_owned(),
        lines: lines.iter().map(|line| (*line).to_owned()).collect(),
    };
    let expected =
        [block("One", "", &["a", "b"]), block("One", "as root", &["c"]), block("Two", "", &["d"])];
    assert_eq!(blocks(page), expected);
}

#[test]
fn a_command_of_qemu_is_left_out_with_all_its_lines() {
    let lines = ["a", "qemu-system-x86_64 -m 1 \\", "  -S", "b"].map(str::to_owned).to_vec();
    let block = Block { heading: String::new(), remark: String::new(), lines };
    assert_eq!(block.without_qemu(), "a\nb");
}

#[test]
fn the_examples_run_as_root() {
    if possible() {
        examples_run(0);
    }
}

#[test]
fn the_examples_run_as_a_user_who_is_not_root() {
    let programs = possible() && needs("setpriv", has("setpriv"));
    if programs && needs("fusermount3", has("fusermount3")) {
        let _device = OpenDevice::open();
        examples_run(NOBODY);
    }
}

#[test]
fn the_commands_of_the_page_on_backups_run_in_its_order() {
    let programs = ["nbdcopy", "nbdinfo", "qemu-img", "qemu-io"];
    if !possible() || !programs.iter().all(|name| needs(name, has(name))) {
        return;
    }
    let session = Session::new(0, &["whole", "part1", "disk", "a", "b", "vda"]);
    let (_, blocks) = page("docs/backup.md");
    assert!(blocks.len() >= 8, "the commands are gone: {blocks:?}");
    // One shell, since a block uses what the ones before it have set.
    let lines: Vec<String> = blocks.iter().map(|block| block.lines.join("\n")).collect();
    session.runs(&lines.join("\n"));
    let left = ["disk", "a", "b", "vda"].map(|name| session.is_mounted(name));
    assert_eq!(left, [false; 4], "a command leaves something mounted");
}

#[test]
fn the_commands_of_a_day_run_in_their_order() {
    if !possible() {
        return;
    }
    let session = Session::new(0, &["whole", "part1", "disk"]);
    let (_, blocks) = page("docs/operations.md");
    let mut days = blocks.iter().filter(|block| block.heading == "A day with ringdisk");
    let day = days.next().expect("the commands of the day");
    session.runs(&day.lines.join("\n"));
    assert!(!session.is_mounted("disk"), "it is mounted still");
    for name in ["tuesday.qcow2", "moved.qcow2", "backup.qcow2", "metrics.txt"] {
        let meta = std::fs::metadata(session.directory.path().join(name)).expect(name);
        assert!(meta.len() > 0, "{name}");
    }
}

#[test]
fn the_commands_of_the_page_on_operations_run_for_jobs() {
    if !possible() {
        return;
    }
    let session = Session::new(0, &["whole", "part1", "disk"]);
    let (_, blocks) = page("docs/operations.md");
    let jobs: Vec<&Block> = blocks.iter().filter(|block| block.heading == "Jobs").collect();
    let [job] = jobs[..] else { panic!("the commands are gone: {blocks:?}") };
    session.runs(&job.lines.join("\n"));
    assert!(!session.is_mounted("disk"), "it is mounted still");
}

#[test]
fn the_two_commands_of_the_start_are_there_and_the_first_one_serves() {
    if !needs_root() {
        return;
    }
    let (root, blocks) = readme();
    let start = blocks.iter().find(|block| block.heading == "Start").expect("the two commands");
    let commands: Vec<&str> =
        start.lines.iter().map(|line| line.split('#').next().unwrap_or(line).trim()).collect();
    let [serve, "./test"] = commands[..] else { panic!("{commands:?}") };
    let words = serve.strip_prefix("./run ").expect("./run");
    for name in ["run", "test"] {
        let mode = std::fs::metadata(root.join(name)).expect(name).permissions().mode();
        assert_eq!(mode & 0o111, 0o111, "{name} can be run");
    }
    // `./run` builds a release and runs it; this is what it runs.
    let session = Session::new(0, &NAMES);
    let server = Process::spawn(&mut session.shell(&format!("exec ringdisk {words}")));
    let size = || std::fs::metadata(session.directory.path().join("disk")).ok().map(|m| m.len());
    let served = until(LIMIT, || size().filter(|len| *len == 10 << 30));
    assert_eq!(served, Some(10 << 30), "{}", server.output());
    server.signal(Signal::INT);
    assert_eq!(server.finish(LIMIT).code(), Some(0));
}
