//! Which system calls may be made: seccomp.
//!
//! Promises: three answers, the strictest first.
//! - A call that no correct version of this program makes once it serves, and that somebody who has taken it over would make (starting a
//!   program, tracing another, mounting, becoming another user, loading a module), **ends the process**: what runs then is not us any
//!   more. That costs no more than any crash: what was flushed is on stable storage, and a kept mount goes on.
//! - Every other call that is not on the list is answered with **`ENOSYS`**. A libc or a standard library that has learned a new call then
//!   falls back to the old one, and a path of ours that was forgotten here gets an error, which it handles, in place of a kill, which costs
//!   somebody's machine its disk. No data depends on it: data goes through rings, which only need io_uring_enter(2).
//! - The rest is **allowed**, some of it with certain arguments only.
//!
//! io_uring_setup(2) is not on the list: a new ring would be one without restrictions.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

mod list;

use list::{ALLOWED, DEADLY, FCNTLS, IOCTLS, PRCTLS, SOCKETS, VHOST_IOCTLS};

/// What a plan needs besides [`ALLOWED`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Unix sockets may be made, bound and connected: for who connects again to a peer that was restarted.
    pub sockets: bool,
    /// Rings may be handed to the module vhost_blk, through a device that is open already.
    pub vhost: bool,
    /// Single calls more, by number (`libc::SYS_…`), also of those that end the process.
    pub more: Vec<i64>,
}

impl Calls {
    /// For a process that removes its mount itself: umount2(2), and what aborts a FUSE connection where fusectl is not mounted.
    #[must_use]
    pub fn unmounting() -> Calls {
        let more = vec![libc::SYS_umount2, libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount];
        Calls { more, ..Calls::default() }
    }
}

/// The two filters, and how many calls they let through.
#[derive(Debug)]
pub(crate) struct Filters {
    /// To be installed in this order: inside the last one nothing can be installed.
    pub(crate) programs: [BpfProgram; 2],
    pub(crate) allowed: usize,
}

fn equal(argument: u8, value: u64) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

/// All bits of `mask` are as in `value`.
fn masked(argument: u8, mask: u32, value: u32) -> Result<SeccompCondition, BackendError> {
    let operator = SeccompCmpOp::MaskedEq(mask.into());
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value.into())
}

fn one(condition: SeccompCondition) -> Result<Vec<SeccompRule>, BackendError> {
    Ok(vec![SeccompRule::new(vec![condition])?])
}

/// One rule for each value of an argument.
fn any(argument: u8, values: &[u64]) -> Result<Vec<SeccompRule>, BackendError> {
    values.iter().map(|value| SeccompRule::new(vec![equal(argument, *value)?])).collect()
}

/// A number of a constant of libc, as the kernel sees it.
const fn bits(value: libc::c_int) -> u32 {
    value.cast_unsigned()
}

/// With which arguments a call is allowed; empty: with any.
fn conditions(call: i64, calls: &Calls) -> Result<Vec<SeccompRule>, BackendError> {
    match call {
        // Memory is never made executable.
        libc::SYS_mmap | libc::SYS_mprotect => one(masked(2, bits(libc::PROT_EXEC), 0)?),
        // Threads, and no processes. (clone3(2) has its flags in memory, which a filter cannot see: ENOSYS, and libc takes clone(2).)
        libc::SYS_clone => one(masked(0, bits(libc::CLONE_THREAD), bits(libc::CLONE_THREAD))?),
        libc::SYS_ioctl if calls.vhost => any(1, &[&IOCTLS[..], &VHOST_IOCTLS[..]].concat()),
        libc::SYS_ioctl => any(1, &IOCTLS),
        libc::SYS_prctl => any(0, &PRCTLS),
        libc::SYS_fcntl => {
            let flags = [equal(1, bits(libc::F_SETFL).into())?, masked(2, bits(libc::O_ASYNC), 0)?];
            let mut rules = any(1, &FCNTLS)?;
            rules.push(SeccompRule::new(flags.to_vec())?);
            Ok(rules)
        }
        // To whom the socket is connected. (A name in the memory of sendmsg(2) cannot be seen here: the one datagram socket, that of the service
        // manager, still reaches every name.)
        libc::SYS_sendto => {
            one(SeccompCondition::new(4, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?)
        }
        // For ourselves only.
        libc::SYS_tgkill => one(equal(0, std::process::id().into())?),
        libc::SYS_prlimit64 | libc::SYS_move_pages => one(equal(0, 0)?),
        libc::SYS_socket => one(equal(0, bits(libc::AF_UNIX).into())?),
        _ => Ok(Vec::new()),
    }
}

/// Makes the filters.
///
/// Errors: a machine that seccompiler does not know.
pub(crate) fn filters(calls: &Calls) -> Result<Filters, BackendError> {
    let machine = TargetArch::try_from(std::env::consts::ARCH)?;
    let mut allowed = BTreeMap::new();
    let sockets: &[i64] = if calls.sockets { &SOCKETS } else { &[] };
    for call in ALLOWED.iter().chain(sockets).chain(&calls.more) {
        allowed.insert(*call, conditions(*call, calls)?);
    }
    let deadly: BTreeMap<i64, Vec<SeccompRule>> = DEADLY
        .iter()
        .filter(|call| !calls.more.contains(call))
        .map(|call| (*call, Vec::new()))
        .collect();
    let count = allowed.len();
    let unknown = SeccompAction::Errno(bits(libc::ENOSYS));
    let deadly =
        SeccompFilter::new(deadly, SeccompAction::Allow, SeccompAction::KillProcess, machine)?;
    let allowed = SeccompFilter::new(allowed, unknown, SeccompAction::Allow, machine)?;
    Ok(Filters { programs: [deadly.try_into()?, allowed.try_into()?], allowed: count })
}
