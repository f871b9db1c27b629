//! Where `unsafe` may stand.
//!
//! Promises: crates without `unsafe` forbid it, and the others keep it to named modules.

use std::collections::BTreeSet;

use crate::tree::{files, relative, root};

/// Where `unsafe` may stand. CONTRIBUTING.md names the crates.
const PLACES: [&str; 10] = [
    "crates/ring/src/",
    // Memory that a guest writes while a queue thread reads it.
    "crates/guest/src/memory/",
    // Ioctls that tell the kernel where memory is.
    "crates/vblk/src/kernel/",
    // System calls that no crate offers, and descriptors from the environment.
    "crates/fuse/src/mount/ffi.rs",
    "crates/fuse/src/mount/inherited.rs",
    // Commands that give the kernel the memory of entries.
    "crates/fuse/src/uring/entry.rs",
    "crates/storage/src/ffi.rs",
    // One socket option that no crate offers.
    "crates/messages/src/peek.rs",
    // A signal handler, and one system call for every thread that no crate offers.
    "crates/sandbox/src/threads.rs",
    // An allocator that counts, for tests.
    "crates/testkit/src/allocations.rs",
];

/// Tests may have some, too: memory of a made-up guest.
fn is_test(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs")
}

/// The crates of `PLACES`.
fn crates_with_unsafe() -> BTreeSet<&'static str> {
    PLACES.iter().filter_map(|place| place.split('/').nth(1)).collect()
}

/// The source files of the crates with `unsafe` in them, without tests.
fn sources_with_unsafe() -> Vec<String> {
    files(&root().join("crates"))
        .iter()
        .filter(|path| path.extension().is_some_and(|ending| ending == "rs"))
        .filter(|path| !is_test(&relative(path)))
        .filter(|path| has_unsafe(&std::fs::read_to_string(path).expect("readable")))
        .map(|path| relative(path))
        .collect()
}

fn has_unsafe(content: &str) -> bool {
    let code = content.lines().map(str::trim_start).filter(|line| !line.starts_with("//"));
    let begins = ["unsafe {", "unsafe fn", "unsafe impl"];
    // `is_unsafe {` is no block.
    let is_word = |line: &str, at: usize| {
        !line[..at].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
    };
    let has = |line: &str, begin: &str| line.match_indices(begin).any(|(at, _)| is_word(line, at));
    code.into_iter().any(|line| begins.iter().any(|begin| has(line, begin)))
}

#[test]
fn crates_without_unsafe_forbid_it() {
    let exempt = crates_with_unsafe();
    let mut wrong = Vec::new();
    for directory in std::fs::read_dir(root().join("crates")).expect("crates").flatten() {
        let name = directory.file_name().to_string_lossy().into_owned();
        let entry = ["lib.rs", "main.rs"].map(|f| directory.path().join("src").join(f));
        for file in entry.iter().filter(|f| f.exists()) {
            let content = std::fs::read_to_string(file).expect("readable");
            let forbids = content.contains("#![forbid(unsafe_code)]");
            let denies = content.contains("#![deny(unsafe_code)]") || name == "ring";
            if !(forbids || exempt.contains(name.as_str()) && denies) {
                wrong.push(relative(file));
            }
        }
    }
    assert!(wrong.is_empty(), "add #![forbid(unsafe_code)] (or deny, in {exempt:?}): {wrong:?}");
}

#[test]
fn unsafe_stands_only_where_the_rules_allow_it() {
    let mut wrong = sources_with_unsafe();
    wrong.retain(|path| !PLACES.iter().any(|place| path.starts_with(place)));
    assert!(wrong.is_empty(), "unsafe outside its modules: {wrong:?}");
}

#[test]
fn no_place_is_allowed_unsafe_that_has_none() {
    let sources = sources_with_unsafe();
    let needless: Vec<&&str> = PLACES
        .iter()
        .filter(|place| !sources.iter().any(|path| path.starts_with(**place)))
        .collect();
    assert!(needless.is_empty(), "take these off the list: {needless:?}");
}

#[test]
fn contributing_names_the_crates_where_unsafe_may_stand() {
    let page = std::fs::read_to_string(root().join("CONTRIBUTING.md")).expect("CONTRIBUTING.md");
    let rule = page.split("\n- ").find(|rule| rule.starts_with("**`unsafe`**")).expect("the rule");
    let missing: Vec<&str> = crates_with_unsafe()
        .into_iter()
        .filter(|name| !rule.contains(&format!("`{name}`")))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}
