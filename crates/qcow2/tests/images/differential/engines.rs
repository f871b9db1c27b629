//! Who works on the images.

use std::path::Path;
use std::sync::Arc;

use imago::file::File as ImagoFile;
use imago::qcow2::Qcow2 as Imago;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate};
use ringdisk_qcow2::{Below, Bytes, GuestOffset, Qcow2, ResizeOptions, compress};
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_storage::{Lock, Storage};
use ringdisk_testkit::images::differs_at;

use crate::common::runtime;
use crate::differential::steps::{Model, Op, Step};
use crate::differential::{Bench, Image};
use crate::live::{buffer, writable};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    Ours,
    Qemu,
    Imago,
}

/// Bytes of the backing file; zeroes past its end.
pub(crate) fn fill(base: &[u8], at: u64, out: &mut [u8]) {
    let start = usize::try_from(at).unwrap_or(usize::MAX).min(base.len());
    let count = out.len().min(base.len() - start);
    out[..count].copy_from_slice(&base[start..start + count]);
    out[count..].fill(0);
}

struct Base<'a>(&'a [u8]);

impl Below for Base<'_> {
    async fn read(&self, _: &Ring, offset: GuestOffset, buf: &IoBuf) -> Result<(), Errno> {
        let mut bytes = vec![0; buf.len()];
        fill(self.0, offset.0, &mut bytes);
        buf.copy_from_slice(0, &bytes);
        Ok(())
    }

    fn has_data(&self, offset: GuestOffset, _: Bytes) -> bool {
        offset < GuestOffset(self.0.len() as u64)
    }
}

impl Engine {
    pub(crate) const ALL: [Engine; 3] = [Engine::Ours, Engine::Qemu, Engine::Imago];

    /// Does a step and says to the model what it did.
    pub(crate) fn work(
        self,
        bench: &Bench,
        image: &Image,
        step: &Step,
        model: &mut Model,
    ) -> Result<(), String> {
        let share_of = |share: u64| (bench.cell.size() / 512 * share / 1000).max(1) * 512;
        let len = model.disk.len() as u64;
        let step = match (step, &model.snapshot) {
            (Step::Snapshot, Some(_)) | (Step::Apply | Step::Delete, None) => return Ok(()),
            // A snapshot of a version 2 image does not say how large its disk is.
            (Step::Resize(_), Some(_)) if bench.cell.version == 2 => return Ok(()),
            // Nor can QEMU say in one that what is added reads as zeroes above a backing file.
            (Step::Resize(share), _)
                if bench.cell.version == 2 && bench.cell.backing && share_of(*share) > len =>
            {
                return Ok(());
            }
            // QEMU zeroes what it adds of the last cluster by its subclusters, which compressed
            // data has none of ("Operation not supported").
            (Step::Resize(share), _)
                if bench.cell.extended
                    && bench.cell.backing
                    && share_of(*share) > len
                    && !len.is_multiple_of(bench.cell.cluster) =>
            {
                return Ok(());
            }
            (step, _) => step,
        };
        let mut ops = Vec::new();
        if let Step::Ops(wanted) = step {
            for op in wanted.iter().filter(|op| self.can(bench, op)) {
                // What one engine cannot do is left to all of them, so that the images stay equal.
                if let Some(op) = model.fit(op) {
                    model.apply(&op);
                    ops.push(op);
                }
            }
        }
        let size = match step {
            Step::Resize(share) => share_of(*share),
            _ => len,
        };
        match step {
            Step::Ops(_) => {}
            Step::Snapshot => model.snapshot = Some(model.disk.clone()),
            Step::Apply => model.restore(),
            Step::Delete => model.snapshot = None,
            Step::Resize(_) => model.resize(size),
        }
        match self {
            Engine::Ours => ours(bench, image, step, &ops, size, model),
            Engine::Imago if matches!(step, Step::Ops(_)) => imago(image, &ops),
            // imago knows no snapshots.
            Engine::Qemu | Engine::Imago => qemu(bench, image, step, &ops, (len, size)),
        }
        .map_err(|error| format!("{step:?}: {error}"))
    }

    /// Whether all engines of this bench can do it.
    fn can(self, bench: &Bench, op: &Op) -> bool {
        let imago = bench.each.len() == 3;
        !(imago && matches!(op, Op::Packed { .. } | Op::Discard { .. }))
    }
}

