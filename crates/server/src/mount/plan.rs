//! The names and options of a `ringdisk mount`.
//!
//! Promises: names hold also after the process has left its directory; the image of a process that
//! was killed is opened only when its locks are free.

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
use ringdisk_daemon::upgrade::ClientView;
use ringdisk_disk::{Disk, Format, Layer};
use ringdisk_fuse::kept::Parked;
use ringdisk_fuse::mount::{MountEntry, Unmount, mountpoint, table, unmount};
use ringdisk_images::new_image::NewImage;

use super::export::Options;
use super::request::{Paths, Request, StopTimeout};
use crate::client_view::ClientViewWords;
use crate::open::{ImagePlan, LOCK_WAIT, reach};
use crate::reopen::{AllowedImages, when_free};

/// How long a stop waits for users where a service manager waits for us: less than the 90 s after
/// which systemd kills.
const STOP_MANAGED: Duration = Duration::from_secs(60);

/// The request, with absolute names where they are used after the start.
pub(super) struct Plan<'a> {
    request: &'a Request,
    pub(super) image: ImagePlan,
    /// As the user wrote it, for messages.
    pub(super) mountpoint_name: String,
    pub(super) mountpoint: PathBuf,
    pub(super) pidfile: Option<PathBuf>,
    /// State that the process before has left of a kept mount.
    kept: Option<State>,
    /// State that was sealed when that mount was made.
    first: Option<State>,
    /// Mark of new overlays ([`ringdisk_daemon::helper::mark`]); empty: none.
    pub(super) mark: String,
    /// The mount comes from a predecessor (`--upgrade`).
    pub(super) is_taken: bool,
}

/// Errors: the directory of this process is gone.
fn absolute_pidfile(request: &Request) -> Result<Option<PathBuf>, Failure> {
    let pidfile = request.pidfile.as_deref().map(std::path::absolute).transpose();
    pidfile.map_err(|error| Failure::system("the name of the pid file", &error, Exit::General))
}

/// Makes the mark of new overlays.
///
/// Errors: the system has no random bytes.
fn new_mark(request: &Request) -> Result<String, Failure> {
    if !request.keep_mount {
        return Ok(String::new());
    }
    mark::new()
        .map_err(|error| Failure::system("no random bytes for the mount", &error, Exit::General))
}

/// The image of a mount.
fn image_plan(request: &Request, image: Option<PathBuf>) -> ImagePlan {
    ImagePlan {
        outlives_process: request.keep_mount,
        leaves_directory: request.daemonize || request.keep_mount,
        growable: request.growable || request.resizable,
        // The kernel closes the image of a dead mount a moment after the mount was removed.
        wait_for_locks: request.passthrough.then_some(LOCK_WAIT),
        note_names: confine::is_wanted(request.sandbox),
        ..ImagePlan::new(&request.disk, image)
    }
}

impl<'a> Plan<'a> {
    /// Errors: a mountpoint that cannot be used, whether it is there or not.
    pub(super) fn new(request: &'a Request, paths: Paths) -> Result<Plan<'a>, Failure> {
        let mut mountpoint = mountpoint::place(&paths.mountpoint)
            .map_err(|error| no_directory(&paths.mountpoint).unwrap_or_else(|| error.into()))?;
        // A mount that is there is not accessed: its server may hang.
        let is_new = table::at(&mountpoint)?.is_none()
            && fs::symlink_metadata(&mountpoint)
                .is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        let mut is_replaced = false;
        if !is_new {
            (mountpoint, is_replaced) = free_mountpoint(&mountpoint)?;
        }
        let mut plan = Plan::of(request, paths, mountpoint, false)?;
        if is_replaced {
            plan.image.wait_for_locks = Some(LOCK_WAIT);
        }
        Ok(plan)
    }

    /// * `is_taken`: the mount is taken over.
    fn of(
        request: &'a Request,
        paths: Paths,
        mountpoint: PathBuf,
        is_taken: bool,
    ) -> Result<Plan<'a>, Failure> {
        Ok(Plan {
            mountpoint_name: paths.mountpoint.display().to_string(),
            pidfile: absolute_pidfile(request)?,
            image: image_plan(request, paths.image),
            mark: new_mark(request)?,
            request,
            mountpoint,
            kept: None,
            first: None,
            is_taken,
        })
    }

