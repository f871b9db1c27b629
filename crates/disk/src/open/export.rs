//! Opens NBD exports as images: the one that the user named, and those that images name.
//!
//! Promises: an image leads to a server only where the user allows that server; the format of an
//! export is never taken from its bytes, except that they are raw. Connecting takes at most 10 s
//! and the look-up of a host's name: to the export that the user named (the target of a mirror,
//! say) it keeps no other task waiting; to one that an image names it blocks.

use std::sync::Arc;

use ringdisk_ring::IoBuf;
use ringdisk_storage::{NBD_RECONNECT_DEFAULT, NbdAddress, NbdOptions, Storage};

use super::guess::{guessed, raw_is_asked};
use super::{Candidate, Found, Opening, of_storage};
use crate::disk::Parts;
use crate::layer::guard::SECTOR_ALIGN;
use crate::name::{FileName, printable, printable_path, shell_word};
use crate::probe::{PROBE_LEN, Probed, probe};
use crate::{Cache, Cause, Error, ErrorKind, Format};

impl Opening<'_> {
    /// Connects to the export that the user named, on a helper thread.
    async fn connect_top(
        &self,
        address: &NbdAddress,
        read_only: bool,
    ) -> Result<Arc<Storage>, Error> {
        let (address, options) = (address.clone(), self.nbd_options(read_only));
        let opened = self.ring.offload(move || Storage::open_nbd(&address, &options)).await;
        opened.map(Arc::new).map_err(|error| of_storage(&error))
    }

    /// Connects to an export that an image names.
    fn connect(&self, address: &NbdAddress, read_only: bool) -> Result<Arc<Storage>, Error> {
        let opened = Storage::open_nbd(address, &self.nbd_options(read_only));
        opened.map(Arc::new).map_err(|error| of_storage(&error))
    }

    fn nbd_options(&self, read_only: bool) -> NbdOptions {
        NbdOptions {
            read_only,
            no_flush: self.options.cache == Cache::Unsafe,
            reconnect: self.options.reconnect.unwrap_or(NBD_RECONNECT_DEFAULT),
            opener: self.options.opener.clone(),
        }
    }

    /// Opens the export that the user named, for writing, or for reading where the options ask for
    /// it or allow it as a fallback.
    pub(super) async fn top_export(
        &self,
        name: FileName,
        parts: &mut Parts,
    ) -> Result<Candidate, Error> {
        let Some(address) = &name.nbd else {
            return Err(Error::new(ErrorKind::Invalid, "the name is no address of an export"));
        };
        if self.options.inactive {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "an NBD export has no locks that could be waited for, so it cannot be opened \
                 inactive",
            ));
        }
        let mut read_only = self.options.read_only;
        let storage = match self.connect_top(address, read_only).await {
            Err(error)
                if !read_only
                    && self.options.auto_read_only
                    && error.kind() == ErrorKind::PermissionDenied =>
            {
                let storage = self.connect_top(address, true).await?;
                read_only = true;
                parts.read_only_reason = Some(error.to_string());
                storage
            }
            result => result?,
        };
        let stated = match (self.options.format, name.format) {
            (Some(stated), Some(named)) if stated != named => {
                let text = format!("the format is given as {stated} and named as {named}");
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            (stated, named) => stated.or(named),
        };
        let format = match stated {
            Some(format) => format,
            None => self.guess_export(&storage, read_only).await?,
        };
        check_part(&name, format)?;
        parts.policy.read_only = read_only;
        Ok(Candidate {
            found: Found::Export(storage),
            name: name.path,
            directory: None,
            format,
            read_only,
            raw_offset: name.raw_offset,
            raw_size: name.raw_size,
            without_backing: self.options.without_backing || name.without_backing,
            // As a device: other programs may probe it, and no note can be kept.
            is_guarded: !read_only && (stated.is_none() || self.options.protect_raw),
            is_unconfirmed: false,
        })
    }

    /// The format of an export that the user did not state: raw, or an error.
    async fn guess_export(&self, storage: &Storage, read_only: bool) -> Result<Format, Error> {
        let shown = printable(storage.name().as_bytes());
        let head = IoBuf::new(PROBE_LEN, SECTOR_ALIGN);
        let count = storage
            .read(self.ring, 0, &head)
            .await
            .map_err(|errno| Error::os(format!("cannot read '{shown}'"), errno))?;
        let probed = probe(head.to_vec().get(..count).unwrap_or_default());
        if probed == Probed::Raw && self.options.ask_for_raw && !read_only {
            return Err(raw_is_asked(&shown));
        }
        guessed(&shown, probed, false, true)
    }

    /// Whether the user lets images lead to the server of an export.
    ///
    /// Errors: `NotAllowed`.
    pub(super) fn check_host(&self, address: &NbdAddress) -> Result<(), Error> {
        let server = &address.server;
        if self.options.allow_hosts.iter().any(|allowed| allowed.allows(server)) {
            return self.check_certificates(address);
        }
        let word = shell_word(server.host().unwrap_or(&server.to_string()));
        Err(Error::new(
            ErrorKind::NotAllowed,
            format!(
                "an image leads to other hosts only where that is allowed; if you trust the image, \
                 allow this one with `--allow-host {word}`"
            ),
        ))
    }

    /// Whether the user lets images name the certificates of an export: who writes an image could
    /// have an authority of his own.
    ///
    /// Errors: `NotAllowed`.
    fn check_certificates(&self, address: &NbdAddress) -> Result<(), Error> {
        let Some(tls) = &address.tls else { return Ok(()) };
        let authority = tls.certificates.join("ca-cert.pem");
        let is_whole = tls.certificates.is_absolute();
        if is_whole && self.allowed.open(&authority, self.access(true)).is_ok() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::NotAllowed,
            format!(
                "an image names certificates only by an absolute path, and where that is allowed; \
                 if you trust the image, allow these with `--allow-path {}`",
                shell_word(&tls.certificates.display().to_string())
            ),
        )
        .because(Cause::PathNotAllowed))
    }

    /// Opens the export that an image names as its backing file.
    ///
    /// * `format`: as the image states it.
    ///
    /// Errors: `NotAllowed`; those of connecting.
    pub(super) fn export_below(
        &self,
        name: &FileName,
        address: &NbdAddress,
        format: Format,
    ) -> Result<Candidate, Error> {
        self.check_host(address)?;
        check_part(name, format)?;
        Ok(Candidate {
            found: Found::Export(self.connect(address, true)?),
            name: name.path.clone(),
            directory: None,
            format,
            read_only: true,
            raw_offset: name.raw_offset,
            raw_size: name.raw_size,
            without_backing: name.without_backing,
            is_guarded: !(self.options.trust_base_format && format == Format::Raw),
            is_unconfirmed: false,
        })
    }
}

/// A part can be named of raw bytes only.
fn check_part(name: &FileName, format: Format) -> Result<(), Error> {
    if format == Format::Qcow2 && (name.raw_offset != 0 || name.raw_size.is_some()) {
        let text = "an offset or a size can be given for raw images only";
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}

/// Refuses an export where only a file will do.
///
/// * `what`: what the name is for.
pub(crate) fn refuse_export(name: &FileName, what: &str) -> Result<(), Error> {
    match name.nbd {
        None => Ok(()),
        Some(_) => Err(Error::new(
            ErrorKind::Unsupported,
            format!("{what} is a file or a block device, not '{}'", printable_path(&name.path)),
        )),
    }
}
