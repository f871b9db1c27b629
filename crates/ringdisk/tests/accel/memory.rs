//! Guests in the host kernel whose memory is of each kind that a VMM gives: the data are right,
//! also where the kernel cannot pin the pages.

use std::fs::File;
use std::path::Path;

use ringdisk_testkit::images::{self, pattern};
use ringdisk_testkit::limits::needs;
use ringdisk_testkit::model::{Cut, FrontEnd, GuestRam, Request, Vm};
use ringdisk_testkit::mount::scratch;
use ringdisk_testkit::process::{LIMIT, Process, command, until};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::common::accel::{PLAIN, aligned, by_threads, has_module};
use crate::common::disks::in_memory;
use crate::common::serving::{Daemon, Place, load, options, stats};

/// Bytes of a guest, in pages of 2 MiB.
const BYTES: u64 = 32 << 20;

/// A machine on a new disk, in memory that `make` makes.
fn started(make: &impl Fn() -> File, words: &[&str]) -> (Place, Daemon, Vm) {
    let place = Place::new("raw");
    let daemon = place.start(&[&PLAIN, words].concat());
    let ram = GuestRam::of(make().into(), BYTES).expect("memory");
    let front = FrontEnd::connect(&place.socket);
    let vm = Vm::start_in(ram, front, options(false)).expect("it starts");
    (place, daemon, vm)
}

/// The kernel serves machines with such memory, and so do queue threads; the disk holds what they
/// have written.
fn verified(make: impl Fn() -> File) {
    for word in ["require", "off"] {
        let (place, daemon, mut vm) = started(&make, &["--accel", word]);
        let mut load = load(40);
        load.run(&mut vm, 400);
        load.drain(&mut vm);
        load.read_all(&mut vm);
        let counters = stats(&place.socket);
        assert_eq!(by_threads(&counters) == 0, word == "require", "{counters}");
        // What lies on whole pages is not copied on its way.
        let bytes = pattern(1, 0, 4096);
        assert_eq!(aligned(&mut vm, 0, 1, 64, &bytes), (0, bytes.clone()));
        assert_eq!(aligned(&mut vm, 1, 0, 64, &[0; 4096]), (0, bytes));
        drop(vm);
        daemon.stop(&[&place.socket]);
    }
}

fn sized(file: File) -> File {
    file.set_len(BYTES).expect("room");
    file
}

/// A new file on some file system.
fn file(path: &Path) -> File {
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
    sized(file.expect("a file"))
}

#[test]
fn memory_of_huge_pages_is_served() {
    if !has_module() {
        return;
    }
    verified(|| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
        sized(memfd_create("huge", flags).expect("a memfd of huge pages").into())
    });
}

#[test]
fn memory_goes_with_its_guest() {
    if !has_module() {
        return;
    }
    let make = || sized(memfd_create("goes-away", MemfdFlags::CLOEXEC).expect("a memfd").into());
    let (place, daemon, vm) = started(&make, &["--accel", "require"]);
    let maps = format!("/proc/{}/maps", daemon.process.pid());
    let is_there = || std::fs::read_to_string(&maps).expect("maps").contains("goes-away");
    assert!(is_there());
    drop(vm);
    assert!(until(LIMIT, || (!is_there()).then_some(())).is_some());
    daemon.stop(&[&place.socket]);
}

#[test]
fn memory_that_is_a_sealed_memfd_is_served() {
    if !has_module() {
        return;
    }
    verified(|| {
        let file = memfd_create("sealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file = sized(file.expect("a memfd").into());
        let seals = SealFlags::SHRINK | SealFlags::GROW;
        fcntl_add_seals(&file, seals).expect("seals");
        file
    });
}

#[test]
fn memory_that_is_a_file_on_tmpfs_is_served() {
    if !has_module() {
        return;
    }
    let (_directory, path) = in_memory();
    verified(|| file(&path));
}

#[test]
fn memory_that_is_a_file_on_a_disk_is_served() {
    if !has_module() {
        return;
    }
    let directory = scratch();
    verified(|| file(&directory.path().join("memory")));
}

/// Memory that no kernel pins (memfd_secret(2)), and who made it. A program that can call what the
/// standard library cannot.
fn secret() -> Option<(Process, File)> {
    let script = "\
        import ctypes, os, sys, time\n\
        fd = ctypes.CDLL(None, use_errno=True).syscall(447, 0)\n\
        if fd < 0: sys.exit(3)\n\
        os.ftruncate(fd, int(sys.argv[1]))\n\
        print(fd, flush=True)\n\
        time.sleep(600)\n";
    let mut maker = Process::spawn(&mut command(&["python3", "-c", script, &BYTES.to_string()]));
    let number = until(LIMIT, || {
        let said = maker.output().trim().parse::<i32>().ok();
        said.map(Some).or_else(|| maker.ended().map(|_| None))
    });
    let number = number.flatten();
    if !needs("memory of memfd_secret", number.is_some()) {
        return None;
    }
    let pid = Pid::from_raw(i32::try_from(maker.pid()).expect("a pid")).expect("a pid");
    let process = pidfd_open(pid, PidfdFlags::empty()).expect("a process");
    let file = pidfd_getfd(&process, number?, PidfdGetfdFlags::empty()).expect("its memory");
    Some((maker, file.into()))
}

#[test]
fn requests_of_memory_that_cannot_be_pinned_are_done_rightly_or_are_errors() {
    if !has_module() {
        return;
    }
    for word in ["off", "auto", "require"] {
        let Some((_maker, file)) = secret() else { return };
        let make = || file.try_clone().expect("a descriptor");
        let (place, daemon, mut vm) = started(&make, &["--accel", word]);
        let bytes = pattern(1, 0, 4096);
        let (written, _) = aligned(&mut vm, 0, 1, 64, &bytes);
        let content = images::piece(&place.image, 64 * 512, 4096);
        let expected = if written == 0 { bytes } else { vec![0; 4096] };
        assert!(written <= 1 && content == expected, "{word}: status {written}");
        let (read, got) = aligned(&mut vm, 1, 0, 64, &[7; 4096]);
        assert!(read == 1 || read == 0 && got == content, "{word}: status {read}");
        // What is copied on its way needs nothing to be pinned.
        let bytes = pattern(2, 0, 4096);
        let odd = Request::write(128, bytes.clone()).cut(Cut::Pieces(3));
        assert_eq!(vm.status(0, odd), 0, "{word}");
        assert_eq!(images::piece(&place.image, 128 * 512, 4096), bytes, "{word}");
        let counters = stats(&place.socket);
        assert_eq!(by_threads(&counters) == 0, word != "off", "{counters}");
        println!("{word}: status {written} of a write, {read} of a read");
        drop(vm);
        let said = daemon.stop(&[&place.socket]).output();
        assert_eq!(said.contains("Bad address"), word == "off" && written + read > 0, "{said}");
    }
}
