//! A backup: a checkpoint of disks, its copy, its end.
//!
//! Promises: a backup has its name only when it is whole and on stable storage. When one fails or
//! is stopped, its file goes and the bitmaps are merged back, also where this process is killed,
//! since the checkpoint is leased. The disks are never written, but for the bitmaps of their
//! images.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_console::operation::{Operation, Showing};
use ringdisk_daemon::control::client::{ANSWER, Client};
use ringdisk_daemon::control::protocol::checkpoint::Bitmaps;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_daemon::sockets::Address;
use ringdisk_daemon::terminal;
use ringdisk_disk::operations::{self, ConvertOptions, ConvertReport};
use ringdisk_disk::{Bytes, Disk, Format, ImageOptions, Progress, Source as DiskSource};
use ringdisk_images::inspect;
use ringdisk_images::new_image::{Described, NewImage};
use ringdisk_ring::Runtime;

use crate::checkpoint::{self, Target, Wanted};
use crate::destination::{self, Place};
use crate::directory;
use crate::request::Request;
use crate::source::{self, Offline, Reader};

/// A disk that is to be backed up.
enum Subject {
    /// Another process serves it.
    Served(Client),
    /// Nobody does.
    Image(Box<Offline>),
}

/// What became of one disk.
#[derive(Debug)]
pub struct Made {
    place: Place,
    /// What was copied.
    pub report: ConvertReport,
}

impl Made {
    /// The name of the backup.
    pub fn file(&self) -> &Path {
        &self.place.file
    }

    /// The backup below it.
    pub fn backing(&self) -> Option<&Path> {
        self.place.backing.as_deref()
    }

    /// Whether it holds changes only.
    pub fn is_part(&self) -> bool {
        self.place.is_part()
    }
}

/// Backs disks up.
///
/// Errors: those of the servers and the images, of reading and writing; stopped by a signal.
pub fn back_up(request: &Request, showing: Showing) -> Result<Vec<Made>, Failure> {
    let paths: Vec<&Path> =
        std::iter::once(&request.target).chain(&request.with).map(PathBuf::as_path).collect();
    let mut runtime = inspect::runtime()?;
    let fresh = NewFiles::default();
    let operation = Operation::start("back up", showing)?;
    let work = Work { request, fresh: &fresh, progress: operation.progress() };
    let result = work.all(&mut runtime, &paths);
    let made = operation.end(result, "no backup was made, and the bitmaps are as they were");
    made.inspect_err(|_| fresh.undo())
}

/// There is no address of TCP: readers are this process.
fn no_listener(_: &Address) -> Result<Vec<OwnedFd>, Failure> {
    Ok(Vec::new())
}

/// One run.
struct Work<'a> {
    request: &'a Request,
    fresh: &'a NewFiles,
    progress: &'a Arc<Progress>,
}

