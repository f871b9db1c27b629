//! Images of a process that was killed, opened again by the one that goes on.
//!
//! Promises: an image is opened when the locks of the killed process are free, and not before.
//! State that it wrote while it was confined can prevent that an image is opened, but opens no
//! image that the process could not have opened itself.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_daemon::confine::Reach;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::keep::State;
use ringdisk_daemon::signals::Watcher;
use ringdisk_daemon::terminal::{self, visible};
use ringdisk_disk::{Disk, Format, Layer};
use ringdisk_storage::Kind;

use crate::open::reach;
use crate::request::ImageRequest;

/// How long the image of a process that was killed may stay locked: the time that its storage has
/// to finish writes in flight.
pub const FREE: Duration = Duration::from_secs(60);
/// How long a stop waits for these locks: most often they are free within milliseconds, and then
/// the end is clean.
pub const FREE_STOPPED: Duration = Duration::from_secs(2);
/// After this time the log says that the process waits for the locks.
const FREE_QUIET: Duration = Duration::from_secs(1);
/// Pause between two attempts to get sockets or images of a process that was killed.
pub(crate) const FREE_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Opens an image as soon as the locks of the process before are free: the kernel keeps them until
/// the last write of that process has completed, and until then nothing may be read or carried out
/// again.
///
/// * `timeout`: how long to try.
/// * `open`: opens the image.
///
/// Errors: those of `open`; the image was not free by then, or not [`FREE_STOPPED`] after a signal
/// came.
pub fn when_free(
    watcher: &Watcher,
    timeout: Duration,
    open: impl Fn() -> Result<Arc<Disk>, Failure>,
) -> Result<Arc<Disk>, Failure> {
    let begun = Instant::now();
    let mut is_said = false;
    let mut stopped = None;
    loop {
        let failure = match open() {
            Err(failure) if failure.exit == Exit::Locked => failure,
            opened => return opened,
        };
        if let Some(signal) = watcher.stopped_by()
            && stopped.get_or_insert_with(Instant::now).elapsed() > FREE_STOPPED
        {
            return Err(failure.hint(format!("{signal} came while it was waited for")));
        }
        if begun.elapsed() > timeout {
            let waited = timeout.as_secs();
            return Err(failure.hint(format!(
                "after a crash it was waited for {waited} s; look whether its storage answers"
            )));
        }
        if !is_said && begun.elapsed() > FREE_QUIET {
            is_said = true;
            terminal::note(format_args!(
                "waiting until the writes of the process before this one have landed: {}",
                failure.message()
            ));
        }
        std::thread::sleep(FREE_POLL_INTERVAL);
    }
}

/// The images that the command line allows.
#[derive(Debug)]
pub struct AllowedImages<'a> {
    /// `mount` or `disk`, for messages.
    pub noun: &'static str,
    /// The options of the disk.
    pub request: &'a ImageRequest,
    /// The image of the command line.
    pub image: Option<&'a Path>,
    /// The process is confined in its files.
    pub confines: bool,
}

impl AllowedImages<'_> {
    /// What `--allow-path` names.
    fn allowed(&self) -> Reach {
        Reach::of(std::iter::empty(), &self.request.allow_path)
    }

    /// The images that were opened are those that were served, and no others that have their names
    /// by now.
    ///
    /// * `first`: what was sealed at the start.
    /// * `now`: what the process before this one said.
    ///
    /// Errors: it is another one; or one that that process could not have opened.
    pub fn check_same(
        &self,
        first: &State,
        now: &State,
        layers: &[Arc<Layer>],
    ) -> Result<(), Failure> {
        let noun = self.noun;
        // What the process before said can only keep an image from being taken; what was sealed, or
        // was marked outside, counts.
        if let Some(other) = now.other(layers) {
            let name = visible(&other.name().display().to_string());
            return Err(Failure::new(
                Exit::Image,
                format!(
                    "'{name}' is not the file any more that the {noun} was made of: its clients \
                     would find another disk, so the {noun} is given up"
                ),
            )
            .hint(format!(
                "what was answered is in the file that had this name; {} the one that you want \
                 anew",
                if noun == "mount" { "mount" } else { "serve" }
            )));
        }
        if !self.confines {
            return Ok(());
        }
        let Some(foreign) = first.foreign_image(&self.allowed(), layers) else { return Ok(()) };
        let what = format!(
            "'{}' was not an image of the {noun} when that was made, was not made for it, and is \
             not where --allow-path allows",
            visible(&foreign.name().display().to_string())
        );
        Err(Failure::new(Exit::Permission, what).hint(
            "if a command of yours put it into the chain, name its directory with --allow-path",
        ))
    }

    /// The image that a command has put on top, as the process before this one says. It was
    /// confined, and this one is not yet: what it may not have opened is not opened for it.
    ///
    /// Errors: an image from elsewhere.
    pub fn checked_top(
        &self,
        first: &State,
        now: &State,
    ) -> Result<Option<(PathBuf, Format)>, Failure> {
        let Some((top, format)) = now.top() else { return Ok(None) };
        if !self.confines
            || self.allowed().has(&top) && first.takes_as_top(&top)
            || reach(self.request, self.image).has(&top) && first.has_or_made(&top)
        {
            return Ok(Some((top, format)));
        }
        let noun = self.noun;
        let what = format!(
            "the process that served the {noun} before names '{}' as the image on top, which is \
             not beside the image of the command line or was \
             not made for this {noun}, is not where --allow-path allows, or is gone",
            visible(&top.display().to_string())
        );
        Err(Failure::new(Exit::Permission, what).hint(
            "if a `ringdisk ctl snapshot` of yours put it there, name its directory with \
             --allow-path",
        ))
    }

    /// Whether the next process takes an image on top, by its name.
    pub fn may_be_top(&self) -> impl Fn(&Layer) -> Result<(), String> + Send + Sync + use<> {
        let confines = self.confines;
        let (reach, allowed) = (reach(self.request, self.image), self.allowed());
        // A device has no extended attribute that could mark it for the next process.
        let has_mark = |top: &Layer| top.file().is_some_and(|file| file.kind() == Kind::Regular);
        let is_taken =
            move |top: &Layer| allowed.has(top.name()) || has_mark(top) && reach.has(top.name());
        move |top| match !confines || is_taken(top) {
            true => Ok(()),
            false => Err(String::from(
                "believes no names outside of the directory of the image of the command line: name \
                 it with --allow-path",
            )),
        }
    }
}
