//! Ordinary users, forbidden interfaces and low limits. Some of it changes a setting of the machine
//! for a moment and puts it back, so the tests of this file run one at a time.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringdisk_testkit::images::{self, pattern, piece};
use ringdisk_testkit::limits::{OpenDevice, Sysctl, alone, mount_at, needs, needs_root};
use ringdisk_testkit::mount::{Mounted, for_user, text};
use ringdisk_testkit::process::{LIMIT, Process, command, has, ok, run, until};
use tempfile::TempDir;

use crate::common::{MIB, assert_refused, program, raw_image};

/// The user and group `nobody`.
const NOBODY: u32 = 65534;

fn set_mode(path: &str, mode: u32) {
    let _ = std::fs::set_permissions(path, PermissionsExt::from_mode(mode));
}

fn possible() -> bool {
    needs_root() && needs("setpriv", has("setpriv")) && needs("fusermount3", has("fusermount3"))
}

/// The program, an image and a mountpoint that belong to nobody.
struct User {
    directory: TempDir,
    program: PathBuf,
    image: PathBuf,
    path: PathBuf,
}

impl User {
    fn new() -> User {
        let (directory, program) = for_user(&program(), NOBODY);
        let (image, path) = (directory.path().join("disk.img"), directory.path().join("disk"));
        images::raw(&image, MIB, 1);
        std::fs::write(&path, "").expect("a mountpoint");
        for file in [&image, &path] {
            std::os::unix::fs::chown(file, Some(NOBODY), Some(NOBODY)).expect("chown");
        }
        User { directory, program, image, path }
    }

