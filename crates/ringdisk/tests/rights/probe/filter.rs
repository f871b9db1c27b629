//! The filter of a running process, read from the kernel, and every question that can be put to it.
//!
//! Promises: each number that a system call may have, on each machine whose calls the processor
//! takes, with arguments on both sides of every rule. What passes and is not in the list of needs
//! fails the test, and what is in the list and does not pass does too.

use std::collections::BTreeSet;

use libc::sock_filter;
use ringdisk_sandbox::Calls;
use ringdisk_sandbox::calls::{Is, Need};
use ringdisk_testkit::limits::needs;

use crate::probe::traced::{Traced, threads};

/// Answers of a filter (linux/seccomp.h).
const KILL_PROCESS: u32 = 0x8000_0000;
const NO_SUCH_CALL: u32 = 0x0005_0000 | 38;
pub(crate) const ALLOW: u32 = 0x7fff_0000;
const ACTION: u32 = 0xffff_0000;

/// `AUDIT_ARCH_…` of linux/audit.h.
#[cfg(target_arch = "x86_64")]
pub(crate) const OURS: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
pub(crate) const OURS: u32 = 0xc000_00b7;
/// i386, x86_64, Arm and aarch64.
const MACHINES: [u32; 4] = [0x4000_0003, 0xc000_003e, 0x4000_0028, 0xc000_00b7];

/// More than any machine has.
const NUMBERS: u32 = 1024;
/// `__X32_SYSCALL_BIT`: the same calls with short pointers.
const X32: u32 = 0x4000_0000;

/// All filters of one thread; the kernel asks each and takes the strictest answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Filters(Vec<Vec<[u32; 4]>>);

/// A question.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    pub(crate) machine: u32,
    pub(crate) call: u32,
    pub(crate) arguments: [u64; 6],
}

impl Question {
    /// A word of `struct seccomp_data`: number, machine, instruction pointer, arguments.
    fn word(&self, offset: u32) -> u32 {
        let half = |value: u64, high: bool| {
            let half = (value >> if high { 32 } else { 0 }) & u64::from(u32::MAX);
            u32::try_from(half).expect("a half")
        };
        match offset {
            0 => self.call,
            4 => self.machine,
            8 | 12 => 0,
            _ => half(self.arguments[(offset as usize - 16) / 8], offset % 8 == 4),
        }
    }
}

/// Runs a program of the kernel's old BPF, as far as filters are made of it.
fn run(program: &[[u32; 4]], question: &Question) -> u32 {
    let (mut at, mut accumulator) = (0usize, 0u32);
    loop {
        let [code, yes, no, k] = program[at];
        let jump = |holds: bool| 1 + if holds { yes } else { no } as usize;
        at += match code {
            // LD|W|ABS, ALU|AND|K
            0x20 => {
                accumulator = question.word(k);
                1
            }
            0x54 => {
                accumulator &= k;
                1
            }
            // JA, JEQ, JGT, JGE, JSET
            0x05 => 1 + k as usize,
            0x15 => jump(accumulator == k),
            0x25 => jump(accumulator > k),
            0x35 => jump(accumulator >= k),
            0x45 => jump(accumulator & k != 0),
            // RET|K
            0x06 => return k,
            other => panic!("an instruction that is not known here: {other:#x}"),
        };
    }
}

impl Filters {
    /// Those of a thread. `None`: the kernel does not show them (`CONFIG_CHECKPOINT_RESTORE`).
    fn of(thread: &Traced) -> Option<Filters> {
        let plain = |it: &sock_filter| [it.code.into(), it.jt.into(), it.jf.into(), it.k];
        let mut all = Vec::new();
        loop {
            match thread.filter(all.len()) {
                Ok(program) => all.push(program.iter().map(plain).collect()),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => break,
                Err(error) if all.is_empty() => {
                    eprintln!("no filters: {error}");
                    return None;
                }
                Err(error) => panic!("a filter cannot be read: {error}"),
            }
        }
        Some(Filters(all))
    }

    /// The answer that counts.
    pub(crate) fn answer(&self, question: &Question) -> u32 {
        let answers = self.0.iter().map(|program| run(program, question));
        answers.min_by_key(|answer| (answer & ACTION).cast_signed()).expect("a filter")
    }
}

