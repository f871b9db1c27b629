//! Confines every thread of the process, where the kernel confines only the calling thread.
//!
//! Promises: when [`confine`] returns, every thread (and so every thread that is started later) has
//! no new privileges, is inside the landlock ruleset, is the other user's, and has lost its
//! capabilities; otherwise the error names the thread that has not.
//!
//! Before Linux 7.0 landlock is for the calling thread, and capabilities and users always are. So
//! each thread gets a signal, one after the other, and confines itself in the handler, which makes
//! bare system calls only. Threads that appear meanwhile are found by listing them again. The
//! kernel's own threads of an io_uring (`iou-wrk-…`) take no signals and run no code of the
//! process; they execute operations that the ring allows.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use crate::user::User;

/// How long one thread may take (10 s): it may be in the middle of a system call that does not end
/// early.
const THREAD_LIMIT: Duration = Duration::from_secs(10);
/// How often the answer of a thread is checked.
const CHECK_INTERVAL: Duration = Duration::from_micros(50);
/// `PF_IO_WORKER` and `PF_USER_WORKER` of the kernel's task flags: threads of the kernel in this
/// process.
const KERNELS_OWN: u64 = 0x10 | 0x4000;
/// Where the task flags are behind the name in /proc/PID/stat (proc(5): field 9; the name is field
/// 2).
const FLAGS_FIELD: usize = 6;

/// The ruleset; -1: none.
static RULESET: AtomicI32 = AtomicI32::new(-1);
/// Capabilities that are kept.
static STAYING: AtomicU64 = AtomicU64::new(0);
/// Whether capabilities are dropped.
static DROPS: AtomicBool = AtomicBool::new(false);
/// User and group that all threads change to; all ones, which is no user: no change.
static USER: AtomicU32 = AtomicU32::new(u32::MAX);
static GROUP: AtomicU32 = AtomicU32::new(u32::MAX);
/// Threads that have answered, and the errno of the last one.
static ANSWERS: AtomicU32 = AtomicU32::new(0);
static RESULT: AtomicI32 = AtomicI32::new(0);
/// Held by one confinement at a time.
static CONFINING: Mutex<()> = Mutex::new(());

/// What every thread loses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Confinement<'a> {
    pub(crate) ruleset: Option<BorrowedFd<'a>>,
    /// `None`: no change.
    pub(crate) user: Option<User>,
    /// `None`: capabilities are left alone.
    pub(crate) capabilities: Option<CapabilitySet>,
}

/// A thread that could not be confined, and why.
#[derive(Debug)]
pub(crate) struct Unconfined {
    pub(crate) thread: String,
    pub(crate) errno: Errno,
}

/// Whether the threads can be found. Seccomp needs no list of them: the kernel does it for all.
///
/// Errors: those of reading `/proc`.
pub(crate) fn are_known() -> Result<(), Errno> {
    threads().map(|_| ())
}

/// Confines every thread. Gives their number.
///
/// Errors: a thread that could not be; those before it are confined.
pub(crate) fn confine(confinement: &Confinement<'_>) -> Result<usize, Unconfined> {
    let _confining = CONFINING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let ruleset = confinement.ruleset.map_or(-1, |fd| fd.as_raw_fd());
    RULESET.store(ruleset, Ordering::Release);
    DROPS.store(confinement.capabilities.is_some(), Ordering::Release);
    STAYING.store(confinement.capabilities.map_or(0, |set| set.bits()), Ordering::Release);
    USER.store(confinement.user.map_or(u32::MAX, User::uid), Ordering::Release);
    GROUP.store(confinement.user.map_or(u32::MAX, User::gid), Ordering::Release);
    let result = confine_all();
    RULESET.store(-1, Ordering::Release);
    result
}

fn confine_all() -> Result<usize, Unconfined> {
    let unconfined = |thread: &str, errno| Unconfined { thread: thread.to_owned(), errno };
    let own = rustix::thread::gettid().as_raw_nonzero().get();
    confine_this().map_err(|errno| unconfined("this thread", errno))?;
    let mut done = HashSet::from([own]);
    let handler = Handler::install().map_err(|errno| unconfined("signals", errno))?;
    loop {
        let mut is_complete = true;
        for thread in threads().map_err(|errno| unconfined("/proc/self/task", errno))? {
            if done.contains(&thread) || is_kernels_own(thread) {
                continue;
            }
            is_complete = false;
            handler.run_on(thread).map_err(|errno| unconfined(&name_of(thread), errno))?;
            done.insert(thread);
        }
        if is_complete {
            return Ok(done.len());
        }
    }
}

/// The threads of this process.
pub(crate) fn threads() -> Result<Vec<i32>, Errno> {
    let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let entries = fs::read_dir("/proc/self/task").map_err(errno)?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

fn file_of(thread: i32, file: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/self/task/{thread}/{file}")).ok()
}

fn name_of(thread: i32) -> String {
    let name = file_of(thread, "comm").unwrap_or_default();
    format!("thread {thread} ({})", name.trim())
}

/// Whether a thread is the kernel's; also of one that has ended.
pub(crate) fn is_kernels_own(thread: i32) -> bool {
    let Some(stat) = file_of(thread, "stat") else { return true };
    // The name may hold blanks and parentheses.
    let flags =
        stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(FLAGS_FIELD));
    flags.and_then(|flags| flags.parse::<u64>().ok()).is_some_and(|flags| flags & KERNELS_OWN != 0)
}

