use std::os::unix::fs::FileTypeExt;

use super::*;

const NAME: &str = "mount-0-77.sock";

fn scratch() -> tempfile::TempDir {
    tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o700))
        .tempdir()
        .expect("a directory")
}

#[test]
fn a_socket_is_ours_alone_and_goes_with_its_server() {
    let directory = scratch();
    let place = directory.path().join("ringdisk");
    let listening = listen_in(std::slice::from_ref(&place), NAME).expect("listens");
    let path = place.join("mount-0-77.sock");
    let meta = fs::symlink_metadata(&path).expect("there");
    assert!(meta.file_type().is_socket());
    assert_eq!(meta.mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(&place).expect("there").mode() & 0o777, 0o700);
    assert!(UnixStream::connect(&path).is_ok());
    drop(listening);
    assert_eq!(fs::read_dir(&place).expect("there").count(), 0);
}

#[test]
fn the_next_server_under_the_same_name_keeps_it() {
    let directory = scratch();
    let place = directory.path().to_owned();
    let first = listen_in(std::slice::from_ref(&place), NAME).expect("listens");
    let second = listen_in(std::slice::from_ref(&place), NAME).expect("listens");
    drop(first);
    assert!(UnixStream::connect(place.join("mount-0-77.sock")).is_ok());
    drop(second);
    assert_eq!(fs::read_dir(&place).expect("there").count(), 0);
}

#[test]
fn a_second_name_leads_to_the_last_server_and_goes_with_it() {
    let directory = scratch();
    let place = directory.path().to_owned();
    let name = name_of_path(Path::new("/srv/disk"));
    let mut first = listen_in(std::slice::from_ref(&place), NAME).expect("listens");
    first.add_name(&name);
    assert!(connect_now(&place.join(&name)).is_ok());
    let mut second = listen_in(std::slice::from_ref(&place), "mount-0-78.sock").expect("listens");
    second.add_name(&name);
    assert_eq!(second.all_named().len(), 2);
    drop(first);
    assert!(connect_now(&place.join(&name)).is_ok(), "that of the second one");
    drop(second);
    assert_eq!(fs::read_dir(&place).expect("there").count(), 0);
}

#[test]
fn a_disk_is_found_by_any_way_to_its_socket_and_served_by_one_process() {
    let directory = scratch();
    let (real, link) = (directory.path().join("real"), directory.path().join("link"));
    fs::create_dir(&real).expect("mkdir");
    std::os::unix::fs::symlink(&real, &link).expect("symlink");
    let name = |path: PathBuf| name_of_disk(&real_path(&path).expect("a directory"));
    assert_eq!(name(real.join("vm.sock")), name(link.join("./vm.sock")));
    assert_ne!(name(real.join("vm.sock")), name(real.join("vm2.sock")));
    assert!(real_path(&directory.path().join("none/vm.sock")).is_err());
    let name = name(real.join("vm.sock"));
    let places = [directory.path().to_owned(), directory.path().join("next")];
    let first = listen_in(&places, &name).expect("listens");
    // Nor is it made where clients look later.
    let error = listen_in(&places, &name).expect_err("in use");
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    assert!(error.to_string().contains("another process"), "{error}");
    assert!(!places[1].join(&name).exists());
    drop(first);
    listen_in(&places, &name).expect("listens again");
}

#[test]
fn what_a_dead_server_left_is_removed_and_a_living_one_is_not() {
    let directory = scratch();
    let place = directory.path().to_owned();
    drop(UnixListener::bind(place.join("mount-0-1.sock")).expect("bind"));
    drop(UnixListener::bind(place.join("disk-1.sock")).expect("bind"));
    drop(UnixListener::bind(place.join("upgrade-disk-1.sock")).expect("bind"));
    drop(UnixListener::bind(place.join("mount-0-77.sock")).expect("bind"));
    let alive = UnixListener::bind(place.join("mount-0-2.sock")).expect("bind");
    fs::write(place.join("notes.txt"), "mine").expect("write");
    let listening = listen_in(std::slice::from_ref(&place), NAME).expect("listens");
    let mut names: Vec<_> = fs::read_dir(&place)
        .expect("there")
        .map(|entry| entry.expect("readable").file_name().into_string().expect("text"))
        .collect();
    names.sort();
    assert_eq!(names, ["mount-0-2.sock", "mount-0-77.sock", "notes.txt"]);
    drop((alive, listening));
}

