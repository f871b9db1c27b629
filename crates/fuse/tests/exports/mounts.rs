//! Mounting, unmounting, and what is said when that does not work.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, chown, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ringdisk_disk::{Bytes, Disk, NullOptions};
use ringdisk_fuse::ErrorKind;
use ringdisk_fuse::mount::mount as mount_new;
use ringdisk_fuse::mount::{
    Abort, Method, MountOptions, Unmount, mount, mountpoint, table, unmount,
};
use ringdisk_testkit::connection::waiting;
use ringdisk_testkit::mount::{copy_program, text};
use ringdisk_testkit::process::{patient, until};

use crate::common::{Served, Wanted, another, can_mount};

fn null() -> std::sync::Arc<Disk> {
    Disk::null(&NullOptions { size: Bytes(1 << 20), read_zeroes: true, ..NullOptions::default() })
}

fn options() -> MountOptions {
    MountOptions {
        source: "image".into(),
        read_only: false,
        allow_other: false,
        max_read: 1 << 20,
        method: Method::Auto,
    }
}

#[test]
fn the_mount_table_shows_what_is_served() {
    if !can_mount() {
        return;
    }
    for method in [Method::Direct, Method::Helper] {
        let served = Served::new(null(), Wanted { method, ..Wanted::default() });
        let path = served.path().canonicalize().expect("exists");
        let entry = table::at(&path).expect("readable").expect("mounted");
        assert!(entry.is_ours());
        assert_eq!(entry.source, "test,image \\ name");
        for option in ["nosuid", "nodev", "noatime"] {
            assert!(entry.options.split(',').any(|word| word == option), "{method:?} {entry:?}");
        }
        for option in ["default_permissions", "max_read=1048576"] {
            let mut words = entry.super_options.split(',');
            assert!(words.any(|word| word == option), "{method:?} {entry:?}");
        }
        let mount = served.mount.as_ref().expect("mounted");
        assert_eq!(mount.connection(), entry.connection());
        assert_eq!(
            mount.connection().map(u64::from),
            Some(std::fs::metadata(&path).expect("stat").dev())
        );
        assert!(mount.is_mounted().expect("readable"));
        assert!(table::ours().expect("readable").contains(&entry));
    }
}

#[test]
fn clones_are_bound_to_the_same_connection() {
    if !can_mount() {
        return;
    }
    let served = Served::new(null(), Wanted::default());
    let clone = another(served.mount.as_ref().expect("mounted"));
    let flags = rustix::fs::fcntl_getfl(&clone).expect("flags");
    assert!(flags.contains(rustix::fs::OFlags::NONBLOCK));
    // A clone of a clone works as well.
    ringdisk_fuse::mount::clone_device(&clone).expect("clone");
}

#[test]
fn a_busy_mount_stays_until_it_is_told_to_go_anyway() {
    if !can_mount() {
        return;
    }
    let mut served = Served::new(null(), Wanted::default());
    let file = File::open(served.path()).expect("opens");
    let mut mount = served.mount.take().expect("mounted");
    let error = mount.unmount(Unmount::Normal).expect_err("in use");
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(mount.is_mounted().expect("readable"));
    mount.unmount(Unmount::Lazy).expect("lazy");
    assert!(!mount.is_mounted().expect("readable"));
    assert_eq!(std::fs::metadata(served.path()).expect("stat").len(), 0, "the file below");
    // The open file still works, and lets the server end when it is closed.
    assert_eq!(file.metadata().expect("stat").len(), 1 << 20);
    drop(file);
}

#[test]
fn a_forced_unmount_ends_requests_that_nobody_serves() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk");
    File::create(&path).expect("a mountpoint");
    let mut mount = mount(&path, &options()).expect("a mount");
    let number = mount.connection().expect("a connection");
    let requests = || waiting(number).expect("its requests");
    let before = requests();
    // Nobody answers INIT, so this waits in the kernel.
    let client = std::thread::spawn(move || std::fs::metadata(path).map(|found| found.len()));
    let waits = until(Duration::from_secs(20), || (requests() > before).then_some(()));
    assert_eq!(waits, Some(()), "nobody waits: {} requests", requests());
    assert!(mount.abort());
    let error = client.join().expect("no panic").expect_err("aborted");
    assert!(matches!(error.raw_os_error(), Some(libc::ECONNABORTED | libc::ENOTCONN)), "{error}");
    mount.unmount(Unmount::Force).expect("unmount");
    assert!(!mount.is_mounted().expect("readable"));
}

