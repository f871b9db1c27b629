//! What `ringdisk mount` was asked for: names and options.
//!
//! Promises: names hold also after the process has left its directory; the image of a process that
//! was killed is opened only when that one has let go of it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ringdisk_daemon::confine::{self, Confinement, Reach};
use ringdisk_daemon::control::registry;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper;
use ringdisk_daemon::helper::mark;
use ringdisk_daemon::keep::{self, State};
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_daemon::signals::Watcher;
use ringdisk_daemon::terminal::{self, shell_word};
use ringdisk_daemon::upgrade::Shown;
use ringdisk_disk::{Disk, Format, Layer};
use ringdisk_fuse::mount::{MountEntry, Unmount, mountpoint, table, unmount};

use crate::cli::{MountArgs, MountPaths, StopTimeout};
use crate::commands::open::{ImagePlan, reach};
use crate::commands::reopen::{AllowedImages, when_free};
use crate::commands::shown::ShownWords;
use crate::new_image::NewImage;
use crate::serve::Options;

/// How long a stop waits for users where a service manager waits for us: less than the 90 s after
/// which systemd kills.
const STOP_MANAGED: Duration = Duration::from_secs(60);

/// What was asked for, with absolute names where they are used after the start.
pub(super) struct Plan<'a> {
    args: &'a MountArgs,
    pub(super) image: ImagePlan<'a>,
    /// As the user wrote it, for messages.
    pub(super) mountpoint_shown: String,
    pub(super) mountpoint: PathBuf,
    pub(super) pidfile: Option<PathBuf>,
    /// Of a mount that is there: what the process before has left.
    kept: Option<State>,
    /// And what it was made with.
    first: Option<State>,
    /// What new overlays are marked with; empty: nothing.
    pub(super) mark: String,
    /// The mount was another process's, which hands it over.
    pub(super) is_taken: bool,
}

/// Errors: the directory of this process is gone.
fn absolute_pidfile(args: &MountArgs) -> Result<Option<PathBuf>, Failure> {
    let pidfile = args.pidfile.as_deref().map(std::path::absolute).transpose();
    pidfile.map_err(|error| Failure::system("the name of the pid file", &error, Exit::General))
}

/// What new overlays are marked with.
///
/// Errors: the system has no random bytes.
fn new_mark(args: &MountArgs) -> Result<String, Failure> {
    if !args.keep_mount {
        return Ok(String::new());
    }
    mark::new()
        .map_err(|error| Failure::system("no random bytes for the mount", &error, Exit::General))
}

/// The image of a mount.
fn image_plan(args: &MountArgs, image: Option<PathBuf>) -> ImagePlan<'_> {
    ImagePlan {
        outlives_process: args.keep_mount,
        leaves_directory: args.daemonize || args.keep_mount,
        growable: args.growable || args.resizable,
        // The kernel lets go of the image of a dead mount a moment after that was removed.
        wait_for_locks: args.passthrough.then_some(LOCK_WAIT),
        note_names: confine::is_wanted(args.sandbox.word),
        ..ImagePlan::new(&args.disk, image)
    }
}