    /// For a mount of a live process, which is to be taken over. Gives the number of its
    /// connection, too.
    ///
    /// Errors: there is no mount of ours.
    pub(super) fn taken(request: &'a Request, paths: Paths) -> Result<(Plan<'a>, u32), Failure> {
        let mountpoint = mountpoint::resolve(&paths.mountpoint)?;
        let entry = table::at(&mountpoint)?.filter(MountEntry::is_ours);
        let connection = entry.and_then(|entry| entry.connection()).ok_or_else(|| {
            let text = format!(
                "no ringdisk serves '{}', so there is nothing to take over",
                paths.mountpoint.display()
            );
            Failure::new(Exit::Mountpoint, text).hint("start without --upgrade")
        })?;
        let plan = Plan::of(request, paths, mountpoint, true)?;
        Ok((plan, connection))
    }

    /// What its users are shown.
    pub(super) fn client_view(&self) -> ClientView {
        let request = self.request;
        let mut words = ClientViewWords::of_source(&request.disk);
        words.switch("--growable", request.growable);
        words.switch("--resizable", request.resizable);
        words.switch("--allow-other", request.allow_other);
        words.switch("--kernel-cache", request.kernel_cache);
        words.switch("--passthrough", request.passthrough);
        words.view(&request.disk, self.image.image.as_deref())
    }

    /// Where the images of a disk that another process has handed over count by their names;
    /// `None`: this process has opened them itself.
    fn trusted_within(&self) -> Option<Reach> {
        let image = self.image.image.as_deref();
        self.is_taken.then(|| reach(&self.request.disk, image))
    }

