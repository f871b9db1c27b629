//! How source files open: what the file is, and what it promises.
//!
//! Promises: reads the `//!` lines at the beginning of each source below `src` of every crate, but
//! for those of tests.

use crate::tree::{files, relative, root};

/// Files that have no promise yet. They leave this list when they have one; none is added.
const NOT_YET: [&str; 0] = [];

/// The text of the `//!` lines at the beginning of a source.
fn opening(content: &str) -> String {
    let lines = content.lines().skip_while(|line| {
        line.trim().is_empty() || line.starts_with("#!") || line.starts_with("// ")
    });
    let lines = lines.map_while(|line| line.strip_prefix("//!"));
    lines.map(str::trim).collect::<Vec<_>>().join(" ")
}

/// Sentences of a text; what stands in backticks has none.
fn sentences(text: &str) -> usize {
    let prose = text.split('`').step_by(2).collect::<Vec<_>>().join("x");
    let is_end = |word: &&str| word.ends_with(['.', '!', '?']);
    prose.split_whitespace().filter(is_end).count()
}

/// What an opening lacks, if it does.
fn fault(content: &str) -> Option<&'static str> {
    let opening = opening(content);
    match sentences(&opening) {
        0 | 1 => Some("fewer than two sentences"),
        _ if !opening.contains("Promises") => Some("no promise"),
        _ => None,
    }
}

#[test]
fn an_opening_without_a_promise_is_found() {
    assert_eq!(fault("//! Reads `a. b`.\n//!\n//! Promises: never waits.\n\nuse a;\n"), None);
    assert_eq!(fault("//! Reads `a. b`.\n\n//! Promises: nothing.\n"), fault("use a;\n"));
    assert_eq!(fault("use a;\n"), Some("fewer than two sentences"));
    assert_eq!(fault("//! Reads. Control path.\n"), Some("no promise"));
}

#[test]
fn each_source_says_what_it_is_and_what_it_promises() {
    let mut wrong = Vec::new();
    for path in files(&root().join("crates")) {
        let name = relative(&path);
        let is_source = name.ends_with(".rs") && name.split('/').nth(2) == Some("src");
        if !is_source || name.contains("/tests/") || name.ends_with("/tests.rs") {
            continue;
        }
        let content = std::fs::read_to_string(&path).expect("readable");
        match (fault(&content), NOT_YET.contains(&&*name)) {
            (Some(what), false) => wrong.push(format!("{name}: {what}")),
            (None, true) => wrong.push(format!("{name}: it is on the list and has its promise")),
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
