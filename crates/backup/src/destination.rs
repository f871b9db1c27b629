//! Where a backup goes, and what it is based on.
//!
//! Promises: no file that is there is overwritten; a backup is written under another name, and gets
//! its own when it is whole and on stable storage.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::new_file::check_new_name;
use ringdisk_daemon::terminal;
use ringdisk_disk::Format;
use ringdisk_images::inspect;
use ringdisk_ring::Runtime;
use ringdisk_storage::{OpenOptions, Storage};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::checkpoint::Image;
use crate::directory::{self, Stored};
use crate::request::Request;

/// What a name of a backup that is not whole ends with.
const PART: &str = ".part";

/// Where one backup goes.
#[derive(Debug)]
pub(super) struct Place {
    /// Its name in the end.
    pub(super) file: PathBuf,
    /// Its name until then.
    pub(super) part: PathBuf,
    pub(super) format: Format,
    /// The backup below an incremental one.
    pub(super) backing: Option<PathBuf>,
    /// The bitmap that says what has changed, or that is replaced.
    pub(super) since: Option<String>,
    /// The bitmap that is started.
    pub(super) bitmap: Option<String>,
    /// Only what has changed is copied.
    is_part: bool,
}

impl Place {
    /// Chooses it.
    ///
    /// * `name`: of the disk.
    /// * `count`: of disks that are backed up together.
    /// * `image`: of the disk.
    ///
    /// Errors: a file that is there; words that do not go together.
    pub(super) fn choose(
        request: &Request,
        name: &str,
        count: usize,
        image: &Image,
        stamp: &str,
    ) -> Result<Place, Failure> {
        let usage = |text: String| Failure::new(Exit::Usage, text);
        let ends_with_slash = request.file.as_os_str().as_encoded_bytes().ends_with(b"/");
        let is_directory = request.file.is_dir() || ends_with_slash;
        if !is_directory {
            if count > 1 {
                return Err(usage(format!("{count} disks need a directory"))
                    .hint(format!("make it: mkdir {}", request.file.display())));
            }
            if request.full {
                return Err(usage(String::from("--full is for a directory of backups")));
            }
            return Place::file(request);
        }
        if request.since.is_some() || request.bitmap.is_some() || request.backing.is_some() {
            return Err(usage(String::from(
                "in a directory ringdisk chooses bitmaps and backing files itself",
            ))
            .hint("leave out --since, --bitmap and --backing, or name a file"));
        }
        let directory = if count > 1 { request.file.join(name) } else { request.file.clone() };
        fs::create_dir_all(&directory).map_err(|error| {
            let doing = format!("cannot make the directory '{}'", directory.display());
            Failure::system(doing, &error, Exit::Mountpoint)
        })?;
        Place::inside(request, &directory, image, stamp)
    }

    /// A file that the user names.
    fn file(request: &Request) -> Result<Place, Failure> {
        let file = request.file.clone();
        check_new_name(&file)?;
        if fs::symlink_metadata(&file).is_ok() {
            let text = format!("'{}' is there already, and is not overwritten", file.display());
            return Err(Failure::new(Exit::Usage, text).hint("give another name"));
        }
        let format = request.format.unwrap_or(Format::Qcow2);
        if format == Format::Raw && request.backing.is_some() {
            return Err(Failure::new(Exit::Usage, "a raw image has no backing file")
                .hint("leave out --format"));
        }
        if format == Format::Raw && request.since.is_some() {
            return Err(Failure::new(
                Exit::Usage,
                "a raw image cannot say which part of it is a change",
            )
            .hint("leave out --format"));
        }
        let backing = request.backing.as_deref().map(std::path::absolute).transpose();
        let backing = backing.map_err(|error| {
            Failure::system("the name of the backing file", &error, Exit::Usage)
        })?;
        Ok(Place {
            part: with_end(&file, PART),
            file,
            format,
            backing,
            since: request.since.clone(),
            bitmap: request.bitmap.clone(),
            is_part: request.since.is_some(),
        })
    }

