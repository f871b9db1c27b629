//! What a client sees of every file operation, on a real mount with a minimal server.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use ringdisk_disk::{Bytes, Disk, ImageOptions, NullOptions};
use ringdisk_fuse::mount::Method;
use ringdisk_storage::Storage;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

use crate::common::{Served, Wanted, can_mount};

const MIB: u64 = 1 << 20;
/// The same as a length in memory.
const MIB_BYTES: usize = 1 << 20;

/// A raw disk of one MiB that holds `x` everywhere, and the file behind it.
fn raw() -> (tempfile::NamedTempFile, Arc<Disk>) {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(&vec![b'x'; MIB_BYTES]).expect("content");
    let disk = open_raw(file.path());
    (file, disk)
}

fn open_raw(path: &Path) -> Arc<Disk> {
    let storage = Storage::open(path, &ringdisk_storage::OpenOptions::default()).expect("opens");
    Disk::from_storage(Arc::new(storage), &ImageOptions::default())
}

fn null(size: u64) -> Arc<Disk> {
    Disk::null(&NullOptions { size: Bytes(size), read_zeroes: true, ..NullOptions::default() })
}

fn read_write(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("opens")
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).expect("an errno")
}

#[test]
fn reads_and_writes_reach_the_image() {
    if !can_mount() {
        return;
    }
    for kernel_cache in [false, true] {
        let (image, disk) = raw();
        let served = Served::new(disk, Wanted { kernel_cache, ..Wanted::default() });
        let file = read_write(served.path());
        file.write_all_at(b"hello", 4095).expect("write");
        let mut bytes = [0; 7];
        file.read_exact_at(&mut bytes, 4094).expect("read");
        assert_eq!(&bytes, b"xhellox");
        file.sync_all().expect("fsync");
        let stored = std::fs::read(image.path()).expect("image");
        assert_eq!(&stored[4094..4101], b"xhellox");
    }
}

#[test]
fn a_request_of_several_mebibytes_is_split_and_complete() {
    if !can_mount() {
        return;
    }
    let image = tempfile::NamedTempFile::new().expect("a file");
    image.as_file().set_len(16 * MIB).expect("size");
    let served = Served::new(open_raw(image.path()), Wanted::default());
    let file = read_write(served.path());
    let pattern: Vec<u8> = (0..5 * MIB + 123).map(|at| (at / 7 % 251) as u8).collect();
    file.write_all_at(&pattern, 77).expect("write");
    let mut back = vec![0; pattern.len()];
    file.read_exact_at(&mut back, 77).expect("read");
    assert!(back == pattern);
}

#[test]
fn writes_past_the_end_of_a_cached_mount_have_no_space() {
    if !can_mount() {
        return;
    }
    let (_image, disk) = raw();
    let served = Served::new(disk, Wanted { kernel_cache: true, ..Wanted::default() });
    let file = read_write(served.path());
    let error = file.write_at(&[1; 100], MIB).expect_err("at the end");
    assert_eq!(errno(&error), Errno::NOSPC);
    assert_eq!(file.metadata().expect("stat").len(), MIB);
}

#[test]
fn writes_past_the_end_grow_with_growable() {
    if !can_mount() {
        return;
    }
    for kernel_cache in [false, true] {
        let (image, disk) = raw();
        let wanted = Wanted { growable: true, kernel_cache, ..Wanted::default() };
        let served = Served::new(disk, wanted);
        let file = read_write(served.path());
        file.write_all_at(b"end", 2 * MIB).expect("past the end");
        assert_eq!(file.metadata().expect("stat").len(), 2 * MIB + 3);
        let mut bytes = [9; 6];
        file.read_exact_at(&mut bytes, 2 * MIB - 3).expect("read");
        assert_eq!(&bytes, b"\0\0\0end");
        assert_eq!(std::fs::metadata(image.path()).expect("stat").len(), 2 * MIB + 3);
    }
}

#[test]
fn several_writers_past_the_end_lose_nothing() {
    if !can_mount() {
        return;
    }
    let (image, disk) = raw();
    let served = Served::new(disk, Wanted { growable: true, ..Wanted::default() });
    let path = served.path();
    std::thread::scope(|scope| {
        for writer in 0..4u8 {
            scope.spawn(move || {
                let file = read_write(path);
                for block in 0..32u64 {
                    let at = MIB + (block * 4 + u64::from(writer)) * 4096;
                    file.write_all_at(&[writer + 1; 4096], at).expect("write");
                }
            });
        }
    });
    let stored = std::fs::read(image.path()).expect("image");
    assert_eq!(stored.len() as u64, MIB + 128 * 4096);
    let writers = (1..=4).cycle();
    let mut blocks = stored[MIB_BYTES..].chunks(4096).zip(writers);
    assert!(blocks.all(|(block, writer)| block == [writer; 4096]));
}