/// * `sizes`: of the disk in bytes, before and after the step.
fn qemu(
    bench: &Bench,
    image: &Image,
    step: &Step,
    ops: &[Op],
    (before, size): (u64, u64),
) -> Result<(), String> {
    let path = image.name;
    match step {
        Step::Ops(_) => {
            let words = ops.iter().map(|op| match *op {
                Op::Write { at, len, byte } => format!("write -q -P {byte} {at} {len}"),
                Op::Zero { at, len, unmap: false } => format!("write -q -z {at} {len}"),
                Op::Zero { at, len, unmap: true } => format!("write -q -z -u {at} {len}"),
                Op::Discard { at, len } => format!("discard -q {at} {len}"),
                Op::Packed { at, byte } => {
                    format!("write -q -c -P {byte} {at} {}", bench.cell.cluster)
                }
                Op::Flush => "flush".to_owned(),
            });
            let words: Vec<String> = words.collect();
            // A process for each packed cluster: QEMU packs on past the last one even if that was
            // freed meanwhile and its host cluster is used for data.
            for some in words.chunk_by(|_, next| !next.starts_with("write -q -c")) {
                bench.images.qemu_io(path, some);
            }
        }
        Step::Snapshot => drop(bench.images.qemu_img(&["snapshot", "-c", "one", path])),
        Step::Apply => drop(bench.images.qemu_img(&["snapshot", "-a", "one", path])),
        Step::Delete => drop(bench.images.qemu_img(&["snapshot", "-d", "one", path])),
        Step::Resize(_) => {
            let text = size.to_string();
            bench.images.qemu_img(&["resize", "-q", "-f", "qcow2", "--shrink", path, &text]);
            // It shows again what it had cut off within a cluster; our engine shows zeroes.
            let shown = size.min(before.next_multiple_of(bench.cell.cluster));
            if shown > before {
                bench.images.qemu_io(path, &[format!("write -q -z {before} {}", shown - before)]);
            }
        }
    }
    Ok(())
}

fn imago(image: &Image, ops: &[Op]) -> Result<(), String> {
    let text = |error: std::io::Error| format!("imago: {error}");
    let gate = PermissiveImplicitOpenGate::default();
    let opened =
        Imago::<ImagoFile>::builder_path(&image.path).write(true).open(gate).map_err(text)?;
    let disk = FormatAccess::new(opened);
    for op in ops {
        match *op {
            Op::Write { at, len, byte } => {
                let bytes = vec![byte; usize::try_from(len).expect("small")];
                disk.write(&bytes[..], at).map_err(text)?;
            }
            Op::Zero { at, len, .. } => disk.write_zeroes(at, len).map_err(text)?,
            Op::Discard { .. } | Op::Packed { .. } => return Err("imago cannot".into()),
            Op::Flush => disk.flush().map_err(text)?,
        }
    }
    disk.flush().map_err(text)?;
    disk.sync().map_err(text)
}

fn storage(path: &Path) -> Arc<Storage> {
    let options = ringdisk_storage::OpenOptions { lock: Lock::None, ..Default::default() };
    Arc::new(Storage::open(path, &options).expect("a file"))
}

fn ours(
    bench: &Bench,
    image: &Image,
    step: &Step,
    ops: &[Op],
    size: u64,
    model: &Model,
) -> Result<(), String> {
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let base = Base(&bench.base);
    runtime.block_on(async {
        let text = |error: ringdisk_qcow2::Error| error.to_string();
        let file = storage(&image.path);
        let mut disk = Qcow2::open(&ring, file, &writable()).await.map_err(text)?;
        if bench.cell.data_file {
            disk.set_data_file(storage(&image.path.with_extension("data"))).map_err(text)?;
        }
        match step {
            Step::Ops(_) => {
                for op in ops {
                    let done = one(&ring, &disk, &base, op, bench.cell.cluster).await;
                    done.map_err(|errno| format!("{op:?}: {errno}"))?;
                }
                reads_back(&ring, &disk, &base, model).await?;
            }
            Step::Snapshot => drop(disk.snapshot_create(&ring, "one").await.map_err(text)?),
            Step::Apply => disk.snapshot_apply(&ring, "one").await.map_err(text)?,
            Step::Delete => disk.snapshot_delete(&ring, "one").await.map_err(text)?,
            Step::Resize(_) => {
                let options = ResizeOptions { shrink: true, ..ResizeOptions::default() };
                disk.resize(&ring, Bytes(size), &options, &base).await.map_err(text)?;
            }
        }
        disk.close(&ring).await.map_err(|errno| format!("close: {errno}"))
    })
}

async fn one(
    ring: &Ring,
    disk: &Qcow2,
    base: &Base<'_>,
    op: &Op,
    cluster: u64,
) -> Result<(), Errno> {
    let bytes = |len: u64, byte| vec![byte; usize::try_from(len).expect("small")];
    match *op {
        Op::Write { at, len, byte } => {
            let buf = buffer(&bytes(len, byte));
            let mut done = 0;
            while done < buf.len() {
                done += disk
                    .write(ring, GuestOffset(at + done as u64), &buf.slice(done..buf.len()), base)
                    .await?;
            }
            Ok(())
        }
        Op::Zero { at, len, unmap } => {
            disk.write_zeroes(ring, GuestOffset(at), Bytes(len), unmap, base).await
        }
        Op::Discard { at, len } => disk.discard(ring, GuestOffset(at), Bytes(len), base).await,
        Op::Packed { at, byte } => {
            let packed = compress(disk.info().compression, None, &bytes(cluster, byte));
            disk.write_compressed(ring, GuestOffset(at), &packed.expect("it gets smaller")).await
        }
        Op::Flush => disk.flush(ring).await,
    }
}

/// What our engine reads before it closes the image, from its caches.
async fn reads_back(
    ring: &Ring,
    disk: &Qcow2,
    base: &Base<'_>,
    model: &Model,
) -> Result<(), String> {
    let mut seen = vec![0; model.disk.len()];
    crate::live::read(ring, disk, base, 0, &mut seen).await.map_err(|errno| errno.to_string())?;
    match differs_at(&seen, &model.disk) {
        Some(at) => Err(format!("our engine reads {:#x} at {at:#x}", seen[at])),
        None => Ok(()),
    }
}