    /// For a mount that is there: of a process that is gone.
    ///
    /// * `first`: what it was made with.
    ///
    /// Errors: another mount was asked for than the one that was kept.
    pub(super) fn resumed(
        request: &'a Request,
        paths: Paths,
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
        let pidfile = absolute_pidfile(request)?;
        let overlay = request.disk.overlay.as_deref().filter(|_| state.top().is_none());
        // It would be made anew, empty.
        if let Some(gone) = overlay.filter(|overlay| !overlay.exists()) {
            let what = format!("the overlay '{}' of the mount is gone", gone.display());
            return Err(Failure::new(Exit::Image, what));
        }
        Ok(Plan {
            request,
            image: ImagePlan {
                top: checked_top(request, paths.image.as_deref(), state, first)?,
                made_format: state.format(),
                window: state.window,
                protect_raw: state.protect_raw,
                ..image_plan(request, paths.image)
            },
            mountpoint_name: paths.mountpoint.display().to_string(),
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
            allowed_images(self.request, self.image.image.as_deref()).check_same(
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
            let shown = shell_word(&self.mountpoint_name);
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
        allowed_images(self.request, self.image.image.as_deref()).may_be_top()
    }

    /// What the next process has to know of a mount that outlives this one.
    ///
    /// * `made`: device and inode number of the mountpoint, if ringdisk made it; format of an image
    ///   that was made.
    pub(super) fn state(
        &self,
        disk: &Disk,
        parked: &Parked,
        (mountpoint, image): (Option<(u64, u64)>, Option<Format>),
    ) -> State {
        let state = State::new(&parked.terms, parked.devices.len(), mountpoint, image);
        let mut state = state.begun_on(&disk.layers());
        state.window = disk.window().map(|(start, len)| (start, len.map(|len| len.0)));
        state.protect_raw = disk.protects_raw();
        state.mark = self.mark.clone();
        state
    }

    /// Whether this is in a sandbox.
    pub(super) fn sandbox_word(&self) -> Confinement {
        self.request.sandbox
    }

    /// What serving takes of the system, for the sandbox.
    pub(super) fn confinement(&self, disk: &Disk) -> ringdisk_sandbox::Plan {
        let request = self.request;
        let plan = confine::plan(request.sandbox);
        let trusted_within = self.trusted_within();
        let allowed = &request.disk.allow_path;
        confine::images(plan, disk, allowed, trusted_within.as_ref())
    }

    /// Where new overlays may be made.
    pub(super) fn directories(&self, disk: &Disk) -> Vec<helper::Named> {
        let request = self.request;
        let trusted_within = self.trusted_within();
        let top = confine::directory_for(request.sandbox, disk, trusted_within.as_ref());
        // As in the process that was there before a command put that one on top of its own.
        let first = request.disk.overlay.as_ref().or(self.image.image.as_ref());
        let first = first.filter(|_| self.image.top.is_some() && top.is_some());
        let first = first.and_then(|image| helper::named(confine::directory_of(image)?));
        top.into_iter().chain(first).collect()
    }

    /// Where new overlays may be made at any depth.
    pub(super) fn trees(&self, disk: &Disk) -> Vec<helper::Named> {
        confine::trees_for(self.request.sandbox, disk, &self.request.disk.allow_path)
    }

    /// The images for the helper process.
    pub(super) fn images(&self, disk: &Disk) -> Vec<helper::chain::Image> {
        let ours = confine::images_of(disk, self.trusted_within().as_ref());
        [ours, confine::images_allowed(&self.request.disk.allow_path)].concat()
    }

    /// Whether clients were to change the size of what has a fixed one: a partition, or a part of
    /// the disk with a size of its own.
    pub(super) fn wants_to_size_a_part(&self, disk: &Disk) -> bool {
        let is_fixed = disk.window().is_some_and(|(_, len)| len.is_some());
        is_fixed && (self.request.growable || self.request.resizable)
    }

    pub(super) fn options(&self, disk: &Disk) -> Options {
        let request = self.request;
        let may_size = !self.wants_to_size_a_part(disk);
        Options {
            mountpoint: self.mountpoint.clone(),
            placement: request.placement.clone(),
            zero_copy: request.zero_copy,
            passthrough: request.passthrough,
            no_pools: request.no_pools,
            stay: request.stay,
            growable: request.growable && may_size,
            resizable: request.resizable && may_size,
            read_only: request.disk.read_only || disk.is_read_only(),
            allow_other: request.allow_other,
            kernel_cache: request.kernel_cache,
            io_timeout: request.io_timeout,
            stop_timeout: stop_timeout(request.stop_timeout, keep::is_managed()),
            restricted: confine::is_wanted(request.sandbox),
            keep: None,
            name: self.image.name(),
        }
    }

    /// What is served where, in one line.
    pub(super) fn ready_line(&self, disk: &Disk) -> String {
        let what = self.image.describe(disk);
        format!("{what} is served as {}", self.mountpoint_name)
    }
}

/// What the command line lets images be.
fn allowed_images<'a>(request: &'a Request, image: Option<&'a Path>) -> AllowedImages<'a> {
    let confines = confine::confines_files(request.sandbox);
    AllowedImages { noun: "mount", request: &request.disk, image, confines }
}

/// The image that a command has put on top, as the process before this one says.
///
/// Errors: an image from elsewhere.
fn checked_top(
    request: &Request,
    image: Option<&Path>,
    state: &State,
    first: Option<&State>,
) -> Result<Option<(PathBuf, Format)>, Failure> {
    first.map_or(Ok(None), |first| allowed_images(request, image).checked_top(first, state))
}

/// How long a stop waits for users; `None`: as long as they take.
///
/// * `is_managed`: a service manager waits for us.
fn stop_timeout(asked: Option<StopTimeout>, is_managed: bool) -> Option<Duration> {
    match asked {
        Some(asked) => asked.0,
        None => is_managed.then_some(STOP_MANAGED),
    }
}

/// Checks a mountpoint; what a ringdisk that was killed left on it goes. Gives the real path, and
/// whether something was there.
///
/// Errors: those of the check.
fn free_mountpoint(path: &Path) -> Result<(PathBuf, bool), Failure> {
    let stale = match mountpoint::check(path) {
        Err(error) if error.kind() == ringdisk_fuse::ErrorKind::Stale => error,
        checked => return Ok((checked?, false)),
    };
    if unmount(path, Unmount::Lazy).is_err() {
        return Err(stale.into());
    }
    terminal::note(format_args!(
        "'{}' still carried the mount of a ringdisk that was killed; it is replaced",
        path.display()
    ));
    Ok((mountpoint::check(path)?, true))
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
