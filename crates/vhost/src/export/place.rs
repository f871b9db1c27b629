//! Where queue threads run.

use ringdisk_ring::{CpuList, Topology};

use super::options::{ExportOptions, Numa, Threads};
use crate::{Error, ErrorKind};

/// The CPUs of each queue thread, an empty list: where the scheduler wants; and all CPUs that queue threads may be on.
///
/// Threads are spread over the nodes, each with a CPU of its own as long as there are enough; a single one is left to the scheduler
/// unless CPUs were named.
///
/// Errors: CPUs that the machine does not have, or of which none can be used.
pub(super) fn place(
    topology: &Topology,
    options: &ExportOptions,
    notes: &mut Vec<String>,
) -> Result<(Vec<CpuList>, CpuList), Error> {
    let usable = match &options.cpus {
        None => topology.allowed.clone(),
        Some(wanted) => {
            let usable = wanted.filter(|cpu| topology.allowed.contains(cpu));
            if usable.is_empty() {
                let text = format!("--cpus {wanted}: none of them can be used");
                let hint = format!("this process may use {}", topology.allowed);
                return Err(Error::new(ErrorKind::Usage, text).hint(hint));
            }
            if usable != *wanted {
                notes.push(format!("--cpus {wanted}: only {usable} can be used"));
            }
            usable
        }
    };
    let order: Vec<usize> = match options.numa {
        Numa::Auto => topology.spread(&usable),
        Numa::Off => usable.iter().collect(),
    };
    let cpus = order.len().max(1);
    let queues = usize::from(options.queues);
    let count = match options.threads {
        Threads::Auto => queues.min(cpus),
        Threads::Count(count) => {
            let count = usize::from(count);
            if count > queues {
                notes.push(format!(
                    "{queues} queue threads instead of {count}: one for each virtqueue"
                ));
            }
            count.min(queues)
        }
    };
    let one = || options.cpus.as_ref().map(|_| usable.clone()).unwrap_or_default();
    let places = match count {
        0 | 1 => vec![one()],
        _ => (0..count).map(|index| [order[index % cpus]].into_iter().collect()).collect(),
    };
    Ok((places, usable))
}
