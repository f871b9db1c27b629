//! Failures in the words of `qemu-img`.
//!
//! Promises: pure; decides by the cause of a failure, never by its text; a failure that `qemu-img`
//! does not know, or puts in words of its own that no program looks for, keeps ours.

use std::path::PathBuf;

use ringdisk_daemon::failure::{Cause, Exit, Failure};
use ringdisk_disk::Cause as Image;
use ringdisk_qcow2::Cause as Qcow2;
use ringdisk_storage::Cause as Storage;

/// A command of `qemu-img`, with what its texts say of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// `create`, with the file that is made.
    Create(Option<PathBuf>),
    /// `convert`, with the file that is made and the name of its format.
    Convert(Option<PathBuf>, &'static str),
    /// `snapshot`, with what is done and the name of the snapshot.
    Snapshot(Option<(Change, String)>),
    /// `resize`.
    Resize,
    /// `rebase`.
    Rebase,
    /// `commit`.
    Commit,
    /// `bitmap`.
    Bitmap,
    /// `check`, and whether it repairs.
    Check {
        /// The image is written to.
        repairs: bool,
    },
    /// One that only looks.
    Look,
}

/// What `snapshot` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// `-c`
    Create,
    /// `-a`
    Apply,
    /// `-d`
    Delete,
}

/// A failure as `qemu-img` reports it, without its name in front.
pub fn of_failure(command: &Command, failure: &Failure) -> String {
    let known = match failure.cause() {
        Some(Cause::Image(cause)) => about_image(command, cause, failure.exit),
        Some(cause) => about_command(command, cause),
        None => None,
    };
    known.unwrap_or_else(|| failure.message().to_owned())
}

/// Options that exclude each other.
///
/// * `one`, `other`: with their dashes, in the order in which they were given.
pub fn of_conflict(one: &str, other: &str) -> Option<&'static str> {
    let is = |a: &str, b: &str| [(one, other), (other, one)].contains(&(a, b));
    if (one, other) == ("--image-opts", "--format") {
        return Some("--image-opts and --format are mutually exclusive");
    }
    if is("--copy-range-offloading", "--sparse-size") {
        return Some("Cannot enable copy offloading when -S is used");
    }
    if is("--copy-range-offloading", "--compress") {
        return Some("Cannot enable copy offloading when -c is used");
    }
    None
}

/// What is wrong with what the command was told to do.
fn about_command(command: &Command, cause: &Cause) -> Option<String> {
    let made = match command {
        Command::Create(file) | Command::Convert(file, _) => file.as_ref(),
        _ => None,
    };
    let text = match (command, cause) {
        (_, Cause::SizeMissing) => {
            format!("{}: Image creation needs a size parameter", made?.display())
        }
        (_, Cause::UnknownOption { name }) => {
            format!("{}: Invalid parameter '{name}'", made?.display())
        }
        (Command::Convert(Some(made), format), Cause::NotCreated { file, why }) => {
            let made = made.display();
            format!("{made}: error while converting {format}: Could not create '{file}': {why}")
        }
        (_, Cause::NotCreated { file, why }) => {
            format!("{}: Could not create '{file}': {why}", made?.display())
        }
        (Command::Convert(..), Cause::RawWithoutBitmaps) => {
            String::from("Format driver 'raw' does not support bitmaps")
        }
        (Command::Convert(..), Cause::BitmapNotCopied { name }) => format!(
            "Cannot copy inconsistent bitmap '{name}'\n\
             Try --skip-broken-bitmaps, or use 'qemu-img bitmap --remove' to delete it"
        ),
        (Command::Resize, Cause::WouldShrink) => String::from(
            "Use the --shrink option to perform a shrink operation.\nqemu-img: warning: Shrinking \
             an image will delete all data beyond the shrunken image's end. Before performing \
             such an operation, make sure there is no important data there.",
        ),
        (Command::Resize, Cause::NothingLeft) => String::from("New image size must be positive"),
        (Command::Check { .. }, Cause::NothingToCheck) => {
            String::from("This image format does not support checks")
        }
        _ => return None,
    };
    Some(text)
}

/// What is wrong with an image.
fn about_image(command: &Command, cause: &Image, exit: Exit) -> Option<String> {
    let text = match (command, cause) {
        (_, cause) if *cause.root() == Image::Qcow2(Qcow2::NoSnapshotToLoad) => {
            String::from("Failed to load snapshot: Can't find snapshot")
        }
        (Command::Snapshot(change), Image::Qcow2(Qcow2::NoSnapshot { wanted })) => {
            let name = wanted.escape_debug();
            match change {
                Some((Change::Delete, _)) => {
                    format!("Could not delete snapshot '{name}': snapshot not found")
                }
                _ => format!(
                    "Could not apply snapshot '{name}': Failed to load snapshot: No such file or \
                     directory"
                ),
            }
        }
        (Command::Snapshot(change), Image::RawWithoutSnapshots) => {
            let (change, name) = change.as_ref()?;
            let doing = match change {
                Change::Create => "create",
                Change::Apply => "apply",
                Change::Delete => "delete",
            };
            format!("Could not {doing} snapshot '{name}': Operation not supported")
        }
        (_, Image::RawWithoutSnapshots) => String::from(
            "Failed to load snapshot: Block format 'raw' used by device '' does not support \
             temporarily loading internal snapshots",
        ),
        (Command::Create(file), Image::BackingFile { file: backing, why, .. }) => {
            let (file, why) = (file.as_ref()?.display(), in_backing_file(cause, why));
            format!("{file}: Could not open '{backing}': {why}\nCould not open backing image.")
        }
        (Command::Rebase, Image::BackingFile { file, why, .. }) => {
            let why = in_backing_file(cause, why);
            format!("Could not open new backing file '{file}': Could not open '{file}': {why}")
        }
        (Command::Rebase, Image::NotCompressible) => {
            String::from("Compression not supported for this file format")
        }
        (Command::Commit, Image::NoBase) => String::from("Image does not have a backing file"),
        // The command that failed is the first that needs the bitmap.
        (Command::Bitmap, Image::Qcow2(Qcow2::NoBitmap { name })) => {
            format!("Operation on bitmap {name} failed: Dirty bitmap '{name}' not found")
        }
        _ => return about_opening(command, cause, exit),
    };
    Some(text)
}

