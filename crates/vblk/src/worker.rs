//! Workers: threads of the kernel that serve rings.
//!
//! Promises: a worker that cannot be bound to CPUs works unbound, and says why. They are threads of
//! this process (`vhost-…` in its task list): they inherit CPUs, cgroup and memory policy from the
//! thread that has them made, and count as its threads do. Control threads only.

use std::collections::BTreeSet;
use std::fs;
use std::io;

use ringdisk_ring::{CpuList, Errno, cpus_of_thread, pin_thread_to_cpus, pin_to_cpus};
use rustix::thread::{Pid, gettid};

/// A worker of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Worker {
    /// Its number in the device; 0 is the one that each device begins with.
    pub id: u32,
    /// Its thread; `None` where it could not be told from others.
    pub tid: Option<u32>,
    /// Why it is not bound to the requested CPUs, if so. It works on others.
    pub unbound: Option<Errno>,
    /// CPUs that it was bound to; empty: those of the thread that had it made.
    pub cpus: CpuList,
}

/// Placement of a thread of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Its name, at most 15 bytes.
    pub name: String,
    /// CPUs that it may run on.
    pub cpus: CpuList,
    /// Its cgroups, a line for each hierarchy (`0::/…` is that of version 2).
    pub cgroup: String,
}

impl Placement {
    /// Reads the placement of a thread.
    ///
    /// * `tid`: of this process.
    ///
    /// Errors: there is none. Source: proc_pid_status(5), cgroups(7).
    pub fn of(tid: u32) -> io::Result<Placement> {
        let text = |name: &str| fs::read_to_string(format!("/proc/self/task/{tid}/{name}"));
        let status = text("status")?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap_or_default().trim()
        };
        Ok(Placement {
            name: field("Name").to_owned(),
            cpus: CpuList::of_kernel(field("Cpus_allowed_list")),
            cgroup: text("cgroup")?.trim_end().to_owned(),
        })
    }
}

impl Worker {
    /// Binds it to CPUs, where it is not bound to them.
    ///
    /// Errors: those of sched_setaffinity(2); `ESRCH`, too, where its thread is not known.
    pub(crate) fn place(&mut self, cpus: &CpuList) -> Result<(), Errno> {
        if *cpus == self.cpus || cpus.is_empty() {
            return Ok(());
        }
        let tid = self.tid.and_then(|tid| Pid::from_raw(tid.cast_signed())).ok_or(Errno::SRCH)?;
        pin_thread_to_cpus(tid, cpus)?;
        (self.cpus, self.unbound) = (cpus.clone(), None);
        Ok(())
    }
}

/// Runs an operation by which the kernel makes a worker, while the calling thread is bound to some
/// CPUs; afterwards the thread has its former CPUs. Gives the result, the worker's thread, and why
/// it could not be bound.
pub(crate) fn making<T>(
    cpus: Option<&CpuList>,
    make: impl FnOnce() -> T,
) -> (T, Option<u32>, Option<Errno>) {
    let before = own_workers();
    let (bound, unbound) = match cpus.map(Bound::to) {
        Some(Ok(bound)) => (Some(bound), None),
        Some(Err(errno)) => (None, Some(errno)),
        None => (None, None),
    };
    let made = make();
    drop(bound);
    let after = own_workers();
    let mut new = after.difference(&before);
    let tid = new.next().copied().filter(|_| new.next().is_none());
    (made, tid, unbound)
}

/// Workers that the calling thread had made, of all devices: the kernel puts its number into their
/// name.
fn own_workers() -> BTreeSet<u32> {
    let name = format!("vhost-{}", gettid().as_raw_nonzero());
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks
        .filter_map(|task| {
            let comm = fs::read_to_string(task.path().join("comm")).ok()?;
            if comm.trim_end() != name {
                return None;
            }
            task.file_name().to_str()?.parse().ok()
        })
        .collect()
}

/// The calling thread is bound to some CPUs.
pub(crate) struct Bound {
    before: CpuList,
}

impl Bound {
    /// Errors: those of sched_setaffinity(2); `EINVAL`, too, where the CPUs of now are not known
    /// and could not be given back.
    pub(crate) fn to(cpus: &CpuList) -> Result<Bound, Errno> {
        let before = cpus_of_thread();
        if before.is_empty() {
            return Err(Errno::INVAL);
        }
        pin_to_cpus(cpus)?;
        Ok(Bound { before })
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if pin_to_cpus(&self.before).is_err() {
            // All of them have gone meanwhile; the kernel takes those of any set that are there.
            let _ = pin_to_cpus(&(0..1024).collect());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_bound_while_something_is_made_and_free_afterwards() {
        let before = cpus_of_thread();
        let one: CpuList = before.first().into_iter().collect();

        let (seen, tid, unbound) = making(Some(&one), cpus_of_thread);

        assert_eq!((seen, tid, unbound), (one, None, None));
        assert_eq!(cpus_of_thread(), before);
    }

    #[test]
    fn cpus_that_are_not_there_are_a_reason_and_no_failure() {
        let before = cpus_of_thread();
        let far: CpuList = [1023].into_iter().collect();

        let (seen, _, unbound) = making(Some(&far), cpus_of_thread);

        assert_eq!((seen, unbound), (before, Some(Errno::INVAL)));
    }

    #[test]
    fn the_placement_of_the_calling_thread_is_read() {
        let tid = gettid().as_raw_nonzero().get().unsigned_abs();

        let placement = Placement::of(tid).unwrap();

        assert_eq!(placement.cpus, cpus_of_thread());
        assert_eq!(placement.cgroup, fs::read_to_string("/proc/self/cgroup").unwrap().trim_end());
        assert!(Placement::of(u32::MAX).is_err());
    }
}
