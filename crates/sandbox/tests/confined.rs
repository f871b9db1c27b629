//! What is left to a process that has entered, tried in processes of their own: a test that is left
//! out by name is the body of one.

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Sender, channel};

use ringdisk_sandbox::{Calls, CapabilitySet, InForce, Keep, Plan, User, become_user};
use ringdisk_testkit::limits::{needs, needs_root, part_needs};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, XattrFlags, openat, openat2};
use rustix::io::Errno;

/// What a body is to try.
const TRY: &str = "RINGDISK_TEST_TRY";
/// Where it may play.
const PLACE: &str = "RINGDISK_TEST_PLACE";
/// SIGSYS.
const BAD_CALL: i32 = 31;
/// What it ends with when the kernel has no landlock and the rest was as it should be.
const NO_LANDLOCK: i32 = 77;

/// Runs the body of a test in a process of its own.
fn body(what: &str, place: &Path) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "the_body", "--ignored", "--nocapture"]);
    let output = command.env(TRY, what).env(PLACE, place).output().expect("a process");
    if !output.status.success() {
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
    }
    output.status
}

fn passes(what: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    fs::create_dir(directory.path().join("ours")).expect("mkdir");
    for name in ["theirs", "ours/image", "ours/readable", "ours/neither"] {
        fs::write(directory.path().join(name), "secret").expect("write");
    }
    let status = body(what, directory.path());
    if !needs("landlock in this kernel", status.code() != Some(NO_LANDLOCK)) {
        return;
    }
    assert!(status.success(), "{what}: {status}");
}

fn place() -> PathBuf {
    PathBuf::from(std::env::var_os(PLACE).expect("a place"))
}

fn enter(plan: Plan) -> InForce {
    let in_force = plan.enter().expect("confined");
    println!("{in_force}");
    if in_force.landlock.is_none() {
        std::process::exit(NO_LANDLOCK);
    }
    in_force
}

fn errno<T>(result: io::Result<T>) -> i32 {
    result.err().expect("an error").raw_os_error().expect("a number")
}

/// A thread that was there before the process entered, and what it is told to do.
fn old_thread() -> Sender<Box<dyn FnOnce() + Send>> {
    let (send, receive) = channel::<Box<dyn FnOnce() + Send>>();
    std::thread::spawn(move || receive.iter().for_each(|work| work()));
    send
}

/// Runs `work` on all kinds of threads: this one, one from before, one from after.
fn everywhere(old: &Sender<Box<dyn FnOnce() + Send>>, work: fn()) {
    work();
    let (send, receive) = channel();
    let done = send.clone();
    old.send(Box::new(move || {
        work();
        done.send(()).expect("told");
    }))
    .expect("a thread");
    std::thread::spawn(move || {
        work();
        send.send(()).expect("told");
    });
    (0..2).for_each(|_| receive.recv().expect("no panic on either"));
}

#[test]
#[ignore = "run by the others"]
fn the_body() {
    let Ok(what) = std::env::var(TRY) else { return };
    match what.as_str() {
        "files" => files(),
        "calls" => calls(),
        "status" => status(),
        "user" => user(),
        "only-user" => only_user(),
        "look" => look(),
        "sockets" => sockets(),
        "others" => others(),
        "memory" => memory(),
        "many" => many(),
        "named" => named(),
        "checked" => checked(),
        "listed" => listed(),
        "signals" => signals(),
        deadly => deadly_call(deadly.parse().expect("a number of a call")),
    }
}

#[test]
fn files_that_were_not_named_cannot_be_opened() {
    passes("files");
}

