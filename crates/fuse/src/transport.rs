//! How requests travel between the kernel and us, and whether rings can be tried.
//!
//! Promises: looks at the kernel, and changes nothing of it. Control path, before a mount.

use crate::uring::is_enabled;
use crate::{Error, ErrorKind};

/// How requests travel between the kernel and us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// The best that the kernel offers.
    #[default]
    Auto,
    /// `/dev/fuse`.
    Dev,
    /// FUSE over io_uring (Linux 6.14, with the module parameter `enable_uring`).
    Uring,
}

impl Transport {
    /// As users write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Dev => "dev",
            Transport::Uring => "uring",
        }
    }
}

/// Whether rings are to be tried, and if not why, with what would change that.
///
/// Errors: [`ErrorKind::TransportMissing`] when they were asked for and cannot be had.
pub(crate) fn choose_transport(wanted: Transport) -> Result<(bool, Option<String>), Error> {
    let (what, hint) = match (wanted, is_enabled()) {
        (Transport::Dev, _) => return Ok((false, None)),
        (_, Some(true)) => return Ok((true, None)),
        (_, Some(false)) => (
            "FUSE over io_uring is switched off",
            "`echo Y > /sys/module/fuse/parameters/enable_uring` (as root) switches it on",
        ),
        (_, None) => (
            "this kernel has no FUSE over io_uring",
            "Linux 6.14 or newer with CONFIG_FUSE_IO_URING has it",
        ),
    };
    match wanted {
        Transport::Uring => Err(Error::new(ErrorKind::TransportMissing, what).hint(hint)),
        _ => Ok((false, Some(format!("{what}; {hint}")))),
    }
}
