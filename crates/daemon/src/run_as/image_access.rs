//! Whether the owner of images can serve them.
//!
//! Promises: what a user may do is asked of the kernel, on a thread that is this user (access(2)),
//! so that lists of access rights and the directories on the way count; no file is opened, and no
//! word of an image is believed.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ringdisk_disk::Disk;
use ringdisk_storage::Kind;
use rustix::fs::{Access, access};

use super::names::{self, Identity};
use crate::confine;
use crate::terminal::visible;

/// A file that is open, by one of its names.
struct Opened {
    path: PathBuf,
    /// For people.
    display_name: String,
    needs: Access,
}

/// Who owns the top images of all disks, is the same for all, and may open all images again.
///
/// Errors: why nobody is, for people.
pub(crate) fn owner(disks: &[&Disk]) -> Result<Identity, String> {
    let mut found: Option<(Identity, String)> = None;
    for disk in disks {
        let (owner, name) = owner_of_top(disk)?;
        match &found {
            Some((other, others)) if *other != owner => {
                return Err(format!("{others} belongs to {other}, and {name} to {owner}"));
            }
            _ => found = Some((owner, name)),
        }
    }
    let (owner, _) = found.ok_or_else(|| String::from("there is no image"))?;
    may_open(&owner, disks)??;
    Ok(owner)
}

fn owner_of_top(disk: &Disk) -> Result<(Identity, String), String> {
    let layers = disk.layers();
    let top = layers.first().and_then(|top| Some((top.name(), top.file()?)));
    let (name, file) = top.ok_or_else(|| String::from("there is no image"))?;
    let display_name = quoted(name);
    if file.nbd_address().is_some() {
        return Err(format!("{display_name} is an NBD export"));
    }
    if file.kind() != Kind::Regular {
        return Err(format!("{display_name} is a device"));
    }
    let open =
        confine::by_descriptor(file).ok_or_else(|| format!("{display_name} has no owner"))?;
    let meta =
        fs::metadata(open).map_err(|error| format!("the owner of {display_name}: {error}"))?;
    match meta.uid() {
        0 => Err(format!("{display_name} belongs to root")),
        uid => Ok((names::owner(uid, meta.gid())?, display_name)),
    }
}

/// Whether a user may open all images of the disks again, as they are open now.
///
/// Errors: outside, this process cannot become that user; inside, one that he may not open. Both
/// for people.
pub(crate) fn may_open(user: &Identity, disks: &[&Disk]) -> Result<Result<(), String>, String> {
    let files: Vec<Opened> = disks.iter().flat_map(|disk| files(disk)).collect();
    let look = || files.iter().find(|file| access(&file.path, file.needs).is_err());
    let denied = user.user.look(look).map_err(|errno| {
        format!("this process cannot become user {user}: {}", std::io::Error::from(errno))
    })?;
    Ok(denied.map_or(Ok(()), |file| {
        let verb = if file.needs.contains(Access::WRITE_OK) { "write" } else { "read" };
        Err(format!("user {user} may not {verb} {}", file.display_name))
    }))
}

/// All files of a disk, each as it is open and by its name, which commands look up.
fn files(disk: &Disk) -> Vec<Opened> {
    let mut all = Vec::new();
    for (depth, layer) in disk.layers().iter().enumerate() {
        let writes = depth == 0 && !disk.is_read_only();
        let needs = if writes { Access::READ_OK | Access::WRITE_OK } else { Access::READ_OK };
        let both = [(layer.file(), Some(layer.name())), (layer.data_storage(), layer.data_name())];
        for (storage, name) in both {
            let Some(open) = storage.and_then(|storage| confine::by_descriptor(storage)) else {
                continue;
            };
            let display_name = name.map_or_else(|| String::from("an image"), quoted);
            // A temporary image has no name any more, and one that came by a descriptor never had
            // one.
            let named = name.filter(|name| name.is_absolute() && name.exists());
            let named = named.map(|name| Opened {
                path: name.to_owned(),
                display_name: display_name.clone(),
                needs,
            });
            all.push(Opened { path: open, display_name, needs });
            all.extend(named);
        }
    }
    all
}

fn quoted(name: &Path) -> String {
    format!("'{}'", visible(&name.display().to_string()))
}