impl<'a> Plan<'a> {
    /// Errors: a mountpoint that cannot be used, whether it is there or not.
    pub(super) fn new(args: &'a MountArgs, paths: MountPaths) -> Result<Plan<'a>, Failure> {
        let mountpoint_shown = paths.mountpoint.display().to_string();
        let mut mountpoint = mountpoint::place(&paths.mountpoint)
            .map_err(|error| no_directory(&paths.mountpoint).unwrap_or_else(|| error.into()))?;
        // What is mounted there is not looked at: its server may stand still.
        let is_new = table::at(&mountpoint)?.is_none()
            && fs::symlink_metadata(&mountpoint)
                .is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if !is_new {
            mountpoint = free_mountpoint(&mountpoint)?;
        }
        let pidfile = absolute_pidfile(args)?;
        let image = image_plan(args, paths.image);
        let mark = new_mark(args)?;
        let (kept, first, is_taken) = (None, None, false);
        Ok(Plan { args, image, mountpoint_shown, mountpoint, pidfile, kept, first, mark, is_taken })
    }

    /// For a mount of a live process, which is to be taken over. Gives the number of its
    /// connection, too.
    ///
    /// Errors: there is no mount of ours.
    pub(super) fn taken(
        args: &'a MountArgs,
        paths: MountPaths,
    ) -> Result<(Plan<'a>, u32), Failure> {
        let mountpoint_shown = paths.mountpoint.display().to_string();
        let mountpoint = mountpoint::resolve(&paths.mountpoint)?;
        let entry = table::at(&mountpoint)?.filter(MountEntry::is_ours);
        let connection = entry.and_then(|entry| entry.connection()).ok_or_else(|| {
            let text = format!(
                "no ringdisk serves '{mountpoint_shown}', so there is nothing to take over"
            );
            Failure::new(Exit::Mountpoint, text).hint("start without --upgrade")
        })?;
        let pidfile = absolute_pidfile(args)?;
        let (image, mark) = (image_plan(args, paths.image), new_mark(args)?);
        let (kept, first, is_taken) = (None, None, true);
        let plan = Plan {
            args,
            image,
            mountpoint_shown,
            mountpoint,
            pidfile,
            kept,
            first,
            mark,
            is_taken,
        };
        Ok((plan, connection))
    }

    /// What its users are shown.
    pub(super) fn shown(&self) -> Shown {
        let args = self.args;
        let mut words = ShownWords::of_source(&args.disk);
        words.switch("--growable", args.growable);
        words.switch("--resizable", args.resizable);
        words.switch("--allow-other", args.allow_other);
        words.switch("--kernel-cache", args.kernel_cache);
        words.switch("--passthrough", args.passthrough);
        words.switch("--keep-mount", args.keep_mount);
        words.shown(&args.disk, self.image.image.as_deref())
    }

    /// Where the images of a disk that another process has handed over count by their names;
    /// `None`: this process has opened them itself.
    fn told_within(&self) -> Option<Reach> {
        let image = self.image.image.as_deref();
        self.is_taken.then(|| reach(&self.args.disk, image))
    }

    /// For a mount that is there: of a process that is gone.
    ///
    /// * `first`: what it was made with.
    ///
    /// Errors: another mount was asked for than the one that was kept.
    pub(super) fn resumed(
        args: &'a MountArgs,
        paths: MountPaths,
        state: &State,
        first: Option<&State>,
    ) -> Result<Plan<'a>, Failure> {
        let kept = state.terms().mountpoint;
        if mountpoint::place(&paths.mountpoint).is_ok_and(|asked| asked != kept) {
            return Err(Failure::new(
                Exit::Mountpoint,
                format!(
                    "the mount on '{}' was kept, and the command asks for '{}'",
                    kept.display(),
                    paths.mountpoint.display()
                ),
            )
            .hint("stop the service, then start it with the new command"));
        }
        let pidfile = absolute_pidfile(args)?;
        let overlay = args.disk.overlay.as_deref().filter(|_| state.top().is_none());
        // It would be made anew, empty.
        if let Some(gone) = overlay.filter(|overlay| !overlay.exists()) {
            let what = format!("the overlay '{}' of the mount is gone", gone.display());
            return Err(Failure::new(Exit::Image, what));
        }
        Ok(Plan {
            args,
            image: ImagePlan {
                top: checked_top(args, paths.image.as_deref(), state, first)?,
                made_format: state.format(),
                window: state.window,
                protect_raw: state.protect_raw,
                ..image_plan(args, paths.image)
            },
            mountpoint_shown: paths.mountpoint.display().to_string(),
            mountpoint: kept,
            pidfile,
            kept: Some(state.clone()),
            first: first.cloned(),
            mark: first.map(|first| first.mark.clone()).unwrap_or_default(),
            is_taken: false,
        })
    }

