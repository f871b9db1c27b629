//! `cargo metadata`, and the few look-ups in it that the checks share.

use std::process::Command;

use serde_json::Value;

use crate::tree::{output, root};

/// `cargo metadata` for the platform of this build; works without a network, since the build has
/// fetched all of it.
pub(crate) fn metadata() -> Value {
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

/// An array; an empty one where it is missing.
pub(crate) fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

/// A string; an empty one where it is missing.
pub(crate) fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}
