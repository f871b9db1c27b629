//! A mount in use that is stopped: it loses its name, tells who uses it, serves them to the last
//! byte, and then ends with 0; and the ways to end it sooner, each with a message and a code of its
//! own.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use ringdisk_testkit::images::{assert_clean, pattern, piece};
use ringdisk_testkit::limits::{UringParameter, mount_at, needs, needs_root, part_needs};
use ringdisk_testkit::mount::{Cleared, ECHO, FileSystem, Loop, Mounted, STOP, scratch, text};
use ringdisk_testkit::process::{Process, command, has, ok_words, run, until};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::mapping::Mapping;
use crate::common::tools::{Ran, qemu_img, ringdisk};
use crate::common::{MIB, mount, open, program, serve, serve_raw};

/// Ended in use.
const FORCED: Option<i32> = Some(13);
/// In use.
const BUSY: i32 = 5;

/// `ringdisk ctl PATH WORDS…`.
fn ctl(path: &Path, words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["ctl", text(path)], words].concat())
}

/// All that a command has said.
fn all(ran: &Ran) -> String {
    format!("{}{}", ran.out, ran.err)
}

/// Waits until a stopped mount has lost its name and has said `words`.
fn detached(disk: &Mounted, words: &str) {
    let is_so = || (mount_at(disk.path()).is_none() && disk.output().contains(words)).then_some(());
    assert_eq!(until(STOP, is_so), Some(()), "no '{words}' in: {}", disk.output());
}

/// Each transport that there is, with the switch held.
pub(super) fn on_each(mut test: impl FnMut(&str)) {
    if !needs_root() {
        return;
    }
    for transport in ["dev", "uring"] {
        let switch = UringParameter::set(transport == "uring");
        if transport == "dev" || part_needs("FUSE over io_uring", switch.is_some()) {
            test(transport);
        }
    }
}

