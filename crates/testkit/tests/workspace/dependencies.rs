//! Manifests: each dependency has its reason and comes from the workspace, once.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use crate::metadata::{list, metadata, text};
use crate::tree::{files, root};

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