impl Work<'_> {
    fn all(&self, runtime: &mut Runtime, paths: &[&Path]) -> Result<Vec<Made>, Failure> {
        let format = self.request.format.unwrap_or(Format::Qcow2);
        if format == Format::Raw && self.request.compress {
            return Err(Failure::new(Exit::Usage, "a raw image cannot be compressed")
                .hint("leave out --format or --compress"));
        }
        let names = checkpoint::names(paths);
        let mut subjects = Vec::with_capacity(paths.len());
        let mut places = Vec::with_capacity(paths.len());
        let stamp = directory::now();
        for (path, name) in paths.iter().zip(&names) {
            let (subject, image) = self.find(runtime, path)?;
            places.push(Place::choose(self.request, name, paths.len(), &image, &stamp)?);
            subjects.push(subject);
        }
        let mut readers = self.begin(runtime, paths, subjects, &places)?;
        let copied = self.copy_all(runtime, &mut readers, places);
        let bitmaps = if copied.is_ok() { Bitmaps::Drop } else { Bitmaps::Merge };
        let copied = copied.map_err(|failure| readers.explain(failure));
        match (readers.end(runtime, bitmaps), copied) {
            (Ok(()), copied) => copied,
            (Err(failure), Ok(made)) => {
                terminal::warn(format_args!(
                    "the backup is whole, but its bitmaps are as they were during it: {}",
                    failure.message()
                ));
                Ok(made)
            }
            (Err(second), Err(first)) => {
                terminal::warn(format_args!("the bitmaps were not merged: {}", second.message()));
                Err(first)
            }
        }
    }

    /// Finds who serves a disk, and what bitmaps its image has.
    ///
    /// Errors: nobody serves it, and it is no image.
    fn find(
        &self,
        runtime: &mut Runtime,
        path: &Path,
    ) -> Result<(Subject, checkpoint::Image), Failure> {
        match Client::connect(path, ANSWER) {
            Ok(mut client) => {
                let image = checkpoint::look(&mut client, ANSWER)?;
                Ok((Subject::Served(client), image))
            }
            Err(failure) if failure.exit == Exit::Mountpoint && source::may_be_image(path) => {
                let offline = Offline::look(runtime, path, &self.request.pool)?;
                let image = offline.image.clone();
                Ok((Subject::Image(Box::new(offline)), image))
            }
            Err(failure) => Err(failure),
        }
    }

    /// Keeps the state of all disks.
    fn begin(
        &self,
        runtime: &mut Runtime,
        paths: &[&Path],
        subjects: Vec<Subject>,
        places: &[Place],
    ) -> Result<source::Readers, Failure> {
        let mut readers = source::Readers::default();
        let mut targets = Vec::new();
        let mut numbers = Vec::new();
        for (number, (subject, place)) in subjects.into_iter().zip(places).enumerate() {
            let (bitmap, since) = (place.bitmap.clone(), place.since.clone());
            match subject {
                Subject::Served(client) => {
                    numbers.push(number);
                    targets.push(Target { client, path: paths[number].to_owned(), bitmap, since });
                }
                Subject::Image(offline) => {
                    let fleece_dir = &self.request.fleece.dir;
                    let begun = offline.begin(runtime, bitmap, since, fleece_dir);
                    match begun {
                        Ok(reader) => readers.push(number, reader),
                        Err(failure) => {
                            let _ = readers.end(runtime, Bitmaps::Merge);
                            return Err(failure);
                        }
                    }
                }
            }
        }
        if targets.is_empty() {
            return Ok(readers);
        }
        let name = format!("backup-{}", std::process::id());
        let wanted = Wanted {
            name: &name,
            address: None,
            listen: no_listener,
            fleece: &self.request.fleece,
            is_leased: true,
        };
        match checkpoint::begin(targets, &wanted, self.progress) {
            Ok(checkpoint) => {
                readers.serve(numbers, checkpoint);
                Ok(readers)
            }
            Err(failure) => {
                let _ = readers.end(runtime, Bitmaps::Merge);
                Err(failure)
            }
        }
    }

    /// Copies all disks, one after the other; each gets its name when all are whole.
    fn copy_all(
        &self,
        runtime: &mut Runtime,
        readers: &mut source::Readers,
        places: Vec<Place>,
    ) -> Result<Vec<Made>, Failure> {
        let mut made = Vec::with_capacity(places.len());
        for (number, place) in places.into_iter().enumerate() {
            let reader = readers.open(runtime, number)?;
            let report = self.copy(runtime, &reader, &place)?;
            made.push(Made { place, report });
        }
        for Made { place, .. } in &made {
            place.finish()?;
        }
        self.fresh.keep();
        Ok(made)
    }

    /// Copies one disk.
    fn copy(
        &self,
        runtime: &mut Runtime,
        reader: &Reader,
        place: &Place,
    ) -> Result<ConvertReport, Failure> {
        let ring = runtime.ring().clone();
        let Described::Image(mut image) = NewImage::parse(place.format, &[])? else {
            return Err(Failure::new(Exit::General, "the options of the backup make no sense"));
        };
        let mut allow_paths = self.request.pool.allow_path.clone();
        if let Some(backing) = &place.backing {
            image.set("backing_file", &place.backing_name(backing)?)?;
            image.set("backing_fmt", destination::format_of(runtime, backing)?.name())?;
            allow_paths.push(backing.clone());
        }
        let size = reader.disk.size();
        runtime.block_on(image.make(&ring, &place.part, size.0, self.fresh))?;
        let options = ImageOptions {
            format: Some(place.format),
            allow_paths,
            allow_hosts: self.request.pool.allow_host.clone(),
            reconnect: self.request.pool.reconnect,
            ..ImageOptions::default()
        };
        let opened = Disk::open(&ring, DiskSource::Path(place.part.clone()), &options);
        let target = runtime.block_on(opened)?;
        let only = place.is_part().then(|| reader.dirty.clone().unwrap_or_default());
        let options = ConvertOptions {
            compressed: self.request.compress,
            target_is_zero: only.is_none(),
            only,
            ..ConvertOptions::default()
        };
        self.progress.set_done(Bytes::ZERO);
        let copying = operations::convert(
            &ring,
            std::slice::from_ref(&reader.disk),
            &target,
            &options,
            self.progress,
        );
        let copied = runtime.block_on(copying).map_err(Failure::from);
        inspect::close(runtime, &target, &place.part, copied)
    }
}
