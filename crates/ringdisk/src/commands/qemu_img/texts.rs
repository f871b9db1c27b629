//! Failures in the words of `qemu-img`.
//!
//! Promises: pure; a failure that `qemu-img` does not know, or puts in words of its own that no
//! program looks for, keeps ours.

use std::path::Path;

use ringdisk_daemon::failure::{Exit, Failure};

use crate::cli::Command;

/// What is wrong with the words: the first line of what clap has to say, and whether a hint at the
/// help follows.
pub(super) fn of_usage(error: &clap::Error) -> (String, bool) {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    let first = first.strip_prefix("error: ").unwrap_or(first);
    match of_conflict(first) {
        Some(known) => (known.to_owned(), false),
        None => (first.to_owned(), true),
    }
}

/// Options that exclude each other, in the words of `qemu-img`.
fn of_conflict(first: &str) -> Option<&'static str> {
    if first.contains("'--image-opts' cannot be used with '--format") {
        return Some("--image-opts and --format are mutually exclusive");
    }
    let conflict = |a: &str, b: &str| {
        first.contains(a) && first.contains(b) && first.contains("cannot be used with")
    };
    if conflict("--copy-range-offloading", "--sparse-size") {
        return Some("Cannot enable copy offloading when -S is used");
    }
    if conflict("--copy-range-offloading", "--compress") {
        return Some("Cannot enable copy offloading when -c is used");
    }
    None
}

/// A failure as `qemu-img` reports it, with its name in front.
pub(super) fn of_failure(command: &Command, failure: &Failure) -> String {
    let message = failure.message();
    let text = translated(command, message).or_else(|| about_image(failure.exit, message));
    format!("{}: {}", super::NAME, text.unwrap_or_else(|| failure.message().to_owned()))
}

/// What stands between the quotes behind `before`, and what comes after.
fn quoted<'a>(text: &'a str, before: &str) -> Option<(&'a str, &'a str)> {
    let start = text.find(before)? + before.len();
    text.get(start..)?.split_once('\'')
}

fn translated(command: &Command, message: &str) -> Option<String> {
    about_snapshots(command, message)
        .or_else(|| about_new_images(command, message))
        .or_else(|| about_changes(command, message))
        .or_else(|| about_opening(command, message))
}

/// The name of the image that the command is about, as it was given.
fn given(command: &Command) -> Option<&Path> {
    match command {
        Command::Create(args) => args.file.as_deref(),
        Command::Convert(args) => args.files.last().map(std::path::PathBuf::as_path),
        _ => None,
    }
}

fn about_snapshots(command: &Command, message: &str) -> Option<String> {
    if message.contains("Failed to load snapshot: Can't find snapshot") {
        return Some(String::from("Failed to load snapshot: Can't find snapshot"));
    }
    if let (Command::Snapshot(_), Some((name, _))) =
        (command, quoted(message, "there is no snapshot '"))
    {
        return Some(match command {
            Command::Snapshot(args) if args.delete.is_some() => {
                format!("Could not delete snapshot '{name}': snapshot not found")
            }
            _ => format!(
                "Could not apply snapshot '{name}': Failed to load snapshot: No such file or \
                 directory"
            ),
        });
    }
    let is_without = message.ends_with("is a raw image, which has no snapshots");
    match command {
        Command::Snapshot(args) if is_without => {
            let (doing, name) = match (&args.create, &args.apply, &args.delete) {
                (Some(name), _, _) => ("create", name),
                (_, Some(name), _) => ("apply", name),
                (_, _, Some(name)) => ("delete", name),
                _ => return None,
            };
            Some(format!("Could not {doing} snapshot '{name}': Operation not supported"))
        }
        _ if is_without => Some(String::from(
            "Failed to load snapshot: Block format 'raw' used by device '' does not support \
             temporarily loading internal snapshots",
        )),
        _ => None,
    }
}

fn about_new_images(command: &Command, message: &str) -> Option<String> {
    let file = given(command)?.display();
    if message == "the size of the new image is missing" {
        return Some(format!("{file}: Image creation needs a size parameter"));
    }
    if let Some((name, _)) = quoted(message, "images have no option '") {
        return Some(format!("{file}: Invalid parameter '{name}'"));
    }
    if let (Command::Create(_), Some((name, rest))) =
        (command, quoted(message, "backing file '").filter(|_| message.starts_with("backing")))
    {
        let why = rest.rsplit(": ").next()?;
        return Some(format!(
            "{file}: Could not open '{name}': {why}\nCould not open backing image."
        ));
    }
    let (name, rest) = quoted(message, "cannot create '")?;
    let why = rest.strip_prefix(": ")?;
    let why = why.split_once("; ").map_or(why, |(why, _)| why);
    let created = format!("Could not create '{name}': {why}");
    Some(match command {
        Command::Convert(args) => {
            let format = args.target_format.map_or("raw", ringdisk_disk::Format::name);
            format!("{file}: error while converting {format}: {created}")
        }
        _ => format!("{file}: {created}"),
    })
}

