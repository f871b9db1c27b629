//! A server of each kind, asked from inside what it could do.
//!
//! A new way to be confined is one more row of [`WAYS`], or one more test.

use std::ffi::{CStr, CString};
use std::fs::{self, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ringdisk_sandbox::Calls;
use ringdisk_testkit::images;
use ringdisk_testkit::limits::{Alone, alone, needs, needs_root};
use ringdisk_testkit::mount::{Mounted, for_user, scratch, text};
use ringdisk_testkit::process::{command, has, until};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::confined::{children, of_threads};
use crate::common::serving::{Daemon, Place, serve_command};
use crate::common::{MIB, Served, program, raw_image, serve};
use crate::probe::filter::{ALLOW, Filters, OURS, Question, differences, filters_of};

/// Words of each way in which root's servers can be confined, for `mount` and `serve`.
const WAYS: [&[&str]; 4] = [
    &["--sandbox", "on"],
    &["--sandbox", "strict"],
    &["--sandbox", "on", "--user", "nobody"],
    &["--sandbox", "strict", "--user", "nobody"],
];

/// The way's user may open the image again.
fn give(way: &[&str], image: &Path) {
    let owner = if way.contains(&"nobody") { NOBODY } else { 0 };
    let directory = image.parent().expect("its directory");
    for path in [directory, image] {
        std::os::unix::fs::chown(path, Some(owner), Some(owner)).expect("chown");
    }
}

/// Serves a raw image that belongs to the way's user.
fn serve_raw(way: &[&str], words: &[&str]) -> Served {
    let (directory, image) = raw_image(MIB, 1);
    give(way, &image);
    let mounted = serve(&image, &[&["--format", "raw"], way, words].concat());
    Served { mounted, image, directory }
}

/// Every thread is the way's user, and cannot be another one again.
#[track_caller]
fn assert_is_of(way: &[&str], pid: u32) {
    let owner = if way.contains(&"nobody") { NOBODY } else { 0 };
    let users = of_threads(pid, "Uid");
    let wanted = [owner.to_string(), owner.to_string(), owner.to_string(), owner.to_string()];
    assert!(users.iter().all(|user| *user == wanted.join("\t")), "{users:?}");
}

/// How long the next process may take.
const NEXT: Duration = Duration::from_secs(30);

/// Types of `/proc/net/unix`: `SOCK_DGRAM`.
const DATAGRAM: &str = "0002";

/// Sockets of datagrams that a process has.
pub(crate) fn datagram_sockets(pid: u32) -> Vec<String> {
    // The two lists are of two moments: a socket that came between them is in one only, and is not
    // taken for one that stays.
    let first = datagram_sockets_now(pid);
    if first.is_empty() {
        return first;
    }
    let again = datagram_sockets_now(pid);
    first.into_iter().filter(|socket| again.contains(socket)).collect()
}

fn datagram_sockets_now(pid: u32) -> Vec<String> {
    // Of the network that the process is in.
    let known = fs::read_to_string(format!("/proc/{pid}/net/unix")).expect("sockets");
    let type_of = |inode: &str| {
        let row = known.lines().find(|line| line.split_whitespace().nth(6) == Some(inode))?;
        row.split_whitespace().nth(4).map(str::to_owned)
    };
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors").flatten();
    let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    let sockets = links.filter_map(|link| {
        let link = link.to_str()?.to_owned();
        let inode = link.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned();
        // One that is in no list is of another family, and should not be there either.
        (type_of(&inode).as_deref().unwrap_or(DATAGRAM) == DATAGRAM).then_some(link)
    });
    sockets.collect()
}

/// The server can do what it needs, and nothing else.
#[track_caller]
fn assert_walled(pid: u32, calls: &Calls, image: &Path) {
    assert_eq!(datagram_sockets(pid), [""; 0]);
    let Some(filters) = filters_of(pid) else { return };
    let found = differences(&filters, calls, pid);
    let first: Vec<_> = found.iter().take(20).collect();
    assert!(found.is_empty(), "{} differ: {first:#?}", found.len());
    assert_reaches_nobody(&filters, pid, calls);
    #[cfg(target_arch = "x86_64")]
    walls::assert_closed(pid, image);
}

/// Whatever the list says: calls that reach other processes, users, files' modes or the kernel are
/// on none.
#[track_caller]
#[expect(clippy::too_many_lines, reason = "a table of calls")]
fn assert_reaches_nobody(filters: &Filters, pid: u32, calls: &Calls) {
    let other = u64::from(pid) + 1;
    let with = |call: i64, first: &[u64]| {
        let mut arguments = [0; 6];
        arguments[..first.len()].copy_from_slice(first);
        (call, arguments)
    };
    let bare = |call: i64| with(call, &[]);
    let all = [
        // Signals.
        bare(libc::SYS_kill),
        bare(libc::SYS_tkill),
        with(libc::SYS_tgkill, &[other, other, 9]),
        bare(libc::SYS_rt_sigqueueinfo),
        bare(libc::SYS_rt_tgsigqueueinfo),
        bare(libc::SYS_pidfd_open),
        bare(libc::SYS_pidfd_send_signal),
        with(libc::SYS_fcntl, &[3, 8, 1]),
        with(libc::SYS_fcntl, &[3, 10, 9]),
        with(libc::SYS_fcntl, &[3, 15, 1]),
        with(libc::SYS_fcntl, &[3, 4, 0x2000]),
        // Locks for which others wait.
        with(libc::SYS_flock, &[3, 2]),
        with(libc::SYS_flock, &[3, 6]),
        with(libc::SYS_flock, &[3, 5]),
        with(libc::SYS_fcntl, &[3, 7]),
        with(libc::SYS_fcntl, &[3, 38]),
        // Where others run, and with what.
        with(libc::SYS_sched_setaffinity, &[other]),
        bare(libc::SYS_sched_setscheduler),
        bare(libc::SYS_sched_setattr),
        bare(libc::SYS_setpriority),
        with(libc::SYS_prlimit64, &[other, 7, 1]),
        with(libc::SYS_prlimit64, &[0, 7, 1]),
        with(libc::SYS_move_pages, &[other]),
        bare(libc::SYS_migrate_pages),
        bare(libc::SYS_process_madvise),
        bare(libc::SYS_process_mrelease),
        // Files of others, and programs.
        bare(libc::SYS_fchmod),
        bare(libc::SYS_fchmodat),
        bare(libc::SYS_fchown),
        bare(libc::SYS_fchownat),
        bare(libc::SYS_setxattr),
        bare(libc::SYS_fsetxattr),
        bare(libc::SYS_linkat),
        bare(libc::SYS_symlinkat),
        bare(libc::SYS_renameat2),
        bare(libc::SYS_mkdirat),
        bare(libc::SYS_mknodat),
        bare(libc::SYS_utimensat),
        with(libc::SYS_openat, &[0, 0, 0x41, 0o4755]),
        with(libc::SYS_openat, &[0, 0, 0x41, 0o755]),
        with(libc::SYS_unlinkat, &[0, 0, 0x200]),
        with(libc::SYS_memfd_create, &[0, 0x10]),
        with(libc::SYS_mmap, &[0, 4096, 5]),
        with(libc::SYS_mprotect, &[0, 4096, 4]),
        bare(libc::SYS_pkey_mprotect),
        bare(libc::SYS_remap_file_pages),
        // Sockets.
        bare(libc::SYS_socket),
        bare(libc::SYS_socketpair),
        bare(libc::SYS_bind),
        bare(libc::SYS_connect),
        bare(libc::SYS_sendmmsg),
        with(libc::SYS_sendto, &[3, 0, 0, 0, 4096, 110]),
        with(libc::SYS_setsockopt, &[3, 1, 26]),
        with(libc::SYS_setsockopt, &[3, 0, 20]),
        // Processes, name spaces, users, the kernel.
        with(libc::SYS_clone, &[17]),
        with(libc::SYS_clone, &[0x003d_0f00 | 0x0002_0000]),
        with(libc::SYS_clone, &[0x003d_0f00 | 0x1000_0000]),
        bare(libc::SYS_clone3),
        bare(libc::SYS_execve),
        bare(libc::SYS_ptrace),
        bare(libc::SYS_process_vm_writev),
        bare(libc::SYS_unshare),
        bare(libc::SYS_setns),
        bare(libc::SYS_setuid),
        bare(libc::SYS_capset),
        bare(libc::SYS_mount),
        bare(libc::SYS_umount2),
        bare(libc::SYS_open_by_handle_at),
        bare(libc::SYS_openat2),
        bare(libc::SYS_name_to_handle_at),
        bare(libc::SYS_bpf),
        bare(libc::SYS_userfaultfd),
        bare(libc::SYS_seccomp),
        bare(libc::SYS_landlock_create_ruleset),
        bare(libc::SYS_io_uring_setup),
        with(libc::SYS_io_uring_register, &[3, 9]),
        with(libc::SYS_io_uring_register, &[3, 30]),
        with(libc::SYS_io_uring_register, &[u64::MAX, 31]),
        with(libc::SYS_prctl, &[4, 1]),
        with(libc::SYS_prctl, &[8]),
        with(libc::SYS_prctl, &[22, 1]),
        with(libc::SYS_ioctl, &[0, 0x5412]),
        with(libc::SYS_ioctl, &[3, 0x4004_6602]),
        bare(libc::SYS_splice),
        bare(libc::SYS_vmsplice),
        bare(libc::SYS_keyctl),
        bare(libc::SYS_shmat),
        bare(libc::SYS_syslog),
    ];
    let is_needed = |call: i64| call == libc::SYS_splice && calls.kept;
    for (call, arguments) in all.into_iter().filter(|(call, _)| !is_needed(*call)) {
        let call = u32::try_from(call).expect("a number");
        let answer = filters.answer(&Question { machine: OURS, call, arguments });
        assert_ne!(answer, ALLOW, "call {call} with {arguments:x?}");
    }
}

/// What a call that is allowed comes to.
#[cfg(target_arch = "x86_64")]
mod walls {
    use super::*;
    use crate::probe::inject::{Puppet, Refused};

    /// Files that no server has to do with, to read.
    const READS: [&CStr; 7] = [
        c"/etc/passwd",
        c"/etc/shadow",
        c"/root",
        c"/dev/fuse",
        c"/dev/mem",
        c"/proc/1/environ",
        c"/proc/1/cwd/etc/passwd",
    ];
    /// What the kernel tells all processes, about the machine and about other processes: to list
    /// or to read.
    const TOLD: [&CStr; 24] = [
        c"/proc",
        c"/proc/1",
        c"/proc/1/status",
        c"/proc/1/cmdline",
        c"/proc/1/task",
        c"/proc/meminfo",
        c"/proc/stat",
        c"/proc/cmdline",
        c"/proc/kallsyms",
        c"/proc/interrupts",
        c"/proc/sys",
        c"/proc/sys/kernel",
        c"/proc/sys/kernel/core_pattern",
        c"/sys",
        c"/sys/block",
        c"/sys/dev/block",
        c"/sys/devices/virtual",
        c"/sys/class/net",
        c"/sys/class/net/lo/address",
        c"/sys/kernel/notes",
        c"/sys/kernel/mm/transparent_hugepage/enabled",
        c"/sys/module/fuse/parameters/enable_uring",
        c"/sys/fs/cgroup",
        c"/sys/devices/system/cpu",
    ];
    /// What a server reads of it: about itself, and the CPUs and nodes.
    const OWN: [&CStr; 8] = [
        c"/proc/self/status",
        c"/proc/self/mountinfo",
        c"/proc/self/task",
        c"/proc/thread-self/schedstat",
        c"/proc/sys/vm/overcommit_memory",
        c"/sys/devices/system/cpu/online",
        c"/sys/devices/system/cpu/possible",
        c"/sys/devices/system/node",
    ];
    /// To write: settings of the kernel, and memory of its own that may not be written.
    const WRITES: [&CStr; 6] = [
        c"/proc/sys/kernel/core_pattern",
        c"/proc/sysrq-trigger",
        c"/proc/self/mem",
        c"/proc/self/oom_score_adj",
        c"/sys/kernel/mm/transparent_hugepage/enabled",
        c"/sys/module/fuse/parameters/enable_uring",
    ];

    pub(super) fn name(path: &Path) -> CString {
        CString::new(path.as_os_str().as_bytes()).expect("a name")
    }

    /// Tries it as the server.
    #[track_caller]
    pub(super) fn assert_closed(pid: u32, image: &Path) {
        let neighbour = scratch();
        let secret = neighbour.path().join("secret");
        fs::write(&secret, "secret").expect("write");
        let others: Vec<CString> = children(pid)
            .into_iter()
            .chain([std::process::id()])
            .flat_map(|other| {
                ["mem", "environ", "fd/0", "maps", "status", "cmdline", "stat", "task", "net/tcp"]
                    .map(|it| format!("/proc/{other}/{it}"))
            })
            .map(|path| CString::new(path).expect("a name"))
            .collect();
        let mut puppet = Puppet::of(pid);
        let mut said = Vec::new();
        let mut expect = |what: &CStr, got: Result<(), Refused>, wanted: &[i32]| {
            let is_so = matches!(got, Err(Refused::With(errno)) if wanted.contains(&errno));
            if !is_so {
                said.push(format!("{what:?}: {got:?}"));
            }
        };
        let closed = [libc::EACCES];
        // What is not there, or not for this user, says nothing.
        let closed_or_gone = [libc::EACCES, libc::ENOENT, libc::EPERM];
        expect(c"secret", puppet.open(&name(&secret), libc::O_RDONLY, 0), &closed);
        expect(c"secret", puppet.open(&name(&secret), libc::O_WRONLY | libc::O_TRUNC, 0), &closed);
        let new = name(&neighbour.path().join("new"));
        expect(c"new", puppet.open(&new, libc::O_WRONLY | libc::O_CREAT, 0o600), &closed);
        let beside = name(&image.with_file_name("program"));
        let program = puppet.open(&beside, libc::O_WRONLY | libc::O_CREAT, 0o4755);
        expect(c"a program", program, &[libc::ENOSYS]);
        for path in READS.iter().chain(&TOLD) {
            expect(path, puppet.open(path, libc::O_RDONLY, 0), &closed_or_gone);
        }
        for path in &others {
            expect(path, puppet.open(path, libc::O_RDONLY, 0), &closed_or_gone);
        }
        for path in WRITES {
            expect(path, puppet.open(path, libc::O_WRONLY, 0), &closed_or_gone);
        }
        let here = i64::from(libc::AT_FDCWD).cast_unsigned();
        let gone = puppet.text(&name(&secret));
        let removed = puppet.call(libc::SYS_unlinkat, [here, gone, 0, 0, 0, 0]).map(|_| ());
        expect(c"unlink", removed, &closed);
        for (what, call, first) in [
            (c"kill", libc::SYS_kill, 1),
            (c"socket", libc::SYS_socket, 1),
            (c"socketpair", libc::SYS_socketpair, 1),
            (c"affinity", libc::SYS_sched_setaffinity, 1),
            (c"limits", libc::SYS_prlimit64, 1),
            (c"pidfd", libc::SYS_pidfd_open, 1),
            (c"ring", libc::SYS_io_uring_setup, 1),
            (c"fork", libc::SYS_clone, 17),
            (c"openat2", libc::SYS_openat2, here),
        ] {
            let got = puppet.call(call, [first, 0, 0, 0, 0, 0]).map(|_| ());
            expect(what, got, &[libc::ENOSYS]);
        }
        // And what it is for works, or nothing above would mean anything.
        let ours = puppet.open(&name(image), libc::O_RDONLY, 0);
        for path in OWN {
            match puppet.open(path, libc::O_RDONLY, 0) {
                // A kernel without NUMA.
                Ok(()) | Err(Refused::With(libc::ENOENT)) => {}
                refused => said.push(format!("{path:?}: {refused:?}")),
            }
        }
        puppet.release();
        assert_eq!((said, ours), (Vec::new(), Ok(())));
        assert_eq!(fs::read(&secret).expect("there"), b"secret");
        assert!(!neighbour.path().join("new").exists());
    }
}

#[test]
fn a_mount_can_do_what_it_needs_and_nothing_else() {
    if !needs_root() {
        return;
    }
    for way in WAYS {
        for transport in ["dev", "auto"] {
            let served = serve_raw(way, &["--transport", transport]);
            assert_is_of(way, served.mounted.pid());
            assert_walled(served.mounted.pid(), &Calls::default(), &served.image);
            assert_eq!(images::piece(served.mounted.path(), 0, 9), images::pattern(1, 0, 9));
            assert_eq!(served.mounted.stop().code(), Some(0));
        }
    }
}

/// The process that serves what another one keeps.
///
/// * `keeper`: the one that keeps it.
/// * `other`: one that served before.
fn serving(keeper: u32, other: Option<u32>) -> u32 {
    // It is confined a moment after it has begun to serve, one thread after the other.
    let is_walled = |pid: &u32| {
        let filters = of_threads(*pid, "Seccomp_filters");
        filters.len() > 1 && filters.iter().all(|count| count == "2")
    };
    let find = || children(keeper).into_iter().find(|pid| Some(*pid) != other && is_walled(pid));
    until(NEXT, find).expect("a process that serves")
}

#[test]
fn a_kept_disk_and_its_next_process_can_do_what_they_need_and_nothing_else() {
    if !needs_root() {
        return;
    }
    let kept = Calls { kept: true, ..Calls::default() };
    for way in WAYS {
        let place = Place::new("qcow2");
        give(way, &place.image);
        let daemon = place.start(&[way, &["--keep"]].concat());
        let keeper = daemon.process.pid();
        let first = serving(keeper, None);
        assert_is_of(way, first);
        assert_walled(first, &kept, &place.image);
        let pid = Pid::from_raw(first.cast_signed()).expect("a process");
        kill_process(pid, Signal::KILL).expect("killed");
        assert_walled(serving(keeper, Some(first)), &kept, &place.image);
        daemon.stop(&[&place.socket]);
    }
}

#[test]
fn a_kept_mount_and_its_next_process_can_do_what_they_need_and_nothing_else() {
    if !needs_root() {
        return;
    }
    for way in WAYS {
        let served = serve_raw(way, &["--keep-mount", "--transport", "dev"]);
        let keeper = served.mounted.pid();
        let serving = |other| serving(keeper, other);
        let first = serving(None);
        assert_is_of(way, first);
        assert_walled(first, &Calls::default(), &served.image);
        let pid = Pid::from_raw(first.cast_signed()).expect("a process");
        kill_process(pid, Signal::KILL).expect("killed");
        assert_walled(serving(Some(first)), &Calls::default(), &served.image);
        assert_eq!(images::piece(served.mounted.path(), 0, 9), images::pattern(1, 0, 9));
        assert_eq!(served.mounted.stop().code(), Some(0));
    }
}

#[test]
fn a_disk_for_a_machine_and_its_successor_can_do_what_they_need_and_nothing_else() {
    if !needs_root() {
        return;
    }
    for way in WAYS {
        let place = Place::new("qcow2");
        give(way, &place.image);
        let old = place.start(way);
        assert_is_of(way, old.process.pid());
        assert_walled(old.process.pid(), &Calls::default(), &place.image);
        let new = place.start(&[way, &["--upgrade"]].concat());
        old.ends(0);
        assert_is_of(way, new.process.pid());
        assert_walled(new.process.pid(), &Calls::default(), &place.image);
        new.stop(&[&place.socket]);
    }
}

#[test]
fn a_server_of_nbd_clients_can_do_what_it_needs_and_nothing_else() {
    if !needs_root() {
        return;
    }
    for way in WAYS {
        let place = Place::new("qcow2");
        give(way, &place.image);
        let at = format!("unix:{}", text(&place.path("nbd")));
        let words = [text(&place.image), "--format", "qcow2", "--nbd", &at];
        let words = [&words[..], way].concat();
        let mut daemon = Daemon::of(&mut serve_command(&words));
        assert_is_of(way, daemon.process.pid());
        assert_walled(daemon.process.pid(), &Calls::default(), &place.image);
        daemon.process.signal(Signal::TERM);
        assert!(daemon.process.wait(NEXT).is_some());
    }
}

#[test]
fn one_that_connects_to_a_front_end_can_do_what_it_needs_and_nothing_else() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    let front = place.path("front");
    let _listener = std::os::unix::net::UnixListener::bind(&front).expect("a front end");
    // The helper process connects, so that it makes no socket either.
    let words = [&place.words()[..], &["--sandbox", "on", "--connect", text(&front)]].concat();
    let mut daemon = Daemon::of(&mut serve_command(&words));
    assert_walled(daemon.process.pid(), &Calls::default(), &place.image);
    daemon.process.signal(Signal::TERM);
    assert!(daemon.process.wait(NEXT).is_some());
}

