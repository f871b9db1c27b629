//! What a client or a user changed of a mount is the same after a restart.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_testkit::images::{self, pattern, piece, qemu_io};
use ringdisk_testkit::limits::{mount_at, needs, needs_root};
use ringdisk_testkit::mount::{Cleared, STOP, scratch, text};
use ringdisk_testkit::process::{command, has, ok_words, run, until};
use rustix::process::Signal;

use crate::common::{MIB, open, patch, program, raw_image};
use crate::keep::kept::{Kept, PAUSE, child_of, kill, lives};

#[test]
fn open_files_mode_and_owner_stay() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let disk = Kept::raw(&image, &["--allow-other"]);
    let path = disk.path();
    let file = open(&path);
    file.set_permissions(Permissions::from_mode(0o640)).expect("chmod");
    std::os::unix::fs::chown(&path, Some(12), Some(34)).expect("chown");
    disk.kill_server();
    file.write_all_at(b"through the old descriptor", 100).expect("write");
    let meta = file.metadata().expect("stat");
    assert_eq!((meta.mode() & 0o777, meta.uid(), meta.gid()), (0o640, 12, 34));
    assert_eq!(piece(&path, 100, 7), b"through");
    drop(file);
    disk.stop();
}

#[test]
fn an_image_that_grew_and_one_that_was_made_are_found_again() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("made.img");
    let disk = Kept::start(&["--growable", "--create", "1M", text(&image)]);
    // As another format it would be read differently: what a client writes must not decide that.
    let header = [b"QFI\xfb".as_slice(), &[0, 0, 0, 3]].concat();
    let file = open(&disk.path());
    file.write_all_at(&header, 0).expect("write");
    file.write_all_at(b"end", 2 * MIB).expect("grow");
    disk.kill_server();
    assert_eq!(piece(&disk.path(), 0, 8), header);
    assert_eq!(
        (piece(&disk.path(), 2 * MIB, 3), file.metadata().expect("stat").len()),
        (b"end".to_vec(), 2 * MIB + 3)
    );
    drop(file);
    disk.stop();
}

#[test]
fn an_overlay_that_a_command_put_on_top_stays_on_top() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let (directory, elsewhere) = (scratch(), scratch());
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "8M", "");
    let overlay = elsewhere.path().join("overlay.qcow2");
    let allowed = text(elsewhere.path());
    let disk = Kept::start(&["--format", "qcow2", "--allow-path", allowed, text(&image)]);
    let path = disk.path();
    let write = |byte: u8, at: u64| open(&path).write_all_at(&[byte; 4096], at).expect("write");
    write(1, 0);
    ok_words(&[&program(), "ctl", text(&path), "snapshot", text(&overlay)]);
    write(2, 4096);
    disk.kill_server();
    assert_eq!((piece(&path, 0, 1), piece(&path, 4096, 1)), (vec![1], vec![2]));
    write(3, 8192);
    assert_eq!(until(Duration::from_secs(20), || disk.is_ready().then_some(())), Some(()));
    ok_words(&[&program(), "ctl", text(&path), "commit"]);
    disk.kill_server();
    write(4, 12288);
    disk.stop();
    let steps = ["read -P 1 0 4k", "read -P 2 4k 4k", "read -P 3 8k 4k", "read -P 4 12k 4k"];
    qemu_io(&image, "qcow2", &steps);
}

#[test]
fn overlays_may_lie_after_a_restart_where_they_might_before() {
    if !needs_root() {
        return;
    }
    let (directory, elsewhere) = (scratch(), scratch());
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "8M", "");
    let allowed = text(elsewhere.path());
    let disk = Kept::start(&["--format", "qcow2", "--allow-path", allowed, text(&image)]);
    let snapshot = |overlay: &Path| {
        ok_words(&[&program(), "ctl", text(&disk.path()), "snapshot", text(overlay)]);
    };
    snapshot(&elsewhere.path().join("first.qcow2"));
    disk.kill_server();
    assert_eq!(until(Duration::from_secs(20), || disk.is_ready().then_some(())), Some(()));
    snapshot(&directory.path().join("second.qcow2"));
    snapshot(&elsewhere.path().join("third.qcow2"));
    disk.stop();
}

/// It was an image's, with the part of the file that the `json:` name gave, and would be the whole
/// file's.
#[test]
fn an_image_that_its_name_does_not_mean_does_not_come_on_top() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let directory = scratch();
    let (base, top) = (directory.path().join("base.raw"), directory.path().join("top.qcow2"));
    images::raw(&base, 3 * MIB, 1);
    let name = format!(
        r#"json:{{"driver":"raw","offset":1048576,"file":{{"driver":"file","filename":"{}"}}}}"#,
        text(&base)
    );
    ok_words(&["qemu-img", "create", "-qf", "qcow2", "-b", &name, "-F", "raw", text(&top), "2M"]);
    let disk = Kept::start(&["--format", "qcow2", text(&top)]);
    let refused = run(command(&[&program(), "ctl", text(&disk.path()), "commit"]));
    assert_eq!(refused.code(), Some(11), "{}", refused.output());
    assert!(refused.stderr.contains("a part of a file"), "{}", refused.stderr);
    disk.kill_server();
    assert!(piece(&disk.path(), 0, 4096) == pattern(1, MIB, 4096));
    disk.stop();
}