#[test]
fn a_directory_that_others_can_enter_is_passed_over() {
    let directory = scratch();
    let open = directory.path().join("open");
    let link = directory.path().join("link");
    let good = directory.path().join("good");
    fs::create_dir(&open).expect("mkdir");
    fs::set_permissions(&open, Permissions::from_mode(0o755)).expect("chmod");
    std::os::unix::fs::symlink(directory.path(), &link).expect("symlink");
    let long = directory.path().join("x".repeat(100));
    let all = [open.clone(), link, long, good.clone()];
    let listening = listen_in(&all, NAME).expect("listens");
    assert!(good.join("mount-0-77.sock").exists());
    assert!(listen_in(&all[..3], NAME).is_err());
    drop(listening);
}

#[test]
fn links_lead_to_no_other_server() {
    let directory = scratch();
    let path = |name: &str| directory.path().join(name);
    for name in ["theirs", "ours"] {
        fs::create_dir(path(name)).expect("mkdir");
    }
    let _ours = UnixListener::bind(path("ours/mount-0-1.sock")).expect("bind");
    std::os::unix::fs::symlink("../ours/mount-0-1.sock", path("theirs/mount-0-77.sock"))
        .expect("a link");
    std::os::unix::fs::symlink("ours", path("linked")).expect("a link");
    fs::write(path("ours/file"), "").expect("write");
    assert!(connect_now(&path("ours/mount-0-1.sock")).is_ok());
    for name in ["theirs/mount-0-77.sock", "linked/mount-0-1.sock", "ours/file"] {
        assert!(connect_now(&path(name)).is_err(), "{name}");
        assert!(!is_dead(&path(name)), "{name}");
    }
    let gone = connect_now(&path("ours/gone")).expect_err("gone");
    assert_eq!(gone.kind(), io::ErrorKind::NotFound);
}

#[test]
fn a_lock_that_others_keep_is_waited_for_and_then_done_without() {
    let directory = scratch();
    let place = directory.path().to_owned();
    drop(UnixListener::bind(place.join("mount-0-1.sock")).expect("bind"));
    let kept = fs::File::open(&place).expect("a directory");
    rustix::fs::flock(&kept, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    let mut listening = listen_in(std::slice::from_ref(&place), NAME).expect("listens");
    listening.add_name("path-1.sock");
    assert!(connect_now(&place.join(NAME)).is_ok());
    assert!(place.join("mount-0-1.sock").exists(), "names are not judged without the lock");
    drop(listening);
    assert!(!place.join(NAME).exists() && !place.join("path-1.sock").exists());
}

#[test]
fn somebody_who_takes_the_directory_first_does_not_take_the_control_socket_away() {
    let directory = scratch();
    let root = directory.path();
    // Others may look into it: it may as well be theirs.
    let taken = root.join(temporary(user()));
    fs::create_dir(&taken).expect("mkdir");
    fs::set_permissions(&taken, Permissions::from_mode(0o755)).expect("chmod");
    fs::create_dir(root.join(format!("{}-open", temporary(user())))).expect("mkdir");
    let places = [taken.clone()];
    let first = listen_somewhere(&places, root, NAME).expect("listens");
    let further = further(root, user());
    let [place] = further.as_slice() else { panic!("{further:?}") };
    assert!(connect_now(&place.join(NAME)).is_ok());
    // The next one uses it, too.
    let second = listen_somewhere(&places, root, "mount-0-78.sock").expect("listens");
    assert!(connect_now(&place.join("mount-0-78.sock")).is_ok());
    drop((first, second));
    assert_eq!(fs::read_dir(place).expect("there").count(), 0);
    assert_eq!(fs::read_dir(&taken).expect("there").count(), 0);
}

#[test]
fn directories_depend_on_the_user() {
    let text = |user, runtime: Option<&str>| -> Vec<String> {
        let all = directories(user, runtime.map(Path::new));
        all.iter().map(|path| path.display().to_string()).collect()
    };
    assert_eq!(
        text(1000, Some("/run/user/1000")),
        ["/run/user/1000/ringdisk", "/tmp/ringdisk-1000"]
    );
    assert_eq!(text(0, None), ["/run/user/0/ringdisk", "/run/ringdisk", "/tmp/ringdisk-0"]);
    assert_eq!(text(5, Some("relative")), ["/run/user/5/ringdisk", "/tmp/ringdisk-5"]);
}