/// Why a backing file cannot be used.
fn in_backing_file<'a>(cause: &Image, why: &'a str) -> &'a str {
    match cause.root() {
        Image::NotQcow2 { .. } => "Image is not in qcow2 format",
        _ => why,
    }
}

/// Why an image cannot be opened.
fn about_opening(command: &Command, cause: &Image, exit: Exit) -> Option<String> {
    let text = match cause {
        Image::Storage(Storage::NotOpened { file, why, is_missing }) => {
            let why = if *is_missing { "No such file or directory" } else { why };
            format!("Could not open '{file}': Could not open '{file}': {why}")
        }
        Image::Storage(Storage::InUse { file, .. }) => {
            let writes = matches!(
                command,
                Command::Resize
                    | Command::Rebase
                    | Command::Commit
                    | Command::Bitmap
                    | Command::Check { repairs: true }
            );
            let kind = if writes { "\"write\"" } else { "shared \"write\"" };
            format!(
                "Could not open '{file}': Failed to get {kind} lock\n\
                 Is another process using the image [{file}]?"
            )
        }
        Image::Storage(Storage::IsDirectory { file }) => {
            format!("Could not open '{file}': 'file' driver requires '{file}' to be a regular file")
        }
        Image::BackingLoop { file } => format!("Backing file '{file}' creates an infinite loop."),
        Image::NotQcow2 { file } => {
            format!("Could not open '{file}': Image is not in qcow2 format")
        }
        // Our reason, behind the words of `qemu-img`.
        Image::Image { file, why }
            if matches!(exit, Exit::Image | Exit::Unsupported | Exit::Permission) =>
        {
            format!("Could not open '{file}': {why}")
        }
        cause => match cause.root() {
            Image::NoNode { options } => format!(
                "Could not open '{options}': Cannot find device='{options}' nor \
                 node-name='{options}'"
            ),
            _ => return None,
        },
    };
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(command: &Command, exit: Exit, cause: Image) -> String {
        let failure = Failure::new(exit, "our words").because(Cause::Image(cause));
        of_failure(command, &failure)
    }

    fn not_opened(is_missing: bool) -> Image {
        let (file, why) = (String::from("a"), String::from("why"));
        Image::Storage(Storage::NotOpened { file, why, is_missing })
    }

    #[test]
    fn the_cause_decides_and_not_the_text() {
        let text = "cannot open 'a': there is no such file";
        let failure = Failure::new(Exit::Image, text);
        assert_eq!(of_failure(&Command::Look, &failure), text);
        let missing = "Could not open 'a': Could not open 'a': No such file or directory";
        assert_eq!(said(&Command::Look, Exit::Image, not_opened(true)), missing);
        let other = "Could not open 'a': Could not open 'a': why";
        assert_eq!(said(&Command::Look, Exit::Image, not_opened(false)), other);
    }

    #[test]
    fn what_happened_to_a_part_keeps_our_words() {
        let cause = not_opened(true).of_part();
        assert_eq!(said(&Command::Look, Exit::Image, cause), "our words");
    }

    #[test]
    fn a_backing_file_has_its_own_texts() {
        let backing =
            || Image::of_backing_file(String::from("b"), "message", Some(&not_opened(false)));
        let create = Command::Create(Some(PathBuf::from("x")));
        let text = "x: Could not open 'b': why\nCould not open backing image.";
        assert_eq!(said(&create, Exit::Image, backing()), text);
        let text = "Could not open new backing file 'b': Could not open 'b': why";
        assert_eq!(said(&Command::Rebase, Exit::Image, backing()), text);
        assert_eq!(said(&Command::Look, Exit::Image, backing()), "our words");
        let none = Image::of_backing_file(String::from("b"), "message", None);
        let text = "Could not open new backing file 'b': Could not open 'b': message";
        assert_eq!(said(&Command::Rebase, Exit::Image, none), text);
    }

    #[test]
    fn a_lock_is_that_of_the_command() {
        let lock = || {
            let by = ringdisk_storage::OtherUse::Writes;
            Image::Storage(Storage::InUse { file: String::from("a"), by })
        };
        assert!(said(&Command::Look, Exit::Locked, lock()).contains("shared \"write\" lock"));
        assert!(said(&Command::Resize, Exit::Locked, lock()).contains("get \"write\" lock"));
    }

    #[test]
    fn options_that_exclude_each_other_are_named_in_its_words() {
        let text = of_conflict("--compress", "--copy-range-offloading");
        assert_eq!(text, Some("Cannot enable copy offloading when -c is used"));
        assert_eq!(of_conflict("--compress", "--sparse-size"), None);
    }
}
