//! Which CPUs the queue threads of an export run on.
//!
//! Pure: a machine and the options of the user in, CPUs and warnings out, so that machines that are
//! not at hand can be tested. Control path, before an export starts. What the system refuses is a
//! warning; only a list of CPUs of which none can be used is an error.

use ringdisk_ring::{CpuList, Topology};

use crate::{Error, ErrorKind, Numa, ThreadOptions};

/// When each of several queue threads has a CPU of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnCpu {
    /// Always: callers are on the same CPUs, and the export is what the machine serves.
    Always,
    /// Only where the user named CPUs. Otherwise nobody here knows what else runs: other processes
    /// like this one choose by the same rule, so all of them would meet on the same few CPUs while
    /// others idle. The scheduler knows, and threads are bound to nodes at most.
    WhereNamed,
}

/// The CPUs that queue threads may run on: those that the user named, or all that this process may
/// use. Never empty.
///
/// CPUs that cannot be used (not in this machine, offline, outside the mask of this process) are
/// left out with a warning.
///
/// Errors: [`ErrorKind::Usage`] when none of the named CPUs can be used.
pub fn usable_cpus(
    topology: &Topology,
    named: Option<&CpuList>,
    warnings: &mut Vec<String>,
) -> Result<CpuList, Error> {
    let Some(named) = named else { return Ok(topology.allowed.clone()) };
    let usable = named.filter(|cpu| topology.allowed.contains(cpu));
    let reasons = why_left_out(topology, named, &usable);
    if usable.is_empty() {
        let reasons = reasons.join(", ");
        let text = format!("--cpus {named}: none of them can be used: {reasons}");
        let hint = format!("this process may use {}", topology.allowed);
        return Err(Error::new(ErrorKind::Usage, text).hint(hint));
    }
    warnings.extend(reasons.iter().map(|reason| format!("--cpus {named}: left out: {reason}")));
    Ok(usable)
}

/// Why CPUs of a list cannot be used, a line for each reason.
fn why_left_out(topology: &Topology, named: &CpuList, usable: &CpuList) -> Vec<String> {
    let Topology { possible, online, allowed, .. } = topology;
    let missing = named.filter(|cpu| !possible.contains(cpu));
    let offline = named.filter(|cpu| possible.contains(cpu) && !online.contains(cpu));
    let outside = named.filter(|cpu| online.contains(cpu) && !usable.contains(cpu));
    let mut reasons = Vec::new();
    if !missing.is_empty() {
        let missing = cpus_named(&missing);
        reasons.push(format!("this machine has no {missing} (its CPUs are {possible})"));
    }
    if !offline.is_empty() {
        reasons.push(format!("{} offline", cpus_are(&offline)));
    }
    if !outside.is_empty() {
        let outside = cpus_are(&outside);
        reasons.push(format!("{outside} outside the CPUs that this process may use ({allowed})"));
    }
    reasons
}

/// The CPUs that each queue thread is bound to; an empty list: it runs where the scheduler wants.
///
/// A single thread is bound to the CPUs that the user named, if there are any. Several threads are
/// spread over the nodes, and each has a CPU or a node as [`OwnCpu`] says; where there are more
/// threads than CPUs they share them.
///
/// * `usable`: as [`usable_cpus`] gives them.
/// * `first`: number of the first thread among all threads of this process that are placed so: the
///   threads of the next export go on behind those of the one before.
pub fn cpus_of_threads(
    topology: &Topology,
    options: &ThreadOptions,
    usable: &CpuList,
    own: OwnCpu,
    first: usize,
    count: usize,
) -> Vec<CpuList> {
    let is_named = options.cpus.is_some();
    if count == 1 {
        return vec![if is_named { usable.clone() } else { CpuList::default() }];
    }
    let has_own = is_named || own == OwnCpu::Always;
    let has_node = options.numa == Numa::Auto && topology.nodes.len() > 1;
    if !has_own && !has_node {
        return vec![CpuList::default(); count];
    }
    let order: Vec<usize> = match options.numa {
        Numa::Auto => topology.spread(usable),
        Numa::Off => usable.iter().collect(),
    };
    let near = |cpu| usable.filter(|other| topology.node_of(other) == topology.node_of(cpu));
    (first..first + count)
        .map(|number| order[number % order.len()])
        .map(|cpu| if has_own { [cpu].into_iter().collect() } else { near(cpu) })
        .collect()
}

/// `CPU 3`, `CPUs 3-4`.
#[must_use]
pub fn cpus_named(cpus: &CpuList) -> String {
    if cpus.len() == 1 { format!("CPU {cpus}") } else { format!("CPUs {cpus}") }
}

/// `CPU 3 is`, `CPUs 3-4 are`.
#[must_use]
pub fn cpus_are(cpus: &CpuList) -> String {
    format!("{} {}", cpus_named(cpus), if cpus.len() == 1 { "is" } else { "are" })
}

#[cfg(test)]
mod tests;