    /// Opens the image of a process that is gone, as soon as that has let go of it: its locks stay
    /// until the last write that it began has landed, and until then nothing may be read or carried
    /// out again.
    ///
    /// * `timeout`: how long.
    ///
    /// Errors: as [`ImagePlan::open`]; the image was not free by then, or not [`FREE_STOPPED`]
    /// after a signal came.
    pub(super) fn open_when_free(
        &self,
        watcher: &Watcher,
        timeout: Duration,
    ) -> Result<Arc<Disk>, Failure> {
        let opened = when_free(watcher, timeout, || self.open_disk(&NewFiles::default(), None));
        opened.and_then(|disk| self.check_same(disk))
    }

    /// The image that clients of a kept mount use is the one that was opened, and no other that has
    /// its name by now, nor one from elsewhere.
    ///
    /// Errors: it is another one.
    fn check_same(&self, disk: Arc<Disk>) -> Result<Arc<Disk>, Failure> {
        if let Some((first, now)) = self.first.as_ref().zip(self.kept.as_ref()) {
            allowed_images(self.args, self.image.image.as_deref()).check_same(
                first,
                now,
                &disk.layers(),
            )?;
        }
        Ok(disk)
    }

    /// Opens what is to be served.
    ///
    /// Errors: as [`ImagePlan::open`].
    pub(super) fn open_disk(
        &self,
        fresh: &NewFiles,
        new: Option<&(NewImage, u64)>,
    ) -> Result<Arc<Disk>, Failure> {
        self.image.open(fresh, new).map_err(|failure| {
            let is_free = table::at(&self.mountpoint).is_ok_and(|mount| mount.is_none());
            if failure.exit != Exit::Locked || !is_free || !registry::is_served(&self.mountpoint) {
                return failure;
            }
            let shown = shell_word(&self.mountpoint_shown);
            failure.hint(format!(
                "the mount that was here was stopped and goes on until its last user has closed \
                 it: \
                 `ringdisk ctl {shown} stats` says who that is, `ringdisk ctl {shown} stop \
                 --force` ends it"
            ))
        })
    }

    /// Whether the next process of a kept mount takes an image on top, by its name.
    pub(super) fn may_be_top(&self) -> impl Fn(&Layer) -> Result<(), String> + Send + Sync + use<> {
        allowed_images(self.args, self.image.image.as_deref()).may_be_top()
    }

    /// Whether this is in a sandbox.
    pub(super) fn sandbox_word(&self) -> Confinement {
        self.args.sandbox.word
    }

    /// What serving takes of the system, for the sandbox.
    pub(super) fn confinement(&self, disk: &Disk) -> ringdisk_sandbox::Plan {
        let args = self.args;
        let plan = confine::plan(args.sandbox.word);
        let told_within = self.told_within();
        let allowed = &args.disk.allow_path;
        confine::images(plan, disk, allowed, told_within.as_ref())
    }

    /// Where new overlays may be made.
    pub(super) fn directories(&self, disk: &Disk) -> Vec<helper::Named> {
        let args = self.args;
        let told_within = self.told_within();
        let top = confine::directory_for(args.sandbox.word, disk, told_within.as_ref());
        // As in the process that was there before a command put that one on top of its own.
        let first = args.disk.overlay.as_ref().or(self.image.image.as_ref());
        let first = first.filter(|_| self.image.top.is_some() && top.is_some());
        let first = first.and_then(|image| helper::named(confine::directory_of(image)?));
        top.into_iter().chain(first).collect()
    }

    /// Where new overlays may be made at any depth.
    pub(super) fn trees(&self, disk: &Disk) -> Vec<helper::Named> {
        confine::trees_for(self.args.sandbox.word, disk, &self.args.disk.allow_path)
    }

    /// The images for the helper process.
    pub(super) fn images(&self, disk: &Disk) -> Vec<helper::chain::Image> {
        let ours = confine::images_of(disk, self.told_within().as_ref());
        [ours, confine::images_allowed(&self.args.disk.allow_path)].concat()
    }

    /// Whether clients were to change the size of what has a fixed one: a partition, or a part of
    /// the disk with a size of its own.
    pub(super) fn wants_to_size_a_part(&self, disk: &Disk) -> bool {
        let is_fixed = disk.window().is_some_and(|(_, len)| len.is_some());
        is_fixed && (self.args.growable || self.args.resizable)
    }

