//! Queue threads on machines that are not at hand.

use std::sync::atomic::AtomicUsize;

use ringdisk_ring::{CpuList, Topology};
use ringdisk_testkit::machine::Machine;

use super::{OwnCpu, PlacementRule, place_threads, usable_cpus};
use crate::{Error, ErrorKind, Numa, THREADS_MAX, ThreadOptions, Threads};

fn cpus(text: &str) -> CpuList {
    CpuList::of_kernel(text)
}

/// A machine whose CPUs 4 to 7 are offline and whose CPU 0 is not for this process.
fn partly_usable() -> Topology {
    Machine::new("0-7", "0-3", &[(0, "0-7")]).allow("1-7", "0").topology()
}

fn usable(topology: &Topology, named: &str) -> Result<(String, Vec<String>), Error> {
    let mut warnings = Vec::new();
    let usable = usable_cpus(topology, Some(&cpus(named)), &mut warnings)?;
    Ok((usable.to_string(), warnings))
}

/// Places some threads, after so many of other exports.
fn placed_after(
    topology: &Topology,
    options: &ThreadOptions,
    own: OwnCpu,
    before: usize,
) -> Vec<String> {
    let before = AtomicUsize::new(before);
    let (most, placed) = (THREADS_MAX, Some(&before));
    let rule = PlacementRule { own, auto_max: most, most, why_most: "the most", placed };
    let places = place_threads(topology, options, &rule, &mut Vec::new()).expect("CPUs");
    places.threads.iter().map(ToString::to_string).collect()
}

fn options(named: Option<&str>, count: usize) -> ThreadOptions {
    let threads = Threads::Count(count);
    ThreadOptions { threads, cpus: named.map(cpus), ..ThreadOptions::default() }
}

fn placed(topology: &Topology, named: Option<&str>, own: OwnCpu, count: usize) -> Vec<String> {
    placed_after(topology, &options(named, count), own, 0)
}

#[test]
fn cpus_that_cannot_be_used_are_left_out_with_the_reason() {
    let (usable, warnings) = usable(&partly_usable(), "0-4,9").expect("some can be used");
    assert_eq!(usable, "1-3");
    assert_eq!(
        warnings,
        [
            "--cpus 0-4,9: left out: this machine has no CPU 9 (its CPUs are 0-7)",
            "--cpus 0-4,9: left out: CPU 4 is offline",
            "--cpus 0-4,9: left out: CPU 0 is outside the CPUs that this process may use (1-3)",
        ]
    );
}

#[test]
fn a_list_of_which_no_cpu_can_be_used_is_refused_with_the_reasons() {
    for (list, reason) in [
        ("8-9", "this machine has no CPUs 8-9 (its CPUs are 0-7)"),
        ("4", "CPU 4 is offline"),
        ("0", "CPU 0 is outside the CPUs that this process may use (1-3)"),
        (
            "0,5-6",
            "CPUs 5-6 are offline, CPU 0 is outside the CPUs that this process may use (1-3)",
        ),
    ] {
        let error = usable(&partly_usable(), list).expect_err(list);
        assert_eq!(error.kind(), ErrorKind::Usage);
        let text = format!("--cpus {list}: none of them can be used: {reason}");
        assert_eq!(error.to_string(), text);
        assert_eq!(error.hint_text(), Some("this process may use 1-3"));
    }
}

#[test]
fn a_single_thread_is_bound_only_to_cpus_that_were_named() {
    let machine = Machine::even(4, 2).topology();
    for own in [OwnCpu::Always, OwnCpu::WhereNamed] {
        assert_eq!(placed(&machine, None, own, 1), ["none"]);
        assert_eq!(placed(&machine, Some("1-2"), own, 1), ["1-2"]);
    }
}

#[test]
fn several_threads_have_a_cpu_each_or_a_node_each() {
    let machine = Machine::even(8, 2).topology();
    assert_eq!(placed(&machine, None, OwnCpu::Always, 4), ["0", "4", "1", "5"]);
    assert_eq!(placed(&machine, None, OwnCpu::WhereNamed, 3), ["0-3", "4-7", "0-3"]);
    assert_eq!(placed(&machine, Some("1,6"), OwnCpu::WhereNamed, 3), ["1", "6", "1"]);
}

#[test]
fn on_one_node_and_without_nodes_the_scheduler_chooses() {
    let (one, two) = (Machine::even(4, 1).topology(), Machine::even(4, 2).topology());
    assert_eq!(placed(&one, None, OwnCpu::WhereNamed, 2), ["none", "none"]);
    let off = |count| ThreadOptions { numa: Numa::Off, ..options(None, count) };
    assert_eq!(placed_after(&two, &off(2), OwnCpu::WhereNamed, 0), ["none", "none"]);
    assert_eq!(placed_after(&two, &off(3), OwnCpu::Always, 0), ["0", "1", "2"]);
}

#[test]
fn the_threads_of_the_next_export_go_on_behind_those_before() {
    let machine = Machine::even(8, 2).topology();
    assert_eq!(placed_after(&machine, &options(None, 2), OwnCpu::WhereNamed, 3), ["4-7", "0-3"]);
}