#[test]
fn a_null_disk_cannot_grow() {
    if !can_mount() {
        return;
    }
    let served = Served::new(null(MIB), Wanted { resizable: true, ..Wanted::default() });
    let file = read_write(served.path());
    let error = file.write_at(&[1; 10], MIB).expect_err("grows");
    assert_eq!(errno(&error), Errno::OPNOTSUPP);
    assert_eq!(errno(&file.set_len(10).expect_err("shrinks")), Errno::OPNOTSUPP);
    assert_eq!(fallocate(&file, FallocateFlags::empty(), MIB, 10), Err(Errno::OPNOTSUPP));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(&file, punch, 0, 4096), Err(Errno::OPNOTSUPP));
    assert_eq!(fallocate(&file, FallocateFlags::ZERO_RANGE, 0, 4096), Ok(()));
    assert_eq!(fallocate(&file, FallocateFlags::ZERO_RANGE, MIB, 4096), Err(Errno::OPNOTSUPP));
}

#[test]
fn ftruncate_does_what_the_options_allow() {
    if !can_mount() {
        return;
    }
    // What clients may: nothing, grow, anything.
    let [fixed, growable, resizable] = SIZES;
    for kernel_cache in [false, true] {
        for (wanted, size, expected) in [
            (fixed, MIB, Ok(())),
            (fixed, 2 * MIB, Err(Errno::PERM)),
            (fixed, 4000, Err(Errno::PERM)),
            (fixed, 0, Err(Errno::PERM)),
            (growable, MIB, Ok(())),
            (growable, 2 * MIB, Ok(())),
            (growable, 4000, Err(Errno::PERM)),
            (growable, 0, Err(Errno::PERM)),
            (resizable, 2 * MIB, Ok(())),
            (resizable, 4000, Ok(())),
            (resizable, 0, Ok(())),
        ] {
            let (image, disk) = raw();
            let served = Served::new(disk, Wanted { kernel_cache, ..wanted });
            let file = read_write(served.path());
            let case = format!("{wanted:?} {size}");
            let done = file.set_len(size).map_err(|error| errno(&error));
            assert_eq!(done, expected, "{case}");
            let after = if expected.is_ok() { size } else { MIB };
            assert_eq!(file.metadata().expect("stat").len(), after, "{case}");
            assert_eq!(std::fs::metadata(image.path()).expect("stat").len(), after, "{case}");
            let kept = usize::try_from(after.min(MIB)).expect("small");
            let stored = std::fs::read(image.path()).expect("image");
            assert!(stored[..kept].iter().all(|byte| *byte == b'x'), "{case}");
        }
    }
}

/// Without an option, with `growable`, with `resizable`.
const SIZES: [Wanted; 3] = [
    Wanted {
        growable: false,
        resizable: false,
        read_only: false,
        allow_other: false,
        kernel_cache: false,
        method: Method::Auto,
    },
    Wanted {
        growable: true,
        resizable: false,
        read_only: false,
        allow_other: false,
        kernel_cache: false,
        method: Method::Auto,
    },
    Wanted {
        growable: false,
        resizable: true,
        read_only: false,
        allow_other: false,
        kernel_cache: false,
        method: Method::Auto,
    },
];

#[test]
fn a_disk_that_is_cut_and_grown_again_shows_zeroes() {
    if !can_mount() {
        return;
    }
    for kernel_cache in [false, true] {
        let (image, disk) = raw();
        let wanted = Wanted { resizable: true, kernel_cache, ..Wanted::default() };
        let served = Served::new(disk, wanted);
        let file = read_write(served.path());
        let mut bytes = [7; 4];
        file.read_exact_at(&mut bytes, 4000).expect("into the cache");
        for size in [2 * MIB, 4000, 0, 8192] {
            file.set_len(size).expect("ftruncate");
            assert_eq!(file.metadata().expect("stat").len(), size);
            assert_eq!(std::fs::metadata(image.path()).expect("stat").len(), size);
        }
        file.read_exact_at(&mut bytes, 4000).expect("read");
        assert_eq!(bytes, [0; 4]);
    }
}

