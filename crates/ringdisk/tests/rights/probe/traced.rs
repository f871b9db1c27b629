//! A thread of another process that stands still for us (ptrace(2)), and goes on when it is let go.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::ptr::null_mut;

/// The event of a thread that was stopped by PTRACE_INTERRUPT (linux/ptrace.h).
const SECCOMP_GET_FILTER: u32 = 0x420c;

/// A thread that stands still. All of it is used by the thread that stopped it.
#[derive(Debug)]
pub(crate) struct Traced {
    pub(crate) tid: i32,
    /// It has ended.
    is_gone: bool,
}

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// It stands still.
    Still,
    /// It is gone, by this signal.
    Killed(i32),
}

fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl Traced {
    /// Stops a thread.
    ///
    /// Errors: it has ended, or is one of the kernel's.
    pub(crate) fn stop(tid: i32) -> io::Result<Traced> {
        let none = null_mut::<libc::c_void>();
        // SAFETY: neither request uses memory of ours.
        unsafe {
            checked(libc::ptrace(libc::PTRACE_SEIZE, tid, none, none))?;
            checked(libc::ptrace(libc::PTRACE_INTERRUPT, tid, none, none))?;
        }
        let mut traced = Traced { tid, is_gone: false };
        match traced.wait() {
            Stop::Still => Ok(traced),
            Stop::Killed(_) => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn wait(&mut self) -> Stop {
        let mut status = 0;
        // SAFETY: the status lives across the call.
        let waited = unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL) };
        if waited == self.tid && libc::WIFSTOPPED(status) {
            return Stop::Still;
        }
        self.is_gone = true;
        Stop::Killed(if libc::WIFSIGNALED(status) { libc::WTERMSIG(status) } else { 0 })
    }

    /// One of its filters, the oldest first.
    ///
    /// Errors: `ENOENT` where it has no more; others where the kernel does not show them.
    pub(crate) fn filter(&self, index: usize) -> io::Result<Vec<libc::sock_filter>> {
        // SAFETY: without a place to write to the kernel gives the length.
        let len = checked(unsafe {
            libc::ptrace(SECCOMP_GET_FILTER, self.tid, index, null_mut::<libc::c_void>())
        })?;
        let none = libc::sock_filter { code: 0, jt: 0, jf: 0, k: 0 };
        let mut program = vec![none; usize::try_from(len).expect("a length")];
        // SAFETY: the place has the length that the kernel has said, and the thread, which stands
        // still, gets no other filter.
        let got =
            unsafe { libc::ptrace(SECCOMP_GET_FILTER, self.tid, index, program.as_mut_ptr()) };
        assert_eq!(checked(got)?, len);
        Ok(program)
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn registers(&self) -> libc::user_regs_struct {
        // SAFETY: plain integers, for which all zero bits are a value.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        let none = null_mut::<libc::c_void>();
        // SAFETY: the structure lives across the call.
        let got = unsafe { libc::ptrace(libc::PTRACE_GETREGS, self.tid, none, &raw mut registers) };
        checked(got).expect("registers");
        registers
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn set_registers(&self, registers: &libc::user_regs_struct) {
        let none = null_mut::<libc::c_void>();
        // SAFETY: the structure lives across the call; what the thread does then is the test's
        // matter.
        let set = unsafe { libc::ptrace(libc::PTRACE_SETREGS, self.tid, none, registers) };
        checked(set).expect("registers");
    }

    /// Carries out one instruction.
    pub(crate) fn step(&mut self) -> Stop {
        let none = null_mut::<libc::c_void>();
        // SAFETY: no memory of ours is used.
        checked(unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, self.tid, none, none) })
            .expect("step");
        self.wait()
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        if !self.is_gone {
            let none = null_mut::<libc::c_void>();
            // SAFETY: no memory of ours is used.
            unsafe { libc::ptrace(libc::PTRACE_DETACH, self.tid, none, none) };
        }
    }
}

/// Threads of a process that run its code; those of the kernel (for rings, for virtqueues) do not.
pub(crate) fn threads(pid: u32) -> Vec<i32> {
    /// `PF_IO_WORKER`, `PF_USER_WORKER`, and `PF_EXITING` of linux/sched.h.
    const NO_CODE: u32 = 0x10 | 0x4000 | 0x4;
    let runs_code = |tid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).unwrap_or_default();
        let flags = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(6));
        flags.and_then(|flags| flags.parse::<u32>().ok()).is_some_and(|flags| flags & NO_CODE == 0)
    };
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("a process").flatten();
    let tids = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok());
    tids.filter(runs_code).collect()
}
