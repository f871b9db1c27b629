use std::os::unix::net::UnixListener;

use super::*;

fn told(tasks: &Tasks) -> Option<Tasks> {
    let mut taken = Tasks::default();
    let messages = tasks.messages();
    let (last, others) = messages.split_last().expect("one at least");
    let all = others.iter().all(|message| taken.take(message) == Some(false));
    (all && taken.take(last) == Some(true)).then_some(taken)
}

#[test]
fn tasks_arrive_as_they_were_told() {
    let files = vec![(PathBuf::from("/a b"), (1, 2)), (PathBuf::from("/c"), (3, u64::MAX))];
    let mount = Some((PathBuf::from("/mnt"), 77));
    let fronts = vec![PathBuf::from("/run/vm.sock")];
    let directories = vec![(PathBuf::from("/srv"), (4, 5))];
    let tasks = Tasks {
        mount,
        files,
        fronts,
        servers: ["unix:/run/nbd sock", "127.0.0.1:10809", "[::1]:5"]
            .map(|server| server.parse().expect("an endpoint"))
            .to_vec(),
        directories,
        trees: vec![(PathBuf::from("/allowed"), (8, 9))],
        maker: User::new(5, 0),
        mark: String::from("0a"),
        images: vec![Image {
            named: (PathBuf::from("/srv/base"), (6, 7)),
            format: ringdisk_disk::Format::Raw,
            names: String::from("below:raw;"),
            directory: PathBuf::from("/other"),
        }],
    };
    assert_eq!(told(&tasks), Some(tasks));
    assert_eq!(told(&Tasks::default()), Some(Tasks::default()));
    for message in [
        &b"n"[..],
        b"nhost:1",
        b"nunix:/a\x00b",
        b"m/mnt",
        b"m/mnt\x00x",
        b"f/file\x001",
        b"d/srv\x001",
        b"x",
        b"",
        b"..",
    ] {
        assert_eq!(Tasks::default().take(message), None);
    }
}

#[test]
fn only_files_that_it_was_told_of_go() {
    let directory = tempfile::tempdir().expect("directory");
    let path = |name: &str| directory.path().join(name);
    for name in ["told", "replaced", "other"] {
        fs::write(path(name), "123\n").expect("write");
    }
    let id = |name: &str| {
        let meta = fs::symlink_metadata(path(name)).expect("there");
        (meta.dev(), meta.ino())
    };
    let files = ["told", "replaced"].map(|name| (path(name), id(name))).to_vec();
    let tasks = Tasks { files, ..Tasks::default() };
    fs::write(path("filled"), "mine").expect("write");
    let filled = Tasks { files: vec![(path("filled"), id("filled"))], ..Tasks::default() };
    let message = [b"R", path("filled").as_os_str().as_bytes()].concat();
    assert_eq!(filled.carry_out(&message, &filled.hold()).kind, REFUSED);
    assert!(path("filled").exists(), "no server has made it");
    let held = tasks.hold();
    fs::rename(path("other"), path("replaced")).expect("rename");
    fs::write(path("other"), "").expect("write");
    for name in ["told", "replaced", "other"] {
        let message = [b"R", path(name).as_os_str().as_bytes()].concat();
        let answer = tasks.carry_out(&message, &held).kind;
        assert_eq!(answer, if name == "other" { REFUSED } else { DONE }, "{name}");
    }
    let left = ["told", "replaced", "other"].map(|name| path(name).exists());
    assert_eq!(left, [false, true, true]);
    for message in [&b"N"[..], b"L", b"F", b"A", b"", b"X", b"R", b"C", b"U"] {
        assert_eq!(tasks.carry_out(message, &Held::default()).kind, REFUSED);
    }
}

#[test]
fn a_file_that_gets_the_number_of_one_that_is_gone_stays() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("name");
    let id = |path: &Path| {
        let meta = fs::symlink_metadata(path).expect("there");
        (meta.dev(), meta.ino())
    };
    let mut order = b"R".to_vec();
    order.extend_from_slice(path.as_os_str().as_bytes());
    // ext4 gives a number that is free to the next file; others may not.
    for _ in 0..20 {
        drop(UnixListener::bind(&path).expect("bind"));
        let tasks = Tasks { files: vec![(path.clone(), id(&path))], ..Tasks::default() };
        let held = tasks.hold();
        assert!(held.pins.iter().all(Option::is_some));
        fs::remove_file(&path).expect("remove");
        drop(UnixListener::bind(&path).expect("bind"));
        assert_eq!(tasks.carry_out(&order, &held).kind, DONE);
        assert!(path.exists(), "the file of another process is gone");
        drop(held);
        fs::remove_file(&path).expect("remove");
    }
}

#[test]
fn what_could_be_another_file_with_the_same_number_goes_only_if_it_is_empty() {
    let directory = tempfile::tempdir().expect("directory");
    for content in ["", "of somebody else"] {
        let path = directory.path().join("mountpoint");
        fs::write(&path, content).expect("write");
        let meta = fs::symlink_metadata(&path).expect("there");
        let files = vec![(path.clone(), (meta.dev(), meta.ino()))];
        let tasks = Tasks { files, ..Tasks::default() };
        // Of what lies below a mount there is no descriptor.
        let held = Held { pins: vec![None], ..Held::default() };
        let order = [b"R", path.as_os_str().as_bytes()].concat();
        let answer = tasks.carry_out(&order, &held).kind;
        assert_eq!(answer, if content.is_empty() { DONE } else { REFUSED });
        assert_eq!(path.exists(), !content.is_empty());
    }
}

#[test]
fn only_sockets_that_it_was_told_of_are_connected() {
    let directory = tempfile::tempdir().expect("directory");
    let path = |name: &str| directory.path().join(name);
    let listeners = ["told", "other"].map(|name| UnixListener::bind(path(name)).expect("bind"));
    let tasks = Tasks { fronts: vec![path("told"), path("gone")], ..Tasks::default() };
    let held = tasks.hold();
    let connect = |name: &str| {
        let answer = tasks.carry_out(&[b"C", path(name).as_os_str().as_bytes()].concat(), &held);
        (answer.kind, answer.fd.is_some())
    };
    assert_eq!(connect("told"), (DONE, true));
    assert_eq!(connect("gone"), (REFUSED, false));
    assert_eq!(connect("other"), (REFUSED, false));
    drop(listeners);
    assert_eq!(connect("told"), (REFUSED, false));
}

#[test]
fn only_servers_that_it_was_told_of_are_connected() {
    let directory = tempfile::tempdir().expect("directory");
    let endpoint = |name: &str| format!("unix:{}", directory.path().join(name).display());
    let listeners = ["told", "other"]
        .map(|name| UnixListener::bind(directory.path().join(name)).expect("bind"));
    let servers = vec![endpoint("told").parse().expect("an endpoint")];
    let tasks = Tasks { servers, ..Tasks::default() };
    let held = tasks.hold();
    let connect = |name: &str| {
        let answer = tasks.carry_out(&[b"O", endpoint(name).as_bytes()].concat(), &held);
        (answer.kind, answer.fd.is_some())
    };
    assert_eq!(connect("told"), (DONE, true));
    assert_eq!(connect("other"), (REFUSED, false));
    drop(listeners);
    assert_eq!(connect("told"), (REFUSED, false));
    assert_eq!(tasks.carry_out(b"O", &held).kind, REFUSED);
}
