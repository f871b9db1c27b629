//! Rules of the workspace that no compiler checks: the direction of dependencies, licences,
//! reasons, `unsafe`, and that no file names a path of somebody's machine. Reads `cargo metadata`
//! and the tree; changes nothing.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// From left to right: a crate may use those before it, never those after it.
const ORDER: [&str; 12] = [
    "ringdisk-messages",
    "ringdisk-ring",
    "ringdisk-storage",
    "ringdisk-qcow2",
    "ringdisk-disk",
    "ringdisk-fuse",
    "ringdisk-guest",
    "ringdisk-vblk",
    "ringdisk-vhost",
    "ringdisk-sandbox",
    "ringdisk-daemon",
    "ringdisk",
];
/// May be used by tests only, and may use all of them.
const TESTKIT: &str = "ringdisk-testkit";

/// SPDX identifiers that may reach a user of a MIT OR Apache-2.0 program without further duties.
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

/// Where `unsafe` may stand: everywhere in `ring`; in the named modules of `fuse` and `storage`; in
/// test programs (counting allocators).
const UNSAFE_PLACES: [&str; 10] = [
    "crates/ring/src/",
    // Memory that a guest writes while we look.
    "crates/guest/src/memory/",
    // Ioctls that tell the kernel where memory is.
    "crates/vblk/src/kernel/",
    "crates/fuse/src/abi",
    "crates/fuse/src/mount/",
    "crates/fuse/src/dev/",
    // Commands that give the kernel the memory of entries.
    "crates/fuse/src/uring/entry.rs",
    "crates/storage/src/ffi",
    // A signal handler, and one call that no crate has for every thread.
    "crates/sandbox/src/threads.rs",
    "/tests/",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/testkit").to_path_buf()
}

fn output(command: &mut Command) -> String {
    let out = command.output().expect("the command starts");
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).expect("UTF-8")
}

