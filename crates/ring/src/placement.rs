//! Binding a thread to CPUs.
//!
//! Promises: a refusal (cpuset, container) is for the caller to log as a warning: a thread that
//! runs elsewhere is slower, not wrong.

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

use crate::{CpuList, Errno};

/// CPUs that the main thread may run on, which binds itself to none; never empty.
pub(crate) fn process_cpus() -> CpuList {
    let set = sched_getaffinity(Some(rustix::process::getpid())).unwrap_or_default();
    let cpus: CpuList = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    if cpus.is_empty() { [0].into_iter().collect() } else { cpus }
}

/// CPUs that the calling thread may run on; empty where the system does not say.
pub fn cpus_of_thread() -> CpuList {
    let set = sched_getaffinity(None).unwrap_or_default();
    (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

/// Binds the calling thread to a set of CPUs.
///
/// Errors: `EINVAL` when none of them is allowed and online, or one has a number of 1024 or more.
pub fn pin_to_cpus(cpus: &CpuList) -> Result<(), Errno> {
    sched_setaffinity(None, &set_of(cpus)?)
}

/// Binds another thread to a set of CPUs.
///
/// Errors: as [`pin_to_cpus`]; there is no such thread, or it is not ours.
pub fn pin_thread_to_cpus(thread: Pid, cpus: &CpuList) -> Result<(), Errno> {
    sched_setaffinity(Some(thread), &set_of(cpus)?)
}

fn set_of(cpus: &CpuList) -> Result<CpuSet, Errno> {
    let mut set = CpuSet::new();
    for cpu in cpus.iter() {
        if cpu >= CpuSet::MAX_CPU {
            return Err(Errno::INVAL);
        }
        set.set(cpu);
    }
    Ok(set)
}