    pub(super) fn options(&self, disk: &Disk) -> Options {
        let args = self.args;
        let may_size = !self.wants_to_size_a_part(disk);
        Options {
            mountpoint: self.mountpoint.clone(),
            placement: args.placement.clone(),
            zero_copy: args.zero_copy,
            passthrough: args.passthrough,
            no_pools: args.no_pools,
            stay: args.stay,
            growable: args.growable && may_size,
            resizable: args.resizable && may_size,
            read_only: args.disk.read_only || disk.is_read_only(),
            allow_other: args.allow_other,
            kernel_cache: args.kernel_cache,
            io_timeout: args.io_timeout,
            stop_timeout: stop_timeout(args.stop_timeout, keep::is_managed()),
            restricted: confine::is_wanted(args.sandbox.word),
            keep: None,
            name: self.image.name(),
        }
    }

    /// What is served where, in one line.
    pub(super) fn ready_line(&self, disk: &Disk) -> String {
        let what = self.image.describe(disk);
        format!("{what} is served as {}", self.mountpoint_shown)
    }
}

/// What the command line lets images be.
fn allowed_images<'a>(args: &'a MountArgs, image: Option<&'a Path>) -> AllowedImages<'a> {
    let confines = confine::confines_files(args.sandbox.word);
    AllowedImages { noun: "mount", args: &args.disk, image, confines }
}

/// The image that a command has put on top, as the process before this one says.
///
/// Errors: an image from elsewhere.
fn checked_top(
    args: &MountArgs,
    image: Option<&Path>,
    state: &State,
    first: Option<&State>,
) -> Result<Option<(PathBuf, Format)>, Failure> {
    first.map_or(Ok(None), |first| allowed_images(args, image).checked_top(first, state))
}

/// How long the kernel may take to let go of an image that was passed through.
const LOCK_WAIT: Duration = Duration::from_secs(3);

/// How long a stop waits for users; `None`: as long as they take.
///
/// * `is_managed`: a service manager waits for us.
fn stop_timeout(asked: Option<StopTimeout>, is_managed: bool) -> Option<Duration> {
    match asked {
        Some(asked) => asked.0,
        None => is_managed.then_some(STOP_MANAGED),
    }
}

/// Checks a mountpoint; what a ringdisk that was killed left on it goes.
///
/// Errors: those of the check.
fn free_mountpoint(path: &Path) -> Result<PathBuf, Failure> {
    let stale = match mountpoint::check(path) {
        Err(error) if error.kind() == ringdisk_fuse::ErrorKind::Stale => error,
        checked => return Ok(checked?),
    };
    if unmount(path, Unmount::Lazy).is_err() {
        return Err(stale.into());
    }
    terminal::note(format_args!(
        "'{}' still carried the mount of a ringdisk that was killed; it is replaced",
        path.display()
    ));
    Ok(mountpoint::check(path)?)
}

/// What is wrong with a mountpoint whose directory is missing; `None` if that is not the matter.
fn no_directory(mountpoint: &Path) -> Option<Failure> {
    let directory = mountpoint.parent().filter(|directory| !directory.as_os_str().is_empty())?;
    if !fs::metadata(directory).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return None;
    }
    let shown = directory.display().to_string();
    Some(
        Failure::new(Exit::Mountpoint, format!("the directory '{shown}' does not exist"))
            .hint(format!("mkdir -p {}", shell_word(&shown))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_waits_for_ever_or_as_long_as_a_service_manager_does_unless_told_otherwise() {
        assert_eq!(stop_timeout(None, false), None);
        assert_eq!(stop_timeout(None, true), Some(Duration::from_secs(60)));
        let never = Some(StopTimeout(None));
        let short = Some(StopTimeout(Some(Duration::from_secs(3))));
        for is_managed in [false, true] {
            assert_eq!(stop_timeout(never, is_managed), None);
            assert_eq!(stop_timeout(short, is_managed), Some(Duration::from_secs(3)));
        }
    }
}
