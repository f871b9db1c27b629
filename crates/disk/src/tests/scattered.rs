//! Requests whose data lies in several pieces of memory read and write what contiguous ones do.

use ringdisk_qcow2::Bytes;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use ringdisk_ring::{IoBuf, Ring, Scatter};
use ringdisk_testkit::sim::{Fault, OpKind, Prng, SimStorage, When};
use tempfile::TempDir;

use super::{assert_same, open, qemu_img, qemu_io, run};
use crate::{Cache, DetectZeroes, Disk, Format, ImageOptions, NullOptions};

/// Bytes of each disk.
const DISK_BYTES: u64 = 1 << 20;
/// Bytes of a request at most.
const REQUEST_MAX: u64 = 200_000;
const REQUESTS: usize = 200;

fn number(random: &mut Prng, below: u64) -> usize {
    usize::try_from(random.below(below)).expect("small")
}

/// Memory of a guest: regions, and a place in each behind which nothing is taken yet.
struct Memory {
    regions: Vec<IoBuf>,
    scatter: Scatter,
}

impl Memory {
    fn new() -> Memory {
        let regions = (0..3).map(|_| IoBuf::new(1 << 20, 4096)).collect();
        Memory { regions, scatter: Scatter::new() }
    }

    /// `len` bytes in pieces.
    ///
    /// * `unit`: places and lengths are multiples of so many bytes, but for the last piece.
    fn request(&mut self, random: &mut Prng, len: usize, unit: usize) -> IoBuf {
        let mut used = vec![0; self.regions.len()];
        self.scatter.clear();
        let longest = 1 + random.below(40_000);
        let mut done = 0;
        while done < len {
            let region = number(random, self.regions.len() as u64);
            let part = (1 + number(random, longest)).next_multiple_of(unit).min(len - done);
            let start: usize = used[region] + number(random, 3) * unit;
            used[region] = start + part;
            self.scatter.push(self.regions[region].slice(start..start + part));
            done += part;
        }
        self.scatter.buffer()
    }
}

/// Random requests on a disk, in pieces and as one, beside a model of its bytes.
async fn exercise(ring: &Ring, disk: &Disk, model: &mut [u8], seed: u64) {
    let mut random = Prng::new(seed);
    let mut memory = Memory::new();
    for request in 0..REQUESTS {
        // As guests mostly do, as firmware may, and as no guest does.
        let (unit, memory_unit) =
            [(4096u64, 4096), (512, 512), (512, 1), (1, 1)][number(&mut random, 4)];
        let offset = random.below(DISK_BYTES) / unit * unit;
        let len = (1 + random.below(REQUEST_MAX)).next_multiple_of(unit).min(DISK_BYTES - offset);
        let (at, len) =
            (usize::try_from(offset).expect("small"), usize::try_from(len).expect("small"));
        let buf = memory.request(&mut random, len, memory_unit);
        assert_eq!(buf.len(), len);
        let before: Vec<Vec<u8>> = memory.regions.iter().map(IoBuf::to_vec).collect();
        if random.below(2) == 0 {
            let byte = if random.below(4) == 0 { 0 } else { number(&mut random, 256) };
            let byte = u8::try_from(byte).expect("a byte");
            let new: Vec<u8> =
                (0..len).map(|at| if byte == 0 { 0 } else { byte ^ at.to_le_bytes()[0] }).collect();
            buf.copy_from_slice(0, &new);
            assert_eq!(disk.write(ring, offset, &buf).await, Ok(len), "write {request}");
            assert_same(&buf.to_vec(), &new);
            model[at..at + len].copy_from_slice(&new);
        } else {
            assert_eq!(disk.read(ring, offset, &buf).await, Ok(len), "read {request}");
            assert_same(&buf.to_vec(), &model[at..at + len]);
            // Nothing beside the pieces was touched.
            let mut expected = before;
            for (region, bytes) in memory.regions.iter().zip(&mut expected) {
                for piece in buf.pieces() {
                    let start = piece.address().wrapping_sub(region.address());
                    if start < region.len() {
                        bytes[start..start + piece.len()].copy_from_slice(&piece.to_vec());
                    }
                }
                assert_same(&region.to_vec(), bytes);
            }
        }
        let plain = IoBuf::new(len, 4096);
        assert_eq!(disk.read(ring, offset, &plain).await, Ok(len));
        assert_same(&plain.to_vec(), &model[at..at + len]);
    }
    assert_eq!(disk.flush(ring).await, Ok(()));
}

fn pattern(seed: u64) -> Vec<u8> {
    let mut random = Prng::new(seed);
    (0..DISK_BYTES).map(|_| u8::try_from(random.below(256)).expect("a byte")).collect()
}

/// Not in /tmp, which may be without O_DIRECT.
fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("directory")
}

fn options(cache: Cache, format: Format) -> ImageOptions {
    ImageOptions { cache, format: Some(format), ..ImageOptions::default() }
}

async fn exercise_file(
    ring: &Ring,
    path: &Path,
    options: &ImageOptions,
    model: &mut [u8],
    seed: u64,
) {
    let disk: Arc<Disk> = open(ring, path, options).await.expect("open");
    exercise(ring, &disk, model, seed).await;
    disk.close(ring).await.expect("close");
}

#[test]
fn raw_images() {
    for (seed, cache) in [(1, Cache::Writeback), (2, Cache::None), (3, Cache::DirectSync)] {
        let directory = directory();
        let path = directory.path().join("a.raw");
        let mut model = pattern(seed);
        fs::write(&path, &model).expect("write");
        run(async |ring| {
            exercise_file(&ring, &path, &options(cache, Format::Raw), &mut model, seed).await;
        });
        assert_same(&fs::read(&path).expect("read"), &model);
    }
}

