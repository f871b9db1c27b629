//! Memory of clients, of every alignment and size, byte for byte against a model: past the page
//! cache and over every kind of extent.
//!
//! Where the kernel has zero-copy (Linux 7.3: `tests/vm/run fuse`) the same requests go straight
//! from the image into that memory, and the counters must say so. There, a RAM disk is the trap:
//! given memory that it cannot take, it reports success and puts the data elsewhere.

use std::fs::{File, Permissions};
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use ringdisk_testkit::images::{differs_at, pattern, qcow2, qemu_img, qemu_io, raw};
use ringdisk_testkit::limits::{UringParameter, needs, needs_root, part_needs};
use ringdisk_testkit::mount::{FileSystem, Mounted, STOP, scratch, text};
use ringdisk_testkit::process::{Process, command, ok_words, run, until};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::process::{Signal, Uid};

use crate::common::tools::ringdisk;
use crate::common::{BLOCK, MIB, open_direct, refused, serve};

/// Distances from a page boundary: nothing, less than any device takes, a sector, and around a
/// page.
const DISTANCES: [usize; 9] = [0, 1, 8, 100, 504, 512, 1024, 4088, 4095];
/// The disk of most tests.
const LEN: usize = 4 << 20;

/// Whether the kernel has buffer pools and zero-copy.
fn has_zero_copy() -> bool {
    crate::common::kernel_is(7, 3)
}

/// Root and rings; with a word when that is not zero-copy.
fn rings() -> Option<UringParameter> {
    if !needs_root() {
        return None;
    }
    // The bytes are checked without it.
    let _ = part_needs("zero-copy (Linux 7.3)", has_zero_copy());
    UringParameter::set(true)
}

/// Serves an image with the most that there is.
fn zero_copy(image: &Path, words: &[&str]) -> Mounted {
    let most: &[&str] = match has_zero_copy() {
        true => &["--transport", "uring", "--zero-copy", "on"],
        false => &["--transport", "uring"],
    };
    serve(image, &[words, most].concat())
}

/// Requests so far, and those that used the client's pages.
fn counted(disk: &Mounted) -> (u64, u64) {
    let stats = ringdisk(Path::new("/"), &["ctl", disk.text(), "stats", "--json"]).ok().json();
    let queues = stats["queues"].as_array().expect("queues");
    let sum = |key: &str| queues.iter().map(|queue| queue[key].as_u64().expect("a number")).sum();
    (sum("requests"), sum("zero-copy"))
}

/// Memory that begins `distance` bytes behind a page boundary, with a fence around it.
struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

const FENCE: u8 = 0xfe;

impl Memory {
    fn new(distance: usize, len: usize) -> Memory {
        let bytes = vec![FENCE; len + 4 * BLOCK];
        let start = bytes.as_ptr().align_offset(BLOCK) + BLOCK + distance;
        Memory { bytes, start, len }
    }

    fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    fn assert_fence(&self, what: &str) {
        let around = self.bytes[..self.start].iter().chain(&self.bytes[self.start + self.len..]);
        assert!(around.into_iter().all(|byte| *byte == FENCE), "{what}: bytes beside the buffer");
    }
}

/// A small generator of numbers: the tests are the same each time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % limit
    }
}

/// Something that moves no bytes of the client between those that do: space is reserved or given
/// back, zeroes are written, all is flushed.
///
/// * `can_discard`: the storage can give space back (a block device: it zeroes by itself); else
///   that is refused, and changes nothing.
fn change_without_bytes(
    file: &File,
    model: &mut [u8],
    range: Range<usize>,
    what: usize,
    can_discard: bool,
) {
    let (offset, len) = (range.start as u64, range.len() as u64);
    let mode = match what {
        0 => FallocateFlags::empty(),
        1 => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        2 => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        _ => return file.sync_data().expect("flush"),
    };
    let done = fallocate(file, mode, offset, len);
    if mode.is_empty() {
        // There may be no way to reserve space; no byte changes either way.
        return assert!(matches!(done, Ok(()) | Err(Errno::OPNOTSUPP)), "{done:?}");
    }
    if mode.contains(FallocateFlags::PUNCH_HOLE) && !can_discard {
        return assert_eq!(done, Err(Errno::OPNOTSUPP), "{mode:?}");
    }
    done.unwrap_or_else(|errno| panic!("{mode:?}: {errno}"));
    model[range].fill(0);
}

