//! The tests that the documentation names as proof of a promise.
//!
//! Promises: each part of a name (program, module, function) is there in the crate that is named
//! with it. That one is inside the other is not looked at.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use crate::tree::{files, relative, root};

/// Pages whose tables end with the tests of each promise.
const PAGES: [&str; 3] = ["docs/security.md", "docs/data-safety.md", "docs/compatibility-jobs.md"];

/// The tests that a line names, each with its crate: "`ringdisk-vhost: session`, `devices::life`".
/// The crate of a name without one is that of the name before.
fn named(line: &str) -> Vec<(String, String)> {
    let mut out = Vec::new();
    let mut of = None;
    for code in line.split('`').skip(1).step_by(2) {
        let name = match code.split_once(": ") {
            Some((place, name)) if place.starts_with("ringdisk") => {
                of = Some(place.to_owned());
                name
            }
            _ => code,
        };
        let is_path = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c);
        if let Some(place) = of.as_ref().filter(|_| name.chars().all(is_path)) {
            out.push((place.clone(), name.to_owned()));
        }
    }
    out
}

/// Names of functions, modules and files below a directory.
fn names(directory: &Path) -> HashSet<String> {
    let mut out = HashSet::new();
    for path in files(directory) {
        let parts = path.strip_prefix(directory).expect("below it").with_extension("");
        out.extend(parts.iter().map(|part| part.to_string_lossy().into_owned()));
        if path.extension().is_some_and(|ending| ending == "rs") {
            let content = std::fs::read_to_string(&path).expect("readable");
            let words: Vec<&str> = content.split_whitespace().collect();
            let defined = words.windows(2).filter(|pair| ["fn", "mod"].contains(&pair[0]));
            let is_end = |c: char| !(c.is_alphanumeric() || c == '_');
            out.extend(defined.filter_map(|pair| pair[1].split(is_end).next()).map(str::to_owned));
        }
    }
    out
}

#[test]
fn a_name_without_a_crate_is_of_the_crate_before_it() {
    let line = "| a `word` | `ringdisk-vhost: session`, `devices::life`, `ringdisk: rights` |";
    let found = named(line);
    let wanted = [("ringdisk-vhost", "session"), ("ringdisk-vhost", "devices::life")];
    let wanted = [&wanted[..], &[("ringdisk", "rights")]].concat();
    let wanted: Vec<_> = wanted.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
    assert_eq!(found, wanted);
}

#[test]
fn every_test_that_the_documentation_names_is_there() {
    let fuzz = names(&root().join("fuzz/fuzz_targets"));
    let mut known = HashMap::new();
    let (mut wrong, mut count) = (Vec::new(), 0);
    for page in PAGES.map(|page| root().join(page)) {
        let content = std::fs::read_to_string(&page).expect("a page");
        for (number, line) in content.lines().enumerate() {
            for (place, name) in named(line) {
                count += 1;
                let directory = place.strip_prefix("ringdisk-").unwrap_or("ringdisk");
                let directory = root().join("crates").join(directory);
                let names = known.entry(place.clone()).or_insert_with(|| names(&directory));
                let is_known = |part: &str| names.contains(part) || fuzz.contains(part);
                if !name.split("::").all(is_known) {
                    wrong.push(format!("{}:{}: {place}: {name}", relative(&page), number + 1));
                }
            }
        }
    }
    assert!(count > 100, "only {count} names were found");
    assert!(wrong.is_empty(), "no such tests: {wrong:#?}");
}