#[test]
fn opening_with_truncation_keeps_the_size_unless_resizable() {
    if !can_mount() {
        return;
    }
    for (wanted, expected) in SIZES.into_iter().zip([MIB, MIB, 0]) {
        for kernel_cache in [false, true] {
            let (_image, disk) = raw();
            let served = Served::new(disk, Wanted { kernel_cache, ..wanted });
            let reader = read_write(served.path());
            let file = File::create(served.path()).expect("O_TRUNC");
            // The kernel's own idea of the size, without a GETATTR in between.
            let mut bytes = [0; 8];
            let read = reader.read_at(&mut bytes, 0).expect("read");
            assert_eq!(read, if expected == 0 { 0 } else { 8 });
            assert_eq!(file.metadata().expect("stat").len(), expected);
        }
    }
}

#[test]
fn a_null_disk_opened_with_truncation_keeps_its_size() {
    if !can_mount() {
        return;
    }
    let served = Served::new(null(MIB), Wanted::default());
    let file = File::create(served.path()).expect("O_TRUNC");
    assert_eq!(file.metadata().expect("stat").len(), MIB);
    let resizable = Served::new(null(MIB), Wanted { resizable: true, ..Wanted::default() });
    let error = File::create(resizable.path()).expect_err("O_TRUNC");
    assert_eq!(errno(&error), Errno::OPNOTSUPP);
}

#[test]
fn fallocate_does_what_each_mode_says() {
    if !can_mount() {
        return;
    }
    let none = FallocateFlags::empty();
    let keep = FallocateFlags::KEEP_SIZE;
    let punch = FallocateFlags::PUNCH_HOLE;
    let zero = FallocateFlags::ZERO_RANGE;
    let refused = Err(Errno::OPNOTSUPP);
    let denied = Err(Errno::PERM);
    let cases = [
        // mode, offset, length, result and size afterwards, the same with growable
        (none, 0, 4096, (refused, MIB), (refused, MIB)),
        (none, MIB - 10, 20, (refused, MIB), (refused, MIB)),
        (none, MIB, 4096, (denied, MIB), (Ok(()), MIB + 4096)),
        (none, 2 * MIB, 10, (denied, MIB), (Ok(()), 2 * MIB + 10)),
        (keep, 0, 4096, (refused, MIB), (refused, MIB)),
        (keep, MIB, 4096, (refused, MIB), (refused, MIB)),
        (punch | keep, 4096, 8192, (Ok(()), MIB), (Ok(()), MIB)),
        (punch | keep, 2 * MIB, 8192, (Ok(()), MIB), (Ok(()), MIB)),
        (punch, 0, 4096, (refused, MIB), (refused, MIB)),
        (zero, 4096, 8192, (Ok(()), MIB), (Ok(()), MIB)),
        (zero, MIB - 4096, 8192, (denied, MIB), (Ok(()), MIB + 4096)),
        (zero | keep, MIB - 4096, 8192, (Ok(()), MIB), (Ok(()), MIB)),
        (zero | keep, 2 * MIB, 8192, (Ok(()), MIB), (Ok(()), MIB)),
        (FallocateFlags::COLLAPSE_RANGE, 0, 4096, (refused, MIB), (refused, MIB)),
        (FallocateFlags::INSERT_RANGE, 0, 4096, (refused, MIB), (refused, MIB)),
        (FallocateFlags::UNSHARE_RANGE, 0, 4096, (refused, MIB), (refused, MIB)),
    ];
    for (mode, offset, length, fixed, growing) in cases {
        for (growable, (expected, size)) in [(false, fixed), (true, growing)] {
            let (_image, disk) = raw();
            let served = Served::new(disk, Wanted { growable, ..Wanted::default() });
            let file = read_write(served.path());
            let case = format!("{mode:?} {offset}+{length} {growable}");
            assert_eq!(fallocate(&file, mode, offset, length), expected, "{case}");
            assert_eq!(file.metadata().expect("stat").len(), size, "{case}");
            let inside = usize::try_from(MIB.saturating_sub(offset).min(length)).expect("small");
            let mut bytes = vec![9; inside];
            file.read_exact_at(&mut bytes, offset.min(MIB)).expect("read");
            let wanted = if expected.is_ok() { 0 } else { b'x' };
            assert!(bytes.iter().all(|byte| *byte == wanted), "{case}");
        }
    }
}

