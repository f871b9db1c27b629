//! The width of lines: at most 100 columns.
//!
//! Promises: counts characters in Rust, Python, C, shell and Markdown. Tables and code blocks of
//! Markdown may be wider, as they cannot be wrapped, and so may a line that is one long word.

use std::path::Path;

use crate::tree::{files, relative, root};

const COLUMNS: usize = 100;
/// Files of others, which stay as they are.
const FOREIGN: [&str; 3] = [
    "kernel/vhost-blk/vhost/6.12/vhost.h",
    "kernel/vhost-blk/vhost/7.2/vhost.h",
    "kernel/vhost-blk/vhost/7.3/vhost.h",
];

/// How a file is written: what may be wider depends on it.
#[derive(Debug, PartialEq)]
enum Kind {
    Source,
    Markdown,
    Other,
}

fn kind(path: &Path, content: &str) -> Kind {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("md") => Kind::Markdown,
        Some("rs" | "py" | "c" | "h" | "sh") => Kind::Source,
        None if content.starts_with("#!") => Kind::Source,
        _ => Kind::Other,
    }
}

/// The numbers of the lines that are too wide, from 1.
fn wide_lines(kind: &Kind, content: &str) -> Vec<usize> {
    let mut in_fence = false;
    let mut out = Vec::new();
    for (at, line) in content.lines().enumerate() {
        in_fence ^= line.starts_with("```");
        let unwrapped = in_fence || ["|", "    ", "<", "!["].iter().any(|b| line.starts_with(b));
        let may_be_wide = *kind == Kind::Markdown && unwrapped || *kind == Kind::Other;
        let one_word = line.trim_start_matches(['/', '#', '!', ' ']).split(' ').count() == 1;
        if line.chars().count() > COLUMNS && !may_be_wide && !one_word {
            out.push(at + 1);
        }
    }
    out
}

#[test]
fn tables_and_code_of_markdown_may_be_wide_and_text_may_not() {
    let wide = "word ".repeat(21);
    let page = format!("| {wide}|\n\n    {wide}\n\n{wide}\n```\n{wide}\n```\n");
    assert_eq!(wide_lines(&Kind::Markdown, &page), [5]);
    assert_eq!(wide_lines(&Kind::Source, &page), [1, 3, 5, 7]);
    assert_eq!(wide_lines(&Kind::Source, &format!("// {}", "x".repeat(120))), [0; 0]);
}

#[test]
fn no_line_is_wider_than_100_columns() {
    let mut wrong = Vec::new();
    for path in files(&root()) {
        let name = relative(&path);
        let Ok(content) = std::fs::read_to_string(&path) else { continue };
        if FOREIGN.contains(&&*name) {
            continue;
        }
        let lines = wide_lines(&kind(&path, &content), &content);
        wrong.extend(lines.iter().map(|line| format!("{name}:{line}")));
    }
    assert!(wrong.is_empty(), "wrap these: {wrong:#?}");
}
