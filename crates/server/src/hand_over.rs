//! A disk that goes from a predecessor to this process: its messages to users, and the checks of
//! its images.
//!
//! Promises: an attacker may have taken the confined predecessor over. So this process trusts the
//! descriptors of the predecessor, and neither its words nor the headers that it has written.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_daemon::confine::{self, Reach};
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::log_target::{self, Subject};
use ringdisk_daemon::terminal::{self, visible};
use ringdisk_daemon::upgrade::Lingering;
use ringdisk_disk::names_note::Names;
use ringdisk_disk::{Disk, LAYERS_MAX, Layer};
use ringdisk_storage::Storage;

use crate::request::ImageRequest;

/// Logs that another process serves the disk now, and emits it as an event.
///
/// * `name`: of the disk, in the log.
pub fn handed_over(disk: &Disk, name: &str) {
    let event = "handed-over";
    disk.events().emit(event, "another process serves the disk now");
    log_target::next_is_about(Subject {
        disk: Some(name.to_owned()),
        event: Some(event.to_owned()),
    });
    terminal::note(format_args!("{name}: handed over to another process"));
}

/// Warns that the predecessor has not ended, and names its images: an attacker in it could use them
/// as long as it lives.
pub fn complain_of(lingering: &Lingering, disk: &Disk, name: &str) {
    let layers = disk.layers();
    let files = layers.iter().flat_map(|layer| [layer.file(), layer.data_storage()]).flatten();
    let files: Vec<_> = files.filter_map(|file| file.identity()).collect();
    let open = lingering.has_open(&files);
    let open: Vec<_> =
        open.iter().map(|path| format!("'{}'", visible(&path.display().to_string()))).collect();
    let pid = lingering.pid.map_or_else(String::new, |pid| format!(" (pid {pid})"));
    let what = if open.is_empty() {
        String::from("whether it has images open cannot be seen")
    } else {
        format!("it still has open: {}", open.join(", "))
    };
    let text =
        format!("the process before this one{pid} has not let go of the disk in time: {what}");
    let mut failure = Failure::new(Exit::General, text).context(name);
    if let Some(pid) = lingering.pid {
        failure = failure.hint(format!(
            "the disk is served here; one that serves other disks, too, may go on, any other is \
             ended with `kill -9 {pid}`"
        ));
    }
    terminal::complain(&failure);
}

/// Checks that the command line leads to the image on top that the predecessor hands over. The
/// predecessor may have been taken over, so neither its words nor headers that it has written
/// count, but the notes of the files that these name ([`ringdisk_disk::names_note`]).
///
/// * `source`, `image`: the command line's.
///
/// Errors: it is another one.
pub fn check_top(disk: &Disk, source: &ImageRequest, image: Option<&Path>) -> Result<(), Failure> {
    let layers = disk.layers();
    let Some(top) = layers.first() else { return Ok(()) };
    let allowed = Reach::of(std::iter::empty(), &source.allow_path);
    let images = [image, source.overlay.as_deref()];
    let images: Vec<_> = images.into_iter().flatten().collect();
    let named: Vec<_> = images
        .iter()
        .filter_map(|path| path.metadata().ok())
        .map(|meta| Storage::identity_of(&meta))
        .collect();
    let is_led_to = match top.file() {
        None => image.is_none(),
        Some(file) => confine::by_descriptor(file).is_some_and(|open| {
            allowed.has_open(&open)
                // Without a name it is an overlay that goes with its process, or an image that was
                // removed while it was served.
                || has_no_name(&open)
                || is_tied(&layers, &named)
                || images.iter().any(|image| is_below_named(file, image))
        }),
    };
    let hint = "if a command of yours put it on top, name its directory with --allow-path";
    if !is_led_to {
        let what = format!(
            "the process that serves the disk hands over '{}', which is not the image of the \
             command line, is no overlay that was made for it, and \
             is not where --allow-path allows",
            visible(&top.name().display().to_string())
        );
        return Err(Failure::new(Exit::Permission, what).hint(hint));
    }
    let has_other_data = |layer: &&Arc<Layer>| {
        let data = layer.external_data().and_then(|data| confine::by_descriptor(data));
        !has_its_data(layer, &images) && !data.is_some_and(|open| allowed.has_open(&open))
    };
    if let Some(layer) = layers.iter().find(has_other_data) {
        let what = format!(
            "the process that serves the disk hands over '{}', which names another data file than \
             it did",
            visible(&layer.name().display().to_string())
        );
        return Err(Failure::new(Exit::Permission, what).hint(hint));
    }
    Ok(())
}

