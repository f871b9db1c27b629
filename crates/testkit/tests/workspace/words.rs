//! The words of the project: those that docs/glossary.md says are not used.
//!
//! Promises: no name and no sentence of the repository has one of them; no function, type or field
//! has one of those that are no names; comments and pages name the actor.

use std::path::Path;

use crate::tree::{files, relative, root};

/// The page that names them.
const GLOSSARY: &str = "docs/glossary.md";

/// The words of the left column of the table under a heading: each one word or two.
fn left_column(page: &str, heading: &str) -> Vec<Vec<String>> {
    let table = page.split(&format!("## {heading}\n")).nth(1).expect("the list of words");
    let table = table.split("\n## ").next().unwrap_or_default();
    let rows = table.lines().filter(|line| line.starts_with("| ")).skip(1);
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let cells = cells.flat_map(|cell| cell.split(',')).filter(|cell| !cell.contains('…'));
    cells.map(words).collect()
}

/// The words of a line in small letters; names are taken apart (`first_look`, `FirstLook`).
fn words(line: &str) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let mut before = ' ';
    for letter in line.chars() {
        let begins = !before.is_alphabetic() || before.is_lowercase() && letter.is_uppercase();
        if letter.is_alphabetic() {
            if begins {
                out.push(String::new());
            }
            out.last_mut().expect("a word has begun").extend(letter.to_lowercase());
        }
        before = letter;
    }
    out
}

/// Forms of "leave" that the row "leave … away" of the glossary means, with words between.
const LEAVE: [&str; 3] = ["leave", "leaves", "leaving"];
/// Words between "leave" and "away" at most.
const LEFT_WORDS_MAX: usize = 8;

/// Whether a line says "leave X away" or "left away", in one part of one sentence.
fn leaves_away(line: &str) -> bool {
    let says_it = |part: Vec<String>| {
        let leave = part.iter().position(|word| LEAVE.contains(&&**word));
        let rest = leave.map_or(&[][..], |leave| &part[leave + 1..]);
        rest.iter().take(LEFT_WORDS_MAX + 1).any(|word| word == "away")
            || has(&part, &words("left away"))
    };
    line.split(['.', ',', ':', ';', '(']).map(words).any(says_it)
}

/// Whether a line has a word, or two of them one behind the other.
fn has(line: &[String], word: &[String]) -> bool {
    line.windows(word.len()).any(|part| part == word)
}

#[test]
fn names_are_taken_apart() {
    assert_eq!(
        words("// the first_look of WardenLink"),
        ["the", "first", "look", "of", "warden", "link"]
    );
    assert_eq!(words("PATIENCE: 5"), ["patience"]);
    assert!(has(&words("let first_look = 1;"), &words("first look")));
    assert!(!has(&words("grungy"), &words("rung")));
}

#[test]
fn what_is_left_away_is_found() {
    assert!(leaves_away("        .hint(\"leave --since and --backing away\")"));
    assert!(leaves_away("An option whose value may be left away."));
    assert!(!leaves_away("What is left. Take it away."));
    assert!(!leaves_away("fn a_socket_that_was_left_is_taken_away()"));
    assert!(!leaves_away("what a killed server has left (a mount) goes away"));
}

#[test]
fn the_words_of_the_glossary_are_not_used() {
    let page = std::fs::read_to_string(root().join(GLOSSARY)).expect("the glossary");
    let unused = left_column(&page, "Words that are not used");
    assert!(unused.len() > 10, "{unused:?}");
    let mut wrong = Vec::new();
    for path in files(&root()) {
        let name = relative(&path);
        if name == GLOSSARY || file!().ends_with(&name) {
            continue;
        }
        let Ok(content) = std::fs::read_to_string(&path) else { continue };
        let in_name = unused.iter().filter(|word| has(&words(&name), word));
        wrong.extend(in_name.map(|word| format!("{name}: the name has {word:?}")));
        for (number, line) in content.lines().enumerate() {
            if leaves_away(line) {
                wrong.push(format!("{name}:{}: leave … away", number + 1));
            }
            let line = words(line);
            let found = unused.iter().filter(|word| has(&line, word));
            wrong.extend(found.map(|word| format!("{name}:{}: {word:?}", number + 1)));
        }
    }
    assert!(wrong.is_empty(), "{GLOSSARY} has better words: {wrong:#?}");
}

/// Of the words that are no names, those with which no name begins or ends, either.
const PARTICIPLES: [&str; 2] = ["told", "shown"];

/// Whether a name is one of these words, or begins or ends with a participle among them.
fn says_nothing(name: &str, no_names: &[Vec<String>]) -> bool {
    let name = words(name);
    let is_participle =
        |word: Option<&String>| word.is_some_and(|word| PARTICIPLES.contains(&&**word));
    no_names.contains(&name) || is_participle(name.first()) || is_participle(name.last())
}

