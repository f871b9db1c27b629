//! Seccomp: which system calls may be made.
//!
//! Promises: three answers, the strictest first.
//! - A call that no correct version of this program makes once it serves, and that an attacker who
//!   controls the process would make (starting a program, tracing another, mounting, changing the
//!   user, loading a module), **ends the process**. That costs no more than any crash: flushed data
//!   is on stable storage, and a kept mount continues.
//! - Every other call that is not on the list is answered with **`ENOSYS`**. A libc or a standard
//!   library with a newer call then falls back to the old one, and a call of this program that is
//!   missing in the list gets an error, which it handles, instead of ending the process and with it
//!   the disk of a machine. No data depends on it: data goes through rings, which only need
//!   io_uring_enter(2).
//! - The rest is **allowed**, some of it with certain arguments only.
//!
//! io_uring_setup(2) is not on the list: a new ring would be one without restrictions.

use std::collections::{BTreeMap, BTreeSet};

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

mod list;
mod need;

use list::{ALLOWED, DEADLY, KEPT, SOCKETS, VHOST};
pub use need::{Argument, Is, Need};

/// Needs of a plan besides the calls of every plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Unix sockets may be made and connected: to connect again to a peer that was restarted.
    pub sockets: bool,
    /// Rings may be given to the module vhost_blk, through a device that is open already.
    pub vhost: bool,
    /// What is sent comes from a pipe that another process keeps, too.
    pub kept: bool,
    /// Single calls more, by number (`libc::SYS_…`), also of those that end the process.
    pub more: Vec<i64>,
}

impl Calls {
    /// For a process that removes its mount itself: umount2(2), and the calls that abort a FUSE
    /// connection where fusectl is not mounted.
    #[must_use]
    pub fn unmounting() -> Calls {
        let more = vec![libc::SYS_umount2, libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount];
        Calls { more, ..Calls::default() }
    }

    /// All calls that are allowed. One that is there twice is allowed with the arguments of either.
    #[must_use]
    pub fn needs(&self) -> Vec<Need> {
        let sockets = if self.sockets { SOCKETS } else { &[] };
        let vhost = if self.vhost { VHOST } else { &[] };
        let kept = if self.kept { KEPT } else { &[] };
        let more = self.more.iter().map(|call| Need {
            call: *call,
            constant: "",
            why: "the plan names it",
            arguments: &[],
        });
        ALLOWED.iter().chain(sockets).chain(vhost).chain(kept).copied().chain(more).collect()
    }

    /// All calls that end the process.
    #[must_use]
    pub fn deadly(&self) -> Vec<Need> {
        DEADLY.iter().filter(|need| !self.more.contains(&need.call)).copied().collect()
    }
}

/// The two filters, and how many calls they let through.
#[derive(Debug)]
pub(crate) struct Filters {
    /// To be installed in this order: inside the last one nothing can be installed.
    pub(crate) programs: [BpfProgram; 2],
    pub(crate) allowed: usize,
}

/// The conditions of seccompiler for one condition on an argument: any of them is enough.
fn conditions(argument: &Argument) -> Result<Vec<SeccompCondition>, BackendError> {
    let low = SeccompCmpArgLen::Dword;
    let one = |len, operator, value: u64| {
        SeccompCondition::new(argument.index, len, operator, value).map(|made| vec![made])
    };
    match argument.is {
        Is::In(values) => {
            let make = |value: &u32| {
                SeccompCondition::new(
                    argument.index,
                    low.clone(),
                    SeccompCmpOp::Eq,
                    (*value).into(),
                )
            };
            values.iter().map(make).collect()
        }
        Is::Bits { mask, value } => one(low, SeccompCmpOp::MaskedEq(mask.into()), value.into()),
        Is::Null => one(SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0),
        Is::OurPid => one(low, SeccompCmpOp::Eq, std::process::id().into()),
    }
}

/// The rules of one need; none: any arguments.
fn rules(need: &Need) -> Result<Vec<SeccompRule>, BackendError> {
    let mut rules = Vec::new();
    for set in need.arguments {
        let mut combined = vec![Vec::new()];
        for argument in *set {
            let any = conditions(argument)?;
            let with = |had: &Vec<SeccompCondition>| -> Vec<Vec<SeccompCondition>> {
                let add = |one: &SeccompCondition| [&had[..], std::slice::from_ref(one)].concat();
                any.iter().map(add).collect()
            };
            combined = combined.iter().flat_map(with).collect();
        }
        for conditions in combined {
            rules.push(SeccompRule::new(conditions)?);
        }
    }
    Ok(rules)
}

/// Makes the filters.
///
/// Errors: a machine that seccompiler does not know.
pub(crate) fn filters(calls: &Calls) -> Result<Filters, BackendError> {
    let machine = TargetArch::try_from(std::env::consts::ARCH)?;
    let needs = calls.needs();
    let with_any: BTreeSet<i64> =
        needs.iter().filter(|need| need.arguments.is_empty()).map(|need| need.call).collect();
    let mut allowed: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for need in &needs {
        let known = allowed.entry(need.call).or_default();
        if !with_any.contains(&need.call) {
            known.extend(rules(need)?);
        }
    }
    let deadly: BTreeMap<i64, Vec<SeccompRule>> =
        calls.deadly().iter().map(|need| (need.call, Vec::new())).collect();
    let count = allowed.len();
    let unknown = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    let deadly =
        SeccompFilter::new(deadly, SeccompAction::Allow, SeccompAction::KillProcess, machine)?;
    let allowed = SeccompFilter::new(allowed, unknown, SeccompAction::Allow, machine)?;
    Ok(Filters { programs: [deadly.try_into()?, allowed.try_into()?], allowed: count })
}

#[cfg(test)]
mod tests;
