//! On which node memory is, and on which it shall be.
//!
//! Promises: control path. A refusal (a cpuset, a filter of system calls in a container, a kernel
//! without NUMA) is for the caller to log: memory elsewhere is slower, not wrong. Sources:
//! mbind(2), move_pages(2), get_mempolicy(2), `linux/mempolicy.h`.

use std::collections::{BTreeMap, BTreeSet};

use crate::Errno;

const MPOL_DEFAULT: libc::c_int = 0;
const MPOL_PREFERRED: libc::c_int = 1;
/// Pages of this process alone.
const MPOL_MF_MOVE: libc::c_int = 1 << 1;
const PAGE_BYTES: usize = 4096;
/// Pages that are asked for at once: 32 KiB of addresses on the heap.
const PAGES_AT_ONCE: usize = 4096;

/// Where the pages of some memory are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePages {
    /// Pages of 4 KiB on each node.
    pub by_node: BTreeMap<usize, u64>,
    /// Pages that nobody has touched yet, so that they take no memory.
    pub untouched: u64,
}

impl NodePages {
    /// Pages that take memory.
    pub fn touched(&self) -> u64 {
        self.by_node.values().sum()
    }
}

/// The result of a system call that returns a number or -1.
fn checked(result: libc::c_long) -> Result<(), Errno> {
    if result >= 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL))
}

/// Whether the user gave the calling thread a memory policy (`numactl`, which children inherit).
///
/// Errors: `ENOSYS` without NUMA, `EPERM` by a filter.
pub(crate) fn has_policy() -> Result<bool, Errno> {
    let mut mode: libc::c_int = MPOL_DEFAULT;
    // SAFETY: the call writes one `int` to `mode`, which outlives it; no mask is asked for (null
    // and 0), no flag and no address given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            std::ptr::null_mut::<libc::c_ulong>(),
            0 as libc::c_ulong,
            std::ptr::null_mut::<libc::c_void>(),
            0 as libc::c_ulong,
        )
    };
    checked(result).map(|()| mode != MPOL_DEFAULT)
}

/// Makes pages of a mapping that are not touched yet come from a node, as long as that has memory.
///
/// * `start`, `len_bytes`: whole pages of one mapping.
///
/// Errors: `EINVAL` when the node does not exist, has no memory or is not ours to use; `EPERM`,
/// `ENOSYS` as above.
pub(crate) fn prefer(start: usize, len_bytes: usize, node: usize) -> Result<(), Errno> {
    const BITS: usize = libc::c_ulong::BITS as usize;
    let mut mask = vec![0 as libc::c_ulong; node / BITS + 1];
    mask[node / BITS] = 1 << (node % BITS);
    // The kernel looks at one bit fewer than it is told of.
    let bits = mask.len() * BITS + 1;
    // SAFETY: the mask has `bits - 1` bits and outlives the call, which reads it only. A policy
    // changes where pages come from, never their content, so the range need not be ours for this to
    // be sound.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start,
            len_bytes,
            MPOL_PREFERRED,
            mask.as_ptr(),
            bits,
            0 as libc::c_uint,
        )
    };
    checked(result)
}

/// Asks where the pages of some memory of this process are.
///
/// * `ranges`: start address and bytes of each. One whose first page is untouched counts as
///   untouched altogether: buffers are used from their start, and most are never used. Memory that
///   has gone meanwhile is untouched too.
///
/// Errors: `ENOSYS` without NUMA, `EPERM` by a filter of system calls.
pub fn pages_by_node(ranges: &[(usize, usize)]) -> Result<NodePages, Errno> {
    let pages = |&(start, len): &(usize, usize)| {
        (start / PAGE_BYTES * PAGE_BYTES..start.saturating_add(len)).step_by(PAGE_BYTES)
    };
    let mut found = NodePages::default();
    let mut used = Vec::new();
    let mut ranges = ranges.iter();
    each_page(&mut ranges.clone().filter_map(|range| pages(range).next()), |node| {
        // In step: a head for each range that has a page.
        let range = ranges.by_ref().find(|range| pages(range).next().is_some());
        let Some(range) = range else { return };
        match node {
            Some(_) => used.push(*range),
            None => found.untouched += pages(range).len() as u64,
        }
    })?;
    each_page(&mut used.iter().flat_map(pages), |node| match node {
        Some(node) => *found.by_node.entry(node).or_default() += 1,
        None => found.untouched += 1,
    })?;
    Ok(found)
}