/// Requests at all alignments, compared with a model; at the end the whole disk.
///
/// * `can_discard`: the storage can give space back.
fn check_against_model(disk: &Path, model: &mut [u8], rounds: usize, seed: u64, can_discard: bool) {
    let file = open_direct(disk);
    let mut numbers = Numbers(seed);
    for round in 0..rounds {
        let distance = DISTANCES[numbers.below(DISTANCES.len())];
        let (offset, len) = match numbers.below(4) {
            // Whole blocks, whatever the memory is.
            0 => (numbers.below(model.len() / 512) * 512, (1 + numbers.below(256)) * 512),
            1 => (numbers.below(model.len() / BLOCK) * BLOCK, (1 + numbers.below(64)) * BLOCK),
            2 => (numbers.below(model.len()), 1 + numbers.below(20_000)),
            _ => (numbers.below(model.len() / 2), 1 + numbers.below(1 << 20)),
        };
        let len = len.min(model.len() - offset);
        let what = format!("round {round}: {len} bytes at {offset}, memory {distance} off a page");
        let mut memory = Memory::new(distance, len);
        let range = offset..offset + len;
        if numbers.below(8) == 0 {
            change_without_bytes(&file, model, range, numbers.below(4), can_discard);
        } else if numbers.below(2) == 0 {
            let data = pattern(seed + round as u64, offset as u64, len);
            memory.get().copy_from_slice(&data);
            file.write_all_at(memory.get(), offset as u64).expect(&what);
            model[range].copy_from_slice(&data);
        } else {
            file.read_exact_at(memory.get(), offset as u64).expect(&what);
            memory.assert_fence(&what);
            let (got, wanted) = (memory.get(), &model[range]);
            assert_eq!(differs_at(got, wanted), None, "{what}");
        }
    }
    let mut all = Memory::new(504, model.len());
    file.read_exact_at(all.get(), 0).expect("all of it");
    assert!(all.get() == model, "the whole disk");
}

fn assert_used(disk: &Mounted) {
    let (requests, zero_copy) = counted(disk);
    assert!(requests > 100, "{requests}");
    if has_zero_copy() {
        assert!(zero_copy > 100, "{zero_copy} of {requests}");
    }
}

fn check_raw(directory: &Path, words: &[&str]) {
    let image = directory.join("disk.img");
    raw(&image, LEN as u64, 1);
    let mut model = pattern(1, 0, LEN);
    let disk = zero_copy(&image, &[&["--format", "raw"], words].concat());
    check_against_model(disk.path(), &mut model, 400, 7, true);
    assert_used(&disk);
    assert_eq!(disk.stop().code(), Some(0));
    assert!(std::fs::read(&image).expect("the image") == model, "the image itself");
}

#[test]
fn raw_through_the_page_cache() {
    let Some(_switch) = rings() else { return };
    check_raw(scratch().path(), &[]);
}

#[test]
fn raw_past_the_page_cache() {
    let Some(_switch) = rings() else { return };
    check_raw(scratch().path(), &["--direct"]);
}

