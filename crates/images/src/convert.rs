//! A copy of an image, in another format or shape.
//!
//! Promises: nothing of a new target stays when the copy fails or is stopped; a target that was
//! there before is only then called incomplete when something was written to it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_console::operation::{Operation, Showing};
use ringdisk_daemon::failure::{Cause, Exit, Failure};
use ringdisk_daemon::new_file::{NewFiles, check_new_name};
use ringdisk_daemon::size::human_size_exact;
use ringdisk_daemon::terminal::{self, visible};
use ringdisk_disk::name::is_export;
use ringdisk_disk::operations::{self, ConvertOptions, ConvertReport, SPARSE_BYTES_DEFAULT};
use ringdisk_disk::{AllowedHost, Bytes, Cache, Disk, Format, ImageOptions, Layer, SnapshotChoice};
use ringdisk_qcow2::{Bitmap, Qcow2};
use ringdisk_ring::Runtime;
use ringdisk_storage::Kind;

use crate::create::{backing_path, is_same, take_backing};
use crate::inspect;
use crate::named::{Named, Pool, of_pool};
use crate::new_image::{Described, NewImage, is_named_qcow2};
use crate::own_image::{Inside, OwnImage};

/// Largest number of zero bytes that `-S` may ask for, bytes; qemu-img's.
const SPARSE_BYTES_MAX: u64 = 16 << 20;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The sources, and last the target.
    pub files: Vec<PathBuf>,
    /// The names of the sources are lists of options.
    pub image_opts: bool,
    /// Of the sources; `None`: they are probed.
    pub format: Option<Format>,
    /// An internal snapshot in place of the disk.
    pub snapshot: Option<SnapshotChoice>,
    /// How the page cache is used for the sources.
    pub source_cache: Cache,
    /// Bitmaps are copied, too.
    pub bitmaps: bool,
    /// Those that cannot be trusted are left out.
    pub skip_broken_bitmaps: bool,
    /// What cannot be read becomes zeroes.
    pub salvage: bool,
    /// `None`: by the name of the target.
    pub target_format: Option<Format>,
    /// The name of the target is a list of options.
    pub target_image_opts: bool,
    /// Options of the new image, as `NAME=VALUE,…`.
    pub options: Vec<String>,
    /// How the page cache is used for the target.
    pub target_cache: Cache,
    /// The backing file of the target.
    pub backing: Option<String>,
    /// Its format.
    pub backing_format: Option<Format>,
    /// Zeroes of so many bytes become a hole; `None`: by default.
    pub sparse_size: Option<u64>,
    /// The target is there already.
    pub no_create: bool,
    /// It reads as zeroes.
    pub target_is_zero: bool,
    /// The target is compressed.
    pub compress: bool,
    /// Other programs may write the sources meanwhile.
    pub force_share: bool,
    /// Copies in flight; `None`: by default.
    pub parallel: Option<u32>,
    /// They may end in any order.
    pub oob_writes: bool,
    /// The kernel copies where it can.
    pub copy_range_offloading: bool,
    /// Where the names inside images may lead.
    pub pool: Pool,
}

fn usage(text: impl Into<String>) -> Failure {
    Failure::new(Exit::Usage, text)
}

/// Copies.
///
/// Errors: options that make no sense, those of opening source and target, of reading and writing;
/// stopped by a signal.
pub fn run(request: &Request, showing: Showing) -> Result<(), Failure> {
    let format = target_format(request)?;
    let mut image = match NewImage::parse(format, &request.options)? {
        Described::Help(text) => {
            terminal::say(text);
            return Ok(());
        }
        Described::Image(image) => image,
    };
    let Some((target, sources)) = request.files.split_last().filter(|(_, from)| !from.is_empty())
    else {
        return Err(usage("give the source, and last the target"));
    };
    let options = check(request, &mut image)?;
    let target = &target_of(request, target)?;
    let mut runtime = inspect::runtime()?;
    let from = sources
        .iter()
        .map(|source| open_source(&mut runtime, request, source))
        .collect::<Result<Vec<_>, Failure>>()?;
    // There is one at least.
    let bitmaps = from.first().map(|first| bitmaps_to_copy(request, first, format));
    let bitmaps = bitmaps.transpose()?.unwrap_or_default();
    let fresh = NewFiles::default();
    let operation = Operation::start("convert", showing)?;
    let work = Work { request, image: &image, format, target, options: &options };
    let result = work.copy(&mut runtime, &from, &fresh, &operation, &bitmaps);
    let sound = match request.no_create {
        true => format!("'{}' is incomplete", target.path().display()),
        false => String::from("the target was not made"),
    };
    let report = operation.end(result, &sound).inspect_err(|_| fresh.undo())?;
    fresh.keep();
    tell_unreadable(&report, sources);
    Ok(())
}