/// Moves memory of this process to a node, as far as it takes memory and may be moved. Gives where
/// its pages are then.
///
/// * `ranges`: start address and bytes of each. Pages that they share with other memory go with
///   them.
///
/// Memory that the kernel has made for itself and lent us (the entries of an io_uring) and memory
/// that is pinned for it stay where they are. Sources: move_pages(2).
///
/// Errors: as [`pages_by_node`]; `EACCES`, `ENODEV` when the node is not ours to use or has no
/// memory.
pub fn move_to_node(ranges: &[(usize, usize)], node: usize) -> Result<NodePages, Errno> {
    let all: BTreeSet<usize> = ranges
        .iter()
        .filter(|(_, len)| *len > 0)
        .flat_map(|&(start, len)| {
            (start / PAGE_BYTES * PAGE_BYTES..start.saturating_add(len)).step_by(PAGE_BYTES)
        })
        .collect();
    let (mut there, mut pages) = (Vec::new(), all.iter().copied());
    each_page(&mut all.iter().copied(), |on| {
        // In step: each page has an answer.
        there.extend(pages.next().filter(|_| on.is_some_and(|on| on != node)));
    })?;
    let target = libc::c_int::try_from(node).map_err(|_| Errno::INVAL)?;
    for batch in there.chunks(PAGES_AT_ONCE) {
        let (nodes, mut status) = (vec![target; batch.len()], vec![0 as libc::c_int; batch.len()]);
        move_pages(batch, Some(&nodes), &mut status)?;
    }
    let mut found = NodePages::default();
    each_page(&mut all.iter().copied(), |on| match on {
        Some(on) => *found.by_node.entry(on).or_default() += 1,
        None => found.untouched += 1,
    })?;
    Ok(found)
}

/// Start address and bytes of the calling thread's stack; `None` where the C library does not say.
pub fn stack_of_thread() -> Option<(usize, usize)> {
    // SAFETY: an all-zero `pthread_attr_t` is a valid place for the C library to write to.
    let mut attributes: libc::pthread_attr_t = unsafe { std::mem::zeroed() };
    // SAFETY: of the calling thread, which lives; `attributes` is a live structure of the right
    // type.
    if unsafe { libc::pthread_getattr_np(libc::pthread_self(), &raw mut attributes) } != 0 {
        return None;
    }
    let (mut start, mut len) = (std::ptr::null_mut(), 0);
    // SAFETY: made by the call above; both results are live variables of the right types.
    let got =
        unsafe { libc::pthread_attr_getstack(&raw const attributes, &raw mut start, &raw mut len) };
    // SAFETY: made above, and not used any more.
    unsafe { libc::pthread_attr_destroy(&raw mut attributes) };
    (got == 0).then(|| (start.addr(), len))
}

/// move_pages(2) of this process.
///
/// * `nodes`: where each page shall go; `None`: nothing moves, and `status` tells where each is.
///
/// Errors: those of the call.
fn move_pages(
    pages: &[usize],
    nodes: Option<&[libc::c_int]>,
    status: &mut [libc::c_int],
) -> Result<(), Errno> {
    assert!(status.len() >= pages.len() && nodes.is_none_or(|nodes| nodes.len() == pages.len()));
    // SAFETY: the call reads `pages.len()` addresses, which it looks up and never follows, and as
    // many nodes, if there are any, and writes as many `int`s to `status`: all are at least as
    // long, as was looked at above. Where a page is does not change what is in it, nor its address,
    // so nothing that points to it is wrong afterwards.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0 as libc::pid_t,
            pages.len(),
            pages.as_ptr(),
            nodes.map_or(std::ptr::null(), <[_]>::as_ptr),
            status.as_mut_ptr(),
            if nodes.is_some() { MPOL_MF_MOVE } else { 0 },
        )
    };
    checked(result)
}