    /// A new backup of a directory.
    fn inside(
        request: &Request,
        directory: &Path,
        image: &Image,
        stamp: &str,
    ) -> Result<Place, Failure> {
        let format = request.format.unwrap_or(Format::Qcow2);
        let all = directory::stored(directory)?;
        let usable =
            |stored: &&Stored| stored.format == Format::Qcow2 && image.has(&stored.bitmap());
        let base = all.iter().rev().find(usable);
        if base.is_none() && !all.is_empty() && !request.full && image.has_bitmaps {
            terminal::note(format_args!(
                "the image has no bitmap of the backups in '{}': a full backup is made",
                directory.display()
            ));
        }
        if !image.has_bitmaps && !request.full {
            terminal::note(
                "the image has no bitmaps (it is no qcow2), so each backup of it is a full one",
            );
        }
        let is_part = base.is_some() && !request.full && format == Format::Qcow2;
        let stored = Stored::new(directory, is_part, stamp, format);
        let bitmap = (image.has_bitmaps && format == Format::Qcow2).then(|| stored.bitmap());
        Ok(Place {
            part: with_end(&stored.file, PART),
            file: stored.file,
            format,
            backing: base.filter(|_| is_part).map(|base| base.file.clone()),
            // Of a full backup too: the new one takes its place.
            since: base.filter(|_| bitmap.is_some()).map(Stored::bitmap),
            bitmap,
            is_part,
        })
    }

    /// Whether it holds changes only.
    pub(super) fn is_part(&self) -> bool {
        self.is_part
    }

    /// How the backup names the one below it: in the same directory by its name alone, so that the
    /// directory can be moved.
    ///
    /// Errors: the name is no text.
    pub(super) fn backing_name(&self, backing: &Path) -> Result<String, Failure> {
        let own = self.file.parent().and_then(|directory| directory.canonicalize().ok());
        let its = backing.parent().and_then(|directory| directory.canonicalize().ok());
        let name = match backing.file_name() {
            Some(name) if own.is_some() && own == its => Path::new(name),
            _ => backing,
        };
        name.to_str().map(str::to_owned).ok_or_else(|| {
            let text = format!("the name '{}' is not UTF-8", backing.display());
            Failure::new(Exit::Usage, text)
        })
    }

    /// Gives the backup its name. What was written is on stable storage already.
    ///
    /// Errors: a file of that name has come meanwhile; those of the system.
    pub(super) fn finish(&self) -> Result<(), Failure> {
        let cannot = |error: &io::Error| {
            let doing = format!("cannot give the backup its name '{}'", self.file.display());
            Failure::system(doing, error, Exit::Mountpoint)
        };
        match renameat_with(CWD, &self.part, CWD, &self.file, RenameFlags::NOREPLACE) {
            // A file system that cannot promise it.
            Err(Errno::INVAL) if fs::symlink_metadata(&self.file).is_err() => {
                fs::rename(&self.part, &self.file).map_err(|error| cannot(&error))?;
            }
            renamed => renamed.map_err(|errno| cannot(&errno.into()))?,
        }
        let directory = match self.file.parent() {
            Some(directory) if !directory.as_os_str().is_empty() => directory,
            _ => Path::new("."),
        };
        // So that the name is there after a crash, too.
        let synced = File::open(directory).and_then(|directory| directory.sync_all());
        if let Err(error) = synced {
            tracing::debug!("the directory of the backup cannot be flushed: {error}");
        }
        Ok(())
    }
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut text = path.as_os_str().to_owned();
    text.push(end);
    text.into()
}

/// The format of an image by its first bytes.
///
/// Errors: it cannot be read.
pub(super) fn format_of(runtime: &mut Runtime, path: &Path) -> Result<Format, Failure> {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let storage = Arc::new(Storage::open(path, &options)?);
    let ring = runtime.ring().clone();
    runtime.block_on(inspect::format_of(&ring, &storage))
}
