//! System calls as a server: one of its threads stands still, is given registers, and carries out
//! one instruction. Filter, landlock and capabilities are its own.
#![cfg(target_arch = "x86_64")]

use std::ffi::CStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use crate::probe::traced::{Stop, Traced};

/// Bytes of memory for names.
const SCRATCH_BYTES: u64 = 8192;

/// A server that does as we say.
#[derive(Debug)]
pub(crate) struct Puppet {
    thread: Traced,
    memory: File,
    /// Address of an instruction that makes a system call.
    instruction: u64,
    /// Address of memory for names.
    scratch: u64,
}

impl Puppet {
    /// Takes the first thread of a process.
    pub(crate) fn of(pid: u32) -> Puppet {
        let thread = Traced::stop(pid.cast_signed()).expect("a thread");
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .expect("its memory");
        // The vDSO makes calls where it knows no better.
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
        let vdso = maps.lines().find(|line| line.ends_with("[vdso]")).expect("a vDSO");
        let (from, to) = vdso.split_once(' ').expect("a range").0.split_once('-').expect("a range");
        let number = |text| u64::from_str_radix(text, 16).expect("hex");
        let (from, to) = (number(from), number(to));
        let mut code = vec![0; usize::try_from(to - from).expect("short")];
        memory.read_exact_at(&mut code, from).expect("code");
        let found = code.windows(2).position(|pair| pair == [0x0f, 0x05]).expect("an instruction");
        let mut puppet = Puppet { thread, memory, instruction: from + found as u64, scratch: 0 };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let map = [0, SCRATCH_BYTES, 3, u64::from(flags.cast_unsigned()), u64::MAX, 0];
        puppet.scratch = puppet.call(libc::SYS_mmap, map).expect("memory").cast_unsigned();
        puppet
    }

    /// Makes a system call. Gives what it gave.
    ///
    /// Errors: the errno; or that of no error and more, when the process has been ended by a
    /// signal.
    pub(crate) fn call(&mut self, call: i64, arguments: [u64; 6]) -> Result<i64, Refused> {
        let before = self.thread.registers();
        let mut registers = before;
        registers.rip = self.instruction;
        registers.rax = call.cast_unsigned();
        // It is in no call that would have to be made again.
        registers.orig_rax = u64::MAX;
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        (registers.rdi, registers.rsi, registers.rdx) = (rdi, rsi, rdx);
        (registers.r10, registers.r8, registers.r9) = (r10, r8, r9);
        self.thread.set_registers(&registers);
        loop {
            match self.thread.step() {
                Stop::Killed(signal) => return Err(Refused::Killed(signal)),
                // Another signal came first.
                Stop::Still if self.thread.registers().rip == self.instruction => {}
                Stop::Still => break,
            }
        }
        let result = self.thread.registers().rax.cast_signed();
        self.thread.set_registers(&before);
        match result {
            -4095..0 => Err(Refused::With(i32::try_from(-result).expect("an errno"))),
            result => Ok(result),
        }
    }

    /// Puts a text into its memory; its address.
    pub(crate) fn text(&self, text: &CStr) -> u64 {
        self.bytes(text.to_bytes_with_nul())
    }

    /// Puts bytes into its memory; their address.
    pub(crate) fn bytes(&self, bytes: &[u8]) -> u64 {
        self.memory.write_all_at(bytes, self.scratch).expect("memory");
        self.scratch
    }

    /// Opens a file. Closes it again.
    pub(crate) fn open(&mut self, path: &CStr, flags: i32, mode: u32) -> Result<(), Refused> {
        let name = self.text(path);
        let here = i64::from(libc::AT_FDCWD).cast_unsigned();
        let flags = u64::from(flags.cast_unsigned());
        let fd = self.call(libc::SYS_openat, [here, name, flags, mode.into(), 0, 0])?;
        self.call(libc::SYS_close, [fd.cast_unsigned(), 0, 0, 0, 0, 0]).map(|_| ())
    }

    /// Lets the process go on as if nothing had been.
    pub(crate) fn release(mut self) {
        self.call(libc::SYS_munmap, [self.scratch, SCRATCH_BYTES, 0, 0, 0, 0]).expect("memory");
    }
}

/// Why a call did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// With this errno.
    With(i32),
    /// The process is gone, by this signal.
    Killed(i32),
}