/// Calls `found` with the node of each page in turn; `None`: there is no page.
fn each_page(
    pages: &mut dyn Iterator<Item = usize>,
    mut found: impl FnMut(Option<usize>),
) -> Result<(), Errno> {
    let mut status = vec![0 as libc::c_int; PAGES_AT_ONCE];
    loop {
        let batch: Vec<usize> = pages.take(PAGES_AT_ONCE).collect();
        if batch.is_empty() {
            return Ok(());
        }
        move_pages(&batch, None, &mut status)?;
        // ENOENT: no page; EFAULT: the page of zeroes, or nothing is mapped there any more.
        status[..batch.len()].iter().for_each(|status| found(usize::try_from(*status).ok()));
    }
}

#[cfg(test)]
mod tests {
    use ringdisk_testkit::limits::needs;

    use super::{NodePages, PAGE_BYTES, pages_by_node};
    use crate::{Errno, SharedMemory, Topology};

    fn range(memory: &SharedMemory) -> (usize, usize) {
        (memory.address(), memory.len())
    }

    /// A container may forbid all of this.
    fn is_refused<T>(result: &Result<T, Errno>) -> bool {
        matches!(result, Err(Errno::PERM | Errno::NOSYS))
    }

    #[test]
    fn pages_are_on_the_node_that_was_asked_for_once_they_are_touched() {
        let nodes = Topology::read().nodes;
        for node in nodes.iter().filter(|node| node.is_memory_usable).map(|node| node.id) {
            // More pages than are asked for at once.
            let memory = SharedMemory::mapped(5000 * PAGE_BYTES);
            let unused = SharedMemory::mapped(3 * PAGE_BYTES);
            let ranges = [range(&unused), (0, 0), range(&memory)];
            let bound = memory.prefer_node(0..5000 * PAGE_BYTES, node);
            let all = pages_by_node(&ranges);
            let is_allowed = !is_refused(&bound) && !is_refused(&all);
            if !needs("leave to bind memory to nodes", is_allowed) {
                return;
            }
            bound.expect("a node with memory");
            assert_eq!(all, Ok(NodePages { untouched: 5003, ..NodePages::default() }));
            memory.buffer().slice(0..4200 * PAGE_BYTES).fill(1);
            let found = pages_by_node(&ranges).expect("asked before");
            assert_eq!(found.by_node.get(&node), Some(&4200), "{found:?}");
            assert_eq!((found.touched(), found.untouched), (4200, 803));
        }
    }

    #[test]
    fn the_kernel_knows_the_node_that_memory_prefers() {
        let memory = SharedMemory::mapped(PAGE_BYTES);
        let node = Topology::read().nodes.iter().find(|node| node.is_memory_usable).map(|n| n.id);
        let bound = memory.prefer_node(0..PAGE_BYTES, node.expect("memory somewhere"));
        let Ok(maps) = std::fs::read_to_string("/proc/self/numa_maps") else { return };
        if is_refused(&bound) {
            return;
        }
        // Neighbours of the same policy are one mapping: the last line that begins at or before it.
        let start = memory.address();
        let line = maps.lines().take_while(|line| {
            let address = line.split(' ').next().unwrap_or_default();
            usize::from_str_radix(address, 16).is_ok_and(|address| address <= start)
        });
        let line = line.last().expect("a line");
        assert!(line.contains(&format!(" prefer:{}", node.unwrap_or(0))), "{line}");
    }

    #[test]
    fn a_node_that_does_not_exist_is_refused_and_the_memory_works() {
        let memory = SharedMemory::mapped(PAGE_BYTES);
        for node in [63, 64, 1000, 100_000] {
            let refused = memory.prefer_node(0..PAGE_BYTES, node);
            assert!(refused.is_err(), "{node}");
        }
        memory.buffer().fill(7);
        assert!(!memory.buffer().is_zero());
    }

    #[test]
    fn memory_that_shares_its_pages_with_others_is_not_bound() {
        assert_eq!(SharedMemory::new(100, 4096).prefer_node(0..100, 0), Err(Errno::INVAL));
    }
}