#[test]
fn the_first_sector_of_a_probed_image_is_looked_at() {
    let directory = directory();
    let path = directory.path().join("a.raw");
    let mut model = pattern(4);
    fs::write(&path, &model).expect("write");
    run(async |ring| {
        let probed = ImageOptions { format: None, ..options(Cache::None, Format::Raw) };
        exercise_file(&ring, &path, &probed, &mut model, 4).await;
        let disk = open(&ring, &path, &probed).await.expect("open");
        let memory = IoBuf::new(4096, 4096);
        memory.copy_from_slice(100, b"QFI");
        memory.copy_from_slice(200, &[0xfb, 0, 0, 0, 3]);
        let header = Scatter::new().fill([
            memory.slice(100..103),
            memory.slice(200..205),
            memory.slice(1000..2000),
        ]);
        assert_eq!(disk.write(&ring, 0, &header).await, Err(crate::Errno::PERM));
    });
    assert_same(&fs::read(&path).expect("read"), &model);
}

#[test]
fn zeroes_are_found_in_pieces() {
    let directory = directory();
    let path = directory.path().join("a.raw");
    let mut model = pattern(5);
    fs::write(&path, &model).expect("write");
    let detecting = ImageOptions {
        detect_zeroes: DetectZeroes::Unmap,
        ..options(Cache::Writeback, Format::Raw)
    };
    run(async |ring| exercise_file(&ring, &path, &detecting, &mut model, 5).await);
    assert_same(&fs::read(&path).expect("read"), &model);
}

#[test]
fn qcow2_images_with_a_backing_file_and_compressed_clusters() {
    for (seed, cache, cluster) in
        [(6, Cache::Writeback, "64k"), (7, Cache::None, "4k"), (8, Cache::None, "64k")]
    {
        let directory = directory();
        // Of three layers: compressed clusters, some plain ones above them, an empty overlay.
        let bytes = pattern(seed);
        let mut model: Vec<u8> = bytes.iter().map(|byte| byte & 3).collect();
        fs::write(directory.path().join("base.raw"), &model).expect("write");
        let cluster_size = format!("cluster_size={cluster}");
        let compress = ["convert", "-q", "-c", "-f", "raw", "-O", "qcow2", "-o", &cluster_size];
        qemu_img(&directory, &[&compress[..], &["base.raw", "base.qcow2"]].concat());
        let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-o", &cluster_size];
        qemu_img(&directory, &[&create[..], &["-b", "base.qcow2", "middle.qcow2"]].concat());
        let writes = ["write -P 9 100k 150k", "write -z 300k 128k", "write -P 8 700k 5k"];
        qemu_io(&directory, "qcow2", "middle.qcow2", &writes);
        for (range, byte) in [(100..250, 9), (300..428, 0), (700..705, 8)] {
            model[range.start << 10..range.end << 10].fill(byte);
        }
        qemu_img(&directory, &[&create[..], &["-b", "middle.qcow2", "top.qcow2"]].concat());
        let path = directory.path().join("top.qcow2");
        run(async |ring| {
            exercise_file(&ring, &path, &options(cache, Format::Qcow2), &mut model, seed).await;
        });
        qemu_img(&directory, &["check", "-q", "top.qcow2"]);
        qemu_img(&directory, &["convert", "-f", "qcow2", "-O", "raw", "top.qcow2", "out.raw"]);
        assert_same(&fs::read(directory.path().join("out.raw")).expect("read"), &model);
    }
}

#[test]
fn storage_that_is_no_file_and_moves_a_few_bytes_at_a_time() {
    let mut model = pattern(9);
    let sim = SimStorage::from_image(&model, 9);
    sim.on(When::kind(OpKind::Read), Fault::Short(70_001));
    sim.on(When::kind(OpKind::Write), Fault::Short(50_003));
    run(async |ring| {
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        exercise(&ring, &disk, &mut model, 9).await;
    });
    assert_same(&sim.image(), &model);
}

#[test]
fn a_null_disk_fills_pieces_with_zeroes() {
    run(async |ring| {
        let null =
            NullOptions { size: Bytes(1 << 20), read_zeroes: true, ..NullOptions::default() };
        let disk = Disk::null(&null);
        let memory = IoBuf::new(100, 16);
        memory.fill(1);
        let buf = Scatter::new().fill([memory.slice(50..60), memory.slice(10..30)]);
        assert_eq!(disk.read(&ring, 0, &buf).await, Ok(30));
        assert!(buf.is_zero() && !memory.slice(9..11).is_zero() && !memory.slice(60..61).is_zero());
        assert_eq!(disk.write(&ring, 0, &buf).await, Ok(30));
    });
}

#[test]
fn more_pieces_than_the_kernel_takes_at_once() {
    for cache in [Cache::Writeback, Cache::None] {
        let directory = directory();
        let path = directory.path().join("a.raw");
        let model = pattern(10);
        fs::write(&path, vec![0; model.len()]).expect("write");
        run(async |ring| {
            let disk = open(&ring, &path, &options(cache, Format::Raw)).await.expect("open");
            // Every other block of the memory.
            let memory = IoBuf::new(2 << 20, 4096);
            let buf =
                Scatter::new().fill((0..2000).map(|at| memory.slice(at * 1024..at * 1024 + 512)));
            buf.copy_from_slice(0, &model[..buf.len()]);
            assert_eq!(disk.write(&ring, 0, &buf).await, Ok(buf.len()));
            memory.fill(0);
            assert_eq!(disk.read(&ring, 0, &buf).await, Ok(buf.len()));
            assert_same(&buf.to_vec(), &model[..buf.len()]);
            disk.close(&ring).await.expect("close");
        });
    }
}
