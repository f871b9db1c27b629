//! Which CPUs the queue threads of an export run on.
//!
//! Promises: pure: a machine and the options of the user in, CPUs and warnings out, so that
//! machines that are not at hand can be tested. Control path, before an export starts. What the
//! system refuses is a warning; only a list of CPUs of which none can be used is an error.

use std::sync::atomic::{AtomicUsize, Ordering};

use ringdisk_ring::{CpuList, Topology};

use crate::{Error, ErrorKind, Numa, THREADS_MAX, ThreadOptions};

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
fn usable_cpus(
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

/// What a protocol wants of its queue threads.
#[derive(Clone, Copy, Debug)]
pub struct PlacementRule<'a> {
    /// When a thread has a CPU of its own.
    pub own: OwnCpu,
    /// Threads that `auto` makes at most; never more than one for each CPU.
    pub auto_max: usize,
    /// Threads that can have work.
    pub most: usize,
    /// Why there are no more, for the warning.
    pub why_most: &'a str,
    /// Threads of this process that were placed by this rule before: the threads of the next export
    /// go on behind them.
    pub placed: Option<&'a AtomicUsize>,
}

/// Threads that serve any client, as many as CPUs, and placed by the scheduler.
impl Default for PlacementRule<'_> {
    fn default() -> Self {
        PlacementRule {
            own: OwnCpu::WhereNamed,
            auto_max: THREADS_MAX,
            most: THREADS_MAX,
            why_most: "the most there can be",
            placed: None,
        }
    }
}

/// Where the queue threads of an export run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadPlaces {
    /// CPUs of each thread; an empty list: it runs where the scheduler wants.
    pub threads: Vec<CpuList>,
    /// CPUs that queue threads may be on.
    pub usable: CpuList,
}

/// Places the queue threads of an export.
///
/// A single thread is bound to the CPUs that the user named, if there are any. Several threads are
/// spread over the nodes, and each has a CPU or a node as [`OwnCpu`] says; where there are more
/// threads than CPUs they share them.
///
/// Errors: [`ErrorKind::Usage`] for a list of CPUs of which none can be used.
pub fn place_threads(
    topology: &Topology,
    options: &ThreadOptions,
    rule: &PlacementRule<'_>,
    warnings: &mut Vec<String>,
) -> Result<ThreadPlaces, Error> {
    let usable = usable_cpus(topology, options.cpus.as_ref(), warnings)?;
    let count = options.count(usable.len().min(rule.auto_max), rule.most, rule.why_most, warnings);
    let first = rule.placed.map_or(0, |placed| placed.fetch_add(count, Ordering::Relaxed));
    let is_named = options.cpus.is_some();
    let has_own = is_named || rule.own == OwnCpu::Always;
    let has_node = options.numa == Numa::Auto && topology.nodes.len() > 1;
    let threads = if count == 1 {
        vec![if is_named { usable.clone() } else { CpuList::default() }]
    } else if has_own || has_node {
        let order: Vec<usize> = match options.numa {
            Numa::Auto => topology.spread(&usable),
            Numa::Off => usable.iter().collect(),
        };
        let near = |cpu| usable.filter(|other| topology.node_of(other) == topology.node_of(cpu));
        let cpus = (first..first + count).map(|number| order[number % order.len()]);
        cpus.map(|cpu| if has_own { [cpu].into_iter().collect() } else { near(cpu) }).collect()
    } else {
        vec![CpuList::default(); count]
    };
    Ok(ThreadPlaces { threads, usable })
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