/// Requests over and past the end of a disk that grows, compared with a model: space that is
/// reserved, zeroes, writes, flushes.
///
/// * `unit`: of all offsets and lengths, bytes.
fn grow_against_model(disk: &Path, model: &mut Vec<u8>, unit: usize, rounds: usize, seed: u64) {
    let file = open_direct(disk);
    let mut numbers = Numbers(seed);
    for round in 0..rounds {
        let len = (1 + numbers.below(60_000 / unit)) * unit;
        let offset = (model.len() / unit - 40_000 / unit + numbers.below(80_000 / unit)) * unit;
        let (end, at) = (offset + len, offset as u64);
        let what = format!("round {round}: {len} bytes at {offset} of {}", model.len());
        match numbers.below(6) {
            0 | 1 => {
                let done = fallocate(&file, FallocateFlags::empty(), at, len as u64);
                if offset < model.len() {
                    // A disk does not reserve space inside.
                    assert_eq!(done, Err(Errno::OPNOTSUPP), "{what}");
                } else {
                    done.expect(&what);
                    model.resize(end, 0);
                }
            }
            2 => {
                fallocate(&file, FallocateFlags::ZERO_RANGE, at, len as u64).expect(&what);
                model.resize(end.max(model.len()), 0);
                model[offset..end].fill(0);
            }
            3 => {
                let data = pattern(seed + round as u64, at, len);
                file.write_all_at(&data, at).expect(&what);
                model.resize(end.max(model.len()), 0);
                model[offset..end].copy_from_slice(&data);
            }
            4 => file.sync_data().expect("flush"),
            _ => {
                let there = end.min(model.len()).saturating_sub(offset);
                let mut bytes = vec![0xee; len];
                assert_eq!(file.read_at(&mut bytes, at).expect(&what), there, "{what}");
                assert!(
                    there == 0 || bytes[..there] == model[offset..end.min(model.len())],
                    "{what}"
                );
            }
        }
    }
    assert_eq!(file.metadata().expect("stat").len(), model.len() as u64);
    let mut all = vec![0; model.len()];
    file.read_exact_at(&mut all, 0).expect("all of it");
    assert!(all == *model, "the whole disk");
}

#[test]
fn a_disk_that_grows_by_every_kind_of_request() {
    let Some(_switch) = rings() else { return };
    let directory = scratch();
    for words in [&["--growable"][..], &["--growable", "--direct"]] {
        let image = directory.path().join("disk.img");
        raw(&image, LEN as u64, 1);
        let mut model = pattern(1, 0, LEN);
        let disk = zero_copy(&image, &[&["--format", "raw"], words].concat());
        grow_against_model(disk.path(), &mut model, 1, 200, 17);
        assert_eq!(disk.stop().code(), Some(0));
        assert!(std::fs::read(&image).expect("the image") == model, "the image itself");

        let image = directory.path().join("disk.qcow2");
        qcow2(&image, "4M", "cluster_size=16k");
        let mut model = vec![0; LEN];
        let disk = zero_copy(&image, &[&["--format", "qcow2"], words].concat());
        grow_against_model(disk.path(), &mut model, 512, 200, 18);
        assert_eq!(disk.stop().code(), Some(0));
        ringdisk_testkit::images::assert_clean(&image);
        let disk = zero_copy(&image, &["--format", "qcow2", "--read-only"]);
        assert!(std::fs::read(disk.path()).expect("read") == model, "when it is served again");
        assert_eq!(disk.stop().code(), Some(0));
        std::fs::remove_file(&image).expect("remove");
    }
}