    /// Words that run as that user.
    fn run_as(&self, words: &[&str]) -> Command {
        let mut out = command(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
        out.args(words).current_dir(self.directory.path());
        out
    }

    fn mount(&self, args: &[&str]) -> Command {
        let words = [&[text(&self.program), "mount", "--format", "raw"], args].concat();
        let mut out = self.run_as(&words);
        out.args([&self.image, &self.path]);
        out
    }
}

#[test]
fn an_ordinary_user_mounts_reads_writes_and_unmounts() {
    if !possible() {
        return;
    }
    let _device = OpenDevice::open();
    let user = User::new();
    let disk = Mounted::from_command(&mut user.mount(&["--threads", "2"]), &user.path);
    let copy = user.directory.path().join("copy");
    let (from, to) = (text(&user.path), text(&copy));
    ok(user.run_as(&["cp", from, to]));
    images::assert_same(&copy, &user.image, "read by the user");
    let of = format!("of={from}");
    ok(user.run_as(&["dd", "if=/dev/zero", &of, "bs=4k", "count=4", "conv=notrunc,fsync"]));
    assert_eq!(piece(&user.image, 0, 16_384), [0; 16_384]);
    let options = mount_at(&user.path).expect("mounted").options;
    assert!(options.contains("user_id=65534") && options.contains("nosuid"), "{options}");
    let finished = disk.stop();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

#[test]
fn an_ordinary_user_upgrades_a_mount_in_use() {
    if !possible() {
        return;
    }
    let _device = OpenDevice::open();
    let user = User::new();
    let serve = |words: &[&str]| {
        let process = Process::spawn(&mut user.mount(&[&["--transport", "dev"], words].concat()));
        let said = || process.output().contains("is served as").then_some(());
        assert!(until(LIMIT, said).is_some(), "{}", process.output());
        process
    };
    let old = serve(&["--threads", "2"]);
    let path = text(&user.path);
    // A client that has it open from the first process to the last.
    let reads = format!(
        "exec 3<{path}; while [ -e go ]; do dd bs=4k count=1 of=/dev/null <&3 || exit 1; done"
    );
    std::fs::write(user.directory.path().join("go"), "").expect("a file");
    let client = Process::spawn(&mut user.run_as(&["sh", "-c", &reads]));
    let new = serve(&["--upgrade"]);
    let finished = old.finish(LIMIT);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    std::fs::remove_file(user.directory.path().join("go")).expect("it is there");
    let client = client.finish(LIMIT);
    assert_eq!(client.code(), Some(0), "{}", client.output());
    ok(user.run_as(&[text(&user.program), "umount", path]));
    let finished = new.finish(LIMIT);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert!(mount_at(&user.path).is_none());
}

#[test]
fn the_sandbox_is_there_for_a_user_who_asks() {
    if !possible() {
        return;
    }
    let _device = OpenDevice::open();
    let user = User::new();
    for (word, mode) in [("auto", "Seccomp:\t0"), ("on", "Seccomp:\t2")] {
        let disk =
            match Mounted::try_from_command(&mut user.mount(&["--sandbox", word]), &user.path) {
                Ok(disk) => disk,
                // A kernel without landlock.
                Err(finished) => return assert_refused(&finished, &["--sandbox off"]),
            };
        let status = std::fs::read_to_string(format!("/proc/{}/status", disk.pid()));
        assert!(status.expect("a process").contains(mode), "{word}");
        ok(user.run_as(&["dd", &format!("if={}", disk.text()), "of=/dev/null"]));
        // fusermount3 becomes root, which nothing inside can.
        let finished = disk.stop();
        assert_eq!(finished.code(), Some(0), "{word}: {}", finished.output());
    }
}

#[test]
fn a_stop_waits_for_the_clients_of_an_ordinary_user() {
    if !possible() {
        return;
    }
    let _device = OpenDevice::open();
    let user = User::new();
    let mut disk = Mounted::from_command(&mut user.mount(&[]), &user.path);
    let gate = user.directory.path().join("gate");
    let script = "exec 3<>\"$0\"; while [ ! -e \"$1\" ]; do sleep 0.05; done; echo done >&3";
    let words = ["sh", "-c", script, text(&user.path), text(&gate)];
    let mut client = Process::spawn(&mut user.run_as(&words));
    client.has_begun(&user.path);
    disk.process().signal(rustix::process::Signal::TERM);
    let words = format!("process {} (sh)", client.pid());
    let is_told =
        || (mount_at(&user.path).is_none() && disk.output().contains(&words)).then_some(());
    assert_eq!(until(LIMIT, is_told), Some(()), "{}", disk.output());
    std::fs::write(&gate, "").expect("write");
    assert!(client.wait(LIMIT).is_some_and(|status| status.success()), "{}", client.output());
    let finished = disk.finish();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert_eq!(piece(&user.image, 0, 5), b"done\n");
}

#[test]
fn others_may_not_look_into_a_users_mount() {
    if !possible() {
        return;
    }
    let _device = OpenDevice::open();
    let user = User::new();
    let _disk = Mounted::from_command(&mut user.mount(&[]), &user.path);
    // Root without the user's identity is "others" for FUSE.
    assert!(std::fs::File::open(&user.path).is_err());
}

#[test]
fn a_user_unmounts_with_our_command_and_with_fusermount3() {
    if !possible() {
        return;
    }
    let _device = OpenDevice::open();
    let user = User::new();
    let ours = [text(&user.program), "umount", text(&user.path)];
    for words in [&ours[..], &["fusermount3", "-u", text(&user.path)]] {
        let disk = Mounted::from_command(&mut user.mount(&[]), &user.path);
        ok(user.run_as(words));
        let finished = disk.finish();
        assert_eq!(finished.code(), Some(0), "{words:?}: {}", finished.output());
    }
}

#[test]
fn a_killed_server_of_a_user_can_be_cleared_by_the_user() {
    if !possible() {
        return;
    }
    let _device = OpenDevice::open();
    let user = User::new();
    let mut disk = Mounted::from_command(&mut user.mount(&[]), &user.path);
    disk.process().signal(rustix::process::Signal::KILL);
    assert!(disk.process().wait(LIMIT).is_some());
    ok(user.run_as(&["fusermount3", "-u", text(&user.path)]));
    assert_eq!(mount_at(&user.path), None);
}

#[test]
fn allow_other_without_permission_is_said() {
    if !possible() {
        return;
    }
    let allowed = std::fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    if !needs(
        "fuse.conf that forbids allow_other",
        !allowed.lines().any(|l| l.trim() == "user_allow_other"),
    ) {
        return;
    }
    let _device = OpenDevice::open();
    let user = User::new();
    match Mounted::try_from_command(&mut user.mount(&["--allow-other"]), &user.path) {
        Ok(disk) => assert!(disk.output().contains("allow"), "{}", disk.output()),
        Err(finished) => assert_refused(&finished, &["user_allow_other"]),
    }
}

#[test]
fn an_image_without_permission_is_named() {
    if !possible() {
        return;
    }
    let _device = OpenDevice::open();
    let user = User::new();
    std::os::unix::fs::chown(&user.image, Some(0), Some(0)).expect("chown");
    set_mode(text(&user.image), 0o600);
    let finished = run(user.mount(&[]));
    assert_refused(&finished, &[text(&user.image), "permission"]);
    // Readable but not writable: the message says how it could be read.
    set_mode(text(&user.image), 0o644);
    assert_refused(&run(user.mount(&[])), &[text(&user.image)]);
    let disk = Mounted::from_command(&mut user.mount(&["--read-only"]), &user.path);
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn io_uring_forbidden_by_sysctl_is_named() {
    if !possible() {
        return;
    }
    let _device = OpenDevice::open();
    // 1 forbids it to ordinary users only, so that other programs of the machine are not disturbed.
    let Some(_setting) = Sysctl::set("kernel/io_uring_disabled", "1") else { return };
    let user = User::new();
    let finished = run(user.mount(&[]));
    assert_refused(&finished, &["io_uring", "io_uring_disabled"]);
    assert_eq!(mount_at(&user.path), None);
}

/// Runs a mount by root in a mount namespace of its own, prepared by `before`.
fn in_namespace(before: &str) -> ringdisk_testkit::process::Finished {
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("disk");
    std::fs::write(&path, "").expect("a mountpoint");
    let script = format!("{before} && exec \"$0\" mount --format raw \"$1\" \"$2\"");
    let mut shell = command(&["unshare", "--mount", "sh", "-c", &script, &program()]);
    Process::spawn(shell.args([&image, &path])).finish(LIMIT)
}

#[test]
fn a_missing_fuse_device_is_named() {
    if !(needs_root() && needs("unshare", has("unshare"))) {
        return;
    }
    let finished = in_namespace("mount -t tmpfs tmpfs /dev && mknod /dev/null c 1 3");
    assert_refused(&finished, &["/dev/fuse"]);
}

#[test]
fn a_fuse_device_that_is_none_is_refused() {
    if !(needs_root() && needs("unshare", has("unshare"))) {
        return;
    }
    let finished = in_namespace("mount --bind /dev/null /dev/fuse");
    // What there is to say is that mounting failed, and where.
    assert_refused(&finished, &["cannot mount"]);
}

#[test]
fn a_fuse_device_closed_to_users_is_named() {
    if !possible() {
        return;
    }
    let _alone = alone();
    let before = std::fs::metadata("/dev/fuse").expect("/dev/fuse").permissions().mode();
    if !needs("closed /dev/fuse", before & 0o006 == 0) {
        return;
    }
    let user = User::new();
    let finished = run(user.mount(&[]));
    assert_refused(&finished, &["/dev/fuse"]);
    assert_eq!(mount_at(&user.path), None);
}

fn with_limit(limit: &str, path: &Path, image: &Path) -> Command {
    let mut out =
        command(&["prlimit", limit, &program(), "mount", "--format", "raw", "--threads", "2"]);
    out.args([image, path]);
    out
}

#[test]
fn too_few_descriptors_are_named() {
    if !(needs_root() && needs("prlimit", has("prlimit"))) {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("disk");
    for limit in 4..14 {
        let words = format!("--nofile={limit}:{limit}");
        match Mounted::try_from_command(&mut with_limit(&words, &path, &image), &path) {
            Ok(disk) => {
                assert_eq!(piece(&path, 0, 100), pattern(1, 0, 100), "{limit}");
                assert_eq!(disk.stop().code(), Some(0), "{limit}");
            }
            // Below six, the loader itself may fail to open libraries.
            Err(finished) if limit >= 6 => assert_refused(&finished, &["open files"]),
            Err(finished) => assert!(!finished.output().contains("panicked")),
        }
        assert_eq!(mount_at(&path), None, "{limit}");
    }
}

#[test]
fn no_locked_memory_is_survived_or_named() {
    if !possible() {
        return;
    }
    let _device = OpenDevice::open();
    let user = User::new();
    let mut limited =
        command(&["prlimit", "--memlock=0:0", "setpriv", "--reuid=65534", "--regid=65534"]);
    limited.args(["--clear-groups", text(&user.program), "mount", "--format", "raw"]);
    match Mounted::try_from_command(limited.args([&user.image, &user.path]), &user.path) {
        Ok(disk) => assert_eq!(disk.stop().code(), Some(0)),
        Err(finished) => assert_refused(&finished, &["memlock"]),
    }
}