/// The functions, types, fields and parameters that a line of a source declares or fills.
fn declared(line: &str) -> Vec<&str> {
    let line = line.trim_start();
    let is_letter = |letter: char| letter.is_alphanumeric() || letter == '_';
    let name = |text: &'_ str| text.len() - text.trim_start_matches(is_letter).len();
    let mut out = Vec::new();
    for keyword in ["fn ", "struct ", "enum ", "type ", "trait ", "union ", "mod "] {
        let behind = |at: usize| &line[at + keyword.len()..];
        let starts = line.match_indices(keyword).map(|(at, _)| at);
        let starts = starts.filter(|at| !line[..*at].ends_with(is_letter));
        out.extend(starts.map(behind).map(|rest| &rest[..name(rest)]));
    }
    let field = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ").map_or("", |(_, rest)| rest),
        Some(rest) if rest.starts_with(' ') => rest.trim_start(),
        _ => line,
    };
    if field[name(field)..].starts_with(": ") {
        out.push(&field[..name(field)]);
    }
    out.retain(|name| !name.is_empty());
    out
}

/// Whether a file is a source of the project outside of test code.
fn is_source(name: &str) -> bool {
    let is_test = name.contains("/tests/") || name.ends_with("/tests.rs");
    let is_test = is_test || name.starts_with("crates/testkit/");
    name.starts_with("crates/") && name.contains("/src/") && name.ends_with(".rs") && !is_test
}

/// The lines of a source in front of its tests.
fn before_tests(content: &str) -> impl Iterator<Item = (usize, &str)> {
    content.lines().enumerate().take_while(|(_, line)| *line != "mod tests {")
}

#[test]
fn declarations_are_found() {
    assert_eq!(declared("    pub(super) fn first<T>(self) -> T {"), ["first"]);
    assert_eq!(declared("    pub(crate) told_at: Option<Instant>,"), ["told_at"]);
    assert_eq!(declared("pub struct Shown<'a> {"), ["Shown"]);
    assert_eq!(declared("    let shown = path.display();"), [""; 0]);
    let no_names = [words("told"), words("show")];
    let all = ["told", "told_at", "is_told", "Show", "show_log", "ToldAll", "quoted"];
    let bad: Vec<_> = all.into_iter().filter(|name| says_nothing(name, &no_names)).collect();
    assert_eq!(bad, ["told", "told_at", "is_told", "Show", "ToldAll"]);
}

#[test]
fn functions_types_and_fields_say_what_they_do() {
    let page = std::fs::read_to_string(root().join(GLOSSARY)).expect("the glossary");
    let no_names = left_column(&page, "Words that are no names");
    assert!(PARTICIPLES.iter().all(|word| no_names.contains(&words(word))), "{no_names:?}");
    let mut wrong = Vec::new();
    for path in files(&root()) {
        let file = relative(&path);
        if !is_source(&file) {
            continue;
        }
        let content = std::fs::read_to_string(&path).expect("a source");
        for (number, line) in before_tests(&content) {
            if !line.trim_start().starts_with("//") {
                let bad = declared(line).into_iter().filter(|name| says_nothing(name, &no_names));
                wrong.extend(bad.map(|name| format!("{file}:{}: {name}", number + 1)));
            }
        }
    }
    assert!(wrong.is_empty(), "{GLOSSARY} has better names: {wrong:#?}");
}

/// Words that leave the actor out.
const NO_ACTORS: [&str; 4] = ["whoever", "somebody", "anybody", "everybody"];

/// The comment in a line of a source, a script or C; of a page the line without code.
fn comment(file: &str, line: &str) -> String {
    let text = line.trim_start();
    let marks: &[&str] = match Path::new(file).extension().and_then(|end| end.to_str()) {
        Some("md") => return line.split('`').step_by(2).collect::<Vec<_>>().join(" "),
        Some("rs") => &["//"],
        Some("c" | "h") => &["//", "/*", "* "],
        _ => &["#", "\"\"\""],
    };
    let is_comment = marks.iter().any(|mark| text.starts_with(mark));
    if is_comment { text.to_owned() } else { String::new() }
}

#[test]
fn comments_are_found() {
    assert_eq!(comment("a.rs", "    /// Whoever reads."), "/// Whoever reads.");
    assert_eq!(comment("a.rs", "    expect(\"somebody serves\");"), "");
    assert_eq!(comment("a.c", " * Whoever reads."), "* Whoever reads.");
    assert_eq!(comment("a.md", "a test (`x::of_somebody`) of it"), "a test ( ) of it");
}

#[test]
fn comments_and_pages_name_the_actor() {
    let mut wrong = Vec::new();
    for path in files(&root()) {
        let name = relative(&path);
        let is_foreign = name.contains("/vhost-blk/vhost/") || file!().ends_with(&name);
        let is_page = name.starts_with("docs/") && name.ends_with(".md");
        let is_read = ["crates/", "tests/", "kernel/"].iter().any(|place| name.starts_with(place));
        if is_foreign || !is_page && !is_read {
            continue;
        }
        let Ok(content) = std::fs::read_to_string(&path) else { continue };
        for (number, line) in content.lines().enumerate() {
            let words = words(&comment(&name, line));
            if words.iter().any(|word| NO_ACTORS.contains(&&**word)) {
                wrong.push(format!("{name}:{}: {line}", number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "which thread, process or user? {wrong:#?}");
}
