//! Survives faults in guest memory whose file was truncated.
//!
//! Promises: a fault in a mapping of this crate marks the mapping lost and maps zeroes there, and
//! the access continues; other faults go to the handler that was installed before. The handler
//! takes no lock and allocates nothing.
//!
//! The owner of the file of a mapping may truncate it, or run out of huge pages; the next access is
//! a SIGBUS. One handler for the process, installed once, finds the address in a fixed table of
//! mappings. It maps zeroes from the page of the fault to the end of the mapping, so that a mapping
//! costs one fault in most cases, and never more than two memory areas of the kernel, of which a
//! process has a limited number.
//! A thread that touches a mapping holds a
//! reference to it, so the entry of a faulting address is neither removed nor reused while the
//! handler looks at it; entries of others may change, which a sequence number tells. SIGBUS must
//! not be blocked in threads that touch such memory: a blocked one kills.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::io::Errno;

use crate::Error;

/// Mappings at once in the process: 16 disks with as many regions as we take (509), and their logs
/// and inflight areas.
const ENTRIES_MAX: usize = 8192;

/// One mapping. Empty while `end` is 0.
struct Entry {
    /// Odd while the fields change.
    sequence: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    /// Bytes of a page of the mapping.
    page: AtomicUsize,
    lost: AtomicBool,
}

impl Entry {
    const fn empty() -> Entry {
        Entry {
            sequence: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        }
    }

    /// Only by a thread that holds the lock of `FREE`.
    fn set(&self, start: usize, end: usize, page: usize) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.page.store(page, Ordering::Relaxed);
        self.lost.store(false, Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// First address of the page of `address`, and end of the mapping that it lies in.
    fn find(&self, address: usize) -> Option<(usize, usize, usize)> {
        let sequence = self.sequence.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let end = self.end.load(Ordering::Relaxed);
        let page = self.page.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let stable =
            sequence.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == sequence;
        (stable && start <= address && address < end && page > 0)
            .then(|| (address - (address - start) % page, end, page))
    }
}

static ENTRIES: [Entry; ENTRIES_MAX] = [const { Entry::empty() }; ENTRIES_MAX];
/// Entries from here on were never used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Entries below `USED` that are empty.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// Faults survived.
static LOSSES: AtomicU64 = AtomicU64::new(0);
/// The handler of SIGBUS that was installed before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();
static INSTALLED: OnceLock<Result<(), Errno>> = OnceLock::new();

/// Number of faults in guest memory since the process began. While it does not change, no region
/// was lost.
pub fn losses() -> u64 {
    LOSSES.load(Ordering::Relaxed)
}

/// The place of a mapping in the table. Freed before the mapping is unmapped.
#[derive(Debug)]
pub(super) struct Guard(usize);

impl Guard {
    /// Enters a mapping, and installs the handler first if it is not there.
    ///
    /// * `start`, `end`: whole pages of `page` bytes.
    pub(super) fn enter(start: usize, end: usize, page: usize) -> Result<Guard, Error> {
        let failed = |errno| Error::System { doing: "handle faults of guest memory", errno };
        (*INSTALLED.get_or_init(install)).map_err(failed)?;
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let index = match free.pop() {
            Some(index) => index,
            None => {
                let next = USED.load(Ordering::Relaxed);
                if next == ENTRIES_MAX {
                    return Err(Error::TooManyRegions { limit: ENTRIES_MAX });
                }
                next
            }
        };
        ENTRIES[index].set(start, end, page);
        USED.fetch_max(index + 1, Ordering::Release);
        Ok(Guard(index))
    }

    /// Whether a part of the mapping was found gone.
    pub(super) fn is_lost(&self) -> bool {
        ENTRIES[self.0].lost.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        ENTRIES[self.0].set(0, 0, 0);
        free.push(self.0);
    }
}

fn install() -> Result<(), Errno> {
    let failed = || Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO);
    // SAFETY: an all-zero `sigaction` is a valid value of the C structure.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: asks for the present action only; `previous` is a live structure of the right type.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut previous) } != 0 {
        return Err(failed());
    }
    // Known before the handler can run.
    let _ = PREVIOUS.set(previous);
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and does only what signal
    // handlers may do.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(failed());
    }
    Ok(())
}

extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a valid siginfo to a handler with SA_SIGINFO, and SIGBUS has an
    // address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // SAFETY: the C library's errno of this thread.
    let errno = unsafe { *libc::__errno_location() };
    // Faults have positive codes, signals of other processes do not. "Action optional" reports
    // memory that no thread accesses.
    let is_fault = code > 0 && code != libc::BUS_MCEERR_AO;
    if !(is_fault && survive(address)) {
        pass_on(signal, info, context, code > 0);
    }
    // SAFETY: as above. The interrupted code must not see the errno of this handler.
    unsafe { *libc::__errno_location() = errno };
}

/// Puts zeroes where memory is gone. Async-signal-safe.
fn survive(address: usize) -> bool {
    let used = USED.load(Ordering::Acquire).min(ENTRIES_MAX);
    let found = ENTRIES[..used].iter().find_map(|entry| Some((entry, entry.find(address)?)));
    let Some((entry, (start, end, page))) = found else { return false };
    // Before any thread can read a zero that the guest has not written: a check after the read sees
    // the mark.
    entry.lost.store(true, Ordering::Release);
    LOSSES.fetch_add(1, Ordering::Release);
    replace(start, end - start) || replace(start, page.min(end - start))
}

fn replace(start: usize, len: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let at = std::ptr::without_provenance_mut(start);
    // SAFETY: the range lies in a mapping of ours that the thread which we interrupted is using, so
    // it is alive and nothing else is there; its bytes are only ever reached through raw pointers.
    let got = unsafe { libc::mmap(at, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    got != libc::MAP_FAILED
}

/// Calls the handler that was installed before.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void, from_kernel: bool) {
    let previous = PREVIOUS.get();
    let handler = previous.map_or(libc::SIG_DFL, |action| action.sa_sigaction);
    let with_info = previous.is_some_and(|action| action.sa_flags & libc::SA_SIGINFO != 0);
    match handler {
        libc::SIG_IGN if !from_kernel => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: sets the default action; a fault then happens again, and ends the process
            // with the right address.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                if !from_kernel {
                    libc::raise(signal);
                }
            }
        }
        handler if with_info => {
            // SAFETY: installed with SA_SIGINFO, so it has this signature.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: installed without SA_SIGINFO, so it has this signature.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}
