//! This program under the name `qemu-img`: the commands that `qemu-img` has too, for programs that
//! start it.
//!
//! Promises: formats that are not given are those of `qemu-img`; errors begin with `qemu-img:` and
//! have its texts where programs look for them; the exit code of a failure is 1, except where
//! `qemu-img` has others (`check`, `compare`). Under its own name ringdisk does none of this.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use ringdisk_console::operation::end_by_signal;
use ringdisk_daemon::{limits, terminal};
use ringdisk_disk::Format;
use ringdisk_images::snapshot::Work;
use ringdisk_qemu_nbd::VERSION;
use ringdisk_qemu_nbd::img_texts::{self, Change};

use crate::cli::{Cli, Command};
use crate::{End, log};

/// The exit code of everything that goes wrong.
const FAILED: u8 = 1;

/// The name of `qemu-img`.
const NAME: &str = "qemu-img";

/// Its commands that are here.
const COMMANDS: [&str; 12] = [
    "bitmap", "check", "commit", "compare", "convert", "create", "info", "map", "measure",
    "rebase", "resize", "snapshot",
];

/// Whether this program was started under the name of `qemu-img`.
pub(crate) fn is_named_so(program: &OsStr) -> bool {
    Path::new(program).file_name().is_some_and(|name| name == NAME)
}

/// Does what the words say. Gives the exit code.
///
/// * `program`: the name under which `qemu-img` was started, for hints.
pub(crate) fn run(program: &str, words: impl IntoIterator<Item = OsString>) -> u8 {
    let words: Vec<OsString> = words.into_iter().collect();
    let refuse = |text: &str, of: &str| {
        terminal::say_error(format_args!(
            "{NAME}: {text}\nTry '{program} {of}--help' for more information"
        ));
        FAILED
    };
    let Some(first) = words.first().map(|word| word.to_string_lossy().into_owned()) else {
        return refuse("Not enough arguments", "");
    };
    match first.as_str() {
        "-h" | "--help" => {
            terminal::say(help(program));
            return 0;
        }
        "-V" | "--version" => {
            let own = env!("CARGO_PKG_VERSION");
            terminal::say(format_args!("{NAME} version {VERSION} (ringdisk {own})"));
            return 0;
        }
        other if other.starts_with('-') => {
            return refuse(&format!("unrecognized option '{other}'"), "");
        }
        other if !COMMANDS.contains(&other) => {
            return refuse(&format!("Command not found: {other}"), "");
        }
        _ => {}
    }
    let refuse_words = |error: &clap::Error| match of_usage(error) {
        (text, true) => refuse(&text, &format!("{first} ")),
        (text, false) => {
            terminal::say_error(format_args!("{NAME}: {text}"));
            FAILED
        }
    };
    let all = std::iter::once(OsString::from("ringdisk")).chain(words);
    let mut cli = match Cli::try_parse_from(all) {
        Ok(cli) => cli,
        Err(error) if error.kind() == ErrorKind::DisplayHelp => {
            let _ = error.print();
            return 0;
        }
        Err(error) => return refuse_words(&error),
    };
    take_defaults(&mut cli.command);
    terminal::call(NAME);
    log::start(cli.verbose, false);
    limits::raise();
    match crate::command(&cli.command) {
        Ok(code) => code,
        Err(End::Usage(error)) => refuse_words(&error),
        Err(End::Failed(failure)) => {
            let text = img_texts::of_failure(&meant(&cli.command), &failure);
            terminal::say_error(format_args!("{NAME}: {text}"));
            if let Some(signal) = failure.signal() {
                end_by_signal(signal);
            }
            failure.own_code().unwrap_or(FAILED)
        }
    }
}

/// What is wrong with the words: the first line of what clap has to say, and whether a hint at the
/// help follows.
fn of_usage(error: &clap::Error) -> (String, bool) {
    let option = |kind| match error.get(kind) {
        // With the name of its value, where it has one.
        Some(ContextValue::String(word)) => word.split([' ', '=']).next(),
        _ => None,
    };
    if error.kind() == ErrorKind::ArgumentConflict
        && let (Some(one), Some(other)) =
            (option(ContextKind::InvalidArg), option(ContextKind::PriorArg))
        && let Some(known) = img_texts::of_conflict(one, other)
    {
        return (known.to_owned(), false);
    }
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    (first.strip_prefix("error: ").unwrap_or(first).to_owned(), true)
}

/// The command as the texts of `qemu-img` know it.
fn meant(command: &Command) -> img_texts::Command {
    use img_texts::Command as Img;
    match command {
        Command::Create(args) => Img::Create(args.file.clone()),
        Command::Convert(args) => {
            Img::Convert(args.files.last().cloned(), args.target_format.map_or("raw", Format::name))
        }
        Command::Snapshot(args) => Img::Snapshot(match args.work() {
            Work::List => None,
            Work::Create(name) => Some((Change::Create, name)),
            Work::Apply(name) => Some((Change::Apply, name)),
            Work::Delete(name) => Some((Change::Delete, name)),
        }),
        Command::Resize(_) => Img::Resize,
        Command::Rebase(_) => Img::Rebase,
        Command::Commit(_) => Img::Commit,
        Command::Bitmap(_) => Img::Bitmap,
        Command::Check(args) => Img::Check { repairs: args.repair.is_some() },
        _ => Img::Look,
    }
}

/// A format that is not given is raw, whatever the name of the new image; and what other options
/// imply.
fn take_defaults(command: &mut Command) {
    match command {
        Command::Create(args) => args.format = args.format.or(Some(Format::Raw)),
        Command::Convert(args) if !args.target_image_opts => {
            args.target_format = args.target_format.or(Some(Format::Raw));
        }
        // A base that is named implies `-d`.
        Command::Commit(args) => args.drop |= args.base.is_some(),
        _ => {}
    }
}

/// What programs look for: the commands and the formats.
fn help(program: &str) -> String {
    let own = env!("CARGO_PKG_VERSION");
    format!(
        "{NAME} version {VERSION} (ringdisk {own})\n\
         usage: {program} COMMAND [COMMAND OPTIONS]\n\n\
         Commands, of which `{program} COMMAND --help` tells more:\n  {}\n\n\
         Supported formats: qcow2 raw",
        COMMANDS.join(" ")
    )
}
