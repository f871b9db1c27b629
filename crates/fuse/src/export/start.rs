//! The start of an export: which transport and mode of rings is tried, and what is tried next.
//!
//! Promises: a transport or mode that the kernel refuses is given up as a whole, with its mount,
//! before the next one is tried; what the user has asked for by name is never replaced by another.
//! Control path.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringdisk_disk::Disk;
use ringdisk_export::{Error, ErrorKind};

use super::Forced;
use super::fallback::first_mode;
use super::phases::{Attempt, Outcome};
use super::{Export, ExportOptions};
use crate::kept;
use crate::transport::{Transport, choose_transport};
use crate::uring::{RingMode, ZeroCopy, is_enabled};

/// How often a mount begins again over io_uring when the switch of the kernel is turned at that
/// moment.
const TURNS_MAX: u32 = 3;

/// Mounts and serves: tries the best that may work, and the next best where that is refused.
///
/// * `forced`, `devices`: as in [`crate::testing`].
pub(crate) fn start(
    disk: Arc<Disk>,
    mut options: ExportOptions,
    forced: Forced,
    devices: Vec<OwnedFd>,
) -> Result<Export, Error> {
    if options.keep.is_some()
        && let Some(why) = kept::refuse(options.transport, options.zero_copy, options.passthrough)
    {
        return Err(why);
    }
    if options.passthrough {
        // The two exclude each other, and the kernel's own reading is better still.
        options.zero_copy = ZeroCopy::Off;
    }
    let mut choice = Choice::first(&options, forced)?;
    let mut devices = Some(devices);
    loop {
        let devices = devices.take().unwrap_or_default();
        let (disk, options, mode) = (&disk, &options, choice.mode);
        let attempt = Attempt { disk, options, mode, taken: None, forced };
        match attempt.run(devices, &mut choice.notes)? {
            Outcome::Serves(export) => return Ok(choice.report(*export)),
            refused => choice.next(options, refused)?,
        }
    }
}

/// What is tried, and why not more.
struct Choice {
    /// The most that rings shall do; `None`: no rings.
    mode: Option<RingMode>,
    /// Why not over io_uring.
    reason: Option<String>,
    /// What was asked for and cannot be had.
    notes: Vec<String>,
    /// How often the switch of the kernel was turned meanwhile.
    turns: u32,
}

impl Choice {
    /// The first attempt.
    ///
    /// Errors: what was asked for cannot be had.
    fn first(options: &ExportOptions, forced: Forced) -> Result<Choice, Error> {
        let is_auto = options.transport == Transport::Auto;
        let (with_rings, reason) = match options.keep {
            Some(_) => (false, is_auto.then(kept::why_dev)),
            None => choose_transport(options.transport)?,
        };
        if let Some(reason) = &reason {
            tracing::info!("served over /dev/fuse: {reason}");
        }
        let mode = match with_rings {
            true => Some(first_mode(options.zero_copy)?.min(forced.ring_mode_max)),
            false => None,
        };
        if mode.is_none() && options.zero_copy == ZeroCopy::On {
            let text = "zero-copy needs FUSE over io_uring";
            return Err(Error::new(ErrorKind::TransportMissing, text).hint(
                "leave `--zero-copy on` out, or see `ringdisk mount --help` on --transport",
            ));
        }
        Ok(Choice { mode, reason, notes: Vec::new(), turns: 0 })
    }

    /// The attempt after one that came to nothing.
    ///
    /// Errors: what was asked for cannot be had.
    fn next(&mut self, options: &ExportOptions, refused: Outcome) -> Result<(), Error> {
        let needs_zero_copy = options.zero_copy == ZeroCopy::On;
        let (refused, why) = match refused {
            Outcome::RingsRefused(mode, why) => (mode, why),
            _ if self.turns < TURNS_MAX && is_enabled() == Some(true) => {
                self.turns += 1;
                return Ok(());
            }
            _ => {
                let mode = self.mode.filter(|_| needs_zero_copy).unwrap_or(RingMode::Entries);
                (mode, String::from("io_uring was switched off or on while this mount began"))
            }
        };
        self.mode = refused.below();
        if needs_zero_copy && refused == RingMode::ZeroCopy {
            let text = format!("no zero-copy: {why}");
            return Err(Error::new(ErrorKind::TransportMissing, text)
                .hint("use `--zero-copy auto`, which takes it where it works"));
        }
        match self.mode {
            Some(RingMode::Pools) => tracing::info!("no zero-copy: {why}"),
            Some(_) => tracing::info!("no buffer pools: {why}"),
            None if options.transport == Transport::Uring => {
                return Err(Error::new(ErrorKind::TransportMissing, why)
                    .hint("use `--transport dev`, or `auto`, which takes what works"));
            }
            None => {
                self.notes.push(format!("{why}: served over /dev/fuse"));
                self.reason = Some(why);
            }
        }
        Ok(())
    }

    /// Says where everything is.
    fn report(self, export: Export) -> Export {
        report(export, self.reason)
    }
}

/// Says where everything is, and why not in rings.
pub(super) fn report(mut export: Export, reason: Option<String>) -> Export {
    export.topology.reason = reason;
    tracing::info!("{}", export.topology.summary());
    export.topology.remarks.iter().for_each(|remark| tracing::info!("{remark}"));
    export
}