/// The name of the target.
///
/// Errors: a name that is wrong.
fn target_of(request: &Request, target: &Path) -> Result<Named, Failure> {
    match request.no_create || request.target_image_opts {
        true => Named::read(request.target_image_opts, target),
        false => Named::of_new(target),
    }
}

/// The format of the target.
///
/// Errors: a name that is wrong.
fn target_format(request: &Request) -> Result<Format, Failure> {
    let Some(target) = request.files.last() else { return Ok(Format::Raw) };
    let target = target_of(request, target)?;
    let named = target.options(ImageOptions::default())?.format;
    Ok(request.target_format.or(named).unwrap_or(match is_named_qcow2(target.path()) {
        true => Format::Qcow2,
        false => Format::Raw,
    }))
}

/// Refuses what makes no sense for several sources.
fn check_several(request: &Request) -> Result<(), Failure> {
    if request.files.len() <= 2 {
        return Ok(());
    }
    if request.backing.is_some()
        || request.options.iter().any(|text| text.contains("backing_file="))
    {
        return Err(usage(
            "Having a backing file for the target makes no sense when concatenating multiple \
             input images",
        ));
    }
    if request.snapshot.is_some() {
        return Err(usage("No support for concatenating multiple snapshot"));
    }
    if request.bitmaps {
        return Err(usage("Copying bitmaps only possible with single source"));
    }
    Ok(())
}

/// Refuses what makes no sense before anything is opened.
fn check(request: &Request, image: &mut NewImage) -> Result<ConvertOptions, Failure> {
    check_several(request)?;
    if request.target_image_opts && !request.no_create {
        return Err(usage("--target-image-opts requires use of -n flag").hint("add --no-create"));
    }
    let sparse_bytes = request.sparse_size.unwrap_or(SPARSE_BYTES_DEFAULT.0);
    if !sparse_bytes.is_multiple_of(operations::SECTOR_BYTES.0) || sparse_bytes > SPARSE_BYTES_MAX {
        return Err(usage("--sparse-size is a multiple of 512 up to 16M, or 0"));
    }
    if request.no_create && !request.options.is_empty() {
        return Err(usage("--options have no effect on a target that is there already"));
    }
    if request.compress && image.format != Format::Qcow2 {
        return Err(usage("a raw image cannot be compressed").hint("give --target-format qcow2"));
    }
    if request.bitmaps && image.format != Format::Qcow2 {
        return Err(usage("a raw image has no bitmaps")
            .because(Cause::RawWithoutBitmaps)
            .hint("give --target-format qcow2"));
    }
    take_backing(image, request.backing.as_deref(), request.backing_format)?;
    if image.size(None)?.is_some() {
        return Err(usage("the size of the target is that of the source"));
    }
    // Values that no image can have are found now too.
    image.qcow2(0).map(|_| ())?;
    Ok(ConvertOptions {
        tasks: request.parallel.map_or(operations::TASKS_DEFAULT, |tasks| tasks as usize),
        out_of_order: request.oob_writes,
        sparse_bytes: Bytes(sparse_bytes),
        compressed: request.compress,
        target_has_backing: image.backing().is_some(),
        salvage: request.salvage,
        copy_range: request.copy_range_offloading,
        ..ConvertOptions::default()
    })
}