/// Holes, zero clusters, compressed clusters, clusters of a backing file that is shorter, many
/// small fragments, and what a write has to complete.
#[test]
fn qcow2_with_every_kind_of_extent() {
    let Some(_switch) = rings() else { return };
    for options in ["cluster_size=4k", "cluster_size=64k", "cluster_size=64k,extended_l2=on"] {
        let directory = scratch();
        let path = |name: &str| directory.path().join(name);
        let (base, packed, top) = (path("base.img"), path("packed.qcow2"), path("top.qcow2"));
        raw(&base, 3 << 20, 1);
        // A middle layer that is compressed.
        qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", text(&base), text(&packed)]);
        qemu_img(&["resize", text(&packed), "3500k"]);
        let size = LEN.to_string();
        let backing = format!("{options},backing_file={},backing_fmt=qcow2", text(&packed));
        qemu_img(&["create", "-f", "qcow2", "-o", &backing, text(&top), &size]);
        let mut model = vec![0; LEN];
        model[..3 << 20].copy_from_slice(&pattern(1, 0, 3 << 20));
        // Every second 4 KiB of a part, so that one read has over 100 extents.
        let pieces: Vec<String> =
            (0..128).map(|at| format!("write -P 0x55 {} 4k", (1 << 20) + at * 8192)).collect();
        qemu_io(&top, "qcow2", &pieces.iter().map(String::as_str).collect::<Vec<_>>());
        qemu_io(&top, "qcow2", &["write -z 2M 192k", "write -P 0x66 3400k 300k"]);
        for at in 0..128 {
            let start = (1 << 20) + at * 8192;
            model[start..start + 4096].fill(0x55);
        }
        model[2 << 20..(2 << 20) + (192 << 10)].fill(0);
        model[3400 << 10..3700 << 10].fill(0x66);
        for words in [&[][..], &["--direct"]] {
            let disk = zero_copy(&top, &[&["--format", "qcow2"], words].concat());
            check_against_model(disk.path(), &mut model, 250, 11, true);
            assert_used(&disk);
            assert_eq!(disk.stop().code(), Some(0), "{options}");
        }
        ringdisk_testkit::images::assert_clean(&top);
    }
}

/// The device that takes any memory, says that it worked, and puts the data elsewhere.
#[test]
fn a_ram_disk_that_lies_about_alignment() {
    let Some(_switch) = rings() else { return };
    let loaded = run(command(&["modprobe", "brd", "rd_nr=1", "rd_size=8192"])).code() == Some(0);
    let device = Path::new("/dev/ram0");
    if !needs("a RAM disk (brd)", loaded && device.exists()) {
        return;
    }
    let most =
        std::fs::read_to_string("/sys/block/ram0/queue/write_zeroes_max_bytes").expect("sysfs");
    let can_discard = most.trim() != "0";
    let mut model = pattern(3, 0, 8 << 20);
    File::options().write(true).open(device).expect("open").write_all_at(&model, 0).expect("fill");
    for words in [&["--direct"][..], &[]] {
        let disk = zero_copy(device, &[&["--format", "raw"], words].concat());
        check_against_model(disk.path(), &mut model, 300, 13, can_discard);
        assert_used(&disk);
        assert_eq!(disk.stop().code(), Some(0));
    }
    // A file system on it does not change that.
    ok_words(&["mkfs.ext4", "-q", text(device)]);
    let directory = scratch();
    let system = FileSystem::of(device, directory.path(), "");
    check_raw(system.path(), &["--direct"]);
    system.unmount();
    ok_words(&["rmmod", "brd"]);
}

#[test]
fn memory_in_odd_pieces() {
    let Some(_switch) = rings() else { return };
    let directory = scratch();
    let image = directory.path().join("disk.img");
    raw(&image, LEN as u64, 1);
    let disk = zero_copy(&image, &["--format", "raw"]);
    let file = open_direct(disk.path());
    let sizes = [1, 511, 4096, 3, 70_001, 512, 9000];
    let total: usize = sizes.iter().sum();
    for offset in [0, 1, 4095, 1_000_003] {
        let mut pieces: Vec<Vec<u8>> = sizes.iter().map(|size| vec![0; *size]).collect();
        let mut slices: Vec<_> = pieces.iter_mut().map(|piece| IoSliceMut::new(piece)).collect();
        assert_eq!(rustix::io::preadv(&file, &mut slices, offset), Ok(total));
        assert!(pieces.concat() == pattern(1, offset, total), "{offset}");
    }
    let data = pattern(9, 0, total);
    let mut rest = &data[..];
    let slices: Vec<_> = sizes
        .iter()
        .map(|size| {
            let (piece, behind) = rest.split_at(*size);
            rest = behind;
            IoSlice::new(piece)
        })
        .collect();
    assert_eq!(rustix::io::pwritev(&file, &slices, 12_345), Ok(total));
    let mut got = vec![0; total];
    file.read_exact_at(&mut got, 12_345).expect("read");
    assert!(got == data);
}