fn files() {
    let old = old_thread();
    let ours = place().join("ours");
    let plan = Plan::new().read_write(ours.join("image")).read(ours.join("readable"));
    enter(plan);
    everywhere(&old, || {
        let ours = place().join("ours");
        for path in ["/etc/shadow", "/etc/passwd", "/root", "/dev/sda", "/dev/fuse"].map(Path::new)
        {
            assert!(!path.exists() || errno(fs::File::open(path)) == libc::EACCES, "{path:?}");
        }
        assert_eq!(errno(fs::File::open(place().join("theirs"))), libc::EACCES);
        assert_eq!(errno(fs::read(ours.join("neither"))), libc::EACCES);
        let write = |path: PathBuf| fs::File::options().write(true).open(path);
        assert_eq!(errno(write(ours.join("readable"))), libc::EACCES);
        assert_eq!(errno(fs::write("/proc/sys/kernel/core_pattern", "x")), libc::EACCES);
        assert_eq!(errno(fs::write(ours.join("new"), "x")), libc::EACCES);
        assert_eq!(errno(fs::remove_file(ours.join("image"))), libc::EACCES);
        assert_eq!(fs::read(ours.join("readable")).expect("readable"), b"secret");
        let image = fs::File::options().read(true).write(true).open(ours.join("image"));
        image.expect("ours").set_len(3).expect("ours");
        fs::write(ours.join("image"), "secret").expect("ours");
        fs::read_to_string("/proc/self/status").expect("about us");
        fs::read_dir("/proc/thread-self").expect("about this thread");
        fs::read("/sys/devices/system/cpu/online").expect("about the machine");
        for path in
            ["/proc", "/proc/1/status", "/proc/meminfo", "/sys", "/sys/class/net", "/sys/kernel"]
        {
            assert_eq!(errno(fs::File::open(path)), libc::EACCES, "{path}");
        }
    });
    assert_eq!(errno(fs::read("/proc/1/environ")), libc::EACCES, "another process");
    // What has a rule in /proc is held, so that the kernel does not make it anew without one.
    let held = fs::read_dir("/proc/self/fd").expect("our own").flatten();
    let held: Vec<_> = held.filter_map(|entry| fs::read_link(entry.path()).ok()).collect();
    let own = PathBuf::from(format!("/proc/{}", std::process::id()));
    for path in [&own, Path::new("/proc/sys/vm/overcommit_memory")] {
        assert!(held.iter().any(|held| held == path), "{path:?}: {held:?}");
    }
}

#[test]
fn a_directory_that_was_named_takes_new_files() {
    passes("many");
}

fn many() {
    // Many threads, so that some come and go while they are confined.
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    for _ in 0..8 {
        let stop = std::sync::Arc::clone(&stop);
        std::thread::spawn(move || {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = std::thread::spawn(std::thread::yield_now).join();
            }
        });
    }
    let ours = place().join("ours");
    // With such a list the umask counts for nothing.
    let for_all: [u16; 3] = [0x01, 0x04, 0x20];
    let entry = |tag: &u16| [&tag.to_le_bytes()[..], &[7, 0], &u32::MAX.to_le_bytes()].concat();
    let list = [2_u32.to_le_bytes().to_vec(), for_all.iter().flat_map(entry).collect()].concat();
    let name = "system.posix_acl_default";
    let set = rustix::fs::setxattr(&ours, name, &list, XattrFlags::empty());
    let _ = part_needs("access control lists", set.is_ok());
    enter(Plan::new().write_below(&ours));
    fs::write(ours.join("new"), "x").expect("a new file");
    fs::remove_file(ours.join("new")).expect("gone");
    // A mode in memory, which a filter does not see, and one that it does see.
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let mode = Mode::from_raw_mode(0o4777);
    let program = ours.join("program");
    let made = openat2(CWD, &program, flags, mode, ResolveFlags::empty());
    assert_eq!(made.map(drop), Err(Errno::NOSYS));
    assert_eq!(openat(CWD, &program, flags, mode).map(drop), Err(Errno::NOSYS));
    let mode = Mode::from_raw_mode(0o666);
    let made = openat(CWD, &program, flags, mode).expect("a new file");
    let mode = fs::File::from(made).metadata().expect("it is there").permissions().mode();
    assert_eq!(mode & 0o7111, 0, "it can be run");
    fs::remove_file(program).expect("gone");
    assert_eq!(errno(fs::create_dir(ours.join("directory"))), libc::ENOSYS);
    assert_eq!(errno(fs::write(place().join("new"), "x")), libc::EACCES);
    all_are_confined();
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
}

#[test]
fn other_calls_are_unknown() {
    passes("calls");
}

