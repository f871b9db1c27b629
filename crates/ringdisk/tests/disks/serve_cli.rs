//! `ringdisk serve` as far as it needs no front end: what is refused and how, what is left alone,
//! and what a failed start leaves behind.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_ringdisk");

fn command(directory: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command
        .arg("serve")
        .args(words)
        .current_dir(directory)
        .env_remove("NOTIFY_SOCKET")
        .env_remove("LISTEN_FDS")
        .env("NO_COLOR", "1")
        .stdin(Stdio::null());
    command
}

/// Fails with `exit`, says each of `texts` on standard error, and does not panic.
fn refused_by(command: &mut Command, exit: i32, texts: &[&str]) {
    // With the standard input that it was given, which may be a socket.
    let output: Output = command.output().expect("the program starts");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(exit), "{command:?}: {text}");
    let missing: Vec<&&str> = texts.iter().filter(|wanted| !text.contains(**wanted)).collect();
    assert!(missing.is_empty(), "{command:?}: nothing of {missing:?} in: {text}");
    assert!(!text.contains("panicked") && !text.contains("os error"), "{text}");
}

fn refused(directory: &Path, words: &[&str], exit: i32, texts: &[&str]) {
    refused_by(&mut command(directory, words), exit, texts);
}

/// A directory with a raw image, `disk.img`.
fn scratch() -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let image = fs::File::create(directory.path().join("disk.img"));
    image.and_then(|file| file.set_len(1 << 20)).expect("an image");
    directory
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("a list");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<String> =
        entries.map(|entry| name(entry).to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn bad_words_end_with_code_2_and_say_what_is_wrong() {
    let directory = scratch();
    for (words, text) in [
        (&[][..], "the IMAGE is missing"),
        (&["disk.img", "--queues", "65"], "1..=64"),
        (&["disk.img", "--serial", "0123456789abcdefghijk"], "20 is the most"),
        (&["disk.img", "--logical-block-size", "520"], "a power of two from 512"),
        (&["--disk", "image=disk.img,sokcet=x"], "there is no key 'sokcet'"),
        (&["--disk", "image=disk.img,socket=x", "--disk", "image=disk.img,socket=x"], "one socket"),
    ] {
        refused(directory.path(), words, 2, &[text]);
    }
}

#[test]
fn a_disk_without_a_place_is_told_how_to_get_one() {
    let directory = scratch();
    let texts = ["not said where", "try:", "--vhost-user-blk"];
    refused(directory.path(), &["disk.img"], 2, &texts);
    refused(directory.path(), &["--disk", "image=disk.img"], 2, &texts);
}

#[test]
fn the_image_is_refused_as_mount_refuses_it() {
    let directory = scratch();
    fs::write(directory.path().join("bad.qcow2"), b"QFI\xfb rubbish").expect("write");
    for (image, exit, text) in
        [("missing.img", 3, "add `--create 10G`"), ("bad.qcow2", 3, "bad.qcow2"), (".", 3, "'.'")]
    {
        refused(directory.path(), &[image, "--vhost-user-blk", "s"], exit, &[text]);
    }
    let offset = ["disk.img", "-f", "raw", "--offset", "1G", "--vhost-user-blk", "s"];
    refused(directory.path(), &offset, 3, &["disk.img"]);
    assert_eq!(names(directory.path()), ["bad.qcow2", "disk.img"]);
}

#[test]
fn an_image_that_a_guest_writes_is_not_taken_as_raw_by_a_guess() {
    let directory = scratch();
    let texts = ["'disk.img' is not a qcow2 image", "--format raw"];
    refused(directory.path(), &["disk.img", "--vhost-user-blk", "s"], 3, &texts);
    let create = ["--create", "1M", "disk.img", "--vhost-user-blk", "s"];
    refused(directory.path(), &create, 3, &texts);
    assert_eq!(names(directory.path()), ["disk.img"]);
}

#[test]
fn a_socket_that_cannot_be_made_is_refused_before_anything_is() {
    let directory = scratch();
    let path = directory.path();
    fs::write(path.join("file"), "mine").expect("write");
    symlink("disk.img", path.join("link")).expect("link");
    let long = "x".repeat(108);
    for (socket, exit, texts) in [
        ("file", 4, ["'file' is there already and is no socket", "another name"]),
        ("link", 4, ["'link' is there already and is no socket", "another name"]),
        (".", 4, ["'.' is there already and is no socket", "another name"]),
        ("none/s", 4, ["the directory 'none' does not exist", "mkdir -p none"]),
        ("file/s", 4, ["'file' is no directory", "another name"]),
        (long.as_str(), 4, ["108 bytes; the system takes 107", "shorter"]),
        ("", 2, ["", ""]),
    ] {
        let words = ["--create", "1M", "new.qcow2", "--vhost-user-blk", socket];
        refused(path, &words, exit, &texts);
    }
    let group = ["disk.img", "--vhost-user-blk", "s", "--socket-group", "no-such-group"];
    refused(path, &group, 2, &["no group 'no-such-group' in /etc/group", "getent"]);
    assert_eq!(names(path), ["disk.img", "file", "link"]);
}

#[test]
fn a_socket_on_which_somebody_listens_is_left_alone() {
    let directory = scratch();
    let socket = directory.path().join("vm.sock");
    let _listener = UnixListener::bind(&socket).expect("bind");
    let words = ["disk.img", "--vhost-user-blk", "vm.sock"];
    let texts = ["another process listens on the socket 'vm.sock'", "ringdisk ctl vm.sock stop"];
    refused(directory.path(), &words, 5, &texts);
    assert!(UnixStream::connect(&socket).is_ok());
}

#[test]
fn descriptors_that_are_no_sockets_of_ours_are_refused() {
    let directory = scratch();
    for (number, exit, text) in
        [("1", 2, "3..="), ("77", 2, "descriptor 77 is no socket of this process")]
    {
        refused(directory.path(), &["disk.img", "--socket-fd", number], exit, &[text]);
    }
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let words = ["disk.img", "--socket-fd", "9"];
    let texts = ["descriptor 9 is no Unix stream socket", "listens or is connected"];
    refused_by(&mut with_nine(directory.path(), &udp, &words, ""), 2, &texts);
    let file = fs::File::open(directory.path().join("disk.img")).expect("open");
    refused_by(&mut with_nine(directory.path(), &file, &words, ""), 2, &["is no socket"]);
}

#[test]
fn sockets_of_a_service_manager_are_those_of_the_disks() {
    let directory = scratch();
    let listener = UnixListener::bind(directory.path().join("vm.sock")).expect("bind");
    let activated = |words: &[&str], names: &str, exit, texts: &[&str]| {
        let set = format!("LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES={names}");
        refused_by(&mut with_three(directory.path(), &listener, words, &set), exit, texts);
    };
    activated(
        &["disk.img", "--socket-name", "other"],
        "vm1",
        2,
        &["no socket named 'other'; there is 'vm1'", "FileDescriptorName=other"],
    );
    activated(
        &["disk.img", "--vhost-user-blk", "s"],
        "vm1",
        2,
        &["one socket more than there are disks for, such as 'vm1'"],
    );
    activated(
        &["--disk", "image=disk.img", "--disk", "null=1G"],
        "vm1",
        2,
        &["not said where the disk is to be served"],
    );
    activated(&["disk.img", "--daemonize"], "vm1", 2, &["leave --daemonize out"]);
    assert!(directory.path().join("vm.sock").exists());
}

#[test]
fn an_upgrade_of_nothing_says_so() {
    let directory = scratch();
    let words = ["disk.img", "--vhost-user-blk", "s", "--upgrade"];
    refused(directory.path(), &words, 4, &["no ringdisk serves", "without --upgrade"]);
}

/// The program with `socket` as descriptor 9 and `set` in its environment.
fn with_nine(directory: &Path, socket: impl AsFd, words: &[&str], set: &str) -> Command {
    with(directory, socket, 9, words, set)
}

/// The program with `socket` as descriptor 3 and `set` in its environment.
fn with_three(directory: &Path, socket: impl AsFd, words: &[&str], set: &str) -> Command {
    with(directory, socket, 3, words, set)
}

/// A shell puts the socket, which is its standard input, where it is wanted.
fn with(directory: &Path, socket: impl AsFd, number: u32, words: &[&str], set: &str) -> Command {
    let socket = socket.as_fd().try_clone_to_owned().expect("a descriptor");
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!("exec env {set} \"$0\" serve \"$@\" {number}<&0 0</dev/null"))
        .arg(PROGRAM)
        .args(words)
        .current_dir(directory)
        .env_remove("NOTIFY_SOCKET")
        .stdin(Stdio::from(socket));
    command
}
