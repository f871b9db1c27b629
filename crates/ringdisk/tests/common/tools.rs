//! Running the tools of the program, and qemu-img, side by side.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use ringdisk_testkit::process::{Finished, Process, command, run, until};
use rustix::process::Signal;
use serde_json::Value;

use super::program;

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    fn of(finished: Finished) -> Ran {
        let code = finished.status.code().unwrap_or(-1);
        let ran = Ran { code, out: finished.stdout, err: finished.stderr };
        assert!(!ran.err.contains("panicked"), "{}", ran.err);
        ran
    }

    /// It ended with this code.
    #[track_caller]
    pub(crate) fn ends(self, code: i32) -> Ran {
        assert_eq!(self.code, code, "{}\n{}", self.out, self.err);
        self
    }

    /// It succeeded.
    #[track_caller]
    pub(crate) fn ok(self) -> Ran {
        self.ends(0)
    }

    /// Standard error says this.
    #[track_caller]
    pub(crate) fn says(self, words: &str) -> Ran {
        assert!(self.err.contains(words), "nothing of {words:?} in: {}", self.err);
        self
    }

    /// Its output as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.out))
    }
}

/// Runs the program in a directory.
pub(crate) fn ringdisk(directory: &Path, words: &[&str]) -> Ran {
    let mut command = Command::new(program());
    command.args(words).current_dir(directory).stdin(Stdio::null()).env_remove("NOTIFY_SOCKET");
    Ran::of(run(&mut command))
}

/// Runs qemu-img in a directory.
pub(crate) fn qemu_img(directory: &Path, words: &[&str]) -> Ran {
    let mut command = command(&["qemu-img"]);
    command.args(words).current_dir(directory).stdin(Stdio::null());
    Ran::of(run(&mut command))
}

/// What qemu-img knows about an image, without what depends on its name and its place.
pub(crate) fn described(directory: &Path, image: &str) -> Value {
    let mut value = qemu_img(directory, &["info", "--output=json", image]).ok().json();
    strip(&mut value);
    value
}

/// Removes names of the image itself, and how much the host stores of it.
fn strip(value: &mut Value) {
    match value {
        Value::Object(object) => {
            for key in ["filename", "actual-size", "data-file"] {
                object.remove(key);
            }
            object.values_mut().for_each(strip);
        }
        Value::Array(values) => values.iter_mut().for_each(strip),
        _ => {}
    }
}

/// The names in a directory, sorted.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .expect("a directory")
        .map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Starts the program, and ends it by a signal as soon as the file has `len` bytes.
pub(crate) fn interrupted(
    directory: &Path,
    words: &[&str],
    file: &str,
    len: u64,
    signal: Signal,
) -> Finished {
    let mut command = Command::new(program());
    let mut process = Process::spawn(command.args(words).current_dir(directory));
    let reached = until(Duration::from_secs(20), || {
        let now = directory.join(file).metadata().map_or(0, |file| file.len());
        (now >= len || process.ended().is_some()).then_some(())
    });
    assert!(reached.is_some(), "{words:?}: the file does not grow");
    process.signal(signal);
    process.finish(Duration::from_secs(20))
}

/// A process that lives (is no zombie) and has this parent. Asks for the children of that process
/// alone: /proc of some other one may hang (a process that dies while it waits for a mount).
pub(crate) fn child_of(parent: u32) -> Option<u32> {
    let children =
        std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(|pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if name.starts_with("ringdisk-helper") {
            return false;
        }
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        !matches!(after_name.split_whitespace().next(), None | Some("Z" | "X"))
    })
}
