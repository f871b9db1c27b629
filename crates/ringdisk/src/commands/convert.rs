//! `ringdisk convert`: a copy of an image, in another format or shape.
//!
//! Promises: nothing of a new target stays when the copy fails or is stopped; a target that was
//! there before is only then called incomplete when something was written to it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::new_file::{NewFiles, check_new_name};
use ringdisk_daemon::size::human_size_exact;
use ringdisk_daemon::terminal::{self, visible};
use ringdisk_disk::jobs::{self, ConvertOptions, ConvertReport, SPARSE_BYTES_DEFAULT};
use ringdisk_disk::name::is_export;
use ringdisk_disk::{AllowedHost, Disk, Format, ImageOptions, Layer};
use ringdisk_qcow2::{Bitmap, Qcow2};
use ringdisk_ring::Runtime;
use ringdisk_storage::Kind;

use crate::cli::{ConvertArgs, is_named_qcow2};
use crate::commands::create::{is_same, take_backing};
use crate::commands::look;
use crate::commands::named::{Named, of_pool};
use crate::commands::operation::Operation;
use crate::commands::own_image::OwnImage;
use crate::new_image::{Described, NewImage};

/// Largest number of zero bytes that `-S` may ask for, bytes; qemu-img's.
const SPARSE_BYTES_MAX: u64 = 16 << 20;

fn usage(text: impl Into<String>) -> Failure {
    Failure::new(Exit::Usage, text)
}

/// Copies.
///
/// Errors: options that make no sense, those of opening source and target, of reading and writing;
/// stopped by a signal.
pub(crate) fn run(args: &ConvertArgs) -> Result<(), Failure> {
    let format = target_format(args)?;
    let mut image = match NewImage::parse(format, &args.options)? {
        Described::Help(text) => {
            terminal::say(text);
            return Ok(());
        }
        Described::Image(image) => image,
    };
    let Some((target, sources)) = args.files.split_last().filter(|(_, from)| !from.is_empty())
    else {
        return Err(usage("give the source, and last the target"));
    };
    let options = check(args, &mut image)?;
    let target = &target_of(args, target)?;
    let mut runtime = look::runtime()?;
    let from = sources
        .iter()
        .map(|source| open_source(&mut runtime, args, source))
        .collect::<Result<Vec<_>, Failure>>()?;
    // There is one at least.
    let bitmaps = from.first().map(|first| bitmaps_to_copy(args, first, format));
    let bitmaps = bitmaps.transpose()?.unwrap_or_default();
    let fresh = NewFiles::default();
    let job = Operation::start("convert", args.show)?;
    let work = Work { args, image: &image, format, target, options: &options };
    let result = work.copy(&mut runtime, &from, &fresh, &job, &bitmaps);
    let sound = match args.no_create {
        true => format!("'{}' is incomplete", target.path().display()),
        false => String::from("the target was not made"),
    };
    let report = job.end(result, &sound).inspect_err(|_| fresh.undo())?;
    fresh.keep();
    tell_unreadable(&report, sources);
    Ok(())
}

/// The name of the target.
///
/// Errors: a name that is wrong.
fn target_of(args: &ConvertArgs, target: &Path) -> Result<Named, Failure> {
    match args.no_create || args.target_image_opts {
        true => Named::read(args.target_image_opts, target),
        false => Named::of_new(target),
    }
}

/// The format of the target.
///
/// Errors: a name that is wrong.
fn target_format(args: &ConvertArgs) -> Result<Format, Failure> {
    let Some(target) = args.files.last() else { return Ok(Format::Raw) };
    let target = target_of(args, target)?;
    let named = target.options(ImageOptions::default())?.format;
    Ok(args.target_format.or(named).unwrap_or(match is_named_qcow2(target.path()) {
        true => Format::Qcow2,
        false => Format::Raw,
    }))
}

/// Refuses what makes no sense for several sources.
fn check_several(args: &ConvertArgs) -> Result<(), Failure> {
    if args.files.len() <= 2 {
        return Ok(());
    }
    if args.backing.is_some() || args.options.iter().any(|text| text.contains("backing_file=")) {
        return Err(usage(
            "Having a backing file for the target makes no sense when concatenating multiple \
             input images",
        ));
    }
    if args.snapshot.is_some() {
        return Err(usage("No support for concatenating multiple snapshot"));
    }
    if args.bitmaps {
        return Err(usage("Copying bitmaps only possible with single source"));
    }
    Ok(())
}

