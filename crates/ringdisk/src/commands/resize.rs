//! `ringdisk resize`: another size for the disk inside an image.

use ringdisk_disk::{Disk, ImageOptions, ResizeOptions, Source};
use ringdisk_qcow2::Preallocation;

use crate::cli::{PreallocationWord, ResizeArgs};
use crate::commands::look;
use crate::report::{Exit, Failure};
use crate::terminal;

/// Changes the size.
///
/// Errors: those of opening the image; a size that it cannot have; smaller without `--shrink`.
pub(crate) fn run(args: &ResizeArgs) -> Result<(), Failure> {
    let mut runtime = look::runtime()?;
    let ring = runtime.ring().clone();
    let options = ImageOptions {
        format: args.format,
        allow_paths: args.pool.allow_path.clone(),
        ..ImageOptions::default()
    };
    let disk = runtime.block_on(Disk::open(&ring, Source::Path(args.file.clone()), &options))?;
    let old = disk.size();
    let size = args.size.apply(old).map_err(|text| Failure::new(Exit::Usage, text))?;
    if size < old && !args.shrink {
        return Err(Failure::new(
            Exit::Usage,
            format!("the disk has {old} bytes; what is behind {size} would be lost"),
        )
        .hint("add --shrink if that is meant"));
    }
    let options = ResizeOptions { shrink: args.shrink, preallocation: word(args.preallocation) };
    let resized = runtime.block_on(disk.resize_with(&ring, size, options)).map_err(Failure::from);
    look::close(&mut runtime, &disk, &args.file, resized)?;
    if !args.quiet {
        terminal::say("Image resized.");
    }
    Ok(())
}

fn word(word: PreallocationWord) -> Preallocation {
    match word {
        PreallocationWord::Off => Preallocation::Off,
        PreallocationWord::Metadata => Preallocation::Metadata,
        PreallocationWord::Falloc => Preallocation::Falloc,
        PreallocationWord::Full => Preallocation::Full,
    }
}