/// The filters of a process, which are those of each of its threads. `None`: the test is left out.
pub(crate) fn filters_of(pid: u32) -> Option<Filters> {
    let mut found: Option<Filters> = None;
    for tid in threads(pid) {
        // It may have ended meanwhile.
        let Ok(thread) = Traced::stop(tid) else { continue };
        let Some(filters) = Filters::of(&thread) else {
            assert!(!needs("a kernel that shows filters (CONFIG_CHECKPOINT_RESTORE)", false));
            return None;
        };
        assert!(!filters.0.is_empty(), "thread {tid} of {pid} has no filter");
        assert!(found.as_ref().is_none_or(|it| *it == filters), "thread {tid} has another filter");
        found = Some(filters);
    }
    Some(found.expect("a thread"))
}

/// Values on both sides of what a rule says of one argument, and each bit alone.
fn values(needs: &[Need], index: u8, pid: u32) -> BTreeSet<u64> {
    let mut values: BTreeSet<u64> = (0..64).map(|bit| 1 << bit).collect();
    values.extend([
        0,
        u64::MAX,
        u32::MAX.into(),
        pid.into(),
        u64::from(pid) + 1,
        1 << 32 | u64::from(pid),
    ]);
    let arguments = needs.iter().flat_map(|need| need.arguments).flat_map(|set| *set);
    for argument in arguments.filter(|argument| argument.index == index) {
        match argument.is {
            Is::In(all) => {
                let near = |value: &u32| [value.wrapping_sub(1), *value, value.wrapping_add(1)];
                values.extend(all.iter().flat_map(near).map(u64::from));
                values.extend(all.iter().map(|value| 1 << 40 | u64::from(*value)));
            }
            Is::Bits { mask, value } => {
                values.extend((0..32).map(|bit| u64::from(value ^ (1 << bit))));
                values.extend([value, value | !mask, value ^ mask].map(u64::from));
            }
            Is::Null | Is::OurPid => {}
        }
    }
    values
}

/// Arguments for a call: all that matter to its rules.
fn arguments(needs: &[Need], pid: u32) -> Vec<[u64; 6]> {
    let rules = needs.iter().flat_map(|need| need.arguments).flat_map(|set| *set);
    let indices: BTreeSet<u8> = rules.map(|argument| argument.index).collect();
    let mut all = vec![[0; 6], [u64::MAX; 6]];
    for index in indices {
        let values = values(needs, index, pid);
        let with = |had: &[u64; 6]| -> Vec<[u64; 6]> {
            let set = |value: &u64| {
                let mut new = *had;
                new[usize::from(index)] = *value;
                new
            };
            values.iter().map(set).collect()
        };
        all = all.iter().flat_map(with).collect();
    }
    all
}

/// What differs between the filters of a process and what its list says, in words.
pub(crate) fn differences(filters: &Filters, calls: &Calls, pid: u32) -> Vec<String> {
    let (needed, deadly) = (calls.needs(), calls.deadly());
    let mut differences = Vec::new();
    let mut ask = |question: Question, expected: u32, name: &str| {
        let answer = filters.answer(&question);
        if answer != expected {
            differences.push(format!("{name} {question:x?}: {answer:#x}, not {expected:#x}"));
        }
    };
    for call in 0..NUMBERS {
        let of_call = |all: &[Need]| -> Vec<Need> {
            all.iter().filter(|need| need.call == i64::from(call)).copied().collect()
        };
        let (needs, kills) = (of_call(&needed), of_call(&deadly));
        for arguments in arguments(&needs, pid) {
            let is_allowed = needs.iter().any(|need| need.allows(&arguments, pid));
            let expected = match (kills.is_empty(), is_allowed) {
                (false, _) => KILL_PROCESS,
                (true, true) => ALLOW,
                (true, false) => NO_SUCH_CALL,
            };
            let name = needs.first().or(kills.first()).map_or("", Need::name);
            ask(Question { machine: OURS, call, arguments }, expected, name);
        }
        for arguments in [[0; 6], [u64::MAX; 6]] {
            for number in [X32 | call, 1 << 31 | call, u32::MAX - call] {
                ask(Question { machine: OURS, call: number, arguments }, NO_SUCH_CALL, "no call");
            }
            for machine in MACHINES.into_iter().filter(|it| *it != OURS) {
                ask(Question { machine, call, arguments }, KILL_PROCESS, "another machine's");
            }
        }
    }
    differences
}
