//! The licences of dependencies, and SPDX expressions.
//!
//! Promises: every package that a build uses can be shipped under MIT OR Apache-2.0.

use std::collections::HashSet;

use crate::metadata::{list, metadata, text};

/// SPDX identifiers of licences that a MIT OR Apache-2.0 program may ship.
const LICENCES: [&str; 12] = [
    "MIT",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Zlib",
    "0BSD",
    "CC0-1.0",
    "Unlicense",
    "Unicode-3.0",
    "MIT-0",
];

/// Whether an SPDX expression can be met by licences of the list alone. `OR` binds weaker than
/// `AND`; the old `/` means `OR`.
fn allowed(expression: &str) -> bool {
    let words = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = words.split_whitespace().collect();
    let mut at = 0;
    let met = either(&words, &mut at);
    met && at == words.len()
}

fn either(words: &[&str], at: &mut usize) -> bool {
    let mut met = all(words, at);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        met |= all(words, at);
    }
    met
}

fn all(words: &[&str], at: &mut usize) -> bool {
    let mut met = one(words, at);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        met &= one(words, at);
    }
    met
}

fn one(words: &[&str], at: &mut usize) -> bool {
    let Some(word) = words.get(*at) else { return false };
    *at += 1;
    if *word == "(" {
        let met = either(words, at);
        let closed = words.get(*at) == Some(&")");
        *at += 1;
        return met && closed;
    }
    if words.get(*at) == Some(&"WITH") {
        let name = format!("{word} WITH {}", words.get(*at + 1).unwrap_or(&""));
        *at += 2;
        return LICENCES.contains(&name.as_str());
    }
    LICENCES.contains(word)
}

#[test]
fn licence_expressions_are_understood() {
    let good = [
        "MIT",
        "MIT OR Apache-2.0",
        "MIT/Apache-2.0",
        "GPL-3.0 OR MIT",
        "(MIT OR GPL-2.0) AND ISC",
    ];
    let bad = [
        "",
        "GPL-2.0",
        "MIT AND GPL-2.0",
        "(MIT",
        "MIT)",
        "Apache-2.0 WITH Foo",
        "(GPL-2.0 OR LGPL-2.1) AND MIT",
    ];
    assert!(good.iter().all(|e| allowed(e)), "{:?}", good.map(allowed));
    assert!(!bad.iter().any(|e| allowed(e)), "{:?}", bad.map(allowed));
}

#[test]
fn every_dependency_has_a_licence_that_we_may_ship() {
    let metadata = metadata();
    let used: HashSet<&str> =
        list(&metadata["resolve"], "nodes").iter().map(|node| text(node, "id")).collect();
    let wrong: Vec<String> = list(&metadata, "packages")
        .iter()
        .filter(|p| used.contains(text(p, "id")) && !allowed(text(p, "license")))
        .map(|p| format!("{} {}: {:?}", text(p, "name"), text(p, "version"), text(p, "license")))
        .collect();
    assert!(wrong.is_empty(), "not on the list of licences: {wrong:#?}");
}