fn calls() {
    let old = old_thread();
    enter(Plan::new());
    everywhere(&old, || {
        assert_eq!(errno(TcpListener::bind("127.0.0.1:0")), libc::ENOSYS);
        assert_eq!(errno(UnixStream::connect("/nowhere")), libc::ENOSYS);
        assert_eq!(errno(Command::new("/bin/true").status()), libc::ENOSYS);
        assert_eq!(errno(io_uring::IoUring::new(2)), libc::ENOSYS, "an unrestricted ring");
        assert_eq!(errno(std::os::unix::fs::symlink("a", "b")), libc::ENOSYS);
    });
}

#[test]
fn descriptors_send_no_signals_and_a_name_gets_no_message_by_sendto() {
    passes("others");
}

fn others() {
    let bound = place().join("theirs");
    let _ = fs::remove_file(&bound);
    let theirs = std::os::unix::net::UnixDatagram::bind(&bound).expect("a socket");
    let ours = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
    let (one, mut other) = UnixStream::pair().expect("sockets");
    enter(Plan::new());
    let fd = std::os::fd::AsRawFd::as_raw_fd(&one);
    let fcntl = |command: i32, argument: i32| {
        // SAFETY: the commands take an integer.
        let result = unsafe { libc::fcntl(fd, command, argument) };
        if result < 0 { std::io::Error::last_os_error().raw_os_error() } else { None }
    };
    // F_SETSIG and F_SETOWN_EX of linux/fcntl.h.
    for command in [libc::F_SETOWN, 10, 15] {
        assert_eq!(fcntl(command, 1), Some(libc::ENOSYS), "{command}");
    }
    assert_eq!(fcntl(libc::F_SETFL, libc::O_ASYNC), Some(libc::ENOSYS));
    assert_eq!(fcntl(libc::F_SETFL, libc::O_NONBLOCK), None);
    assert_eq!(errno(ours.send_to(b"x", &bound)), libc::ENOSYS);
    assert_eq!(errno(UnixStream::pair()), libc::ENOSYS);
    let file = fs::File::open("/dev/null").expect("a file");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o4777);
    assert_eq!(errno(file.set_permissions(mode)), libc::ENOSYS);
    // To whom a socket is connected it sends as before.
    std::io::Write::write_all(&mut other, b"x").expect("sent");
    // SAFETY: the buffer is as long as is said.
    let sent = unsafe { libc::send(fd, b"x".as_ptr().cast(), 1, 0) };
    assert_eq!(sent, 1);
    theirs.set_nonblocking(true).expect("a flag");
    assert_eq!(errno(theirs.recv(&mut [0])), libc::EAGAIN);
}

#[test]
fn sockets_are_there_for_a_plan_that_asks() {
    passes("sockets");
}

fn sockets() {
    enter(Plan::new().calls(Calls { sockets: true, ..Calls::default() }));
    assert_eq!(errno(UnixStream::connect("/nowhere")), libc::ENOENT);
    // One for datagrams reaches every name.
    assert_eq!(errno(std::os::unix::net::UnixDatagram::unbound()), libc::ENOSYS);
    assert_eq!(errno(TcpListener::bind("127.0.0.1:0")), libc::ENOSYS);
}

#[test]
fn a_look_ahead_changes_nothing() {
    passes("checked");
}

fn checked() {
    let plan = || Plan::new().insist(true);
    plan().without_files("nobody outside").check().expect_err("something is missing");
    let is_possible = plan().check().is_ok();
    let status = fs::read_to_string("/proc/self/status").expect("status");
    assert!(status.contains("Seccomp:\t0") && status.contains("NoNewPrivs:\t0"), "{status}");
    fs::File::open("/etc/passwd").expect("as before");
    assert_eq!(plan().enter().is_ok(), is_possible);
}

#[test]
fn memory_does_not_become_executable() {
    passes("memory");
}

fn memory() {
    enter(Plan::new());
    let map = |protection| {
        // SAFETY: a new mapping of the kernel's choice, which no code uses.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0)
        }
    };
    assert_ne!(map(libc::PROT_READ | libc::PROT_WRITE), libc::MAP_FAILED);
    assert_eq!(map(libc::PROT_READ | libc::PROT_EXEC), libc::MAP_FAILED);
}

#[test]
fn every_thread_shows_what_it_lost() {
    passes("status");
}

