//! What a server could do to other servers, and to root's scripts, by what they share with it:
//! directories of sockets, and its pid file; and where another user leads root's commands.
#![cfg(target_arch = "x86_64")]

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{needs, needs_root};
use ringdisk_testkit::mount::{Mounted, for_user, scratch, text};
use ringdisk_testkit::process::{LIMIT, command as command_of, has};
use rustix::process::Signal;

use crate::common::serving::{Daemon, Place, serve_command};
use crate::common::{MIB, program, raw_image};
use crate::probe::inject::Puppet;
use crate::probe::modes::{NOBODY, as_nobody};

fn name(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("a name")
}

/// Locks all that it can: what it has open, and these directories. Gives how many it has locked.
fn lock_all(puppet: &mut Puppet, pid: u32, directories: &[&Path]) -> usize {
    let here = i64::from(libc::AT_FDCWD).cast_unsigned();
    let flags = u64::from((libc::O_RDONLY | libc::O_DIRECTORY).cast_unsigned());
    for directory in directories {
        let at = puppet.text(&name(directory));
        let _ = puppet.call(libc::SYS_openat, [here, at, flags, 0, 0, 0]);
    }
    let numbers = fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors").flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok());
    let lock = u64::from((libc::LOCK_EX | libc::LOCK_NB).cast_unsigned());
    numbers
        .filter(|number| {
            let file = fs::read_link(format!("/proc/{pid}/fd/{number}")).unwrap_or_default();
            directories.contains(&file.as_path())
                && puppet.call(libc::SYS_flock, [*number, lock, 0, 0, 0, 0]).is_ok()
        })
        .count()
}

#[test]
fn a_server_locks_no_directory_in_which_others_make_sockets() {
    if !needs_root() {
        return;
    }
    let run = scratch();
    let place = Place::new("raw");
    let start = |socket: &Path, image: &Path| {
        let words = ["--format", "raw", "--sandbox", "on", "--vhost-user-blk"];
        let mut command = serve_command(&[&words[..], &[text(socket), text(image)]].concat());
        Daemon::of(command.env("XDG_RUNTIME_DIR", run.path()))
    };
    let first = start(&place.socket, &place.image);
    let pid = first.process.pid();
    let control = run.path().join("ringdisk");
    let mut puppet = Puppet::of(pid);
    let locked = lock_all(&mut puppet, pid, &[place.directory.path(), &control]);
    let other = place.path("other");
    images::sparse(&place.path("other.img"), MIB);
    let second = start(&other, &place.path("other.img"));
    second.stop(&[&other]);
    puppet.release();
    assert_eq!(locked, 0);
    first.stop(&[&place.socket]);
    assert_eq!(fs::read_dir(&control).expect("there").count(), 0);
}

#[test]
fn a_server_cannot_write_its_pid_file() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let (path, file) = (directory.path().join("disk"), directory.path().join("pid"));
    let words = ["--sandbox", "on", "--format", "raw", "--pidfile", text(&file), text(&image)];
    let mut disk = Mounted::start_at(&program(), &words, &path);
    let pid = disk.pid();
    let content = format!("{pid}\n");
    let numbers = fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors").flatten();
    let is_it = |number: &u64| {
        fs::read_link(format!("/proc/{pid}/fd/{number}")).is_ok_and(|link| link == file)
    };
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok());
    let numbers: Vec<u64> = numbers.filter(is_it).collect();
    assert_eq!(fs::read_to_string(&file).expect("there"), content);
    let mut puppet = Puppet::of(pid);
    for number in &numbers {
        let at = puppet.bytes(b"1\n");
        let _ = puppet.call(libc::SYS_pwrite64, [*number, at, 2, 0, 0, 0]);
        let _ = puppet.call(libc::SYS_ftruncate, [*number, 2, 0, 0, 0, 0]);
    }
    let after = fs::read_to_string(&file).expect("there");
    puppet.release();
    assert_eq!(after, content);
    // A process that asks for the lock sees that the server lives.
    let asked = fs::File::options().read(true).write(true).open(&file).expect("there");
    let lock = rustix::fs::FlockOperation::NonBlockingLockExclusive;
    assert!(rustix::fs::fcntl_lock(&asked, lock).is_err(), "{numbers:?}");
    disk.process().signal(Signal::TERM);
    assert!(disk.process().wait(LIMIT).is_some());
    assert!(!file.exists());
}

/// The control socket in a runtime directory.
fn control_in(run: &Path) -> PathBuf {
    let entries = fs::read_dir(run.join("ringdisk")).expect("a directory").flatten();
    let is_control = |path: &PathBuf| {
        path.file_name().is_some_and(|name| text(Path::new(name)).starts_with("disk-"))
    };
    entries.map(|entry| entry.path()).find(is_control).expect("a control socket")
}

#[test]
fn a_link_of_another_user_leads_no_command_to_another_disk() {
    if !(needs_root() && needs("setpriv", has("setpriv"))) {
        return;
    }
    let (place, run) = (Place::new("raw"), scratch());
    let words = ["--format", "raw", "--vhost-user-blk", text(&place.socket), text(&place.image)];
    let ours = Daemon::of(serve_command(&words).env("XDG_RUNTIME_DIR", run.path()));
    let (directory, program) = for_user(&program(), NOBODY);
    let (image, socket) = (directory.path().join("disk.img"), directory.path().join("socket"));
    images::sparse(&image, MIB);
    // The program lies beside it, by the name that the directory of sockets has.
    let runtime = directory.path().join("run");
    fs::create_dir(&runtime).expect("a directory");
    for theirs in [&image, &runtime] {
        std::os::unix::fs::chown(theirs, Some(NOBODY), Some(NOBODY)).expect("chown");
    }
    let words = ["serve", "--format", "raw", "--vhost-user-blk", text(&socket), text(&image)];
    let mut command = as_nobody(&[&[text(&program)], &words[..]].concat());
    command.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS");
    let theirs = Daemon::of(command.env("XDG_RUNTIME_DIR", &runtime));
    // As root after su, which leaves the environment as it was.
    let ctl = |word: &str| {
        let mut command = command_of(&[&crate::common::program(), "ctl", text(&socket), word]);
        ringdisk_testkit::process::run(command.env("XDG_RUNTIME_DIR", &runtime))
    };
    let asked = ctl("stats");
    assert_eq!(asked.code(), Some(0), "{}", asked.output());
    let control = control_in(&runtime);
    fs::remove_file(&control).expect("it is theirs");
    symlink(control_in(run.path()), &control).expect("a link");
    for word in ["stats", "stop"] {
        let asked = ctl(word);
        assert!(asked.code().is_some_and(|code| code != 0), "{word}: {}", asked.output());
    }
    ours.stop(&[&place.socket]);
    theirs.kill();
}
