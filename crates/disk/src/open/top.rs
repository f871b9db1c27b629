//! Opens the image that the user named, and finds its format.
//!
//! Promises: the image is opened for writing, or for reading where the options ask for it or allow
//! it as a fallback; the reason for a fallback is kept.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::{Candidate, Found, Opening};
use crate::disk::Parts;
use crate::name::{FileName, printable, printable_path};
use crate::resolve::{Held, Opened, absolute, identify};
use crate::{Error, ErrorKind, Source};

impl Opening<'_> {
    /// Opens the image that the user named and finds its format.
    pub(super) async fn top(
        &mut self,
        source: Source,
        parts: &mut Parts,
    ) -> Result<(Candidate, Option<Held>), Error> {
        if let Source::Path(path) = &source
            && let Some(name) = FileName::export_of(path)?
        {
            return Ok((self.top_export(name, parts).await?, None));
        }
        let mut read_only = self.options.read_only;
        let (held, opened, name, directory) = match source {
            Source::Path(path) => {
                let held = Held::named(&path)?;
                let directory =
                    absolute(&path).ok().and_then(|path| path.parent().map(Path::to_path_buf));
                if let Some(directory) = &directory {
                    // A directory that cannot be looked into allows nothing; an image that names
                    // no files does not need it.
                    let _ = self.resolver.allow(directory);
                }
                let opened = self.open_held(&held, &mut read_only, parts)?;
                (Some(held), opened, path, directory)
            }
            Source::Fd(fd, name) => {
                let opened = self.inherited(fd, &name, &mut read_only, parts)?;
                (None, opened, PathBuf::from(name), None)
            }
        };
        let shown = printable_path(&name);
        let format = match self.options.format {
            Some(format) => format,
            None => self.guess(&opened.fd, &shown, read_only)?,
        };
        let is_guarded = !read_only && self.is_guarded(&opened.fd, &shown)?;
        let candidate = Candidate {
            found: Found::File(opened),
            name,
            directory,
            format,
            read_only,
            raw_offset: 0,
            raw_size: None,
            without_backing: self.options.without_backing,
            is_guarded,
            is_unconfirmed: false,
        };
        parts.policy.read_only = candidate.read_only;
        Ok((candidate, held))
    }

    /// Opens for writing, or for reading where the options ask for it or allow it as a fallback.
    fn open_held(
        &self,
        held: &Held,
        read_only: &mut bool,
        parts: &mut Parts,
    ) -> Result<Opened, Error> {
        let opener = self.options.opener.as_deref();
        match held.open(self.access(*read_only), opener) {
            Err(error)
                if !*read_only
                    && self.options.auto_read_only
                    && error.kind() == ErrorKind::PermissionDenied =>
            {
                let opened = held.open(self.access(true), opener)?;
                *read_only = true;
                parts.read_only_reason = Some(error.to_string());
                Ok(opened)
            }
            Err(error) if !*read_only && error.kind() == ErrorKind::PermissionDenied => {
                let message = format!("{error}; open it read-only, or ask for write permission");
                let cause = error.cause().cloned();
                Err(Error::new(error.kind(), message).because(cause))
            }
            result => result,
        }
    }

    /// Takes an inherited descriptor as it is.
    fn inherited(
        &self,
        fd: OwnedFd,
        name: &str,
        read_only: &mut bool,
        parts: &mut Parts,
    ) -> Result<Opened, Error> {
        let shown = printable(name.as_bytes());
        let identity = identify(&fd, &shown)?;
        let flags = rustix::fs::fcntl_getfl(&fd)
            .map_err(|errno| Error::os(format!("cannot use '{shown}'"), errno))?;
        let mode = flags & rustix::fs::OFlags::RWMODE;
        if mode == rustix::fs::OFlags::WRONLY || flags.contains(rustix::fs::OFlags::PATH) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("the descriptor '{shown}' cannot be read; open it for reading and writing"),
            ));
        }
        if mode == rustix::fs::OFlags::RDONLY && !*read_only {
            let reason = format!("the descriptor '{shown}' is open for reading only");
            if !self.options.auto_read_only {
                return Err(Error::new(
                    ErrorKind::PermissionDenied,
                    format!("{reason}; pass a writable one, or open it read-only"),
                ));
            }
            *read_only = true;
            parts.read_only_reason = Some(reason);
        }
        Ok(Opened { fd, identity })
    }
}