/// A name that is given to a loop device is kept, however long the file system on it takes to
/// write.
#[test]
fn what_a_file_system_on_a_loop_device_has_not_written_yet_outlives_a_stop() {
    on_each(|transport| {
        if !needs("mkfs.ext4", has("mkfs.ext4")) {
            return;
        }
        let directory = scratch();
        let image = directory.path().join("disk.qcow2");
        qemu_img(directory.path(), &["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]).ok();
        let mut disk = serve(&image, &["--transport", transport]);
        ok_words(&["mkfs.ext4", "-q", "-F", disk.text()]);
        let Some(device) = Loop::attach(disk.path(), &[]) else { return };
        let place = directory.path().join("files");
        let files = FileSystem::of(device.device(), &place, "commit=600");
        let content = pattern(7, 0, 5_000_000);
        std::fs::write(place.join("before"), &content).expect("write");

        disk.process().signal(Signal::TERM);
        let name = device.device().file_name().and_then(|name| name.to_str()).expect("a name");
        detached(&disk, &format!("{name} (mounted on {})", place.display()));
        std::fs::write(place.join("after"), &content).expect("write after the stop");
        assert_eq!(disk.process().ended(), None, "{}", disk.output());
        files.unmount();
        drop(device);
        let finished = disk.finish();
        assert_eq!(finished.code(), Some(0), "{transport}: {}", finished.output());

        assert_clean(&image);
        let again = serve(&image, &["--transport", transport]);
        ok_words(&["e2fsck", "-fn", again.text()]);
        let device = Loop::attach(again.path(), &[]).expect("as before");
        let files = FileSystem::of(device.device(), &place, "ro");
        for name in ["before", "after"] {
            let read = std::fs::read(place.join(name)).expect("read");
            assert!(read == content, "{transport}: {name}");
        }
        files.unmount();
        drop(device);
        assert_eq!(again.stop().code(), Some(0));
    });
}

#[test]
fn a_loop_device_of_a_copy_of_the_mount_is_named() {
    if !needs_root() {
        return;
    }
    let mut disk = serve_raw(MIB, &[]);
    let copy = disk.directory.path().join("copy");
    std::fs::write(&copy, "").expect("a place");
    ok_words(&["mount", "--bind", disk.mounted.text(), text(&copy)]);
    let _cleared = Cleared(copy.clone());
    let Some(device) = Loop::attach(&copy, &[]) else { return };
    disk.mounted.process().signal(Signal::TERM);
    let name = device.device().file_name().and_then(|name| name.to_str()).expect("a name");
    detached(&disk.mounted, &format!("is in use by {name}:"));
    drop(device);
    assert_eq!(disk.mounted.finish().code(), Some(0));
}

#[test]
fn a_second_signal_ends_a_mount_in_use_with_a_code_of_its_own() {
    on_each(|transport| {
        let disk = serve_raw(MIB, &["--transport", transport]);
        let file = open(disk.mounted.path());
        file.write_all_at(b"kept", 10).expect("write");
        let finished = disk.mounted.force_stop();
        assert_eq!(finished.code(), FORCED, "{transport}: {}", finished.output());
        assert!(finished.stderr.contains("1 open file"), "{}", finished.output());
        file.write_all_at(b"lost", 10).expect_err("it has ended");
        assert_eq!(piece(&disk.image, 10, 4), b"kept", "what was answered is there");
    });
}

#[test]
fn a_stop_names_the_process_and_lasts_until_that_ends() {
    on_each(|transport| {
        let disk = serve_raw(MIB, &["--transport", transport]);
        let path = disk.mounted.path().to_owned();
        let gate = disk.directory.path().join("gate");
        let script = "exec 3<>\"$0\"; while [ ! -e \"$1\" ]; do sleep 0.05; done; echo done >&3";
        let mut client =
            Process::spawn(&mut command(&["sh", "-c", script, text(&path), text(&gate)]));
        let pid = client.pid();
        let has_opened =
            || std::fs::read_link(format!("/proc/{pid}/fd/3")).ok().filter(|p| *p == path);
        assert!(until(STOP, has_opened).is_some());
        let mut stop = Process::spawn(&mut command(&[&program(), "ctl", text(&path), "stop"]));
        detached(&disk.mounted, &format!("process {pid} (sh)"));
        // The one who asked is told, and waits; others still find the server by the path.
        let told = || stop.output().contains(&format!("process {pid} (sh)")).then_some(());
        assert_eq!(until(STOP, told), Some(()), "{}", stop.output());
        assert_eq!(stop.ended(), None);
        let stats = ctl(&path, &["stats"]);
        assert_eq!(stats.code, 0, "{}", all(&stats));
        assert!(all(&stats).contains("stopping: still in use by"), "{}", all(&stats));
        let late = ctl(&path, &["--timeout", "3s", "stop"]);
        assert_eq!(late.code, BUSY, "{}", all(&late));
        std::fs::write(&gate, "").expect("write");
        assert!(client.wait(STOP).is_some());
        let finished = disk.mounted.finish();
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        assert_eq!(stop.wait(STOP).and_then(|status| status.code()), Some(0));
        assert_eq!(piece(&disk.image, 0, 5), b"done\n");
    });
}

#[test]
fn ctl_stop_force_ends_a_mount_in_use() {
    on_each(|transport| {
        for is_stopping in [false, true] {
            let mut disk = serve_raw(MIB, &["--transport", transport]);
            let path = disk.mounted.path().to_owned();
            let file = open(&path);
            if is_stopping {
                disk.mounted.process().signal(Signal::INT);
                detached(&disk.mounted, "is in use by");
            }
            let stop = ctl(&path, &["stop", "--force"]);
            assert_eq!(stop.code, 0, "{}", all(&stop));
            let finished = disk.mounted.finish();
            assert_eq!(finished.code(), FORCED, "{}", finished.output());
            drop(file);
        }
    });
}

#[test]
fn a_stop_waits_as_long_as_it_was_told_to() {
    on_each(|transport| {
        let disk = serve_raw(MIB, &["--transport", transport, "--stop-timeout", "300ms"]);
        let file = open(disk.mounted.path());
        let finished = disk.mounted.stop();
        assert_eq!(finished.code(), FORCED, "{}", finished.output());
        assert!(finished.stderr.contains("still in use 300ms"), "{}", finished.output());
        drop(file);
    });
}

#[test]
fn a_stop_of_a_mount_that_somebody_detached_waits_too() {
    on_each(|transport| {
        let mut disk = serve_raw(MIB, &["--transport", transport]);
        let file = open(disk.mounted.path());
        ok_words(&["umount", "-l", disk.mounted.text()]);
        disk.mounted.process().signal(Signal::TERM);
        detached(&disk.mounted, "is in use by");
        file.write_all_at(b"kept", 10).expect("write");
        drop(file);
        let finished = disk.mounted.finish();
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        assert_eq!(piece(&disk.image, 10, 4), b"kept");
    });
}

#[test]
fn a_stop_of_a_mount_that_is_covered_waits_too() {
    on_each(|transport| {
        let mut disk = serve_raw(MIB, &["--transport", transport]);
        let path = disk.mounted.path().to_owned();
        let file = open(&path);
        let other = disk.directory.path().join("other");
        std::fs::write(&other, "other").expect("write");
        ok_words(&["mount", "--bind", text(&other), text(&path)]);
        disk.mounted.process().signal(Signal::TERM);
        let said = || disk.mounted.output().contains("is in use by").then_some(());
        assert_eq!(until(STOP, said), Some(()), "{}", disk.mounted.output());
        file.write_all_at(b"kept", 10).expect("write");
        ok_words(&["umount", text(&path)]);
        drop(file);
        let finished = disk.mounted.finish();
        assert_eq!(finished.code(), Some(0), "{transport}: {}", finished.output());
        assert_eq!(piece(&disk.image, 10, 4), b"kept");
    });
}

/// A paused terminal, or a pipe that is full, keeps neither a stop nor its end waiting.
#[test]
fn a_stop_does_not_wait_for_a_reader_of_its_messages() {
    on_each(|transport| {
        for is_forced in [false, true] {
            let (directory, image) = crate::common::raw_image(MIB, 1);
            let path = directory.path().join("disk");
            let _cleared = Cleared(path.clone());
            let (reader, writer) = std::io::pipe().expect("a pipe");
            rustix::fs::fcntl_setfl(&writer, OFlags::NONBLOCK).expect("a flag");
            while (&writer).write(&[b'x'; 4096]).is_ok() {}
            rustix::fs::fcntl_setfl(&writer, OFlags::empty()).expect("a flag");
            let mut words = std::process::Command::new(program());
            words.args(["mount", "--transport", transport, "-f", "raw"]).arg(&image).arg(&path);
            let mut server = words.stderr(writer).spawn().expect("the program");
            let pid = Pid::from_child(&server);
            // By then it answers.
            let ready = || {
                let there = mount_at(&path).is_some() && ctl(&path, &["stats"]).code == 0;
                there.then_some(())
            };
            assert_eq!(until(STOP, ready), Some(()), "{transport}");
            let file = open(&path);
            kill_process(pid, Signal::TERM).expect("it runs");
            let gone = until(STOP, || mount_at(&path).is_none().then_some(()));
            assert_eq!(gone, Some(()), "{transport}: it has its name still");
            file.write_all_at(b"kept", 10).expect("it is served on");
            if is_forced {
                std::thread::sleep(ECHO);
                kill_process(pid, Signal::TERM).expect("it runs");
            } else {
                drop(file);
            }
            let ended = until(STOP, || server.try_wait().expect("a child"));
            let _ = kill_process(pid, Signal::KILL);
            let code = ended.and_then(|status| status.code());
            assert_eq!(code, if is_forced { FORCED } else { Some(0) }, "{transport}");
            assert_eq!(piece(&image, 10, 4), b"kept");
            drop(reader);
        }
    });
}

#[test]
fn a_stop_says_how_long_it_waits_which_is_a_minute_under_a_service_manager() {
    if !needs_root() {
        return;
    }
    // The kit listens as a service manager does.
    let with_words: [(&[&str], Option<&str>); 3] = [
        (&[], Some("(60s at most)")),
        (&["--stop-timeout", "5min"], Some("(300s at most)")),
        (&["--stop-timeout", "none"], None),
    ];
    for (words, most) in with_words {
        let mut disk = serve_raw(MIB, words);
        let file = open(disk.mounted.path());
        disk.mounted.process().signal(Signal::TERM);
        detached(&disk.mounted, "is in use by");
        drop(file);
        let finished = disk.mounted.finish();
        assert_eq!(finished.code(), Some(0), "{words:?}: {}", finished.output());
        match most {
            Some(most) => assert!(finished.stderr.contains(most), "{}", finished.output()),
            None => assert!(!finished.stderr.contains("at most"), "{}", finished.output()),
        }
    }
}

#[test]
fn a_mapping_is_a_use() {
    on_each(|transport| {
        let mut disk = serve_raw(MIB, &["--transport", transport]);
        let mapping = Mapping::new(&open(disk.mounted.path()), 65_536);
        mapping.write(100, b"before");
        disk.mounted.process().signal(Signal::TERM);
        detached(&disk.mounted, &format!("process {}", std::process::id()));
        mapping.write(200, b"after");
        drop(mapping);
        let finished = disk.mounted.finish();
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        assert_eq!(piece(&disk.image, 100, 6), b"before");
        assert_eq!(piece(&disk.image, 200, 5), b"after", "what was in memory only");
    });
}

#[test]
fn storage_that_does_not_answer_holds_up_a_stop_but_not_its_end() {
    on_each(|transport| {
        let disk = mount(&["--null", "1G", "--latency", "60s", "--transport", transport]);
        let input = format!("if={}", disk.text());
        let words = ["dd", &input, "of=/dev/null", "bs=4k", "count=1", "iflag=direct"];
        let mut client = Process::spawn(&mut command(&words));
        client.has_begun(disk.path());
        let finished = disk.force_stop();
        // Not 13, which says that what was answered is on stable storage.
        assert_eq!(finished.code(), Some(12), "{}", finished.output());
        assert!(client.wait(STOP).is_some_and(|status| !status.success()));
    });
}

#[test]
fn the_next_mount_of_an_image_that_is_still_in_use_says_so() {
    if !needs_root() {
        return;
    }
    let mut disk = serve_raw(MIB, &[]);
    let path = disk.mounted.path().to_owned();
    let file = open(&path);
    disk.mounted.process().signal(Signal::TERM);
    detached(&disk.mounted, "is in use by");
    let words = ["mount", "--format", "raw", text(&disk.image), text(&path)];
    let next = ringdisk(Path::new("/"), &words);
    assert_eq!(next.code, BUSY, "{}", all(&next));
    let pid = format!("process {} (ringdisk)", disk.mounted.pid());
    for words in [pid.as_str(), "stop --force", "until its last user has closed it"] {
        assert!(all(&next).contains(words), "no '{words}' in {}", all(&next));
    }
    // Another image may take the place.
    let (_directory, image) = crate::common::raw_image(MIB, 2);
    let next = Mounted::start_at(&program(), &["--format", "raw", text(&image)], &path);
    assert_eq!(piece(&path, 0, 100), pattern(2, 0, 100));
    let stats = ctl(&path, &["stats"]);
    assert!(stats.code == 0 && !all(&stats).contains("stopping"), "{}", all(&stats));
    assert_eq!(next.stop().code(), Some(0));
    let mut bytes = [0; 100];
    file.read_exact_at(&mut bytes, 0).expect("the first one is served still");
    assert_eq!(bytes[..], pattern(1, 0, 100));
    drop(file);
    let finished = disk.mounted.finish();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

/// Its place is another mount's by then: a command that waits for the end of
/// that one does not wait for the first.
#[test]
fn a_mount_in_the_place_of_one_that_is_in_use_still_ends_by_itself() {
    on_each(|transport| {
        let mut disk = serve_raw(MIB, &["--transport", transport]);
        let path = disk.mounted.path().to_owned();
        let file = open(&path);
        let mut stop = Process::spawn(&mut command(&[&program(), "ctl", text(&path), "stop"]));
        detached(&disk.mounted, "is in use by");
        for words in [["ctl", text(&path), "stop"].as_slice(), &["umount", text(&path)]] {
            let next = Mounted::start_at(&program(), &["--null", "1M"], &path);
            let ended = ringdisk(Path::new("/"), words);
            assert_eq!(ended.code, 0, "{transport} {words:?}: {}", all(&ended));
            assert_eq!(next.finish().code(), Some(0));
        }
        assert_eq!(disk.mounted.process().ended(), None, "{}", disk.mounted.output());
        assert_eq!(stop.ended(), None, "{}", stop.output());
        drop(file);
        assert_eq!(stop.wait(STOP).and_then(|status| status.code()), Some(0), "{}", stop.output());
        // The process that has waited may use the image.
        let again = serve(&disk.image, &["--format", "raw", "--transport", transport]);
        assert_eq!(again.stop().code(), Some(0));
        assert_eq!(disk.mounted.finish().code(), Some(0));
    });
}

#[test]
fn who_waits_for_the_end_of_a_server_hears_when_that_is_killed_or_forced() {
    if !needs_root() {
        return;
    }
    for (signal, code) in [(Signal::KILL, 7), (Signal::TERM, 13)] {
        let mut disk = serve_raw(MIB, &[]);
        let path = disk.mounted.path().to_owned();
        let file = open(&path);
        let stop = Process::spawn(&mut command(&[&program(), "ctl", text(&path), "stop"]));
        let told = || stop.output().contains("in use by").then_some(());
        assert_eq!(until(STOP, told), Some(()), "{}", stop.output());
        disk.mounted.process().signal(signal);
        if signal == Signal::TERM {
            // The first signal: it was told to stop by a command.
            std::thread::sleep(ECHO);
            disk.mounted.process().signal(signal);
        }
        let finished = stop.finish(STOP);
        assert_eq!(finished.code(), Some(code), "{signal:?}: {}", finished.output());
        drop(file);
        assert!(disk.mounted.process().wait(STOP).is_some(), "{}", disk.mounted.output());
    }
}

/// None of them loses what was taken from it, also who comes at the last moment: between a look
/// that finds nobody and the end of the name.
#[test]
fn a_client_that_opens_it_again_and_again_is_served_until_it_has_no_name() {
    on_each(|transport| {
        for round in 0..10 {
            let mut disk = serve_raw(MIB, &["--transport", transport]);
            let path = disk.mounted.path().to_owned();
            let device = std::fs::metadata(&path).expect("stat").dev();
            // No open file of the server's, but it keeps the mount busy.
            let kept = rustix::fs::open(&path, OFlags::PATH, Mode::empty()).expect("a name");
            let client = std::thread::spawn(move || {
                let mut count = 0u64;
                // Without its name, there is the file below, or none.
                while let Ok(file) = File::options().read(true).write(true).open(&path) {
                    if file.metadata().expect("stat").dev() != device {
                        break;
                    }
                    count += 1;
                    file.write_all_at(&count.to_le_bytes(), 0).expect("write");
                    drop(file);
                    std::thread::sleep(Duration::from_micros(100));
                }
                count
            });
            std::thread::sleep(ECHO);
            disk.mounted.process().signal(Signal::TERM);
            let count = client.join().expect("no error");
            drop(kept);
            let finished = disk.mounted.finish();
            assert_eq!(finished.code(), Some(0), "{transport} {round}: {}", finished.output());
            assert!(count > 0, "it was served");
            assert_eq!(piece(&disk.image, 0, 8), count.to_le_bytes(), "{transport} {round}");
        }
    });
}

#[test]
fn an_unmount_names_who_uses_the_mount_and_by_force_is_no_clean_end() {
    on_each(|transport| {
        let mut disk = serve_raw(MIB, &["--transport", transport]);
        let path = disk.mounted.path().to_owned();
        let file = open(&path);
        let busy = ringdisk(Path::new("/"), &["umount", text(&path)]);
        assert_eq!(busy.code, BUSY, "{}", all(&busy));
        let pid = format!("process {}", std::process::id());
        assert!(all(&busy).contains(&pid), "{}", all(&busy));
        let forced = ringdisk(Path::new("/"), &["umount", "--force", text(&path)]);
        assert_eq!(forced.code, 0, "{}", all(&forced));
        let ended = disk.mounted.process().wait(STOP).and_then(|status| status.code());
        assert_eq!(ended, FORCED, "{}", disk.mounted.output());
        drop(file);
    });
}

/// The kernel aborts first, and then finds that it is in use.
#[test]
fn an_unmount_by_force_of_another_program_is_no_clean_end() {
    on_each(|transport| {
        let mut disk = serve_raw(MIB, &["--transport", transport]);
        let path = disk.mounted.path().to_owned();
        let file = open(&path);
        file.write_all_at(b"kept", 10).expect("write");
        let _ = run(command(&["umount", "-f", text(&path)]));
        let ended = disk.mounted.process().wait(STOP).and_then(|status| status.code());
        assert_eq!(ended, FORCED, "{transport}: {}", disk.mounted.output());
        assert!(disk.mounted.output().contains("aborted"), "{}", disk.mounted.output());
        assert_eq!(mount_at(&path), None);
        file.write_all_at(b"lost", 10).expect_err("it has ended");
        assert_eq!(piece(&disk.image, 10, 4), b"kept", "what was answered is there");

        let disk = serve_raw(MIB, &["--transport", transport]);
        ok_words(&["umount", "-f", disk.mounted.text()]);
        let finished = disk.mounted.finish();
        assert_eq!(finished.code(), Some(0), "nobody used it: {}", finished.output());
    });
}

#[test]
fn a_kept_mount_in_use_outlives_its_process_and_ends_with_its_last_user() {
    if !needs_root() {
        return;
    }
    let mut disk = serve_raw(MIB, &["--keep-mount"]);
    let file: File = open(disk.mounted.path());
    disk.mounted.process().signal(Signal::TERM);
    detached(&disk.mounted, "is in use by");
    let serving = child_of(disk.mounted.pid()).expect("a serving process");
    ok_words(&["kill", "-KILL", &serving.to_string()]);
    file.write_all_at(b"kept", 10).expect("by the next process");
    assert_ne!(child_of(disk.mounted.pid()), Some(serving));
    drop(file);
    let finished = disk.mounted.finish();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert_eq!(piece(&disk.image, 10, 4), b"kept");
}

#[test]
fn a_second_signal_ends_a_kept_mount_in_use() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(MIB, &["--keep-mount"]);
    let file = open(disk.mounted.path());
    let finished = disk.mounted.force_stop();
    assert_eq!(finished.code(), FORCED, "{}", finished.output());
    drop(file);
}

/// Whether the serving process hears it, or dies before that, or the next one is not ready yet.
#[test]
fn a_second_signal_that_meets_the_death_of_the_serving_process_ends_a_kept_mount() {
    if !needs_root() {
        return;
    }
    for delay_ms in [0, 1, 5, 20, 100] {
        let mut disk = serve_raw(MIB, &["--keep-mount"]);
        let file = open(disk.mounted.path());
        disk.mounted.process().signal(Signal::TERM);
        detached(&disk.mounted, "is in use by");
        std::thread::sleep(ECHO);
        let serving = child_of(disk.mounted.pid()).expect("a serving process");
        ok_words(&["kill", "-KILL", &serving.to_string()]);
        std::thread::sleep(Duration::from_millis(delay_ms));
        disk.mounted.process().signal(Signal::TERM);
        let finished = disk.mounted.finish();
        assert_eq!(finished.code(), FORCED, "{delay_ms} ms: {}", finished.output());
        drop(file);
    }
}

/// The process that a kept mount's parent has started.
fn child_of(pid: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

/// A clean end, if it comes at all, in any case without help.
#[test]
fn nothing_is_waited_for_where_nobody_uses_the_mount() {
    on_each(|transport| {
        let disk = serve_raw(MIB, &["--transport", transport]);
        assert_eq!(piece(disk.mounted.path(), 0, 100), pattern(1, 0, 100));
        let finished = disk.mounted.stop();
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        assert!(!finished.stderr.contains("in use"), "{}", finished.output());
    });
}

/// The lock of the mountpoint tells of the server's end; another program may have had it when the
/// mount began.
#[test]
fn an_unmount_does_not_end_before_a_server_that_could_not_lock_its_mountpoint() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let (slow, at) = (directory.path().join("slow"), directory.path().join("disk"));
    std::fs::write(&slow, "").expect("a mountpoint");
    let other = File::create(&at).expect("a mountpoint");
    rustix::fs::flock(&other, rustix::fs::FlockOperation::LockExclusive).expect("lock");
    // An image that takes long for its flush.
    let image = Mounted::start_at(&program(), &["--null", "1M", "--latency", "3s"], &slow);
    let disk = Mounted::start_at(&program(), &["--format", "raw", image.text()], &at);
    drop(other);
    open(disk.path()).write_all_at(&[7; 512], 0).expect("write");
    let ran = ringdisk(Path::new("/"), &["umount", "--timeout", "1s", text(&at)]);
    assert_eq!(ran.code, 14, "{}", all(&ran));
    assert!(all(&ran).contains("its server has not ended"), "{}", all(&ran));
    assert_eq!(disk.finish().code(), Some(0));
}