fn open_source(
    runtime: &mut Runtime,
    request: &Request,
    source: &Path,
) -> Result<Arc<Disk>, Failure> {
    let options = ImageOptions {
        format: request.format,
        read_only: true,
        cache: request.source_cache,
        force_share: request.force_share,
        internal_snapshot: request.snapshot.clone(),
        ..of_pool(&request.pool)
    };
    Named::read(request.image_opts, source)?.open(runtime, options)
}

/// Bytes of all disks; each but the last ends at a sector.
fn total(disks: &[Arc<Disk>]) -> u64 {
    let last = disks.len().saturating_sub(1);
    let sizes = disks.iter().enumerate().map(|(number, disk)| match number == last {
        true => disk.size(),
        false => disk.size().next_multiple_of(operations::SECTOR_BYTES),
    });
    sizes.fold(Bytes::ZERO, Bytes::saturating_add).0
}

/// The qcow2 on top of a disk.
fn top(layers: &[Arc<Layer>]) -> Option<&Qcow2> {
    layers.first().and_then(|layer| layer.qcow2()).map(|image| &**image)
}

/// The bitmaps of the source that are copied.
///
/// Errors: one cannot be trusted, and that was not to be passed over.
fn bitmaps_to_copy(
    request: &Request,
    source: &Disk,
    format: Format,
) -> Result<Vec<Bitmap>, Failure> {
    let layers = source.layers();
    let (true, Format::Qcow2, Some(image)) = (request.bitmaps, format, top(&layers)) else {
        return Ok(Vec::new());
    };
    let mut all = image.info().bitmaps.clone();
    if let Some(broken) = all.iter().find(|bitmap| bitmap.in_use)
        && !request.skip_broken_bitmaps
    {
        let name = visible(&broken.name).to_string();
        return Err(Failure::new(
            Exit::Image,
            format!("the bitmap '{name}' is inconsistent and cannot be copied"),
        )
        .because(Cause::BitmapNotCopied { name })
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
    request: &'a Request,
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
        operation: &Operation,
        bitmaps: &[Bitmap],
    ) -> Result<ConvertReport, Failure> {
        let ring = runtime.ring().clone();
        let target = self.target.path();
        let size = total(from);
        // A raw export is made already, and a server may serve one client only.
        let is_made = is_export(target) && self.format == Format::Raw;
        if !self.request.no_create && !is_made {
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
        if is_made && to.size() < Bytes(size) {
            return Err(Failure::new(
                Exit::Image,
                format!(
                    "the export '{}' has {} and cannot hold a disk of {}",
                    target.display(),
                    human_size_exact(to.size().0),
                    human_size_exact(size)
                ),
            ));
        }
        let target_is_zero = match self.request.no_create {
            true => self.request.target_is_zero,
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
            .block_on(operations::convert(&ring, from, &to, &options, operation.progress()))
            .map_err(Failure::from);
        let report = inspect::close(runtime, &to, target, copied)?;
        drop(to);
        if let (Some(from), false) = (from.first(), bitmaps.is_empty()) {
            self.copy_bitmaps(runtime, from, bitmaps)?;
        }
        Ok(report)
    }

    fn open_target(&self, runtime: &mut Runtime) -> Result<Arc<Disk>, Failure> {
        let mut allow_paths = self.request.pool.allow_path.clone();
        let mut allow_hosts = self.request.pool.allow_host.clone();
        // The user has just named the backing file, so it may be where it is.
        if let Some(name) = self.image.backing() {
            let parsed = ringdisk_disk::name::FileName::parse(name.as_bytes())?;
            let path = backing_path(self.target.path(), &parsed);
            match parsed.nbd {
                Some(address) => allow_hosts.push(AllowedHost::Server(address.server)),
                None => allow_paths.push(path),
            }
        }
        let options = ImageOptions {
            format: Some(self.format),
            cache: self.request.target_cache,
            allow_paths,
            allow_hosts,
            reconnect: self.request.pool.reconnect,
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
        let mut target = offline.open(runtime, self.target, &self.request.pool, Inside::Bitmaps)?;
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
    if report.unreadable_bytes == Bytes::ZERO {
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
