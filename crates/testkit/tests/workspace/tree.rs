//! The files of the project, as the checks read them.
//!
//! Promises: build output, inputs of the fuzz targets and hidden files are left out.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The directory of the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/testkit").to_path_buf()
}

/// What a command prints; it must succeed.
pub(crate) fn output(command: &mut Command) -> String {
    let out = command.output().expect("the command starts");
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).expect("UTF-8")
}

/// The files of the project, without build output and what is hidden (`.ci` is not), nor the file
/// that a work tree has in place of `.git`.
pub(crate) fn files(directory: &Path) -> Vec<PathBuf> {
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

/// A file's name from the directory of the workspace on.
pub(crate) fn relative(path: &Path) -> String {
    path.strip_prefix(root()).expect("inside the project").to_string_lossy().into_owned()
}