#[test]
fn a_mount_that_is_dropped_is_gone() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk");
    File::create(&path).expect("a mountpoint");
    drop(mount(&path, &options()).expect("a mount"));
    let path = path.canonicalize().expect("the file below");
    assert!(table::at(&path).expect("readable").is_none());
}

/// Does this until it was so five times that the second mount got the number of the first, which it
/// says: other tests mount meanwhile.
fn until_met(rounds: u32, mut case: impl FnMut() -> bool) {
    let met = (0..rounds).filter(|_| case()).take(5).count();
    assert_eq!(met, 5, "the case did not occur");
}

#[test]
fn a_mount_that_is_gone_leaves_the_next_one_with_its_number_alone() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let paths = ["first", "second"].map(|name| directory.path().join(name));
    for path in &paths {
        File::create(path).expect("a mountpoint");
    }
    until_met(5000, || {
        let first = mount(&paths[0], &options()).expect("a mount");
        let (number, mountpoint) = (first.connection(), first.mountpoint().to_owned());
        rustix::mount::unmount(&mountpoint, rustix::mount::UnmountFlags::empty())
            .expect("unmounted by somebody");
        let second = mount(&paths[1], &options()).expect("another mount");
        let has_number = second.connection() == number;
        assert!(!first.is_mounted().expect("readable"));
        // Else another test may have copied the mounts into a namespace of its own, and the first
        // one lives there for a moment.
        assert!(!has_number || !first.abort());
        drop(first);
        assert!(second.is_mounted().expect("readable"), "removed by the number of another");
        has_number
    });
}

#[test]
fn an_aborted_mount_that_somebody_removed_leaves_the_next_one_with_its_number_alone() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk");
    File::create(&path).expect("a mountpoint");
    until_met(1000, || {
        let mut served = Served::new(null(), Wanted::default());
        // INIT is answered then, and an abort told.
        assert_eq!(std::fs::metadata(served.path()).expect("stat").len(), 1 << 20);
        let mut first = served.mount.take().expect("mounted");
        let number = first.connection().expect("a connection");
        assert!(Abort::of(number).expect("fusectl").abort());
        rustix::mount::unmount(served.path(), rustix::mount::UnmountFlags::DETACH)
            .expect("unmounted by somebody");
        let second = mount(&path, &options()).expect("another mount");
        let has_number = second.connection() == Some(number);
        assert!(!first.is_mounted().expect("readable"));
        assert!(!has_number || !first.abort(), "aborted by the number of another");
        first.unmount(Unmount::Lazy).expect("nothing to be done");
        assert!(second.is_mounted().expect("readable"), "removed by the number of another");
        has_number
    });
}

/// The helper process has the abort file open before it is needed.
#[test]
fn what_aborts_a_mount_does_nothing_to_the_next_one_with_its_number() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk");
    File::create(&path).expect("a mountpoint");
    until_met(1000, || {
        let first = mount(&path, &options()).expect("a mount");
        let number = first.connection().expect("a connection");
        let abort = Abort::of(number).expect("fusectl");
        assert!(abort.is_there());
        drop(first);
        let second = mount(&path, &options()).expect("another mount");
        let has_number = second.connection() == Some(number);
        if has_number {
            assert!(!abort.is_there() && Abort::of(number).is_some_and(|own| own.is_there()));
            abort.abort();
            assert!(!second.is_closed(), "aborted by what was held of another");
            assert!(Abort::of(number).expect("fusectl").abort() && second.is_closed());
        }
        has_number
    });
}

#[test]
fn an_aborted_mount_that_is_in_use_is_there_still() {
    if !can_mount() {
        return;
    }
    let mut served = Served::new(null(), Wanted::default());
    let file = File::open(served.path()).expect("open");
    let mut mount = served.mount.take().expect("mounted");
    let force = |path: &Path| rustix::mount::unmount(path, rustix::mount::UnmountFlags::FORCE);
    // Aborts first, and then finds that it is in use.
    assert_eq!(force(served.path()), Err(rustix::io::Errno::BUSY));
    assert!(mount.is_mounted().expect("readable"));
    mount.unmount(Unmount::Lazy).expect("it is removed");
    assert!(!mount.is_mounted().expect("readable"));
    drop(file);
}