fn status() {
    let _old: Vec<_> = (0..4).map(|_| old_thread()).collect();
    let keep = CapabilitySet::DAC_OVERRIDE;
    let in_force = enter(Plan::new().keep(Keep(keep)));
    if rustix::process::geteuid().is_root() {
        assert_eq!(in_force.capabilities, Some(keep));
    }
    assert!(in_force.calls.is_some() && in_force.missing.is_empty(), "{in_force:?}");
    let _new = old_thread();
    all_are_confined();
}

/// The user and group `nobody`.
const NOBODY: u32 = 65534;

fn nobody() -> User {
    User::new(NOBODY, NOBODY).expect("a user")
}

#[test]
fn every_thread_becomes_another_user() {
    if needs_root() {
        passes("user");
    }
}

fn user() {
    let old = old_thread();
    let in_force = enter(Plan::new().read("/etc/shadow").user(nobody()));
    assert_eq!(in_force.capabilities, Some(CapabilitySet::empty()));
    everywhere(&old, || {
        assert_eq!(errno(fs::File::open("/etc/shadow")), libc::EACCES, "the mode of the file");
        // The kernel shows a process its own files, whatever their owner.
        fs::File::open("/proc/self/fd/0").map(drop).expect("our own descriptor");
    });
    all_are_confined();
    all_are(NOBODY);
}

#[test]
fn a_process_becomes_another_user_and_nothing_else() {
    if needs_root() {
        passes("only-user");
    }
}

fn only_user() {
    let old = old_thread();
    // As a setuid program may: then the kernel takes no capabilities away by itself.
    rustix::thread::set_capabilities_secure_bits(
        rustix::thread::CapabilitiesSecureBits::NO_SETUID_FIXUP,
    )
    .expect("root");
    become_user(nobody()).expect("root can");
    everywhere(&old, || {
        assert_eq!(errno(fs::File::open("/etc/shadow")), libc::EACCES, "the mode of the file");
        fs::File::open("/etc/passwd").map(drop).expect("no rules for files");
        assert!(rustix::thread::set_thread_uid(rustix::process::Uid::ROOT).is_err(), "a way back");
    });
    all_are(NOBODY);
    become_user(User::new(1, 1).expect("a user")).expect_err("not root any more");
}

/// The user, the group and nothing else of each thread.
fn all_are(number: u32) {
    for entry in fs::read_dir("/proc/self/task").expect("threads").flatten() {
        let Ok(status) = fs::read_to_string(entry.path().join("status")) else { continue };
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        let four = vec![number.to_string(); 4];
        assert_eq!((value("Uid:"), value("Gid:")), (four.clone(), four), "{status}");
        assert_eq!(value("Groups:"), [""; 0], "{status}");
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            assert_eq!(value(set), ["0000000000000000"], "{status}");
        }
    }
}

#[test]
fn a_look_with_the_eyes_of_another_changes_nobody() {
    if needs_root() {
        passes("look");
    }
}

fn look() {
    let shadow = || fs::File::open("/etc/shadow").map(drop);
    let seen = nobody().look(shadow).expect("a look");
    assert_eq!(errno(seen), libc::EACCES);
    shadow().expect("root as before");
    all_are_root();
    let dumpable = rustix::process::dumpable_behavior().expect("known");
    assert_eq!(dumpable, rustix::process::DumpableBehavior::Dumpable);
}

fn all_are_root() {
    let status = fs::read_to_string("/proc/self/status").expect("status");
    assert!(status.contains("Uid:\t0\t0\t0\t0"), "{status}");
}

/// Whether a thread is on its way out (`PF_EXITING`, linux/sched.h): it runs no code of ours any
/// more, and the kernel gives it no filter. `None`: it has ended.
fn is_exiting(task: &Path) -> Option<bool> {
    let stat = fs::read_to_string(task.join("stat")).ok()?;
    // After the name, which may hold anything: state, ppid, pgrp, session, tty, tpgid, flags.
    let flags = stat.rsplit(") ").next()?.split(' ').nth(6)?;
    Some(flags.parse::<u32>().expect("flags") & 0x4 != 0)
}