/// Whether an image names the data file that it did, and that one was handed over with it.
///
/// * `images`: of the command line, beside which it may be named.
fn has_its_data(layer: &Layer, images: &[&Path]) -> bool {
    let Some(file) = layer.file() else { return true };
    let names = Names::of_layer(layer);
    if names.ask(file).other_data {
        return false;
    }
    let Some((data, name)) = layer.external_data().zip(names.data_path()) else { return true };
    let real = confine::by_descriptor(file).and_then(|open| fs::read_link(open).ok());
    let beside = real.as_deref().into_iter().chain(images.iter().copied());
    let mut found = beside
        .filter_map(|image| image.parent()?.join(&name).metadata().ok())
        .map(|meta| Some(Storage::identity_of(&meta)) == data.identity())
        .peekable();
    // One that was removed or renamed while it was served leads nowhere.
    found.peek().is_none() || found.any(|is_it| is_it)
}

/// Whether the image on top is one of these, or notes lead from it to one of them.
///
/// * `named`: device and inode of what the command line names.
fn is_tied(layers: &[Arc<Layer>], named: &[(u64, u64)]) -> bool {
    let is_of_command_line = |file: &Storage| file.identity().is_some_and(|id| named.contains(&id));
    for (depth, layer) in layers.iter().enumerate() {
        let Some(file) = layer.file() else { return false };
        if is_of_command_line(file) {
            return true;
        }
        let Some(below) = layers.get(depth + 1) else { break };
        let said = Names::of_layer(layer).ask(file);
        // The file that it names is the one that was handed over as its data file.
        let is_below = below.file().is_some_and(|below| leads_to(layer, below));
        if said.is_absent || said.other_below || !is_below {
            return false;
        }
    }
    false
}

/// Whether the header of an image, with its note, leads to this file.
fn leads_to(layer: &Layer, below: &Storage) -> bool {
    let open = layer.file().and_then(|file| confine::by_descriptor(file));
    // Not the directory that the predecessor names.
    let name = open.and_then(|open| fs::read_link(open).ok());
    let named = name.and_then(|name| below_of(&name, &Names::of_layer(layer)));
    let identity = named.and_then(|path| path.metadata().ok()).map(|it| Storage::identity_of(&it));
    identity.is_some() && identity == below.identity()
}

fn below_of(image: &Path, names: &Names) -> Option<PathBuf> {
    Some(image.parent()?.join(names.backing_path()?))
}

/// Whether notes lead from an image of the command line down to this file: a command has committed
/// all above into it.
fn is_below_named(file: &Storage, image: &Path) -> bool {
    let mut name = fs::canonicalize(image).ok();
    for _ in 0..LAYERS_MAX {
        let below = name.and_then(|name| below_of(&name, &Names::noted_at(&name)?));
        let Some(below) = below.and_then(|below| fs::canonicalize(below).ok()) else { break };
        let identity = below.metadata().map(|meta| Storage::identity_of(&meta)).ok();
        if identity.is_some() && identity == file.identity() {
            return true;
        }
        name = Some(below);
    }
    false
}

/// Whether no name leads to an open file any more.
fn has_no_name(open: &Path) -> bool {
    open.metadata().is_ok_and(|meta| meta.nlink() == 0)
}