#[test]
fn a_mount_that_was_removed_leaves_the_next_one_in_its_place_alone() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("disk");
    std::fs::write(&path, "").expect("a mountpoint");
    until_met(5000, || {
        let mut first = mount(&path, &options()).expect("a mount");
        let number = first.connection();
        first.unmount(Unmount::Lazy).expect("removed");
        let second = mount(&path, &options()).expect("another mount");
        let has_number = second.connection() == number;
        assert!(!has_number || !first.abort(), "the number is another's");
        let mut buffer = [0; 8192];
        let init = rustix::io::read(second.device(), &mut buffer[..]);
        assert!(init.is_ok(), "aborted by the number of the first: {init:?}");
        has_number
    });
}

#[test]
fn a_mount_that_was_aborted_before_it_was_served_is_removed() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk");
    File::create(&path).expect("a mountpoint");
    let mount = mount(&path, &options()).expect("a mount");
    let mountpoint = mount.mountpoint().to_owned();
    assert!(mount.abort());
    drop(mount);
    assert_eq!(table::at(&mountpoint).expect("readable"), None);
}

#[test]
fn mountpoints_are_refused_with_a_reason() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    symlink("loop", directory.join("loop")).expect("a link");
    let cases = [
        (directory.join("missing"), ErrorKind::NotFound, "does not exist"),
        (directory.join("no/such/file"), ErrorKind::NotFound, "does not exist"),
        (directory.to_path_buf(), ErrorKind::NotRegular, "is a directory"),
        ("/".into(), ErrorKind::Occupied, "mounted on it"),
        ("/dev/null".into(), ErrorKind::NotRegular, "is a device"),
        (directory.join("loop"), ErrorKind::NotRegular, "a symbolic link"),
    ];
    for (path, kind, words) in cases {
        let error = mountpoint::check(&path).expect_err("refused");
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.with_hint().to_string().contains(words), "{error}");
    }
}

/// It may be another user's, and lead anywhere.
#[test]
fn a_link_in_the_place_of_a_mountpoint_is_not_followed_and_its_target_is_named() {
    let directory = tempfile::tempdir().expect("a directory");
    let target = directory.path().canonicalize().expect("exists").join("target");
    let link = directory.path().join("link");
    symlink("target", &link).expect("a link");
    for is_there in [false, true] {
        if is_there {
            File::create(&target).expect("a file");
        }
        let error = mountpoint::check(&link).expect_err("a link");
        assert_eq!(error.kind(), ErrorKind::NotRegular);
        assert!(
            error.with_hint().to_string().contains(&format!("{}", target.display())),
            "{error}"
        );
    }
    // That of a directory is the user's own way to write the name.
    let folder = directory.path().join("folder");
    symlink(".", &folder).expect("a link");
    assert_eq!(mountpoint::check(&folder.join("target")).expect("fine"), target);
}

#[test]
fn a_mountpoint_that_serves_already_is_refused_and_named() {
    if !can_mount() {
        return;
    }
    let served = Served::new(null(), Wanted::default());
    let error = mount(served.path(), &options()).expect_err("occupied");
    assert_eq!(error.kind(), ErrorKind::AlreadyOurs);
    assert!(error.with_hint().to_string().contains("test,image \\ name"), "{error}");
    assert!(error.with_hint().to_string().contains("ringdisk umount"), "{error}");
}

#[test]
fn a_mount_whose_server_is_gone_is_told_apart_and_can_be_removed() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk");
    File::create(&path).expect("a mountpoint");
    // The last descriptor of the connection is closed without unmounting.
    drop(mount(&path, &options()).expect("a mount").into_device().expect("a duplicate"));
    let error = mount(&path, &options()).expect_err("stale");
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    unmount(&path, Unmount::Normal).expect("unmount");
    mountpoint::check(&path).expect("free again");
}

#[test]
fn a_mount_on_top_of_ours_is_left_alone() {
    if !can_mount() {
        return;
    }
    let mut served = Served::new(null(), Wanted::default());
    let path = served.path().to_path_buf();
    let other = path.with_file_name("other");
    std::fs::write(&other, b"other").expect("a file");
    rustix::mount::mount_bind(&other, &path).expect("bind");
    let mut mount = served.mount.take().expect("mounted");
    let error = mount.unmount(Unmount::Normal).expect_err("covered");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(std::fs::read(&path).expect("still there"), b"other");
    rustix::mount::unmount(&path, rustix::mount::UnmountFlags::empty()).expect("the bind mount");
    mount.unmount(Unmount::Normal).expect("ours");
    assert_eq!(std::fs::metadata(&path).expect("the file below").len(), 0);
}

