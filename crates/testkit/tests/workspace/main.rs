//! Rules of the workspace that no compiler checks: the order of the crates, dependencies and their
//! licences, `unsafe`, paths, openings of files, and the documents.
//!
//! Promises: reads `cargo metadata` and the tree; changes nothing.

mod circles;
mod dependencies;
mod documents;
mod layers;
mod licences;
mod metadata;
mod named_tests;
mod openings;
mod paths;
mod pipes;
mod sizes;
mod tree;
mod unsafe_code;
mod widths;
mod words;
