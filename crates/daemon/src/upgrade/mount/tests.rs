use std::os::fd::OwnedFd;

use super::*;

fn words(version: u32) -> String {
    let terms = ringdisk_fuse::kept::Terms {
        mountpoint: "/mnt/disk".into(),
        connection: 7,
        profile: Profile::detect(false),
        negotiated: ringdisk_fuse::negotiate::Negotiated {
            minor: 40,
            flags: 0,
            offered: 0,
            max_write: 1 << 20,
        },
        queues: 1,
    };
    let (mode, uid, gid, open_files, writable_files) = (0o600, 0, 0, 1, 1);
    let file =
        FileWords { mode, uid, gid, open_files, writable_files, since_s: u64::MAX, since_ns: 7 };
    let mount = State::new(&terms, 1, Some((1, 2)), None);
    let words = Words { mount, file, disk: String::new(), roles: vec![Role::Device] };
    Versions::new(version, version).to_text(&words).expect("JSON")
}

fn refused(description: String, fds: Vec<OwnedFd>, connection: u32) -> String {
    let state = HandOverState { description, fds };
    let failure = open(state, Path::new("/mnt/disk"), connection).expect_err("refused");
    assert_eq!(failure.exit, Exit::Unsupported);
    failure.message().to_owned()
}

#[test]
fn what_is_not_of_this_mount_or_not_understood_is_refused() {
    let file = || OwnedFd::from(tempfile::tempfile().expect("a file"));
    for (description, fds, connection, why) in [
        (words(2), vec![file()], 7, "its version is 2"),
        (String::from("{}"), vec![file()], 7, "its version is null"),
        (String::from("none"), vec![file()], 7, "cannot be read"),
        (words(1), vec![], 7, "0 descriptors came"),
        (words(1), vec![file(), file()], 7, "2 descriptors came"),
        (words(1), vec![file()], 8, "another mount"),
        (words(1), vec![file()], 7, "none of /dev/fuse"),
    ] {
        let text = refused(description, fds, connection);
        assert!(text.contains(why), "{text}");
    }
}

#[test]
fn a_file_with_content_is_never_taken_for_a_mountpoint_that_ringdisk_made() {
    let file = tempfile::tempfile().expect("a file");
    let meta = file.metadata().expect("it is open");
    let id = (meta.dev(), meta.ino());
    assert!(is_empty(&file, id) && !is_empty(&file, (id.0, id.1 + 1)));
    file.set_len(1).expect("room");
    assert!(!is_empty(&file, id));
}

#[test]
fn sizes_of_another_machine_are_refused() {
    let ours = Profile::detect(true);
    assert_eq!(sizes(ours).expect("ours"), ours);
    for other in [
        Profile { max_pages: u16::MAX, ..ours },
        Profile { max_pages: 0, ..ours },
        Profile { page_bytes: ours.page_bytes * 2, ..ours },
        Profile { page_bytes: u32::MAX, ..ours },
    ] {
        assert!(sizes(other).is_err(), "{other:?}");
    }
}