/// Refuses what makes no sense before anything is opened.
fn check(args: &ConvertArgs, image: &mut NewImage) -> Result<ConvertOptions, Failure> {
    check_several(args)?;
    if args.target_image_opts && !args.no_create {
        return Err(usage("--target-image-opts requires use of -n flag").hint("add --no-create"));
    }
    let sparse_bytes = args.sparse_size.unwrap_or(SPARSE_BYTES_DEFAULT);
    if !sparse_bytes.is_multiple_of(jobs::SECTOR_BYTES) || sparse_bytes > SPARSE_BYTES_MAX {
        return Err(usage("--sparse-size is a multiple of 512 up to 16M, or 0"));
    }
    if args.no_create && !args.options.is_empty() {
        return Err(usage("--options have no effect on a target that is there already"));
    }
    if args.compress && image.format != Format::Qcow2 {
        return Err(usage("a raw image cannot be compressed").hint("give --target-format qcow2"));
    }
    if args.bitmaps && image.format != Format::Qcow2 {
        return Err(usage("a raw image has no bitmaps").hint("give --target-format qcow2"));
    }
    take_backing(image, args.backing.as_deref(), args.backing_format)?;
    if image.size(None)?.is_some() {
        return Err(usage("the size of the target is that of the source"));
    }
    // Values that no image can have are found now too.
    image.qcow2(0).map(|_| ())?;
    Ok(ConvertOptions {
        tasks: args.parallel.map_or(jobs::TASKS_DEFAULT, |tasks| tasks as usize),
        out_of_order: args.oob_writes,
        sparse_bytes,
        compressed: args.compress,
        target_has_backing: image.backing().is_some(),
        salvage: args.salvage,
        copy_range: args.copy_range_offloading,
        ..ConvertOptions::default()
    })
}

fn open_source(
    runtime: &mut Runtime,
    args: &ConvertArgs,
    source: &Path,
) -> Result<Arc<Disk>, Failure> {
    let options = ImageOptions {
        format: args.format,
        read_only: true,
        cache: args.source_cache,
        force_share: args.force_share,
        internal_snapshot: args.snapshot.clone(),
        ..of_pool(&args.pool)
    };
    Named::of(args.name, source)?.open(runtime, options)
}

/// Bytes of all disks; each but the last ends at a sector.
fn total(disks: &[Arc<Disk>]) -> u64 {
    let last = disks.len().saturating_sub(1);
    let sizes = disks.iter().enumerate().map(|(number, disk)| match number == last {
        true => disk.size(),
        false => disk.size().next_multiple_of(jobs::SECTOR_BYTES),
    });
    sizes.fold(0, u64::saturating_add)
}

/// The qcow2 on top of a disk.
fn top(layers: &[Arc<Layer>]) -> Option<&Qcow2> {
    layers.first().and_then(|layer| layer.qcow2()).map(|image| &**image)
}

/// The bitmaps of the source that are copied.
///
/// Errors: one cannot be trusted, and that was not to be passed over.
fn bitmaps_to_copy(
    args: &ConvertArgs,
    source: &Disk,
    format: Format,
) -> Result<Vec<Bitmap>, Failure> {
    let layers = source.layers();
    let (true, Format::Qcow2, Some(image)) = (args.bitmaps, format, top(&layers)) else {
        return Ok(Vec::new());
    };
    let mut all = image.info().bitmaps.clone();
    if let Some(broken) = all.iter().find(|bitmap| bitmap.in_use)
        && !args.skip_broken_bitmaps
    {
        return Err(Failure::new(
            Exit::Image,
            format!("the bitmap '{}' is inconsistent and cannot be copied", visible(&broken.name)),
        )
        .hint("--skip-broken-bitmaps leaves it out"));
    }
    for broken in all.extract_if(.., |bitmap| bitmap.in_use) {
        let name = visible(&broken.name);
        terminal::warn(format_args!("the inconsistent bitmap '{name}' is left out"));
    }
    Ok(all)
}

/// One copy.
struct Work<'a> {
    args: &'a ConvertArgs,
    image: &'a NewImage,
    format: Format,
    target: &'a Named,
    options: &'a ConvertOptions,
}

