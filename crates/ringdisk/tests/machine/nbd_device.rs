//! Devices `/dev/nbdN` of the kernel: `qemu-nbd -c` and `-d`, and `nbd-client` at `serve --nbd`.
//! Each test has devices of its own.

use std::fs;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringdisk_testkit::images::{assert_clean, pattern, piece, qcow2};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{FileSystem, scratch, text};
use ringdisk_testkit::process::{Finished, LIMIT, Process, has, ok_words, patient, run, until};
use ringdisk_testkit::skips::needs;
use rustix::process::Signal;

use crate::common::serving::{Daemon, serve_command};
use crate::common::{MIB, program};

/// This program as `qemu-nbd`.
fn qemu_nbd(words: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.arg0("qemu-nbd").args(words);
    command
}

/// Whether there are devices.
fn there() -> bool {
    needs_root() && {
        let loaded = Path::new("/sys/module/nbd").exists()
            || Command::new("modprobe").args(["-q", "nbd"]).status().is_ok_and(|s| s.success());
        needs("kernel module nbd", loaded)
    }
}

/// A device of a test; at its end nothing is connected to it.
struct Device(PathBuf);

impl Device {
    fn number(index: u32) -> Device {
        Device(PathBuf::from(format!("/dev/nbd{index}")))
    }

    fn text(&self) -> &str {
        text(&self.0)
    }

    /// What the kernel says of it.
    fn says(&self, name: &str) -> Option<String> {
        let device = self.0.file_name().expect("a name").to_str().expect("text");
        let value = fs::read_to_string(format!("/sys/block/{device}/{name}")).ok()?;
        Some(value.trim().to_owned())
    }

    /// `qemu-nbd -c`, which has to succeed and to say nothing, but that a killed server has left
    /// its socket.
    fn connect(&self, words: &[&str]) {
        let ran = run(qemu_nbd(&[&["-c", self.text()], words].concat()));
        let said = ran.output();
        let said: Vec<&str> = said.lines().filter(|it| !it.contains("it is replaced")).collect();
        assert_eq!((ran.code(), said), (Some(0), Vec::new()), "{words:?}");
        assert!(self.says("pid").is_some(), "{} has no server", self.text());
    }

    /// `qemu-nbd -d`, which has to succeed.
    fn disconnect(&self) {
        let ran = run(qemu_nbd(&["-d", self.text()]));
        assert_eq!(ran.code(), Some(0), "{}", ran.output());
        assert_eq!(ran.stdout, format!("{} disconnected\n", self.text()));
        assert_eq!(self.says("pid"), None);
    }

    /// Waits until it has no server.
    fn is_free(&self) {
        let free = until(patient(LIMIT), || self.says("pid").is_none().then_some(()));
        assert!(free.is_some(), "{} still has a server", self.text());
    }

    /// fio writes all of it with direct I/O, and reads it back.
    fn verify(&self) {
        let name = format!("--filename={}", self.text());
        let words = ["fio", "--name=v", &name, "--rw=randwrite", "--bsrange=4k-64k", "--direct=1"];
        let more = ["--ioengine=libaio", "--iodepth=32", "--size=24M", "--verify=crc32c"];
        ok_words(&[&words[..], &more, &["--do_verify=1", "--verify_fatal=1"]].concat());
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.says("pid").is_some() {
            drop(run(qemu_nbd(&["-d", self.text()])));
        }
    }
}

fn image(directory: &Path) -> PathBuf {
    let image = directory.join("a.qcow2");
    qcow2(&image, "64M", "cluster_size=64k");
    image
}

