//! The documents: sizes, links, and what is written in one place only.
//!
//! Promises: the README stays short; every link of a page, and every path of the project in
//! backticks, leads to a file.

use std::path::Path;

use crate::tree::{files, relative, root};

/// Lines of the README: what a newcomer reads.
const README_LINES: usize = 150;

#[test]
fn the_readme_is_short() {
    let page = std::fs::read_to_string(root().join("README.md")).expect("README.md");
    let lines = page.lines().count();
    assert!(lines <= README_LINES, "{lines} lines: move what is not for a newcomer to docs/");
}

/// What the links of a page lead to, without those to other sites and places in the page.
fn links(page: &str) -> Vec<String> {
    let targets = page.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let files = targets.filter_map(|target| target.split('#').next());
    files.filter(|file| !file.is_empty() && !file.contains("://")).map(str::to_owned).collect()
}

#[test]
fn every_link_leads_to_a_file() {
    assert_eq!(links("[a](b.md#c) [d](https://e) [f](#g) ![h](i.svg)"), ["b.md", "i.svg"]);
    let pages = files(&root()).into_iter().filter(|p| p.extension().is_some_and(|e| e == "md"));
    let mut wrong = Vec::new();
    for page in pages {
        let content = std::fs::read_to_string(&page).expect("readable");
        let directory = page.parent().unwrap_or(Path::new("."));
        let dead = links(&content).into_iter().filter(|file| !directory.join(file).exists());
        wrong.extend(dead.map(|file| format!("{}: {file}", relative(&page))));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Directories whose paths are looked for in a page.
const DIRECTORIES: [&str; 5] = ["crates/", "docs/", "tests/", "bench/", "kernel/"];

/// The paths in backticks of a page that begin with one of [`DIRECTORIES`], without the words of a
/// command behind them. Those with `…`, `*` or `{` stand for several files.
fn paths(page: &str) -> Vec<&str> {
    let paragraphs = page.split("\n\n").filter(|part| !part.starts_with("    "));
    let quoted = paragraphs.flat_map(|part| part.split('`').skip(1).step_by(2));
    let paths = quoted.filter_map(|text| text.split([' ', '\n', ':']).next());
    let is_path = |path: &&str| DIRECTORIES.iter().any(|place| path.starts_with(place));
    paths.filter(is_path).filter(|path| !path.contains(['…', '*', '{'])).collect()
}

#[test]
fn every_path_in_a_page_is_there() {
    let page = "`crates/a.rs` `b/c` `bench/run\n--all`\n\n    `docs/x`\n\n`tests/…` `docs/d.md`";
    assert_eq!(paths(page), ["crates/a.rs", "bench/run", "docs/d.md"]);
    let pages = files(&root()).into_iter().filter(|p| p.extension().is_some_and(|e| e == "md"));
    let mut wrong = Vec::new();
    for page in pages {
        let content = std::fs::read_to_string(&page).expect("readable");
        let dead = paths(&content).into_iter().filter(|path| !root().join(path).exists());
        wrong.extend(dead.map(|path| format!("{}: {path}", relative(&page))));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_order_of_the_crates_is_written_once() {
    let with_order = |path: &Path| {
        let content = std::fs::read_to_string(path).unwrap_or_default();
        content.lines().any(|line| line.trim_start().starts_with("ring ◄"))
    };
    let pages: Vec<String> = files(&root())
        .iter()
        .filter(|path| path.extension().is_some_and(|ending| ending == "md"))
        .filter(|path| with_order(path))
        .map(|path| relative(path))
        .collect();
    assert_eq!(pages, ["docs/architecture.md"]);
}