#[test]
fn reads_over_the_end_are_short_and_touch_nothing_behind_it() {
    let Some(_switch) = rings() else { return };
    let directory = scratch();
    for (len, words) in [(1_000_003, &[][..]), (1_000_003, &["--direct"]), (1 << 20, &["--direct"])]
    {
        let image = directory.path().join("disk.img");
        raw(&image, len, 1);
        let disk = zero_copy(&image, &[&["--format", "raw"], words].concat());
        let file = open_direct(disk.path());
        for (offset, wanted) in [(len - 1, 1), (len - 5000, 5000), (len, 0), (len + 4096, 0)] {
            let mut memory = Memory::new(8, 65536);
            let got = file.read_at(memory.get(), offset).expect("a read");
            assert_eq!(got, wanted, "at {offset} of {len}");
            assert!(memory.get()[..got] == pattern(1, offset, got), "at {offset} of {len}");
            memory.assert_fence("over the end");
        }
        drop(file);
        assert_eq!(disk.stop().code(), Some(0));
    }
}

#[test]
fn an_image_that_shrinks_meanwhile_reads_as_zeroes_there() {
    let Some(_switch) = rings() else { return };
    let directory = scratch();
    let image = directory.path().join("disk.img");
    raw(&image, LEN as u64, 1);
    let disk = zero_copy(&image, &["--format", "raw"]);
    let file = open_direct(disk.path());
    File::options().write(true).open(&image).expect("open").set_len(1_500_000).expect("cut");
    let mut memory = Memory::new(504, 1 << 20);
    file.read_exact_at(memory.get(), MIB).expect("no error");
    let there = usize::try_from(1_500_000 - MIB).expect("small");
    assert!(memory.get()[..there] == pattern(1, MIB, there));
    assert!(memory.get()[there..].iter().all(|byte| *byte == 0));
    memory.assert_fence("a cut image");
}

/// With the page cache of the client in between: readahead, and writes of odd pieces.
#[test]
fn pages_of_the_kernels_own_cache() {
    let Some(_switch) = rings() else { return };
    let directory = scratch();
    let image = directory.path().join("disk.img");
    raw(&image, LEN as u64 + 777, 1);
    let disk = zero_copy(&image, &["--format", "raw", "--kernel-cache"]);
    let mut model = pattern(1, 0, LEN + 777);
    assert!(std::fs::read(disk.path()).expect("read") == model);
    let file = File::options().read(true).write(true).open(disk.path()).expect("open");
    for (offset, len) in [(0_usize, 5), (4_095, 2), (100_000, 300_001), (LEN, 777)] {
        let data = pattern(5, offset as u64, len);
        file.write_all_at(&data, offset as u64).expect("write");
        model[offset..offset + len].copy_from_slice(&data);
    }
    file.sync_all().expect("flush");
    drop(file);
    assert!(std::fs::read(disk.path()).expect("read") == model);
    assert_eq!(disk.stop().code(), Some(0));
    assert!(std::fs::read(&image).expect("the image") == model);
}

/// A user who is not root.
const SOMEBODY: u32 = 65534;

/// The file, past the page cache, opened by a thread of this user.
fn open_as(user: u32, path: &Path) -> File {
    std::thread::scope(|scope| {
        let open = scope.spawn(|| {
            let user = Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(user, user, user).expect("another user");
            open_direct(path)
        });
        open.join().expect("opened")
    })
}

