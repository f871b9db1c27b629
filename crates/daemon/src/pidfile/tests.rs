use super::*;

#[test]
fn the_file_holds_the_pid_and_goes_with_its_owner() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("pid");
    Pidfile::check(&path).expect("free");
    assert!(!path.exists());
    let pidfile = Pidfile::create(&path).expect("create");
    let text = fs::read_to_string(directory.path().join("pid")).expect("read");
    assert_eq!(text, format!("{}\n", std::process::id()));
    assert_eq!(fs::metadata(&path).expect("stat").mode() & 0o777, 0o600);
    drop(pidfile);
    assert_eq!(fs::read_dir(directory.path()).expect("list").count(), 0);
}

#[test]
fn a_file_that_is_left_stays_for_the_next_process() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("pid");
    Pidfile::create(&path).expect("create").leave();
    assert!(path.exists());
    drop(Pidfile::create(&path).expect("it can be had"));
    assert!(!path.exists());
}

#[test]
fn a_stale_file_is_taken_over_and_its_rest_cut_off() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("pid");
    fs::write(&path, "12345678901234567\n").expect("write");
    let _pidfile = Pidfile::create(&path).expect("create");
    let text = fs::read_to_string(&path).expect("read");
    assert_eq!(text, format!("{}\n", std::process::id()));
    assert_eq!(fs::metadata(&path).expect("stat").mode() & 0o777, 0o600);
}

#[test]
fn another_file_is_left_as_it_is() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("notes.txt");
    fs::write(&path, "my notes").expect("write");
    let failure = Pidfile::create(&path).expect_err("refused");
    assert!(failure.message().contains("something else than a pid"));
    assert_eq!(fs::read_to_string(&path).expect("read"), "my notes");
}

#[test]
fn what_another_user_put_there_is_not_written() {
    let directory = tempfile::tempdir().expect("directory");
    let path = |name: &str| directory.path().join(name);
    fs::write(path("number"), "77\n").expect("write");
    std::os::unix::fs::symlink("number", path("link")).expect("a link");
    std::os::unix::fs::symlink("nothing", path("dangling")).expect("a link");
    fs::write(path("first"), "").expect("write");
    fs::hard_link(path("first"), path("second")).expect("a link");
    fs::write(path("theirs"), "").expect("write");
    let is_theirs = std::os::unix::fs::chown(path("theirs"), Some(12), None).is_ok();
    for (name, why) in [
        ("link", "a symbolic link"),
        ("dangling", "a symbolic link"),
        ("second", "other names"),
        ("theirs", "another user"),
    ] {
        if name == "theirs" && !is_theirs {
            // Only root can give files away.
            continue;
        }
        let failures = [Pidfile::check(&path(name)), Pidfile::create(&path(name)).map(drop)];
        for failure in failures {
            let failure = failure.expect_err(name);
            assert!(failure.message().contains(why), "{name}: {}", failure.message());
        }
    }
    assert_eq!(fs::read_to_string(path("number")).expect("there"), "77\n");
    assert!(!path("nothing").exists());
}

#[test]
fn who_holds_it_can_only_read_it() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("pid");
    for _ in 0..2 {
        let pidfile = Pidfile::create(&path).expect("create");
        assert!(pidfile.file.write_all_at(b"1\n", 0).is_err());
        assert!(pidfile.file.set_len(0).is_err());
        pidfile.leave();
    }
}

#[test]
fn a_directory_and_a_missing_directory_are_refused() {
    let directory = tempfile::tempdir().expect("directory");
    assert!(Pidfile::check(directory.path()).is_err());
    assert!(Pidfile::check(&directory.path().join("no/pid")).is_err());
    assert!(Pidfile::create(&directory.path().join("no/pid")).is_err());
}