#[test]
fn fallocate_past_the_end_reserves_what_it_adds() {
    if !can_mount() {
        return;
    }
    let (image, disk) = raw();
    let served = Served::new(disk, Wanted { growable: true, ..Wanted::default() });
    let file = read_write(served.path());
    let taken = || std::fs::metadata(image.path()).expect("stat").blocks() * 512;
    let before = taken();
    // A gap before it is none of the range.
    fallocate(&file, FallocateFlags::empty(), 4 * MIB, 2 * MIB).expect("space");
    assert_eq!(file.metadata().expect("stat").len(), 6 * MIB);
    assert!((2 * MIB..3 * MIB).contains(&(taken() - before)), "{}", taken() - before);
}

#[test]
fn data_and_holes_are_found() {
    if !can_mount() {
        return;
    }
    let image = tempfile::NamedTempFile::new().expect("a file");
    image.as_file().set_len(4 * MIB).expect("size");
    image.as_file().write_all_at(&[1; 4096], MIB).expect("data");
    let served = Served::new(open_raw(image.path()), Wanted::default());
    let file = read_write(served.path());
    assert_eq!(seek(&file, SeekFrom::Data(0)), Ok(MIB));
    assert_eq!(seek(&file, SeekFrom::Hole(0)), Ok(0));
    assert_eq!(seek(&file, SeekFrom::Hole(MIB)), Ok(MIB + 4096));
    assert_eq!(seek(&file, SeekFrom::Data(MIB + 4096)), Err(Errno::NXIO));
    assert_eq!(seek(&file, SeekFrom::Hole(4 * MIB)), Err(Errno::NXIO));
    assert_eq!(seek(&file, SeekFrom::Data(9 * MIB)), Err(Errno::NXIO));
    assert_eq!(seek(&file, SeekFrom::End(0)), Ok(4 * MIB));

    let (_image, disk) = raw();
    let full = Served::new(disk, Wanted::default());
    let file = read_write(full.path());
    assert_eq!(seek(&file, SeekFrom::Data(5)), Ok(5));
    assert_eq!(seek(&file, SeekFrom::Hole(5)), Ok(MIB));
}

#[test]
fn synchronous_writes_and_both_syncs_work() {
    if !can_mount() {
        return;
    }
    let (_image, disk) = raw();
    let served = Served::new(disk, Wanted::default());
    for flags in [libc::O_DSYNC, libc::O_SYNC, libc::O_DIRECT | libc::O_DSYNC] {
        let mut options = OpenOptions::new();
        let file = options.write(true).custom_flags(flags).open(served.path()).expect("opens");
        file.write_all_at(&[3; 4096], 0).expect("write");
        file.sync_data().expect("fdatasync");
        file.sync_all().expect("fsync");
    }
}

#[test]
fn chmod_and_chown_follow_allow_other() {
    if !can_mount() {
        return;
    }
    let (_image, disk) = raw();
    let alone = Served::new(disk, Wanted::default());
    let path = alone.path();
    let chmod =
        |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode));
    for mode in [0o400, 0o500, 0o600] {
        chmod(path, mode).expect("a mode of the owner");
        assert_eq!(std::fs::metadata(path).expect("stat").mode() & 0o7777, mode);
    }
    assert_eq!(errno(&chmod(path, 0o644).expect_err("others")), Errno::PERM);
    let chown = |path: &Path| std::os::unix::fs::chown(path, Some(65534), Some(65534));
    assert_eq!(errno(&chown(path).expect_err("chown")), Errno::OPNOTSUPP);

    let (_image, disk) = raw();
    let open = Served::new(disk, Wanted { allow_other: true, ..Wanted::default() });
    chmod(open.path(), 0o4755).expect("any mode");
    chown(open.path()).expect("chown");
    let metadata = std::fs::metadata(open.path()).expect("stat");
    assert_eq!((metadata.uid(), metadata.gid()), (65534, 65534));
    assert_eq!(metadata.mode() & 0o7777, 0o755, "chown clears set-user-id");
}

#[test]
fn a_copy_through_the_kernel_is_complete() {
    if !can_mount() {
        return;
    }
    let (_image, disk) = raw();
    let served = Served::new(disk, Wanted::default());
    let copy = tempfile::NamedTempFile::new().expect("a file");
    std::fs::copy(served.path(), copy.path()).expect("copy");
    assert!(std::fs::read(copy.path()).expect("read") == vec![b'x'; MIB_BYTES]);
}