#[test]
fn auto_takes_client_pages_once_requests_are_large() {
    let Some(_switch) = rings() else { return };
    if !needs("zero-copy (Linux 7.3)", has_zero_copy()) {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.img");
    raw(&image, LEN as u64, 1);
    let words = ["--format", "raw", "--transport", "uring", "--allow-other"];
    let disk = serve(&image, &words);
    // The directories of tests are for root alone.
    for (path, mode) in [(disk.path().parent().expect("one"), 0o755), (disk.path(), 0o666)] {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("chmod");
    }
    let read_as = |user: u32, size: usize, count: usize| {
        let file = open_as(user, disk.path());
        let mut memory = Memory::new(0, size);
        for at in 0..count {
            file.read_exact_at(memory.get(), (at * size % LEN) as u64).expect("read");
        }
        counted(&disk).1
    };
    let read = |size, count| read_as(SOMEBODY, size, count);
    assert_eq!(read(4096, 200), 0);
    assert_eq!(read(1 << 20, 200), 0, "decided when it was opened");
    assert_eq!(read_as(0, 1 << 20, 100), 0, "root may hand the file to a loop device");
    let some = read(1 << 20, 100);
    assert!(some >= 100, "{some}");
    assert!(read(4096, 4000) > some);
    let now = read(4096, 1);
    assert_eq!(read(4096, 10), now, "small requests again");
}

#[test]
fn zero_copy_that_was_asked_for_and_cannot_be_had_is_refused() {
    let Some(switch) = rings() else { return };
    let on = ["--null", "1M", "--zero-copy", "on"];
    if !has_zero_copy() {
        refused(&on, &["zero-copy", "7.3"]);
    }
    refused(&[&on[..], &["--transport", "dev"]].concat(), &["zero-copy", "io_uring"]);
    drop(switch);
    let Some(_off) = UringParameter::set(false) else { return };
    refused(&on, &["zero-copy", "io_uring"]);
}

/// A killed client leaves no page behind that something is still written to, and the mount serves
/// on.
#[test]
fn killed_clients_and_servers_leave_nobody_hanging() {
    let Some(_switch) = rings() else { return };
    let directory = scratch();
    let image = directory.path().join("disk.img");
    raw(&image, LEN as u64, 1);
    let mut disk = zero_copy(&image, &["--format", "raw", "--direct"]);
    let reader = format!(
        "while dd if={} of=/dev/null bs=1M iflag=direct 2>/dev/null; do :; done",
        disk.text()
    );
    let reading = |disk: &Mounted| {
        let before = counted(disk).0;
        let client = Process::spawn(&mut command(&["sh", "-c", &reader]));
        let served = until(STOP, || (counted(disk).0 > before + 2).then_some(()));
        assert_eq!(served, Some(()), "{}", disk.output());
        client
    };
    for _ in 0..10 {
        let mut client = reading(&disk);
        client.signal(Signal::KILL);
        assert!(client.wait(STOP).is_some());
    }
    let file = open_direct(disk.path());
    let mut memory = Memory::new(0, 1 << 20);
    file.read_exact_at(memory.get(), MIB).expect("it serves on");
    assert!(memory.get() == pattern(1, MIB, 1 << 20));
    drop(file);
    let mut client = reading(&disk);
    disk.process().signal(Signal::KILL);
    assert!(client.wait(STOP).is_some());
    assert!(std::fs::read(&image).expect("the image") == pattern(1, 0, LEN));
}

/// Options that a qcow2 needs to be made: all of them are there.
#[test]
fn zeroes_that_are_detected_are_looked_for_in_client_pages_too() {
    let Some(_switch) = rings() else { return };
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    qcow2(&image, "4M", "");
    let disk = zero_copy(&image, &["--format", "qcow2", "--detect-zeroes", "on"]);
    let file = open_direct(disk.path());
    let mut memory = Memory::new(8, 1 << 20);
    memory.get().fill(0);
    file.write_all_at(memory.get(), 0).expect("zeroes");
    memory.get()[1000] = 1;
    file.write_all_at(memory.get(), MIB).expect("not all zeroes");
    drop(file);
    assert_eq!(disk.stop().code(), Some(0));
    let map = qemu_img(&["map", "--output=json", text(&image)]);
    let runs: serde_json::Value = serde_json::from_str(&map).expect("json");
    let data: u64 = runs
        .as_array()
        .expect("runs")
        .iter()
        .filter(|run| run["data"] == true)
        .map(|run| run["length"].as_u64().expect("bytes"))
        .sum();
    assert_eq!(data, MIB, "{map}");
}