fn all_are_confined() {
    let is_root = rustix::process::geteuid().is_root();
    for entry in fs::read_dir("/proc/self/task").expect("threads").flatten() {
        let Ok(status) = fs::read_to_string(entry.path().join("status")) else { continue };
        if is_exiting(&entry.path()) != Some(false) {
            continue;
        }
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
            line.trim_start_matches(':').trim().to_owned()
        };
        assert_eq!((value("NoNewPrivs").as_str(), value("Seccomp").as_str()), ("1", "2"));
        let effective = u64::from_str_radix(&value("CapEff"), 16).expect("hex");
        let bounding = u64::from_str_radix(&value("CapBnd"), 16).expect("hex");
        let most = Keep::default().0.bits();
        assert!(!is_root || (effective | bounding) & !most == 0, "{status}");
    }
}

/// Makes a call with an argument in each place. Gives the errno, or 0.
fn bare(call: i64, argument: u64) -> i32 {
    // SAFETY: only for calls that a filter answers, or ends the process for, before anything is
    // done with the arguments.
    let result =
        unsafe { libc::syscall(call, argument, argument, argument, argument, argument, argument) };
    if result == -1 { io::Error::last_os_error().raw_os_error().unwrap_or(0) } else { 0 }
}

#[test]
fn what_is_on_no_list_is_unknown() {
    passes("listed");
}

fn listed() {
    enter(Plan::new());
    let calls = Calls::default();
    let is_on = |call: &i64| calls.needs().iter().chain(&calls.deadly()).any(|it| it.call == *call);
    // uretprobe and uprobe of x86_64: the kernel asks no filter about them, and sends a signal to
    // who is not one of its trampolines.
    let is_unasked = |call: &i64| cfg!(target_arch = "x86_64") && [335, 336].contains(call);
    // More than any machine has.
    let others: Vec<i64> = (0..1024).filter(|call| !is_on(call) && !is_unasked(call)).collect();
    assert!(others.len() > 800);
    for call in others {
        for argument in [0, u64::MAX] {
            assert_eq!(bare(call, argument), libc::ENOSYS, "{call} with {argument:x}");
        }
    }
}

#[test]
fn signals_reach_nobody_outside() {
    passes("signals");
}

fn signals() {
    let outside = std::os::unix::process::parent_id();
    let more = vec![libc::SYS_kill];
    enter(Plan::new().calls(Calls { more, ..Calls::default() }));
    let kill = |pid: u32| {
        // SAFETY: the number of no signal, so that it is only looked whether one might be sent.
        let result = unsafe { libc::kill(pid.cast_signed(), 0) };
        (result != 0).then(|| io::Error::last_os_error().raw_os_error()).flatten()
    };
    let release = rustix::system::uname();
    let mut numbers = release.release().to_str().expect("text").split('.').map(str::parse::<u32>);
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or(0);
    let (major, minor) = (next(), next());
    // Where threads of one process are never taken for strangers.
    if (major, minor) >= (6, 15) {
        assert_eq!(kill(outside), Some(libc::EPERM));
    }
    assert_eq!(kill(std::process::id()), None);
    // To another thread of ours, which is in a landlock domain of its own.
    let (send, receive) = channel();
    std::thread::spawn(move || {
        send.send(rustix::thread::gettid()).expect("told");
        std::thread::park();
    });
    let thread = receive.recv().expect("a thread").as_raw_nonzero().get();
    // SAFETY: as above.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, 0) };
    assert_eq!(sent, 0);
}

#[test]
fn calls_of_somebody_else_end_the_process() {
    let directory = tempfile::tempdir().expect("a directory");
    for need in Calls::default().deadly() {
        let status = body(&need.call.to_string(), directory.path());
        assert_eq!(status.signal(), Some(BAD_CALL), "{}: {status}", need.name());
    }
}

fn deadly_call(call: i64) {
    let in_force = Plan::new().enter().expect("confined");
    assert!(in_force.calls.is_some(), "{in_force:?}");
    // Should it be made all the same, the kernel refuses what these arguments ask for.
    bare(call, u64::MAX);
}

#[test]
fn a_call_that_a_plan_names_is_allowed() {
    passes("named");
}

fn named() {
    let more = vec![libc::SYS_umount2];
    enter(Plan::new().calls(Calls { more, ..Calls::default() }));
    // Landlock has the last word on mounts.
    let result = rustix::mount::unmount("/nowhere", rustix::mount::UnmountFlags::empty());
    assert!(result.is_err());
}
