//! What a command can do about an image that another program uses, or that is damaged.
//!
//! Promises: only options that the command has are recommended. Pure.

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_disk::jobs::BAD_TABLES;
use ringdisk_storage::{IN_USE_FOR_WRITING, NOT_FOR_OTHERS_TO_WRITE};

use crate::cli::{Command, SnapshotWork};

/// Reads an image that changes meanwhile.
const READ_ALL_THE_SAME: &str = "-U reads it nevertheless; its content may change meanwhile";

/// What commands do that change an image which nobody else may use.
const CHANGE_IN_USE: &str = "stop the other program first; where that is ringdisk, `ringdisk ctl` \
     changes the disk while it is in use (resize, snapshot, commit, backing), and `ringdisk ps` \
     shows where it is served";

/// Adds the advice, where the failure is a lock's or one of damaged tables, and has none yet.
pub(crate) fn add(command: &Command, failure: Failure) -> Failure {
    if failure.message().contains(BAD_TABLES) && failure.hint_text().is_none() {
        let rest = match command {
            Command::Convert(_) => "; `convert --salvage` copies the rest",
            _ => "",
        };
        return failure.hint(format!("`ringdisk check` of that image says what is damaged{rest}"));
    }
    let is_lock = failure.exit == Exit::Locked && failure.hint_text().is_none();
    match advice(command, failure.message()).filter(|_| is_lock) {
        Some(advice) => failure.hint(advice),
        None => failure,
    }
}

/// * `message`: of the failure.
fn advice(command: &Command, message: &str) -> Option<&'static str> {
    let is_written = message.contains(IN_USE_FOR_WRITING);
    let is_shared = message.contains(NOT_FOR_OTHERS_TO_WRITE);
    let serving = |read_only: bool| match (is_written, is_shared, read_only) {
        (true, _, true) => {
            Some("--force-share serves it nevertheless; its content may change meanwhile")
        }
        (true, _, false) => Some(
            "--read-only --force-share serves it nevertheless; its content may change meanwhile",
        ),
        (_, true, _) => Some("--read-only serves it without writing"),
        _ => None,
    };
    let reading = is_written.then_some(READ_ALL_THE_SAME);
    let changing = (is_written || is_shared).then_some(CHANGE_IN_USE);
    match command {
        Command::Mount(args) => serving(args.disk.read_only),
        Command::Serve(_) => serving(false),
        Command::Info(_)
        | Command::Map(_)
        | Command::Convert(_)
        | Command::Compare(_)
        | Command::Measure(_) => reading,
        Command::Check(args) if args.repair.is_none() => reading,
        Command::Snapshot(args) if matches!(args.work(), SnapshotWork::List) => reading,
        Command::Check(_)
        | Command::Snapshot(_)
        | Command::Resize(_)
        | Command::Commit(_)
        | Command::Rebase(_)
        | Command::Bitmap(_) => changing,
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::Cli;

    fn hint(words: &[&str], message: &str) -> Option<String> {
        let all = std::iter::once("ringdisk").chain(words.iter().copied());
        let cli = Cli::try_parse_from(all).expect("parses");
        add(&cli.command, Failure::new(Exit::Locked, message)).hint_text().map(str::to_owned)
    }

    #[test]
    fn no_command_recommends_an_option_that_it_lacks() {
        let written = format!("'a' {IN_USE_FOR_WRITING} process 1");
        for (words, option) in [
            (&["mount", "a", "b"][..], "--read-only --force-share"),
            (&["mount", "-r", "a", "b"], "--force-share"),
            (&["info", "a"], "-U"),
            (&["check", "a"], "-U"),
            (&["convert", "a", "b"], "-U"),
            (&["snapshot", "-l", "a"], "-U"),
        ] {
            let hint = hint(words, &written).expect("a hint");
            assert!(hint.starts_with(option), "{words:?}: {hint}");
        }
        for words in [
            &["resize", "a", "1G"][..],
            &["check", "-r", "all", "a"],
            &["commit", "a"],
            &["snapshot", "-c", "s", "a"],
        ] {
            let hint = hint(words, &written).expect("a hint");
            assert!(!hint.contains("-U") && !hint.contains("--"), "{words:?}: {hint}");
            assert!(hint.contains("ringdisk ctl"), "{words:?}: {hint}");
        }
        assert_eq!(hint(&["create", "a", "1G"], &written), None);
    }
}
