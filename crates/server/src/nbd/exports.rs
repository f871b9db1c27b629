//! Disks as NBD clients see them: their names, and bitmaps of their images.
//!
//! Promises: a bitmap is read once, at the start; one that changes while it is read is refused.

use std::sync::Arc;

use ringdisk_daemon::failure::{Cause, Exit, Failure};
use ringdisk_daemon::sockets::Address;
use ringdisk_daemon::terminal;
use ringdisk_disk::Disk;
use ringdisk_images::inspect;
use ringdisk_nbd::{DirtyBitmap, NamedDisk};
use ringdisk_ring::Ring;

use super::request::{DiskRequest, Request};
use crate::client_view::ClientViewWords;

/// Errors: two disks of one name.
pub(crate) fn check_names(disks: &[DiskRequest]) -> Result<(), Failure> {
    for (number, disk) in disks.iter().enumerate() {
        if disks[..number].iter().any(|other| other.name == disk.name) {
            let text = match disk.name.as_str() {
                "" => String::from("several disks need names: add export-name=NAME to each --disk"),
                this => format!("two disks are named '{this}': give each its own export-name"),
            };
            return Err(Failure::new(Exit::Usage, text));
        }
    }
    Ok(())
}

/// What clients see of a disk, beside its image: a process that takes it over must show the same.
pub(crate) fn say_what_clients_see(
    words: &mut ClientViewWords,
    request: &Request,
    disk: &DiskRequest,
) {
    let address = |address: &Address| match address {
        Address::Unix(path) => {
            let whole = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            whole.display().to_string()
        }
        other => other.to_string(),
    };
    let addresses: Vec<String> = request.addresses.iter().map(address).collect();
    words.say("--nbd", Some(addresses.join(" ")));
    words.say("--export-name", Some(disk.name.clone()).filter(|name| !name.is_empty()));
    words.say("--bitmap", Some(disk.bitmaps.join(" ")));
}

/// A disk with its name and its bitmaps.
///
/// Errors: a bitmap that is not there, cannot be used, or records.
pub(crate) fn named(request: &DiskRequest, opened: Arc<Disk>) -> Result<NamedDisk, Failure> {
    let mut bitmaps = Vec::new();
    if !request.bitmaps.is_empty() && opened.window().is_some() {
        let text = "a bitmap is one of a whole image: --bitmap does not go with a part of it";
        return Err(Failure::new(Exit::Usage, text));
    }
    if !request.bitmaps.is_empty() {
        let mut runtime = inspect::runtime()?;
        let ring = runtime.ring().clone();
        for name in &request.bitmaps {
            let bitmap = bitmap(&ring, &opened, name, request.shows_recording);
            bitmaps.push(runtime.block_on(bitmap)?);
        }
    }
    let (name, description) = (request.name.clone(), request.description.clone());
    let allocation_depth = request.allocation_depth;
    Ok(NamedDisk { description, bitmaps, allocation_depth, ..NamedDisk::new(name, opened) })
}

/// The name of an export for people: ` as 'NAME'`, or nothing for the default one.
pub(crate) fn as_name(name: &str) -> String {
    match name {
        "" => String::new(),
        name => format!(" as '{}'", terminal::visible(name)),
    }
}

/// A bitmap of the topmost image that has it.
///
/// * `as_at_start`: one that records is shown as it is now.
async fn bitmap(
    ring: &Ring,
    disk: &Disk,
    name: &str,
    as_at_start: bool,
) -> Result<DirtyBitmap, Failure> {
    for layer in disk.layers() {
        let Some(image) = layer.qcow2() else { continue };
        let Some(bitmap) = image.info().bitmaps.iter().find(|bitmap| bitmap.name == name) else {
            continue;
        };
        if bitmap.in_use {
            let text = format!("Bitmap '{name}' is inconsistent and cannot be used");
            let cause = Cause::BitmapUnusable { name: name.to_owned() };
            return Err(Failure::new(Exit::Image, text).because(cause));
        }
        if bitmap.auto && layer.is_writable() && !as_at_start {
            let text = format!("the bitmap '{name}' records, so it changes while it is read");
            let hint = "serve the disk with --read-only, or end the recording first: `ringdisk \
                        bitmap --disable`";
            return Err(Failure::new(Exit::Usage, text).hint(hint));
        }
        let contents = image.bitmap_contents(ring, name).await?;
        let ranges = contents.ranges().map(|range| range.start.0..range.end.0);
        return Ok(DirtyBitmap { name: name.to_owned(), ranges: ranges.collect() });
    }
    let image = disk.layers().first().map(|layer| layer.name().display().to_string());
    let image = terminal::visible(&image.unwrap_or_default()).to_string();
    let word = terminal::shell_word(&image);
    Err(Failure::new(Exit::Image, format!("Bitmap '{name}' is not found in '{image}'"))
        .because(Cause::BitmapNotFound { name: name.to_owned() })
        .hint(format!("`ringdisk info {word}` names those that are there")))
}
