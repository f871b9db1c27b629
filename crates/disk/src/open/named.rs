//! Opens the files that the header of an image names: its backing file and its external data file.
//!
//! Promises: every name goes through the [`Resolver`](crate::resolve::Resolver); the format of a
//! backing file is what the image states, or it is refused; a name that is not in the note of the
//! image is followed only where the user allows it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_storage::Storage;

use super::export::refuse_export;
use super::{Candidate, Found, Opening};
use crate::name::{FileName, beside, printable_path, shell_name, shell_path, shell_word};
use crate::resolve::Resolver;
use crate::{Cause, Error, ErrorKind, Format, format_note};

/// What an image names a file as.
#[derive(Clone, Copy, Debug)]
pub(super) enum Role<'a> {
    /// Its backing file, with the format that it states.
    Backing(Option<&'a str>),
    /// Its data file.
    Data,
}

impl Opening<'_> {
    /// Opens the backing file that an image names.
    ///
    /// * `of`, `directory`: name of that image, and where its relative names start.
    pub(super) fn below(
        &self,
        file: &[u8],
        format: Option<&str>,
        of: &Path,
        directory: Option<&Path>,
    ) -> Result<(String, Candidate), Error> {
        let parsed = FileName::parse(file)?;
        let format = backing_format(format, &parsed, file, of)?;
        if format == Format::Qcow2 && (parsed.raw_offset != 0 || parsed.raw_size.is_some()) {
            return Err(Error::new(
                ErrorKind::Invalid,
                "an offset or a size can be given for raw images only",
            ));
        }
        if let Some(address) = &parsed.nbd {
            let candidate = self.export_below(&parsed, address, format)?;
            return Ok((String::from_utf8_lossy(file).into_owned(), candidate));
        }
        let path = self.path_of(&parsed, directory)?;
        let opened = self.resolver.open(&path, self.access(true))?;
        if format == Format::Qcow2 && format_note::is_raw(&opened.fd) {
            return Err(Error::new(
                ErrorKind::UnknownFormat,
                format!(
                    "'{}' was used as raw, so its guest may have written what it begins with; if \
                     it was made as a qcow2 image, serve it once by itself with `--format qcow2`",
                    printable_path(&path)
                ),
            ));
        }
        // It is opened for reading, but a commit may write it.
        let is_trusted = self.options.trust_base_format && format == Format::Raw;
        let is_guarded = !is_trusted || format_note::set_raw(&opened.fd).is_err();
        let name = beside(of, &parsed);
        let full = if file.starts_with(b"json:") {
            String::from_utf8_lossy(file).into_owned()
        } else {
            name.to_string_lossy().into_owned()
        };
        let candidate = Candidate {
            found: Found::File(opened),
            name,
            directory: path.parent().map(Path::to_path_buf),
            format,
            read_only: true,
            raw_offset: parsed.raw_offset,
            raw_size: parsed.raw_size,
            without_backing: parsed.without_backing,
            is_guarded,
            is_unconfirmed: false,
        };
        Ok((full, candidate))
    }

    /// Checks a name in a header that is not in the note of the image: a process that an attacker
    /// controlled may have written it.
    ///
    /// Errors: `NotAllowed`: no path that the user allowed leads there; of a data file, which is
    /// written, the user has not allowed that file itself.
    pub(super) fn check_allowed(
        &self,
        file: &[u8],
        of: &Path,
        directory: Option<&Path>,
        role: Role<'_>,
    ) -> Result<(), Error> {
        let parsed = FileName::parse(file)?;
        if let Some(address) = &parsed.nbd {
            return self.check_host(address);
        }
        let path = self.path_of(&parsed, directory)?;
        let allowed = match role {
            Role::Backing(_) => &self.allowed,
            Role::Data => &self.allowed_files,
        };
        if allowed.open(&path, self.access(true)).is_ok() {
            return Ok(());
        }
        let remedy = match role {
            Role::Backing(format) => format!(
                "`ringdisk rebase -u -b {} -F {} {}`",
                shell_name(file),
                shell_word(format.unwrap_or("FORMAT")),
                shell_path(of)
            ),
            Role::Data => format!("`--allow-path {}`", shell_path(&path)),
        };
        let cause = match role {
            Role::Backing(_) => None,
            Role::Data => Some(Cause::PathNotAllowed),
        };
        let of = printable_path(of);
        Err(Error::new(
            ErrorKind::NotAllowed,
            format!(
                "'{of}' did not name this file when it was served last, and it was not changed by \
                 ringdisk since: who takes a server over can write such names; if it was changed \
                 by you or another program, say so once with {remedy}"
            ),
        )
        .because(cause))
    }

    /// Whether `--allow-path` names a file itself, and not a directory above it.
    pub(super) fn is_allowed_itself(
        &self,
        file: &[u8],
        directory: Option<&Path>,
    ) -> Result<bool, Error> {
        let parsed = FileName::parse(file)?;
        if let Some(address) = &parsed.nbd {
            return Ok(self.check_host(address).is_ok());
        }
        let path = self.path_of(&parsed, directory)?;
        Ok(self.allowed_files.open(&path, self.access(true)).is_ok())
    }

    /// Checks a name in the header of an image to which a name led that is in no note: that one may
    /// be another user's image, which leads to files that the image on top had no right to.
    ///
    /// Errors: `NotAllowed`: no path that the user allowed leads there, and it is no image that the
    /// user named.
    pub(super) fn check_reached(
        &self,
        file: &[u8],
        of: &Path,
        directory: Option<&Path>,
    ) -> Result<(), Error> {
        let parsed = FileName::parse(file)?;
        if let Some(address) = &parsed.nbd {
            return self.check_host(address);
        }
        let path = self.path_of(&parsed, directory)?;
        let reaches = |resolver: &Resolver| resolver.open(&path, self.access(true)).is_ok();
        if reaches(&self.allowed) || reaches(&self.known_files) {
            return Ok(());
        }
        let of = printable_path(of);
        Err(Error::new(
            ErrorKind::NotAllowed,
            format!(
                "'{of}' is allowed by --allow-path only, so what it names must be, too: add \
                 `--allow-path {}`",
                shell_path(&path)
            ),
        )
        .because(Cause::PathNotAllowed))
    }

    /// The absolute path of a file that an image names.
    fn path_of(&self, name: &FileName, directory: Option<&Path>) -> Result<PathBuf, Error> {
        debug_assert!(name.nbd.is_none(), "an export has no path");
        if name.path.is_absolute() {
            return Ok(name.path.clone());
        }
        match directory.or_else(|| self.resolver.first_directory()) {
            Some(directory) => Ok(directory.join(&name.path)),
            None => Err(Error::new(
                ErrorKind::NotAllowed,
                "the image was handed over as a descriptor, so its directory is not known; name \
                 the directory with `--allow-path DIRECTORY`",
            )
            .because(Cause::PathNotAllowed)),
        }
    }

    /// Opens the external data file that an image names.
    pub(super) async fn data_file(
        &self,
        file: &[u8],
        of: &Path,
        directory: Option<&Path>,
        writable: bool,
    ) -> Result<(PathBuf, Arc<Storage>), Error> {
        let parsed = FileName::parse(file)?;
        refuse_export(&parsed, "a data file")?;
        if parsed.format == Some(Format::Qcow2)
            || parsed.raw_offset != 0
            || parsed.raw_size.is_some()
        {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a data file is a plain file or block device, used from its first byte",
            ));
        }
        let path = self.path_of(&parsed, directory)?;
        let opened = self.resolver.open(&path, self.access(!writable))?;
        if self.seen.contains(&opened.identity) {
            return Err(Error::new(ErrorKind::Loop, "it is one of the images of the chain itself"));
        }
        let name = beside(of, &parsed);
        // Guests may write any bytes to it, now or by a commit: by itself it is raw.
        if !self.options.read_only && format_note::set_raw(&opened.fd).is_err() {
            tracing::warn!(
                "'{}' can keep no note that it is raw: say `--format raw` whenever it is used by \
                 itself",
                printable_path(&name)
            );
        }
        let storage = self.storage(opened, &name, !writable).await?;
        Ok((name, storage))
    }
}

/// The format of a backing file: the image must state it.
fn backing_format(
    stated: Option<&str>,
    name: &FileName,
    file: &[u8],
    of: &Path,
) -> Result<Format, Error> {
    let stated = match stated {
        // The names of QEMU's file drivers mean raw.
        Some("file" | "host_device") => Some(Format::Raw),
        Some(text) => Some(text.parse::<Format>().map_err(|error| {
            let hint = "convert it with `ringdisk convert`, or state its real format with \
                        `ringdisk rebase -u`";
            Error::new(error.kind(), format!("{error}; {hint}"))
        })?),
        None => None,
    };
    match (stated, name.format) {
        (Some(stated), Some(named)) if stated != named => Err(Error::new(
            ErrorKind::Invalid,
            format!("its format is stated as {stated} and named as {named}"),
        )),
        (Some(format), _) | (None, Some(format)) => Ok(format),
        (None, None) => Err(Error::new(
            ErrorKind::UnknownFormat,
            format!(
                "the image does not state the format of its backing file, and guessing it would \
                 let a guest choose which files are read; state it with `ringdisk rebase -u -b \
                 {} -F FORMAT {}` (FORMAT is raw or qcow2)",
                shell_name(file),
                shell_path(of),
            ),
        )),
    }
}
