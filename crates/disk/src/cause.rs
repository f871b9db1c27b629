//! Why a disk could not be opened or changed, for programs.
//!
//! Promises: has what a program needs to act on the error, or to say it in words of its own; the
//! text for people is that of the [`Error`](crate::Error).

use ringdisk_storage::words;

/// Why a disk could not be opened or changed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// Its storage could not be opened.
    Storage(ringdisk_storage::Cause),
    /// A qcow2 image lacks something.
    Qcow2(ringdisk_qcow2::Cause),
    /// The file is no qcow2 image.
    NotQcow2 {
        /// Its name, as the user knows it.
        file: String,
    },
    /// Anything else that is wrong with a qcow2 image.
    Image {
        /// Its name, as the user knows it.
        file: String,
        /// What is wrong, and what the user can do.
        why: String,
    },
    /// A backing file cannot be used.
    BackingFile {
        /// Its name, as the image or the user has it.
        file: String,
        /// Why, in words.
        why: String,
        /// Why, for programs.
        cause: Option<Box<Cause>>,
    },
    /// A backing file is in the chain already.
    BackingLoop {
        /// Its name.
        file: String,
    },
    /// A list of options names no image.
    NoNode {
        /// The list.
        options: String,
    },
    /// A raw image has no snapshots.
    RawWithoutSnapshots,
    /// The image cannot hold compressed clusters.
    NotCompressible,
    /// The tables of an image are damaged, or cannot be read.
    BadTables,
    /// There is no backing file into which the image could be committed.
    NoBase,
    /// The user has not allowed a path; the text says that `--allow-path` does.
    PathNotAllowed,
    /// A part of a disk was asked for that begins past its end.
    BeginsBehindEnd {
        /// Where the part begins, bytes.
        offset: u64,
        /// Bytes of the disk.
        size: u64,
    },
    /// Anything else.
    Other,
    /// This happened to a part of what the error is about, such as an external data file.
    OfPart(Box<Cause>),
}

impl Cause {
    /// Of an error of the storage.
    pub fn of_storage(error: &ringdisk_storage::Error) -> Option<Cause> {
        error.cause().cloned().map(Cause::Storage)
    }

    /// Of an error of the format.
    pub fn of_qcow2(error: &ringdisk_qcow2::Error) -> Cause {
        use std::error::Error as _;
        let file = error.file().to_owned();
        if let Some(cause) = error.cause() {
            return Cause::Qcow2(cause.clone());
        }
        if error.kind() == ringdisk_qcow2::ErrorKind::NotQcow2 {
            return Cause::NotQcow2 { file };
        }
        let (reason, advice) = (error.reason(), error.advice());
        let why = match error.source().and_then(|source| source.downcast_ref()) {
            Some(system) => format!("{reason}; {advice}: {}", words(system)),
            None => format!("{reason}; {advice}"),
        };
        Cause::Image { file, why }
    }

    /// What happened first, wherever in the disk that was.
    pub fn root(&self) -> &Cause {
        match self {
            Cause::OfPart(cause) | Cause::BackingFile { cause: Some(cause), .. } => cause.root(),
            cause => cause,
        }
    }

    /// Why a file cannot be used, in words without its name, where that is known.
    pub fn why(&self) -> Option<&str> {
        match self {
            Cause::Storage(ringdisk_storage::Cause::NotOpened { why, .. })
            | Cause::Image { why, .. }
            | Cause::BackingFile { why, .. } => Some(why),
            Cause::OfPart(cause) => cause.why(),
            _ => None,
        }
    }

    /// The same, of a part of what an error is about.
    #[must_use]
    pub fn of_part(self) -> Cause {
        match self {
            Cause::OfPart(_) => self,
            cause => Cause::OfPart(Box::new(cause)),
        }
    }

    /// Of a backing file.
    ///
    /// * `message`: what is wrong with it, for people.
    /// * `cause`: the same, for programs.
    pub fn of_backing_file(file: String, message: &str, cause: Option<&Cause>) -> Cause {
        let why = cause.and_then(Cause::why).unwrap_or(message).to_owned();
        Cause::BackingFile { file, why, cause: cause.cloned().map(Box::new) }
    }
}