impl Work<'_> {
    fn copy(
        &self,
        runtime: &mut Runtime,
        from: &[Arc<Disk>],
        fresh: &NewFiles,
        job: &Operation,
        bitmaps: &[Bitmap],
    ) -> Result<ConvertReport, Failure> {
        let ring = runtime.ring().clone();
        let target = self.target.path();
        let size = total(from);
        // A raw export is made already, and a server may serve one client only.
        let is_made = is_export(target) && self.format == Format::Raw;
        if !self.args.no_create && !is_made {
            if !is_export(target) {
                check_new_name(target)?;
            }
            let names: Vec<Arc<Layer>> = from.iter().flat_map(|from| from.layers()).collect();
            if names.iter().any(|layer| is_same(layer.name(), target)) {
                return Err(usage(format!("'{}' is the source, or below it", target.display())));
            }
            runtime.block_on(self.image.make(&ring, target, size, fresh))?;
        }
        let to = self.open_target(runtime)?;
        if is_made && to.size() < size {
            return Err(Failure::new(
                Exit::Image,
                format!(
                    "the export '{}' has {} and cannot hold a disk of {}",
                    target.display(),
                    human_size_exact(to.size()),
                    human_size_exact(size)
                ),
            ));
        }
        let target_is_zero = match self.args.no_create {
            true => self.args.target_is_zero,
            // A raw device keeps what it held.
            false => {
                let layers = to.layers();
                let file = layers.first().and_then(|layer| layer.file());
                let device = file.is_some_and(|file| file.kind() == Kind::BlockDevice);
                !(device && self.format == Format::Raw) && self.image.backing().is_none()
            }
        };
        let options = ConvertOptions { target_is_zero, ..self.options.clone() };
        let copied = runtime
            .block_on(jobs::convert(&ring, from, &to, &options, job.progress()))
            .map_err(Failure::from);
        let report = look::close(runtime, &to, target, copied)?;
        drop(to);
        if let (Some(from), false) = (from.first(), bitmaps.is_empty()) {
            self.copy_bitmaps(runtime, from, bitmaps)?;
        }
        Ok(report)
    }

    fn open_target(&self, runtime: &mut Runtime) -> Result<Arc<Disk>, Failure> {
        let mut allow_paths = self.args.pool.allow_path.clone();
        let mut allow_hosts = self.args.pool.allow_host.clone();
        // The user has just named the backing file, so it may be where it is.
        if let Some(name) = self.image.backing() {
            let parsed = ringdisk_disk::name::FileName::parse(name.as_bytes())?;
            let path = crate::commands::create::backing_path(self.target.path(), &parsed);
            match parsed.nbd {
                Some(address) => allow_hosts.push(AllowedHost::Server(address.server)),
                None => allow_paths.push(path),
            }
        }
        let options = ImageOptions {
            format: Some(self.format),
            cache: self.args.target_cache,
            allow_paths,
            allow_hosts,
            ..ImageOptions::default()
        };
        self.target.open(runtime, options)
    }

    /// Gives the target the bitmaps of the source, with what they have recorded.
    fn copy_bitmaps(
        &self,
        runtime: &mut Runtime,
        from: &Disk,
        bitmaps: &[Bitmap],
    ) -> Result<(), Failure> {
        let layers = from.layers();
        let Some(source) = top(&layers) else { return Ok(()) };
        let offline = OwnImage { format: Some(Format::Qcow2), writable: true, force_share: false };
        let mut target = offline.open(runtime, self.target, &self.args.pool, "bitmaps")?;
        let ring = runtime.ring().clone();
        let copied = runtime.block_on(async {
            for bitmap in bitmaps {
                let contents = source.bitmap_contents(&ring, &bitmap.name).await?;
                let granularity = Some(bitmap.granularity_bytes);
                if bitmap.auto {
                    target.bitmap_add(&ring, &bitmap.name, granularity).await?;
                } else {
                    target.bitmap_add_disabled(&ring, &bitmap.name, granularity).await?;
                }
                target.bitmap_merge(&ring, &bitmap.name, &contents).await?;
            }
            Ok::<(), Failure>(())
        });
        let closed = runtime.block_on(target.close(&ring)).map_err(|errno| {
            let doing = format!("cannot write '{}' to the end", self.target.path().display());
            Failure::system(doing, &errno.into(), Exit::Storage)
        });
        copied.and(closed)
    }
}

/// Says what could not be read.
fn tell_unreadable(report: &ConvertReport, sources: &[PathBuf]) {
    if report.unreadable_bytes == 0 {
        return;
    }
    for range in &report.unreadable {
        terminal::warn(format_args!(
            "{} bytes at {} could not be read; there are zeroes now",
            range.end - range.start,
            range.start
        ));
    }
    terminal::warn(format_args!(
        "{} bytes of '{}' could not be read",
        report.unreadable_bytes,
        sources.iter().map(|source| source.to_string_lossy()).collect::<Vec<_>>().join("', '")
    ));
}