#[test]
fn a_file_system_in_a_partition_lives_on_a_device() {
    if !there() {
        return;
    }
    let directory = scratch();
    let image = image(directory.path());
    let device = Device::number(0);
    device.connect(&["-f", "qcow2", "--discard=unmap", text(&image)]);
    assert_eq!(device.says("size").as_deref(), Some("131072"));
    assert_eq!(device.says("queue/logical_block_size").as_deref(), Some("512"));
    assert_eq!(device.says("queue/write_cache").as_deref(), Some("write back"));
    let queues = fs::read_dir("/sys/block/nbd0/mq").expect("queues").count();
    let cpus = std::thread::available_parallelism().expect("CPUs").get();
    assert_eq!(queues, cpus.min(4), "a connection for each CPU");
    // Another server does not get the device, and loses nothing of its own.
    let other = directory.path().join("b.qcow2");
    qcow2(&other, "1M", "");
    let second = run(qemu_nbd(&["-f", "qcow2", "-c", device.text(), text(&other)]));
    let wanted = "qemu-nbd: Failed to set NBD socket: /dev/nbd0 has a server already\n";
    assert_eq!((second.code(), second.output().as_str()), (Some(1), wanted));
    ok_words(&["sh", "-c", "printf 'label: gpt\\n,40M\\n,\\n' | sfdisk -q /dev/nbd0"]);
    ok_words(&["mkfs.ext4", "-q", "/dev/nbd0p1"]);
    let mounted = FileSystem::of(Path::new("/dev/nbd0p1"), &directory.path().join("m"), "rw");
    let file = mounted.path().join("file");
    fs::write(&file, pattern(3, 0, 8 << 20)).expect("write");
    mounted.unmount();
    device.disconnect();
    assert_clean(&image);
    // Its partitions are there when the command is back.
    device.connect(&["-f", "qcow2", "--discard=unmap", text(&image)]);
    ok_words(&["fsck.ext4", "-fn", "/dev/nbd0p1"]);
    let mounted = FileSystem::of(Path::new("/dev/nbd0p1"), &directory.path().join("m"), "ro");
    assert!(fs::read(&file).expect("read") == pattern(3, 0, 8 << 20));
    mounted.unmount();
    // A discard gives the space back.
    let before = fs::metadata(&image).map(|it| std::os::unix::fs::MetadataExt::blocks(&it));
    ok_words(&["blkdiscard", "/dev/nbd0p1"]);
    let after = fs::metadata(&image).map(|it| std::os::unix::fs::MetadataExt::blocks(&it));
    let (before, after) = (before.expect("blocks"), after.expect("blocks"));
    assert!(after * 512 + 4 * MIB < before * 512, "{before} blocks, then {after}");
    device.disconnect();
    assert_clean(&image);
}

#[test]
fn what_is_written_by_direct_io_is_read_back_on_all_connections() {
    if !(there() && needs("fio", has("fio"))) {
        return;
    }
    let directory = scratch();
    let image = image(directory.path());
    let device = Device::number(1);
    device.connect(&["-f", "qcow2", "-n", text(&image)]);
    device.verify();
    device.disconnect();
    assert_clean(&image);
}

#[test]
fn a_snapshot_and_a_disk_that_is_read_only_are_read_only_devices() {
    if !there() {
        return;
    }
    let directory = scratch();
    let image = image(directory.path());
    let device = Device::number(2);
    device.connect(&["-f", "qcow2", text(&image)]);
    let write = |seed| {
        let file = fs::File::options().write(true).open(&device.0).expect("open");
        file.write_all_at(&pattern(seed, 0, 1 << 20), 0).and_then(|()| file.sync_all())
    };
    write(4).expect("write");
    device.disconnect();
    ok_words(&["qemu-img", "snapshot", "-c", "then", text(&image)]);
    device.connect(&["-f", "qcow2", text(&image)]);
    write(5).expect("write");
    device.disconnect();
    for (words, seed) in [(&["-r"][..], 5), (&["-l", "then"], 4)] {
        device.connect(&[&["-f", "qcow2"], words, &[text(&image)]].concat());
        assert_eq!(device.says("ro").as_deref(), Some("1"));
        assert!(piece(&device.0, 0, 1 << 20) == pattern(seed, 0, 1 << 20), "{words:?}");
        write(6).expect_err("read-only");
        device.disconnect();
    }
}

/// The parent of the device, and the server: its child that has the image.
fn processes(device: &Device) -> (u32, u32) {
    let backend = device.says("backend").expect("a backend");
    let parent: u32 = backend.strip_prefix("ringdisk:").expect("ours").parse().expect("a pid");
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let server = children.expect("children").trim().parse().expect("one child");
    (parent, server)
}

fn signal(pid: u32, signal: &str) {
    ok_words(&["kill", signal, &pid.to_string()]);
}

fn is_gone(pid: u32) {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let gone = until(patient(LIMIT), || (!process.exists()).then_some(()));
    assert!(gone.is_some(), "process {pid} stays");
}