/// The user and group `nobody`.
pub(crate) const NOBODY: u32 = 65534;

/// Words that run as that user.
pub(crate) fn as_nobody(words: &[&str]) -> Command {
    let mut out = command(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
    out.args(words);
    out
}

#[test]
fn a_server_of_an_ordinary_user_can_do_what_it_needs_and_nothing_else() {
    if !(needs_root() && needs("setpriv", has("setpriv"))) {
        return;
    }
    let (directory, program) = for_user(&program(), NOBODY);
    let (image, socket) = (directory.path().join("disk.img"), directory.path().join("socket"));
    images::raw(&image, MIB, 1);
    std::os::unix::fs::chown(&image, Some(NOBODY), Some(NOBODY)).expect("chown");
    let words = ["serve", "--format", "raw", "--sandbox", "on", "--vhost-user-blk"];
    let mut command =
        as_nobody(&[&[text(&program)], &words[..], &[text(&socket), text(&image)]].concat());
    command.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS");
    let daemon = Daemon::of(&mut command);
    let pid = daemon.process.pid();
    assert_eq!(fs::metadata(format!("/proc/{pid}")).expect("a process").uid(), NOBODY);
    assert_walled(pid, &Calls::default(), &image);
    daemon.stop(&[&socket]);
}

/// `/dev/fuse` open to all users, as udev has it on every distribution; put back when dropped.
struct OpenDevice {
    before: u32,
    _alone: Alone,
}

impl OpenDevice {
    const PATH: &str = "/dev/fuse";

    fn new() -> OpenDevice {
        let _alone = alone();
        let before = fs::metadata(OpenDevice::PATH).expect("/dev/fuse").mode();
        fs::set_permissions(OpenDevice::PATH, Permissions::from_mode(0o666)).expect("chmod");
        OpenDevice { before: before & 0o7777, _alone }
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        let _ = fs::set_permissions(OpenDevice::PATH, Permissions::from_mode(self.before));
    }
}

#[test]
fn a_mount_of_an_ordinary_user_can_do_what_it_needs_and_nothing_else() {
    if !(needs_root()
        && needs("setpriv", has("setpriv"))
        && needs("fusermount3", has("fusermount3")))
    {
        return;
    }
    let _open = OpenDevice::new();
    let (directory, program) = for_user(&program(), NOBODY);
    let (image, path) = (directory.path().join("disk.img"), directory.path().join("disk"));
    images::raw(&image, MIB, 1);
    fs::write(&path, "").expect("a mountpoint");
    for file in [&image, &path] {
        std::os::unix::fs::chown(file, Some(NOBODY), Some(NOBODY)).expect("chown");
    }
    let words = [text(&program), "mount", "--format", "raw", "--sandbox", "on"];
    let mut command = as_nobody(&[&words[..], &[text(&image), text(&path)]].concat());
    let mounted = Mounted::from_command(&mut command, &path);
    assert_walled(mounted.pid(), &Calls::default(), &image);
    assert_eq!(mounted.stop().code(), Some(0));
}
