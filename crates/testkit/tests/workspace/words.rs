//! The words of the project: those that docs/glossary.md says are not used.
//!
//! Promises: no name and no sentence of the repository has one of them, and comments of sources
//! name the actor.

use crate::tree::{files, relative, root};

/// The page that names them.
const GLOSSARY: &str = "docs/glossary.md";

/// The words of the left column under "Words that are not used": each one word or two.
fn unused_words(page: &str) -> Vec<Vec<String>> {
    let table = page.split("## Words that are not used").nth(1).expect("the list of words");
    let rows = table.lines().filter(|line| line.starts_with("| ")).skip(1);
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    cells.flat_map(|cell| cell.split(',')).map(words).collect()
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
fn the_words_of_the_glossary_are_not_used() {
    let page = std::fs::read_to_string(root().join(GLOSSARY)).expect("the glossary");
    let unused = unused_words(&page);
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
            let line = words(line);
            let found = unused.iter().filter(|word| has(&line, word));
            wrong.extend(found.map(|word| format!("{name}:{}: {word:?}", number + 1)));
        }
    }
    assert!(wrong.is_empty(), "{GLOSSARY} has better words: {wrong:#?}");
}

/// Words of comments that leave the actor out.
const NO_ACTORS: [&str; 3] = ["whoever", "somebody", "anybody"];

#[test]
fn comments_of_sources_name_the_actor() {
    let mut wrong = Vec::new();
    for path in files(&root()) {
        let name = relative(&path);
        let is_source = name.starts_with("crates/") && name.contains("/src/");
        if !is_source || !name.ends_with(".rs") || name.contains("/tests") {
            continue;
        }
        let content = std::fs::read_to_string(&path).expect("a source");
        for (number, line) in content.lines().enumerate() {
            let comment = line.trim_start();
            let words = words(comment);
            if comment.starts_with("//") && words.iter().any(|word| NO_ACTORS.contains(&&**word)) {
                wrong.push(format!("{name}:{}: {comment}", number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "which thread, process or user? {wrong:#?}");
}