/// Confines the calling thread. In a signal handler: bare system calls only.
fn confine_this() -> Result<(), Errno> {
    rustix::thread::set_no_new_privs(true)?;
    let ruleset = RULESET.load(Ordering::Acquire);
    if ruleset >= 0 {
        restrict_self(ruleset)?;
    }
    let drops = DROPS.load(Ordering::Acquire);
    let staying = CapabilitySet::from_bits_retain(STAYING.load(Ordering::Acquire));
    if drops {
        bound(staying)?;
    }
    if let Some(user) = User::new(USER.load(Ordering::Acquire), GROUP.load(Ordering::Acquire)) {
        user.put_on()?;
    }
    if drops {
        let inheritable = CapabilitySet::empty();
        let sets = CapabilitySets { effective: staying, permitted: staying, inheritable };
        set_capabilities(None, sets)?;
    }
    Ok(())
}

/// Takes all others out of the bounding set, which takes a capability.
fn bound(staying: CapabilitySet) -> Result<(), Errno> {
    for capability in CapabilitySet::all().difference(staying).iter() {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // Without CAP_SETPCAP, or one that this kernel does not know: with no new privileges
            // the set is of no use.
            Ok(()) | Err(Errno::PERM | Errno::INVAL) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn restrict_self(ruleset: i32) -> Result<(), Errno> {
    // SAFETY: landlock_restrict_self(2) takes two integers and touches no memory of this process.
    let result = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0u32) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// The kernel's version of landlock.
///
/// Errors: `OPNOTSUPP` where it was not enabled at boot, `NOSYS` where the kernel has none.
pub(crate) fn landlock_version() -> Result<i32, Errno> {
    const VERSION: u32 = 1;
    let version = ask_landlock(VERSION);
    i32::try_from(version).ok().filter(|version| *version > 0).ok_or_else(last_error)
}

/// Bits of the errors of landlock that the kernel has repaired; none where it does not report them.
pub(crate) fn landlock_repairs() -> i32 {
    const ERRATA: u32 = 2;
    i32::try_from(ask_landlock(ERRATA)).unwrap_or(0).max(0)
}

fn ask_landlock(what: u32) -> i64 {
    // SAFETY: landlock_create_ruleset(2) with one of these flags takes no memory and gives a
    // number.
    unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0usize, what)
    }
}

fn last_error() -> Errno {
    // SAFETY: the address of this thread's errno is always valid.
    Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}

extern "C" fn on_signal(_: libc::c_int) {
    // SAFETY: as in `last_error`; the interrupted code finds its errno unchanged.
    let saved = unsafe { *libc::__errno_location() };
    RESULT.store(confine_this().map_or_else(Errno::raw_os_error, |()| 0), Ordering::Release);
    ANSWERS.fetch_add(1, Ordering::AcqRel);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = saved };
}

/// The handler while it is installed; dropping it restores the former one.
struct Handler {
    signal: libc::c_int,
    before: libc::sigaction,
}

impl Handler {
    fn install() -> Result<Handler, Errno> {
        // One that neither libc (the first of these) nor anything here uses.
        let signal = libc::SIGRTMIN() + 7;
        // SAFETY: `sigaction` is plain integers and a pointer, for which all zero bits are a value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_signal as *const () as libc::sighandler_t;
        // Interrupted calls continue.
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: as for `action`.
        let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: both structures live across the call, and the handler is async-signal-safe:
        // atomics and bare system calls.
        let result = unsafe { libc::sigaction(signal, &raw const action, &raw mut before) };
        if result == 0 { Ok(Handler { signal, before }) } else { Err(last_error()) }
    }

    /// Runs the handler on a thread and waits for it; one that has ended is done.
    fn run_on(&self, thread: i32) -> Result<(), Errno> {
        let before = ANSWERS.load(Ordering::Acquire);
        let process = rustix::process::getpid().as_raw_nonzero().get();
        // SAFETY: tgkill(2) takes three integers; the thread is of this process, or the number is
        // unused.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, self.signal) };
        if sent != 0 {
            return match last_error() {
                Errno::SRCH => Ok(()),
                errno => Err(errno),
            };
        }
        let begun = Instant::now();
        while ANSWERS.load(Ordering::Acquire) == before {
            if is_kernels_own(thread) {
                // It has ended meanwhile.
                return Ok(());
            }
            if begun.elapsed() > THREAD_LIMIT {
                return Err(Errno::TIMEDOUT);
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
        match RESULT.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => Err(Errno::from_raw_os_error(errno)),
        }
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        // SAFETY: `before` is what the kernel gave; no answer is owed any more, or the process is
        // about to give up.
        unsafe { libc::sigaction(self.signal, &raw const self.before, std::ptr::null_mut()) };
    }
}
