//! What a command can do about an image that another program uses, or that is damaged.
//!
//! Promises: only options that the command has are recommended. Pure.

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_disk::Cause;
use ringdisk_images::snapshot::Work;
use ringdisk_storage::{Cause as StorageCause, OtherUse};

use crate::cli::Command;

/// Reads an image that changes meanwhile.
const READ_ALL_THE_SAME: &str = "-U reads it nevertheless; its content may change meanwhile";

/// What commands do that change an image which nobody else may use.
const CHANGE_IN_USE: &str = "stop the other program first; where that is ringdisk, `ringdisk ctl` \
     changes the disk while it is in use (resize, snapshot, commit, backing), and `ringdisk ps` \
     shows where it is served";

/// Adds the advice, where the failure is a lock's or one of damaged tables, and has none yet.
pub(crate) fn add(command: &Command, failure: Failure) -> Failure {
    if failure.hint_text().is_some() {
        return failure;
    }
    let cause = failure.image_cause();
    if cause == Some(&Cause::BadTables) {
        let rest = match command {
            Command::Convert(_) => "; `convert --salvage` copies the rest",
            _ => "",
        };
        return failure.hint(format!("`ringdisk check` of that image says what is damaged{rest}"));
    }
    let advice = match cause {
        Some(Cause::Storage(StorageCause::InUse { by, .. })) => advice(command, *by),
        _ => None,
    };
    match advice.filter(|_| failure.exit == Exit::Locked) {
        Some(advice) => failure.hint(advice),
        None => failure,
    }
}

/// * `by`: how another program uses the image.
fn advice(command: &Command, by: OtherUse) -> Option<&'static str> {
    let is_written = by == OtherUse::Writes;
    let is_shared = by == OtherUse::NoOtherWriter;
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
        Command::Snapshot(args) if args.work() == Work::List => reading,
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

    fn hint(words: &[&str], by: OtherUse) -> Option<String> {
        let all = std::iter::once("ringdisk").chain(words.iter().copied());
        let cli = Cli::try_parse_from(all).expect("parses");
        let cause = Cause::Storage(StorageCause::InUse { file: String::from("a"), by });
        let failure = Failure::new(Exit::Locked, "'a' is in use");
        let failure = failure.because(ringdisk_daemon::failure::Cause::Image(cause));
        add(&cli.command, failure).hint_text().map(str::to_owned)
    }

    #[test]
    fn no_command_recommends_an_option_that_it_lacks() {
        for (words, option) in [
            (&["mount", "a", "b"][..], "--read-only --force-share"),
            (&["mount", "-r", "a", "b"], "--force-share"),
            (&["info", "a"], "-U"),
            (&["check", "a"], "-U"),
            (&["convert", "a", "b"], "-U"),
            (&["snapshot", "-l", "a"], "-U"),
        ] {
            let hint = hint(words, OtherUse::Writes).expect("a hint");
            assert!(hint.starts_with(option), "{words:?}: {hint}");
        }
        for words in [
            &["resize", "a", "1G"][..],
            &["check", "-r", "all", "a"],
            &["commit", "a"],
            &["snapshot", "-c", "s", "a"],
        ] {
            let hint = hint(words, OtherUse::Writes).expect("a hint");
            assert!(!hint.contains("-U") && !hint.contains("--"), "{words:?}: {hint}");
            assert!(hint.contains("ringdisk ctl"), "{words:?}: {hint}");
        }
        assert_eq!(hint(&["create", "a", "1G"], OtherUse::Writes), None);
        assert_eq!(hint(&["mount", "a", "b"], OtherUse::Alone), None);
        let serving = hint(&["mount", "a", "b"], OtherUse::NoOtherWriter);
        assert!(serving.expect("a hint").starts_with("--read-only"));
    }
}