#[test]
fn a_device_whose_server_ends_is_free_again() {
    if !there() {
        return;
    }
    let directory = scratch();
    let image = image(directory.path());
    let device = Device::number(3);
    for (is_server, how) in [(true, "-KILL"), (true, "-TERM"), (false, "-TERM")] {
        device.connect(&["-f", "qcow2", text(&image)]);
        let (parent, server) = processes(&device);
        let open = fs::File::open(&device.0).expect("open");
        signal(if is_server { server } else { parent }, how);
        is_gone(parent);
        // Who has it open gets errors, and no wait; when it is closed, the device is free.
        open.read_exact_at(&mut [0; 4096], 32 * MIB).expect_err("no server");
        drop(open);
        device.is_free();
    }
    // A kill of the parent leaves the device with its server, and `-d` ends both.
    device.connect(&["-f", "qcow2", text(&image)]);
    let (parent, server) = processes(&device);
    signal(parent, "-KILL");
    assert_eq!(piece(&device.0, 0, 4096), [0; 4096]);
    device.disconnect();
    is_gone(server);
    assert!(!Path::new("/var/lock/qemu-nbd-nbd3").exists(), "its socket stays");
}

#[test]
fn in_the_foreground_it_says_what_it_has_connected_and_ends_by_a_signal() {
    if !there() {
        return;
    }
    let directory = scratch();
    let (image, socket) = (image(directory.path()), directory.path().join("s"));
    let device = Device::number(4);
    let words = ["-v", "-t", "-f", "qcow2", "-e", "2", "-k", text(&socket), "-c", device.text()];
    let mut command = qemu_nbd(&[&words[..], &[text(&image)]].concat());
    let server = Process::spawn(&mut command);
    let wanted = format!("NBD device /dev/nbd4 is now connected to {}\n", text(&image));
    let said = until(patient(LIMIT), || server.output().contains(&wanted).then_some(()));
    assert!(said.is_some(), "{}", server.output());
    // The kernel is one of two clients.
    let uri = format!("nbd+unix:///?socket={}", text(&socket));
    ok_words(&["qemu-io", "-f", "raw", "-c", "write -P 7 0 1M", &uri]);
    assert_eq!(piece(&device.0, 0, 4096), [7; 4096]);
    server.signal(Signal::INT);
    let finished: Finished = server.finish(patient(LIMIT));
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert_eq!(device.says("pid"), None);
    assert!(!socket.exists());
}

#[test]
fn what_cannot_be_connected_leaves_the_device_free() {
    if !there() {
        return;
    }
    let directory = scratch();
    let image = image(directory.path());
    let device = Device::number(5);
    let no = directory.path().join("no/s");
    for (words, wanted) in [
        (&["-f", "qcow2", "nothing"][..], "Failed to blk_new_open 'nothing': Could not open"),
        (&["-f", "raw", "--aio=native", text(&image)], "aio=native was specified"),
        (&["-f", "qcow2", "-k", text(&no), text(&image)], "Failed to bind socket to"),
    ] {
        let ran = run(qemu_nbd(&[&["-c", device.text()], words].concat()));
        assert_eq!(ran.code(), Some(1), "{words:?}");
        assert!(ran.stderr.contains(wanted), "{}", ran.stderr);
        assert_eq!(device.says("pid"), None);
    }
    // One that nobody is connected to.
    device.disconnect();
    device.connect(&["-f", "qcow2", text(&image)]);
    device.disconnect();
}

#[test]
fn nbd_client_connects_several_times_and_a_file_system_lives_there() {
    if !(there() && needs("nbd-client", has("nbd-client")) && needs("fio", has("fio"))) {
        return;
    }
    let directory = scratch();
    let (image, socket) = (image(directory.path()), directory.path().join("s"));
    let device = Device::number(6);
    let words = ["-f", "qcow2", text(&image), "--export-name", "n", "--nbd", text(&socket)];
    let daemon = Daemon::of(&mut serve_command(&words));
    let socket = text(&socket);
    ok_words(&["nbd-client", "-unix", socket, device.text(), "-N", "n", "-C", "4", "-b", "512"]);
    assert_eq!(device.says("size").as_deref(), Some("131072"));
    device.verify();
    ok_words(&["mkfs.ext4", "-q", device.text()]);
    let mounted = FileSystem::of(&device.0, &directory.path().join("m"), "rw");
    let file = mounted.path().join("file");
    fs::write(&file, pattern(3, 0, 8 << 20)).expect("write");
    mounted.unmount();
    ok_words(&["fsck.ext4", "-fn", device.text()]);
    ok_words(&["nbd-client", "-d", device.text()]);
    daemon.process.signal(Signal::TERM);
    let finished = daemon.process.finish(patient(LIMIT));
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert_clean(&image);
}