/// A shared mapping of a whole file.
struct Mapping(*mut u8, usize);

impl Mapping {
    fn new(file: &File, len: usize) -> Mapping {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let address = unsafe {
            mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0).expect("mmap")
        };
        Mapping(address.cast(), len)
    }

    fn get(&self, at: usize) -> u8 {
        assert!(at < self.1);
        // SAFETY: inside the mapping, which lives as long as self.
        unsafe { self.0.add(at).read_volatile() }
    }

    fn set(&self, at: usize, byte: u8) {
        assert!(at < self.1);
        // SAFETY: inside the mapping, which is writable and lives as long as self.
        unsafe { self.0.add(at).write_volatile(byte) }
    }

    fn sync(&self) {
        // SAFETY: the range is the mapping.
        unsafe { msync(self.0.cast(), self.1, MsyncFlags::SYNC).expect("msync") }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping, and nobody holds a reference into it.
        unsafe { munmap(self.0.cast(), self.1).expect("munmap") }
    }
}

#[test]
fn shared_mappings_buffered_and_direct_opens_agree() {
    if !can_mount() {
        return;
    }
    for kernel_cache in [false, true] {
        let (image, disk) = raw();
        let served = Served::new(disk, Wanted { kernel_cache, ..Wanted::default() });
        let buffered = read_write(served.path());
        let mut options = OpenOptions::new();
        let direct = options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let direct = direct.open(served.path()).expect("O_DIRECT");
        let mapping = Mapping::new(&buffered, MIB_BYTES);
        let mut block = AlignedBlock([0; 4096]);

        // A mapping's write is seen by both, and by the image after msync.
        assert_eq!(mapping.get(5000), b'x');
        mapping.set(5000, b'm');
        direct.read_exact_at(&mut block.0, 4096).expect("direct read");
        assert_eq!(block.0[5000 - 4096], b'm', "cache {kernel_cache}");
        let mut byte = [0];
        buffered.read_exact_at(&mut byte, 5000).expect("buffered read");
        assert_eq!(&byte, b"m");
        mapping.sync();
        assert_eq!(std::fs::read(image.path()).expect("image")[5000], b'm');

        // A direct write is seen by the mapping and by buffered reads.
        block.0.fill(b'd');
        direct.write_all_at(&block.0, 4096).expect("direct write");
        assert_eq!(mapping.get(5000), b'd', "cache {kernel_cache}");
        buffered.read_exact_at(&mut byte, 5000).expect("buffered read");
        assert_eq!(&byte, b"d");

        // A buffered write is seen by the mapping and by direct reads.
        buffered.write_all_at(b"b", 5000).expect("buffered write");
        assert_eq!(mapping.get(5000), b'b', "cache {kernel_cache}");
        direct.read_exact_at(&mut block.0, 4096).expect("direct read");
        assert_eq!(block.0[5000 - 4096], b'b');
        assert_eq!(block.0[5001 - 4096], b'd');
    }
}

#[repr(align(4096))]
struct AlignedBlock([u8; 4096]);

#[test]
fn a_resize_from_outside_is_seen_at_once_after_a_notification() {
    if !can_mount() {
        return;
    }
    for kernel_cache in [false, true] {
        let (_image, disk) = raw();
        let served = Served::new(Arc::clone(&disk), Wanted { kernel_cache, ..Wanted::default() });
        let file = read_write(served.path());
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, MIB - 4).expect("into the cache");
        assert_eq!(file.metadata().expect("stat").len(), MIB);
        for size in [2 * MIB, MIB / 2] {
            let mut runtime = ringdisk_ring::Runtime::new(ringdisk_ring::Config::default())
                .expect("a ring of the control thread");
            let ring = runtime.ring().clone();
            runtime.block_on(disk.resize(&ring, Bytes(size))).expect("resize");
            let mount = served.mount.as_ref().expect("mounted");
            let frame = ringdisk_fuse::reply::notify_inval_inode(kernel_cache);
            rustix::io::write(mount.device(), &frame).expect("notify");
            assert_eq!(file.metadata().expect("stat").len(), size);
        }
        assert_eq!(file.read_at(&mut bytes, MIB - 4).expect("past the end"), 0);
    }
}
