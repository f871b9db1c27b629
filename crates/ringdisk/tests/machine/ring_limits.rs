//! What rings need of the machine and do not get: locked memory, huge pages, capabilities, io_uring
//! itself. The next lower way serves, or a clear error says what is missing.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use ringdisk_testkit::images::{pattern, piece};
use ringdisk_testkit::limits::{Sysctl, UringParameter, alone, mount_at, needs, needs_root};
use ringdisk_testkit::mount::{Mounted, text};
use ringdisk_testkit::process::{LIMIT, Process, command, has};

use crate::common::tools::ringdisk;
use crate::common::{
    MIB, assert_refused, kernel_is, open, open_direct, program, raw_image, serve_raw,
};

/// Root, and the kernel's switch.
fn rings() -> Option<UringParameter> {
    if !needs_root() {
        return None;
    }
    UringParameter::set(true)
}

/// How requests travel, as the mount says itself.
fn transport(disk: &Mounted) -> String {
    let out = ringdisk(Path::new("/"), &["topology", disk.text()]).ok().out;
    let line = out.lines().find_map(|line| line.trim().strip_prefix("transport"));
    line.expect("a line about it").trim().to_owned()
}

/// Reads and writes past the page cache.
fn assert_serves(disk: &Mounted) {
    let file = open_direct(disk.path());
    let mut memory = crate::common::Aligned::new(1 << 20);
    file.read_exact_at(memory.bytes_mut(), MIB).expect("read");
    assert!(memory.bytes() == pattern(1, MIB, 1 << 20));
    file.write_all_at(memory.bytes(), 0).expect("write");
    assert!(piece(disk.path(), 0, 1 << 20) == memory.bytes());
}

/// The program serving `image` over rings, past the page cache, without the right to lock more than
/// `limit` bytes.
fn with_locked(limit: u64, zero_copy: &str, image: &Path, path: &Path) -> Command {
    let limit = format!("--memlock={limit}:{limit}");
    let mut out = command(&["prlimit", &limit, "setpriv", "--bounding-set=-ipc_lock"]);
    out.args(["--inh-caps=-ipc_lock", &program(), "-vv", "mount", "--transport", "uring"]);
    out.args(["--direct", "--zero-copy", zero_copy, "-f", "raw"]).args([image, path]);
    out
}

#[test]
fn with_little_locked_memory_pools_serve_unregistered() {
    let Some(_switch) = rings() else { return };
    if !(needs("setpriv", has("setpriv")) && needs("prlimit", has("prlimit"))) {
        return;
    }
    let (directory, image) = raw_image(4 * MIB, 1);
    let path = directory.path().join("disk");
    for zero_copy in ["off", "auto"] {
        // What systemd gives: enough for rings, and not for pools.
        let mut words = with_locked(8 * MIB, zero_copy, &image, &path);
        let disk = Mounted::from_command(&mut words, &path);
        assert_serves(&disk);
        let is_over_rings = transport(&disk).contains("io_uring");
        let finished = disk.stop();
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        assert!(is_over_rings, "{}", finished.output());
        let said = finished.stderr.lines().filter(|l| l.contains("pools are not registered"));
        assert_eq!(said.count() > 0, kernel_is(7, 3), "{}", finished.output());
        crate::common::patch(&image, 0, &pattern(1, 0, 1 << 20));
    }
}

#[test]
fn without_locked_memory_for_rings_either_it_is_served_or_the_limit_is_named() {
    let Some(_switch) = rings() else { return };
    if !(needs("setpriv", has("setpriv")) && needs("prlimit", has("prlimit"))) {
        return;
    }
    let (directory, image) = raw_image(4 * MIB, 1);
    let path = directory.path().join("disk");
    match Mounted::try_from_command(&mut with_locked(0, "auto", &image, &path), &path) {
        Ok(disk) => assert_eq!(disk.stop().code(), Some(0)),
        Err(finished) => assert_refused(&finished, &["RLIMIT_MEMLOCK"]),
    }
    assert_eq!(mount_at(&path), None);
}

#[test]
fn without_huge_pages_pools_serve() {
    let Some(_switch) = rings() else { return };
    let _alone = alone();
    let Some(_pages) = Sysctl::set("/sys/kernel/mm/transparent_hugepage/enabled", "never") else {
        return;
    };
    let disk = serve_raw(4 * MIB, &["--transport", "uring", "--direct"]);
    assert_serves(&disk.mounted);
    assert_eq!(disk.mounted.stop().code(), Some(0));
}

/// Root of a user namespace looks like root and has no right to the pages of clients.
#[test]
fn without_the_right_to_zero_copy_pools_serve_and_asking_for_it_is_an_error() {
    let Some(_switch) = rings() else { return };
    if !needs("unshare", has("unshare")) {
        return;
    }
    let (directory, image) = raw_image(4 * MIB, 1);
    let script = format!(
        "cd {dir} && : >disk && {{ {program} -v mount --transport uring --zero-copy $1 -f raw \
         {image} disk & }} \
         && n=0 && until {program} topology disk | grep transport; do kill -0 $! || exit 9; sleep \
         0.05; done \
         && cmp disk {image} && {program} umount disk; wait",
        dir = text(directory.path()),
        program = program(),
        image = text(&image),
    );
    let run = |zero_copy: &str| {
        let words =
            ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", &script, "sh"];
        Process::spawn(command(&words).arg(zero_copy)).finish(LIMIT)
    };
    let finished = run("auto");
    let said = finished.output();
    if !needs("mounts in user namespaces", !said.contains("permission denied")) {
        return;
    }
    assert_eq!(finished.code(), Some(0), "{said}");
    assert!(said.contains("io_uring") && !said.contains("served over /dev/fuse"), "{said}");
    let lines = said.lines().filter(|line| line.contains("ringdisk: no zero-copy:")).count();
    assert_eq!(lines, usize::from(kernel_is(7, 3)), "{said}");
    let finished = run("on");
    assert_refused(&finished, &["no zero-copy"]);
    assert_eq!(finished.code(), Some(9), "{}", finished.output());
}

/// `kernel.io_uring_disabled=2` forbids io_uring to all processes: a server that had it
/// before goes on, to the flush at the end.
#[test]
fn where_io_uring_is_switched_off_for_all_new_mounts_say_so_and_old_ones_end_well() {
    // For the whole machine, so only where nobody else is.
    let wanted = std::env::var("RINGDISK_HOTPLUG").is_ok_and(|value| value == "1");
    if !needs("leave to forbid io_uring to everybody (RINGDISK_HOTPLUG=1)", wanted) {
        return;
    }
    for transport in ["dev", "uring", "auto"] {
        let Some(_switch) = rings() else { return };
        let _alone = alone();
        let old = serve_raw(4 * MIB, &["--transport", transport]);
        let Some(setting) = Sysctl::set("kernel/io_uring_disabled", "2") else { return };
        open(old.mounted.path()).write_all_at(b"later", 10).expect("write");
        let path = old.directory.path().join("new");
        std::fs::write(&path, "").expect("a mountpoint");
        let refused = crate::common::try_mount(&["--null", "1M", "--transport", transport], &path);
        assert_refused(&refused, &["io_uring", "kernel.io_uring_disabled is 2"]);
        assert_eq!(mount_at(&path), None);
        let finished = old.mounted.stop();
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        drop(setting);
        assert_eq!(piece(&old.image, 10, 5), b"later");
    }
}
