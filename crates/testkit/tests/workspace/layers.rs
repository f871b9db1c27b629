//! The order of the crates, as docs/architecture.md writes it down.
//!
//! Promises: a crate uses only crates to its left, and every crate has a place.

use std::collections::HashSet;

use crate::metadata::{list, metadata, text};
use crate::tree::root;

/// May be used by tests only, and may use all crates.
const TESTKIT: &str = "ringdisk-testkit";

/// One step of the order: crates that do not use one another.
type Step = Vec<String>;

/// The order of the page: its first code line that begins with `ring ◄`.
fn order(page: &str) -> Vec<Step> {
    let line = page
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .find(|line| line.starts_with("ring ◄"))
        .expect("the line of the crates in docs/architecture.md");
    let crates = line.split("  ").next().expect("a line");
    let package = |name: &str| match name.trim() {
        "ringdisk" => "ringdisk".to_owned(),
        name => format!("ringdisk-{name}"),
    };
    crates.split('◄').map(|step| step.split(',').map(package).collect()).collect()
}

fn written_order() -> Vec<Step> {
    let page = root().join("docs/architecture.md");
    order(&std::fs::read_to_string(page).expect("docs/architecture.md"))
}

/// The number of a crate's step, counted from the left.
fn step(order: &[Step], name: &str) -> Option<usize> {
    order.iter().position(|step| step.iter().any(|each| each == name))
}

#[test]
fn the_order_is_read_with_crates_of_one_step() {
    let order = order("text\n\n    ring ◄ fuse, guest ◄ ringdisk     testkit: tests only\n");
    assert_eq!(order[1], ["ringdisk-fuse", "ringdisk-guest"]);
    assert_eq!((step(&order, "ringdisk"), step(&order, "ringdisk-testkit")), (Some(2), None));
}

#[test]
fn no_crate_depends_on_one_to_its_right() {
    let (order, metadata) = (written_order(), metadata());
    let mut wrong = Vec::new();
    for package in list(&metadata, "packages") {
        let Some(at) = step(&order, text(package, "name")) else { continue };
        for dependency in list(package, "dependencies") {
            let (on, kind) = (text(dependency, "name"), text(dependency, "kind"));
            let is_left = step(&order, on).is_none_or(|left| left < at);
            if kind != "dev" && (on == TESTKIT || !is_left) {
                wrong.push(format!("{} depends on {on}", text(package, "name")));
            }
        }
    }
    assert!(wrong.is_empty(), "against the order {order:?}: {wrong:?}");
}

#[test]
fn every_crate_of_the_workspace_has_a_place_in_the_order() {
    let (order, metadata) = (written_order(), metadata());
    let members: HashSet<&str> =
        list(&metadata, "workspace_members").iter().filter_map(|each| each.as_str()).collect();
    let unknown: Vec<&str> = list(&metadata, "packages")
        .iter()
        .filter(|package| members.contains(text(package, "id")))
        .map(|package| text(package, "name"))
        .filter(|name| *name != TESTKIT && step(&order, name).is_none())
        .collect();
    assert!(unknown.is_empty(), "write them into docs/architecture.md: {unknown:?}");
}
