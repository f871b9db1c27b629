use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};

use super::bind::{check, group_in, open_to};
use super::*;

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

#[test]
fn a_socket_is_ours_alone_and_goes_at_the_end() {
    let directory = scratch();
    let path = directory.path().join("vm.sock");
    let (_socket, made) = MadeSocket::make(&path, 0o600, None).expect("made");
    assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    assert!(UnixStream::connect(&path).is_ok());
    drop(made);
    assert_eq!(fs::read_dir(directory.path()).expect("list").count(), 0);
}

#[test]
fn mode_and_group_are_those_that_were_asked_for() {
    use std::os::unix::fs::MetadataExt;
    let directory = scratch();
    let path = directory.path().join("vm.sock");
    let own = directory.path().metadata().expect("stat").gid();
    let _made = MadeSocket::make(&path, 0o666, Some(own)).expect("made");
    let meta = fs::metadata(&path).expect("there");
    assert_eq!((meta.mode() & 0o777, meta.gid()), (0o666, own));
}

#[test]
fn what_a_dead_process_left_is_replaced_and_nothing_else() {
    let directory = scratch();
    let path = |name: &str| directory.path().join(name);
    drop(UnixListener::bind(path("dead")).expect("bind"));
    let (_socket, _made) = MadeSocket::make(&path("dead"), 0o600, None).expect("replaced");
    let alive = UnixListener::bind(path("alive")).expect("bind");
    assert_eq!(check(&path("alive")).expect_err("alive").exit, Exit::Locked);
    assert_eq!(
        MadeSocket::make(&path("alive"), 0o600, None).expect_err("alive").exit,
        Exit::Locked
    );
    assert!(UnixStream::connect(path("alive")).is_ok());
    drop(alive);
    fs::write(path("file"), "mine").expect("write");
    std::os::unix::fs::symlink("dead", path("link")).expect("link");
    for name in ["file", "link"] {
        let failure = MadeSocket::make(&path(name), 0o600, None).expect_err(name);
        assert_eq!(failure.exit, Exit::Mountpoint, "{}", failure.message());
    }
    assert_eq!(fs::read_to_string(path("file")).expect("still there"), "mine");
    fs::create_dir(path("directory")).expect("mkdir");
    assert!(check(&path("directory")).is_err());
}

#[test]
fn one_that_was_replaced_meanwhile_stays() {
    let directory = scratch();
    let path = directory.path().join("vm.sock");
    let (_socket, made) = MadeSocket::make(&path, 0o600, None).expect("made");
    fs::remove_file(&path).expect("remove");
    let next = UnixListener::bind(&path).expect("bind");
    drop(made);
    assert!(UnixStream::connect(&path).is_ok());
    drop(next);
}

#[test]
fn paths_that_cannot_be_are_refused_with_their_reason() {
    let long = "x".repeat(108);
    for (path, text) in [
        ("", "is empty"),
        (long.as_str(), "108 bytes"),
        ("/nowhere/at/all/vm.sock", "'/nowhere/at/all' does not exist"),
        ("/etc/passwd/vm.sock", "'/etc/passwd' is no directory"),
    ] {
        let failure = check_path(Path::new(path)).expect_err(text);
        assert!(failure.message().contains(text), "{}", failure.message());
    }
    assert!(check_path(Path::new("vm.sock")).is_ok());
}

#[test]
fn groups_are_found_by_name() {
    let all = "root:x:0:\nkvm:x:104:qemu,me\nbad:x:y:\n";
    assert_eq!(group_in(all, "kvm"), Some(104));
    assert_eq!(group_in(all, "bad"), None);
    assert_eq!(group_in(all, "kv"), None);
}

#[test]
fn what_takes_the_place_of_a_new_socket_is_not_changed() {
    let directory = scratch();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("victim"), "").expect("write");
    fs::set_permissions(path("victim"), fs::Permissions::from_mode(0o640)).expect("chmod");
    std::os::unix::fs::symlink("victim", path("link")).expect("a link");
    for name in ["link", "victim"] {
        assert!(open_to(&path(name), 0o666, None).is_err(), "{name}");
    }
    assert_eq!(fs::metadata(path("victim")).expect("there").permissions().mode() & 0o777, 0o640);
}

#[test]
fn a_directory_that_others_keep_locked_keeps_nobody_from_starting() {
    let directory = scratch();
    let path = directory.path().join("vm.sock");
    let kept = fs::File::open(directory.path()).expect("a directory");
    rustix::fs::flock(&kept, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    let (_socket, made) = MadeSocket::make(&path, 0o600, None).expect("made");
    assert!(UnixStream::connect(&path).is_ok());
    drop(made);
    assert!(!path.exists());
}
