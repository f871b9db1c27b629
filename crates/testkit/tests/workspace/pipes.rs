//! Pipes of shell scripts end with a program that reads all.
//!
//! Promises: finds `… | grep -q`. `grep -q` ends at the first line that matches; what writes into
//! the pipe may then end by SIGPIPE, and with `set -o pipefail` the whole pipe has failed although
//! the line was there: now and then, when the writer is slow.

use std::path::Path;

use crate::tree::{files, relative, root};

fn is_shell(path: &Path, content: &str) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str());
    let first = content.lines().next().unwrap_or_default();
    matches!(ending, Some("sh" | "job")) || first.starts_with("#!") && first.ends_with("sh")
}

/// The numbers of the lines, from 1, that pipe into a `grep` which may end early.
fn early_ends(content: &str) -> Vec<usize> {
    let ends_early = |command: &str| {
        let mut words = command.split_whitespace();
        words.next() == Some("grep")
            && words
                .take_while(|word| word.starts_with('-'))
                .any(|word| word == "--quiet" || !word.starts_with("--") && word.contains('q'))
    };
    // `a || grep -q x FILE` is no pipe.
    let is_wrong = |line: &str| line.replace("||", ";").split('|').skip(1).any(ends_early);
    (1..).zip(content.lines()).filter(|(_, line)| is_wrong(line)).map(|(at, _)| at).collect()
}

#[test]
fn a_grep_that_ends_early_is_found_in_a_pipe_alone() {
    let script = "a | grep -q x\ngrep -q x file\na | grep -a -qE x\na || grep -q x file\n\
                  a | grep --quiet x\na | grep quiet\na | b | grep -v x\n";
    assert_eq!(early_ends(script), [1, 3, 5]);
}

#[test]
fn no_pipe_ends_in_a_grep_that_ends_early() {
    let mut wrong = Vec::new();
    for path in files(&root()) {
        let Ok(content) = std::fs::read_to_string(&path) else { continue };
        if is_shell(&path, &content) {
            let name = relative(&path);
            wrong.extend(early_ends(&content).iter().map(|line| format!("{name}:{line}")));
        }
    }
    assert!(wrong.is_empty(), "write `grep … >/dev/null` here: {wrong:#?}");
}