#[test]
fn an_overlay_of_the_command_line_is_opened_again() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let overlay = directory.path().join("overlay.qcow2");
    let disk = Kept::start(&["--format", "raw", "--overlay", text(&overlay), text(&image)]);
    let path = disk.path();
    open(&path).write_all_at(b"above", 100).expect("write");
    disk.kill_server();
    assert_eq!(
        (piece(&path, 100, 5), piece(&path, 0, 100)),
        (b"above".to_vec(), pattern(1, 0, 100))
    );
    open(&path).write_all_at(b"again", 5000).expect("write");
    disk.stop();
    assert_eq!(piece(&image, 0, 8192), pattern(1, 0, 8192));
    let again = crate::common::serve(&image, &["--format", "raw", "--overlay", text(&overlay)]);
    assert_eq!(
        (piece(again.path(), 100, 5), piece(again.path(), 5000, 5)),
        (b"above".to_vec(), b"again".to_vec())
    );
}

#[test]
fn a_partition_stays_where_it_is_whatever_becomes_of_its_table() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(4 * MIB, 1);
    // An MBR with one partition: from sector 2048 on, 4096 sectors.
    let mut table = [0; 66];
    table[..16].copy_from_slice(&[0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 16, 0, 0]);
    table[64..].copy_from_slice(&[0x55, 0xaa]);
    patch(&image, 446, &table);
    let disk = Kept::raw(&image, &["--partition", "1"]);
    // Locks stop only those who ask for them.
    patch(&image, 446, &[0; 16]);
    disk.kill_server();
    assert_eq!(std::fs::metadata(disk.path()).expect("stat").len(), 2 * MIB);
    assert!(piece(&disk.path(), 0, 4096) == pattern(1, MIB, 4096));
    disk.stop();
}

/// The kernel knows the size of the file and its pages; both are right whichever process serves.
/// What is appended is there once, in its order.
fn appended(options: &[&str]) {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.img");
    images::sparse(&image, 0);
    let disk = Kept::raw(&image, &[options, &["--growable"]].concat());
    let path = disk.path();
    let (record, stop) = (|number: u32| pattern(u64::from(number), 0, 100), AtomicBool::new(false));
    let count = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut file = File::options().append(true).open(&path).expect("open to append");
            let mut count = 0;
            while !stop.load(Ordering::Relaxed) {
                file.write_all(&record(count)).expect("append");
                count += 1;
            }
            count
        });
        for _ in 0..4 {
            std::thread::sleep(PAUSE);
            disk.kill_server();
        }
        std::thread::sleep(Duration::from_millis(500));
        stop.store(true, Ordering::Relaxed);
        writer.join().expect("no error")
    });
    let all: Vec<u8> = (0..count).flat_map(record).collect();
    assert!(count > 100, "only {count}");
    let seen = std::fs::read(&path).expect("read");
    assert!(seen == all, "{} bytes instead of {}", seen.len(), all.len());
    disk.stop();
    assert!(std::fs::read(&image).expect("read") == all);
}

#[test]
fn what_is_appended_is_there_once_and_in_order() {
    appended(&[]);
}

#[test]
fn what_is_appended_through_the_kernels_cache_is_there_once_and_in_order() {
    appended(&["--kernel-cache"]);
}

/// Names of the queue threads of a process with the CPUs that they may use.
fn queue_threads(pid: u32) -> Vec<(String, String)> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it lives");
    let of = |task: &Path| {
        let status = std::fs::read_to_string(task.join("status")).unwrap_or_default();
        let value = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap_or_default().trim().to_owned()
        };
        (value("Name:"), value("Cpus_allowed_list:"))
    };
    let mut all: Vec<_> = tasks.map(|task| of(&task.expect("a thread").path())).collect();
    all.retain(|(name, _)| name.starts_with("queue-"));
    all.sort();
    all
}

#[test]
fn the_next_process_has_as_many_threads_on_the_same_cpus() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let disk = Kept::raw(&image, &["--threads", "3", "--cpus", "0", "--numa", "off"]);
    let before = queue_threads(disk.server().expect("somebody serves"));
    assert_eq!((before.len(), before[0].1.as_str()), (3, "0"), "{before:?}");
    let next = disk.kill_server();
    until(STOP, || disk.is_ready().then_some(())).expect("it serves again");
    assert_eq!(queue_threads(next), before);
    disk.stop();
}

/// The pid of a process that is not a child of the test.
fn pid_of(pidfile: &Path) -> u32 {
    std::fs::read_to_string(pidfile).expect("a pid file").trim().parse().expect("a number")
}

#[test]
fn in_the_background_the_pid_file_names_the_process_that_keeps_the_mount() {
    if !needs_root() {
        return;
    }
    let (directory, _) = raw_image(MIB, 1);
    let (path, pidfile) = (directory.path().join("disk"), directory.path().join("pid"));
    let _cleared = Cleared(path.clone());
    let words = ["mount", "--keep-mount", "--transport", "dev", "--daemonize", "--format", "raw"];
    // Names that mean something in this directory only.
    let finished = run(command(&[&program()]).current_dir(directory.path()).args(words).args([
        "--pidfile",
        "pid",
        "disk.img",
        "disk",
    ]));
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    let helper = pid_of(&pidfile);
    let server = child_of(helper).expect("somebody serves");
    kill(server, Signal::KILL);
    let next = until(STOP, || child_of(helper).filter(|pid| *pid != server));
    assert!(next.is_some(), "nobody serves");
    assert_eq!(piece(&path, 5, 100), pattern(1, 5, 100));
    assert_eq!(pid_of(&pidfile), helper);
    // The control socket comes a moment after the first answers.
    let asks = || {
        let asked = run(command(&[&program(), "ctl", text(&path), "stats"]));
        (asked.code() == Some(0)).then_some(())
    };
    assert_eq!(until(STOP, asks), Some(()));
    ok_words(&[&program(), "umount", text(&path)]);
    let gone = until(STOP, || (!lives(helper) && !pidfile.exists()).then_some(()));
    // The mountpoint was made by the first server, and removed by the last.
    assert_eq!((gone, mount_at(&path), path.exists()), (Some(()), None, false));
}
