//! The size of source files: one idea for each file.
//!
//! Promises: counts the lines of Rust below `src` of every crate; a file that has more than
//! [`LINES_MAX`] is on the list, with the reason.

use crate::tree::{files, relative, root};

/// Most lines of a source file.
const LINES_MAX: usize = 600;
/// Files that may have more, and why.
const EXEMPT: [(&str, &str); 0] = [];

#[test]
fn no_source_file_has_more_than_600_lines() {
    let mut wrong = Vec::new();
    for path in files(&root().join("crates")) {
        let name = relative(&path);
        if !name.ends_with(".rs") || name.split('/').nth(2) != Some("src") {
            continue;
        }
        let lines = std::fs::read_to_string(&path).expect("readable").lines().count();
        let is_exempt = EXEMPT.iter().any(|(exempt, _)| *exempt == name);
        if (lines > LINES_MAX) != is_exempt {
            wrong.push(format!("{name}: {lines} lines"));
        }
    }
    assert!(wrong.is_empty(), "split these by idea, or correct the list: {wrong:#?}");
}