fn about_changes(command: &Command, message: &str) -> Option<String> {
    match command {
        Command::Rebase(_) if message.contains("cannot hold compressed clusters") => {
            Some(String::from("Compression not supported for this file format"))
        }
        Command::Convert(_) if message == "a raw image has no bitmaps" => {
            Some(String::from("Format driver 'raw' does not support bitmaps"))
        }
        Command::Convert(_) if message.ends_with("is inconsistent and cannot be copied") => {
            let (name, _) = quoted(message, "the bitmap '")?;
            Some(format!(
                "Cannot copy inconsistent bitmap '{name}'\n\
                 Try --skip-broken-bitmaps, or use 'qemu-img bitmap --remove' to delete it"
            ))
        }
        Command::Resize(_) if message.contains("would be lost") => Some(String::from(
            "Use the --shrink option to perform a shrink operation.\nqemu-img: warning: Shrinking \
             an image will delete all data beyond the shrunken image's end. Before performing \
             such an operation, make sure there is no important data there.",
        )),
        Command::Resize(_)
            if message.contains("so it cannot lose")
                || message.starts_with("nothing would be left") =>
        {
            Some(String::from("New image size must be positive"))
        }
        Command::Check(_) if message.contains("no metadata that could be checked") => {
            Some(String::from("This image format does not support checks"))
        }
        Command::Commit(_) if message.contains("has no backing file that") => {
            Some(String::from("Image does not have a backing file"))
        }
        Command::Bitmap(_) => {
            let (name, _) = quoted(message, "bitmap '")
                .filter(|(_, rest)| rest.starts_with(" is not there"))?;
            // The command that failed is the first that needs the bitmap.
            Some(format!("Operation on bitmap {name} failed: Dirty bitmap '{name}' not found"))
        }
        Command::Rebase(_) if message.starts_with("backing file '") => {
            let (name, rest) = quoted(message, "backing file '")?;
            let why = rest.rsplit(": ").next()?;
            Some(format!(
                "Could not open new backing file '{name}': Could not open '{name}': {why}"
            ))
        }
        _ => None,
    }
}

/// What is wrong with an image that was opened: our reason, behind the words of `qemu-img`.
fn about_image(exit: Exit, message: &str) -> Option<String> {
    let is_image = matches!(exit, Exit::Image | Exit::Unsupported | Exit::Permission);
    let (name, why) = message.strip_prefix('\'')?.split_once("': ").filter(|_| is_image)?;
    Some(format!("Could not open '{name}': {why}"))
}

fn about_opening(command: &Command, message: &str) -> Option<String> {
    if let Some((name, rest)) = quoted(message, "cannot open the image '")
        .or_else(|| quoted(message, "cannot open '"))
        .filter(|_| message.starts_with("cannot open"))
    {
        let why = rest.strip_prefix(": ")?;
        let why = if why == "there is no such file" { "No such file or directory" } else { why };
        return Some(format!("Could not open '{name}': Could not open '{name}': {why}"));
    }
    if message.starts_with("the backing chain of '") {
        let (name, _) = quoted(message, "' names '")?;
        return Some(format!("Backing file '{name}' creates an infinite loop."));
    }
    if let Some((text, why)) = message.split_once(": Cannot find device=") {
        return Some(format!("Could not open '{text}': Cannot find device={why}"));
    }
    let (name, rest) = message.strip_prefix('\'')?.split_once('\'')?;
    if rest.starts_with(" is in use") {
        let is_written = matches!(command, Command::Resize(_) | Command::Rebase(_))
            || matches!(command, Command::Commit(_) | Command::Bitmap(_))
            || matches!(command, Command::Check(args) if args.repair.is_some())
            || rest.contains("--read-only --force-share");
        let kind = if is_written { "\"write\"" } else { "shared \"write\"" };
        return Some(format!(
            "Could not open '{name}': Failed to get {kind} lock\n\
             Is another process using the image [{name}]?"
        ));
    }
    if rest.starts_with(": not a qcow2 image") {
        return Some(format!("Could not open '{name}': Image is not in qcow2 format"));
    }
    if rest.starts_with(" is a directory") {
        return Some(format!(
            "Could not open '{name}': 'file' driver requires '{name}' to be a regular file"
        ));
    }
    None
}