#[test]
fn unmounting_what_is_not_ours_is_refused() {
    let error = unmount(Path::new("/proc"), Unmount::Normal).expect_err("not ours");
    assert_eq!(error.kind(), ErrorKind::NotMounted);
    let error = unmount(Path::new("/etc/passwd"), Unmount::Force).expect_err("not mounted");
    assert_eq!(error.kind(), ErrorKind::NotMounted, "{error}");
}

/// Runs one ignored test of this program as the user `nobody`, in a directory of theirs and a mount
/// namespace of its own, where `/dev/fuse` has the mode that is given.
///
/// The helper opens the device with the rights of its user, so it must be open to all users, as it
/// is on most machines.
fn as_nobody(test: &str, device_mode: &str) {
    const NOBODY: u32 = 65534;
    const SCRIPT: &str = "set -e
        mknod -m $2 $TMPDIR/fuse c 10 229
        mount --bind $TMPDIR/fuse /dev/fuse
        exec setpriv --reuid 65534 --regid 65534 --clear-groups \\
            $TMPDIR/program $1 --exact --ignored --nocapture";
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    chown(path, Some(NOBODY), Some(NOBODY)).expect("chown");
    let program = std::env::current_exe().expect("a path");
    copy_program(text(&program), &path.join("program"));
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", SCRIPT, "sh", test, device_mode]);
    let output = command.env("TMPDIR", path).current_dir(path).output().expect("unshare");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{complaint}");
}

#[test]
fn an_ordinary_user_mounts_through_the_helper() {
    if can_mount() {
        as_nobody("mounts::ordinary_user", "666");
    }
}

#[test]
#[ignore = "run by an_ordinary_user_mounts_through_the_helper"]
fn ordinary_user() {
    let mut served = Served::new(null(), Wanted::default());
    assert_eq!(std::fs::read(served.path()).expect("read"), vec![0; 1 << 20]);
    let flags = rustix::fs::fcntl_getfl(served.mount.as_ref().expect("mounted").device());
    assert!(flags.expect("flags").contains(rustix::fs::OFlags::NONBLOCK));

    let mut mount = served.mount.take().expect("mounted");
    let file = File::open(served.path()).expect("opens");
    let error = mount.unmount(Unmount::Normal).expect_err("in use");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    drop(file);
    // The kernel sends RELEASE after close has returned.
    let start = Instant::now();
    let limit = patient(Duration::from_secs(5));
    while mount.unmount(Unmount::Normal).is_err() && start.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!mount.is_mounted().expect("readable"));

    let refused = MountOptions { allow_other: true, ..options() };
    let error = mount_new(served.path(), &refused).expect_err("not in fuse.conf");
    assert_eq!(error.kind(), ErrorKind::AllowOtherDenied, "{error}");
}

#[test]
fn an_ordinary_user_learns_why_nothing_was_mounted() {
    if can_mount() {
        as_nobody("mounts::ordinary_user_refused", "666");
    }
}

#[test]
#[ignore = "run by an_ordinary_user_learns_why_nothing_was_mounted"]
fn ordinary_user_refused() {
    let error = mount_new(Path::new("/etc/passwd"), &options()).expect_err("not theirs");
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(error.with_hint().to_string().contains("own or may write"), "{error}");

    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk");
    File::create(&path).expect("a mountpoint");
    let direct = MountOptions { method: Method::Direct, ..options() };
    let error = mount_new(&path, &direct).expect_err("not root");
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(error.with_hint().to_string().contains("run as root"), "{error}");
}

#[test]
fn a_device_that_may_not_be_opened_is_named() {
    if can_mount() {
        as_nobody("mounts::forbidden_device", "600");
    }
}

#[test]
#[ignore = "run by a_device_that_may_not_be_opened_is_named"]
fn forbidden_device() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk");
    File::create(&path).expect("a mountpoint");
    for method in [Method::Auto, Method::Direct] {
        let refused = MountOptions { method, ..options() };
        let error = mount_new(&path, &refused).expect_err("forbidden");
        assert_eq!(error.kind(), ErrorKind::DeviceForbidden, "{error}");
        assert!(error.with_hint().to_string().contains("chmod 666 /dev/fuse"), "{error}");
    }
}
