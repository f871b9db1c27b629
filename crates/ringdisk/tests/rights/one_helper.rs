//! What is kept and confined has two processes: the server, and one that keeps what it serves,
//! starts the next server, and is the helper process of each.

use std::fs;
use std::path::Path;

use ringdisk_testkit::images::{pattern, piece};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::model::{FrontEnd, Request, Vm, VmOptions};
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, ok_words, until};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::confined::{assert_confined, children, of_threads};
use crate::common::tools::ringdisk;
use crate::common::{MIB, program};

/// The server, confined, as the only process beside the one that keeps what it serves.
///
/// * `before`: the server before it.
fn only_server(keeper: u32, before: Option<u32>) -> u32 {
    let is_inside = |server: &u32| {
        let filters = of_threads(*server, "Seccomp_filters");
        Some(*server) != before && filters.len() > 1 && filters.iter().all(|count| count == "2")
    };
    let server = until(LIMIT, || children(keeper).into_iter().find(is_inside));
    let server = server.expect("a server that is confined");
    assert_confined(server, true);
    assert_confined(keeper, false);
    assert_eq!((children(keeper), children(server)), (vec![server], vec![]));
    server
}

fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid");
    kill_process(pid, Signal::KILL).expect("it runs");
}

/// All names of a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("a directory").flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn qcow2(directory: &Path) -> std::path::PathBuf {
    let image = directory.join("disk.qcow2");
    ok_words(&[&program(), "create", text(&image), "64M"]);
    image
}

#[test]
fn a_kept_mount_has_one_process_beside_its_server() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let (image, path) = (qcow2(directory.path()), directory.path().join("mount"));
    let program = program();
    let words = [&program, "mount", "--keep-mount", "--transport", "dev"];
    // The mountpoint is the program's own.
    let mut command = command(&["sh", "-c", "rm -f -- \"$0\"; exec \"$@\"", text(&path)]);
    command.args(words).args([&image, &path]);
    let disk = Mounted::from_command(&mut command, &path);
    let mut last = only_server(disk.pid(), None);
    let write = |seed: u64| {
        fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|file| {
                std::os::unix::fs::FileExt::write_all_at(&file, &pattern(seed, 0, 4096), seed * MIB)
            })
            .expect("write");
    };
    for seed in 1..4 {
        kill(last);
        write(seed);
        last = only_server(disk.pid(), Some(last));
        // The helper makes the overlay.
        let overlay = directory.path().join(format!("{seed}.qcow2"));
        let words = ["ctl", text(&path), "snapshot", text(&overlay)];
        ringdisk(Path::new("/"), &words).ok();
    }
    assert_eq!(children(disk.pid()), [last]);
    for seed in 1..4 {
        assert_eq!(piece(&path, seed * MIB, 4096), pattern(seed, 0, 4096));
    }
    // The helper removes the mount, and the mountpoint, which was made.
    assert_eq!(disk.stop().code(), Some(0));
    assert_eq!(names(directory.path()), ["1.qcow2", "2.qcow2", "3.qcow2", "disk.qcow2"]);
}

#[test]
fn a_kept_disk_has_one_process_beside_its_server() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let (image, socket) = (qcow2(directory.path()), directory.path().join("socket"));
    let words = ["serve", "--keep", "--queues", "1", "--vhost-user-blk", text(&socket)];
    let mut keeper = Process::spawn(command(&[&[&*program()], &words[..]].concat()).arg(&image));
    let options = VmOptions { queues: 1, ..VmOptions::default() };
    let mut vm = Vm::started(FrontEnd::connect(&socket), options);
    let mut last = only_server(keeper.pid(), None);
    for seed in 1..4 {
        kill(last);
        let data = pattern(seed, 0, 4096);
        assert_eq!(vm.status(0, Request::write(seed * 8, data)), 0, "{}", keeper.output());
        last = only_server(keeper.pid(), Some(last));
        let overlay = directory.path().join(format!("{seed}.qcow2"));
        let words = ["ctl", text(&socket), "snapshot", text(&overlay)];
        ringdisk(Path::new("/"), &words).ok();
    }
    assert_eq!(vm.status(0, Request::flush()), 0);
    assert_eq!(children(keeper.pid()), [last]);
    // The helper removes the socket.
    keeper.signal(Signal::TERM);
    assert!(keeper.wait(LIMIT).expect("it ends").success(), "{}", keeper.output());
    assert_eq!(names(directory.path()), ["1.qcow2", "2.qcow2", "3.qcow2", "disk.qcow2"]);
}