/// `cargo metadata` for the platform of this build; works without a network, since the build has
/// fetched all of it.
fn metadata() -> Value {
    let version = output(Command::new(env!("CARGO")).arg("-vV"));
    let host =
        version.lines().find_map(|l| l.strip_prefix("host: ")).expect("cargo -vV names host");
    let text = output(
        Command::new(env!("CARGO"))
            .args(["metadata", "--format-version=1", "--offline", "--filter-platform", host])
            .current_dir(root()),
    );
    serde_json::from_str(&text).expect("cargo prints JSON")
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// Position in `ORDER`, or the end for the test kit.
fn place(name: &str) -> usize {
    ORDER.iter().position(|each| *each == name).unwrap_or(ORDER.len())
}

#[test]
fn no_crate_depends_on_one_to_its_right() {
    let metadata = metadata();
    let mut wrong = Vec::new();
    for package in list(&metadata, "packages") {
        let name = text(package, "name");
        for dependency in list(package, "dependencies") {
            let (on, kind) = (text(dependency, "name"), text(dependency, "kind"));
            let ours = on == TESTKIT || ORDER.contains(&on);
            let of_ours = ORDER.contains(&name);
            if ours && of_ours && kind != "dev" && place(on) >= place(name) {
                wrong.push(format!("{name} depends on {on}"));
            }
        }
    }
    assert!(wrong.is_empty(), "against the order {ORDER:?}: {wrong:?}");
}

#[test]
fn every_crate_of_the_workspace_has_a_place_in_the_order() {
    let metadata = metadata();
    let members: HashSet<&str> =
        list(&metadata, "workspace_members").iter().filter_map(Value::as_str).collect();
    let names: Vec<&str> = list(&metadata, "packages")
        .iter()
        .filter(|p| members.contains(text(p, "id")))
        .map(|p| text(p, "name"))
        .collect();
    let unknown: Vec<&&str> =
        names.iter().filter(|n| **n != TESTKIT && !ORDER.contains(*n)).collect();
    assert!(unknown.is_empty(), "no place in the order of crates: {unknown:?}");
}

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

#[test]
fn every_dependency_says_why_it_is_there() {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    let section = manifest.split("[workspace.dependencies]").nth(1).expect("the section");
    let mut reason = false;
    let mut wrong = Vec::new();
    for line in section.lines().take_while(|line| !line.starts_with('[')) {
        reason = match line.chars().next() {
            None => false,
            Some('#') => true,
            _ => reason,
        };
        let external = line.contains('=') && !line.starts_with('#') && !line.contains("path =");
        if external && !reason {
            wrong.push(line.to_owned());
        }
    }
    assert!(wrong.is_empty(), "write the reason in a comment above: {wrong:#?}");
}

#[test]
fn dependencies_and_lints_come_from_the_workspace() {
    let mut wrong = Vec::new();
    for manifest in files(&root()).into_iter().filter(|p| p.ends_with("Cargo.toml")) {
        let content = std::fs::read_to_string(&manifest).expect("readable");
        let member = manifest.parent().and_then(Path::parent) == Some(&root().join("crates"));
        let mut section = "";
        for line in content.lines() {
            section = if line.starts_with('[') { line } else { section };
            let entry =
                section.ends_with("dependencies]") && line.contains('=') && !line.starts_with('#');
            if member && entry && !line.contains("workspace = true") {
                wrong.push(format!("{}: {line}", manifest.display()));
            }
        }
        if member && !content.contains("[lints]\nworkspace = true") {
            wrong.push(format!("{}: no lints of the workspace", manifest.display()));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The files of the project, without build output and what is hidden (`.ci` is not), nor the file
/// that a work tree has in place of `.git`.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(directory).expect("a directory").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type().expect("a type");
        let skipped = ["target", "corpus", "artifacts", "tmp", "__pycache__"]
            .contains(&name.as_str())
            || (name.starts_with('.') && name != ".ci");
        if kind.is_dir() && !skipped {
            out.extend(files(&entry.path()));
        } else if kind.is_file() && name != ".git" {
            out.push(entry.path());
        }
    }
    out
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).expect("inside the project").to_string_lossy().into_owned()
}

#[test]
fn crates_without_unsafe_forbid_it() {
    let exempt = ["ring", "fuse", "storage", "guest", "vblk", "sandbox"];
    let mut wrong = Vec::new();
    for directory in std::fs::read_dir(root().join("crates")).expect("crates").flatten() {
        let name = directory.file_name().to_string_lossy().into_owned();
        let entry = ["lib.rs", "main.rs"].map(|f| directory.path().join("src").join(f));
        for file in entry.iter().filter(|f| f.exists()) {
            let content = std::fs::read_to_string(file).expect("readable");
            let forbids = content.contains("#![forbid(unsafe_code)]");
            let denies = content.contains("#![deny(unsafe_code)]") || name == "ring";
            let may_deny = exempt.contains(&name.as_str());
            if !(forbids || may_deny && denies) {
                wrong.push(relative(file));
            }
        }
    }
    assert!(wrong.is_empty(), "add #![forbid(unsafe_code)] (or deny, in {exempt:?}): {wrong:?}");
}

#[test]
fn unsafe_stands_only_where_the_rules_allow_it() {
    let wrong: Vec<String> = files(&root().join("crates"))
        .iter()
        .filter(|path| path.extension().is_some_and(|e| e == "rs"))
        .filter(|path| !UNSAFE_PLACES.iter().any(|place| relative(path).contains(place)))
        .filter(|path| {
            let content = std::fs::read_to_string(path).expect("readable");
            content.lines().map(str::trim_start).filter(|line| !line.starts_with("//")).any(
                |line| ["unsafe {", "unsafe fn", "unsafe impl"].iter().any(|u| line.contains(u)),
            )
        })
        .map(|path| relative(path))
        .collect();
    assert!(wrong.is_empty(), "unsafe outside its modules: {wrong:?}");
}

#[test]
fn no_file_names_a_path_of_a_machine() {
    // Put together here, so that this file does not name them itself.
    let mut forbidden: Vec<String> = [
        ["/wo", "rk/"],
        ["../sha", "red"],
        [".lib", "rary/"],
        ["/tmp", "/rd"],
        ["index.crates", ".io"],
    ]
    .iter()
    .map(|parts| parts.concat())
    .collect();
    let home = std::env::var("HOME").unwrap_or_default();
    forbidden.extend(Some(format!("{}/", home.trim_end_matches('/'))).filter(|h| h.len() > 1));
    let wrong: Vec<String> = files(&root())
        .iter()
        .filter_map(|path| Some((path, std::fs::read_to_string(path).ok()?)))
        .flat_map(|(path, content)| {
            let found = forbidden.iter().filter(move |f| content.contains(f.as_str()));
            found.map(|f| format!("{}: {f}", relative(path))).collect::<Vec<_>>()
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_package_is_there_in_the_versions_that_reasons_allow() {
    // Two major versions of one direct dependency are a mistake; of an indirect one they happen.
    let metadata = metadata();
    let direct: HashSet<&str> = list(&metadata, "packages")
        .iter()
        .filter(|p| p["source"].is_null())
        .flat_map(|p| list(p, "dependencies"))
        .map(|d| text(d, "name"))
        .collect();
    let mut versions: HashMap<&str, HashSet<&str>> = HashMap::new();
    for package in list(&metadata, "packages").iter().filter(|p| direct.contains(text(p, "name"))) {
        versions.entry(text(package, "name")).or_default().insert(text(package, "version"));
    }
    let library = ["io-uring", "rustix", "zerocopy", "clap", "tracing"];
    let twice: Vec<_> =
        versions.iter().filter(|(name, v)| library.contains(name) && v.len() > 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
}
