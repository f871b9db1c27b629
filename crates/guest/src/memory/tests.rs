//! Regions, tables, views and logs; and memory that goes away.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::{Error, Log, Memory, Region, View, losses};

use super::{MEMORY_BYTES_MAX, REGIONS_MAX};

const MIB: u64 = 1 << 20;

fn memfd(bytes: u64) -> OwnedFd {
    let fd = memfd_create(c"test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

fn region(guest_addr: u64, size: u64) -> Arc<Region> {
    Region::map(memfd(size), guest_addr, guest_addr + (1 << 40), size, 0).unwrap()
}

fn view(regions: Vec<Arc<Region>>) -> View {
    View::new(Arc::new(Memory::new(regions).unwrap()))
}

#[test]
fn a_region_of_odd_size_and_offset_shows_the_bytes_of_its_file() {
    let fd = memfd(0x5000 + 0x3b10);
    rustix::io::pwrite(&fd, b"begin", 0x1234).unwrap();
    let twin = fd.try_clone().unwrap();

    let region = Region::map(fd, 0x1000, 0x7000, 0x3b10, 0x1234).unwrap();
    let view = view(vec![Arc::clone(&region)]);
    let mut got = [0; 5];
    assert!(view.read(0x1000, &mut got));
    assert!(view.write(0x1000 + 0x3b10 - 4, b"last"));
    let mut last = [0; 4];
    rustix::io::pread(&twin, &mut last, 0x1234 + 0x3b10 - 4).unwrap();

    assert_eq!((&got, &last), (b"begin", b"last"));
    assert_eq!(region.buffer().len(), 0x3b10);
    assert!(!view.contains(0x1000 + 0x3b10 - 4, 5) && !region.is_lost());
}

#[test]
fn what_is_no_memory_is_refused() {
    let map = |fd, addr, size, offset| Region::map(fd, addr, 0, size, offset).unwrap_err();
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    let device: OwnedFd = std::fs::File::open("/dev/zero").unwrap().into();

    assert_eq!(map(pipe, 0, 4096, 0), Error::NotMemory);
    assert_eq!(map(device, 0, 4096, 0), Error::NotMemory);
    let short = Error::FileTooShort { file_bytes: 4096, end_bytes: 4097 };
    assert_eq!(map(memfd(4096), 0, 4096, 1), short);
    for (addr, size, offset) in
        [(0, 0, 0), (u64::MAX - 10, 4096, 0), (0, 1 << 45, 0), (0, 4096, u64::MAX - 10)]
    {
        let error = map(memfd(4096), addr, size, offset);
        assert!(matches!(error, Error::BadRange { .. }), "{error}");
        assert!(!error.to_string().is_empty());
    }
}

#[test]
fn a_table_finds_regions_by_both_addresses_and_refuses_overlaps() {
    let (low, high) = (region(0, MIB), region(16 * MIB, MIB));
    let memory = Memory::new(vec![Arc::clone(&high), Arc::clone(&low)]).unwrap();

    assert_eq!(memory.regions()[0].guest_addr(), 0);
    let (found, at) = memory.translate_user((1 << 40) + 16 * MIB + 5, MIB - 5).unwrap();
    assert_eq!((found.guest_addr(), at), (16 * MIB, 5));
    assert!(memory.translate_user((1 << 40) + 16 * MIB + 5, MIB - 4).is_none());
    assert!(memory.translate_user((1 << 40) + 2 * MIB, 1).is_none());
    assert!(matches!(memory.with(region(MIB - 1, 2)), Err(Error::Overlap { .. })));
    assert!(Memory::new(vec![low, region(MIB - 4096, MIB)]).is_err());
    let more = memory.with(region(MIB, MIB)).unwrap();
    assert_eq!(more.regions()[1].guest_addr(), MIB);
    assert!(more.without(MIB, MIB, 77).is_err());
    let (less, removed) = more.without(MIB, MIB, (1 << 40) + MIB).unwrap();
    assert_eq!((less.regions().len(), removed.guest_addr()), (2, MIB));
}

#[test]
fn more_regions_than_the_limit_are_refused() {
    let all = (0..REGIONS_MAX as u64).map(|number| region(number * 4096, 4096)).collect();
    let memory = Memory::new(all).unwrap();

    let error = memory.with(region(MIB * 1000, 4096)).unwrap_err();

    assert_eq!(error, Error::TooManyRegions { limit: REGIONS_MAX });
}

#[test]
fn more_memory_than_the_limit_is_refused() {
    let half = MEMORY_BYTES_MAX / 2;
    let (low, high) = (region(0, half), region(half, half));
    let memory = Memory::new(vec![Arc::clone(&low), Arc::clone(&high)]).unwrap();
    let small = region(1 << 44, 1);

    let error = memory.with(Arc::clone(&small)).unwrap_err();

    let too_much = Error::TooMuchMemory { size: MEMORY_BYTES_MAX + 1, limit: MEMORY_BYTES_MAX };
    assert_eq!(error, too_much);
    assert_eq!(Memory::new(vec![low, high, small]).unwrap_err(), too_much);
    assert!(error.to_string().contains("at most 0x40000000000 are mapped"), "{error}");
    assert!(Memory::check_size([u64::MAX, 2].into_iter()).is_err());
}

#[test]
fn a_range_over_adjacent_regions_is_pieces_of_one_memory() {
    let view = view(vec![region(0, 8192), region(8192, 4096), region(16384, 4096)]);
    let text: Vec<u8> = (0..6000u32).map(|n| n.to_le_bytes()[0]).collect();
    assert!(view.write(6000, &text));

    let mut pieces = Vec::new();
    assert!(view.pieces(6000, 6000, |piece| pieces.push(piece.to_vec())));

    assert_eq!(pieces.iter().map(Vec::len).collect::<Vec<_>>(), [2192, 3808]);
    assert_eq!(pieces.concat(), text);
    assert!(view.piece(6000, 2193).is_none() && view.contains(6000, 6000));
    assert_eq!(view.piece(8192, 4096).unwrap().len(), 4096);
    let outside = [(12288, 1), (12287, 2), (0, 16385), (u64::MAX, 1), (u64::MAX - 1, 100)];
    assert!(outside.iter().all(|(addr, len)| !view.contains(*addr, *len)));
    assert!(outside.iter().all(|(addr, len)| view.piece(*addr, *len).is_none()));
}

#[test]
fn buffers_keep_their_memory_when_region_and_view_are_gone() {
    let view = view(vec![region(0, MIB)]);
    let piece = view.piece(4096, 4096).unwrap();
    drop(view);

    piece.copy_from_slice(0, b"still there");

    assert_eq!(&piece.to_vec()[..11], b"still there");
}

#[test]
fn memory_that_is_truncated_reads_as_zeroes_and_says_so() {
    let fd = memfd(MIB);
    let twin = fd.try_clone().unwrap();
    let lost = Region::map(fd, 0, 0, MIB, 0).unwrap();
    let (kept, before) = (region(MIB, MIB), losses());
    let memory = Arc::new(Memory::new(vec![Arc::clone(&lost), Arc::clone(&kept)]).unwrap());
    let view = View::new(Arc::clone(&memory));
    assert!(view.write(0, &[7; 4096]) && view.write(8192, &[7; 4096]));
    let ring = memory.ring(12288, 4096).unwrap();

    ftruncate(&twin, 4096).unwrap();
    let mut got = [1; 4096];
    assert!(view.read(0, &mut got));
    assert!(got.iter().all(|byte| *byte == 7) && !lost.is_lost());
    assert!(view.read(8192, &mut got));

    assert!(got.iter().all(|byte| *byte == 0));
    assert!(lost.is_lost() && memory.is_lost() && ring.is_lost() && losses() > before);
    ring.store_u16(0, 5, Ordering::Release);
    assert_eq!(ring.load_u16(0, Ordering::Acquire), 5);
    view.piece(0, 1 << 20).unwrap().fill(3);
    assert!(view.write(MIB, &[9; 4096]) && !kept.is_lost());
}

#[test]
fn writing_to_memory_that_is_gone_is_survived_by_copies_too() {
    let fd = memfd(0x3b10);
    let twin = fd.try_clone().unwrap();
    let region = Region::map(fd, 0, 0, 0x3b10, 0).unwrap();
    ftruncate(&twin, 0).unwrap();

    region.buffer().copy_from_slice(5, &[1; 0x3b00]);

    assert!(region.is_lost());
    assert_eq!(region.buffer().to_vec()[5], 1);
}

#[test]
fn many_scattered_faults_take_few_areas_of_the_kernel() {
    let fd = memfd(256 * MIB);
    let twin = fd.try_clone().unwrap();
    let view = view(vec![Region::map(fd, 0, 0, 256 * MIB, 0).unwrap()]);
    ftruncate(&twin, 0).unwrap();
    let areas = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let before = areas();

    for page in (0..65536_u64).rev().step_by(2) {
        assert!(view.write(page * 4096, b"x"));
    }

    // Other tests map memory meanwhile.
    assert!(areas() < before + 2000);
}

#[test]
fn huge_pages_that_are_missing_are_survived_in_whole_pages() {
    let fd = memfd_create(c"huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB)
        .expect("a kernel with huge pages, as every distribution has (CONFIG_HUGETLBFS)");
    ftruncate(&fd, 4 * MIB).expect("nothing is reserved by that");
    let twin = fd.try_clone().unwrap();
    // Nothing is reserved, so without a pool the first touch already fails; with one, after the
    // truncation.
    let region = Region::map(fd, 0, 0, 3 * MIB, MIB).unwrap();
    let view = view(vec![Arc::clone(&region)]);
    assert!(view.write(0, b"touched"));
    ftruncate(&twin, 0).unwrap();

    assert!(view.write(2 * MIB + 5, b"after") && view.write(10, b"before"));

    assert!(region.is_lost());
}

#[test]
fn faults_while_others_map_and_unmap_hit_only_their_own_memory() {
    let end = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    let region = region(0, 16 * 4096);
                    region.buffer().fill(0x5a);
                    assert!(region.buffer().to_vec().iter().all(|byte| *byte == 0x5a));
                    assert!(!region.is_lost());
                }
            });
        }
        for _ in 0..300 {
            let fd = memfd(16 * 4096);
            let twin = fd.try_clone().unwrap();
            let region = Region::map(fd, 0, 0, 16 * 4096, 0).unwrap();
            region.buffer().fill(1);
            ftruncate(&twin, 0).unwrap();
            assert!(region.buffer().is_zero() && region.is_lost());
        }
        end.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_fault_elsewhere_still_ends_the_process() {
    let exe = std::env::current_exe().unwrap();
    let name = "memory::tests::child_that_faults_elsewhere";

    let status = Command::new(exe).args(["--exact", name, "--ignored"]).output().unwrap().status;

    assert_eq!(status.signal(), Some(libc::SIGBUS));
}

#[test]
#[ignore = "run by a_fault_elsewhere_still_ends_the_process: dies"]
fn child_that_faults_elsewhere() {
    let _handler = region(0, 4096);
    let fd = memfd(4096);
    // SAFETY: a new mapping at an address that the kernel chooses.
    let start = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            4096,
            rustix::mm::ProtFlags::READ,
            rustix::mm::MapFlags::SHARED,
            fd.as_fd(),
            0,
        )
    }
    .unwrap();
    ftruncate(&fd, 0).unwrap();
    // SAFETY: reads the mapping, which faults: that is the test.
    let byte = unsafe { start.cast::<u8>().read_volatile() };
    println!("{byte} was read");
}

fn log(bytes: u64) -> (Arc<Log>, OwnedFd) {
    let fd = memfd(bytes + 24);
    let twin = fd.try_clone().unwrap();
    (Log::map(fd, bytes, 24).unwrap(), twin)
}

fn marked(fd: &OwnedFd, bytes: usize) -> Vec<u64> {
    let mut all = vec![0; bytes];
    rustix::io::pread(fd, &mut all, 24).unwrap();
    (0..bytes as u64 * 8)
        .filter(|page| all[usize::try_from(page / 8).unwrap()] & (1 << (page % 8)) != 0)
        .collect()
}

#[test]
fn a_log_marks_the_pages_that_were_written() {
    let (log, fd) = log(8);

    log.mark(4096 * 3 + 4095, 2);
    log.mark(4096 * 9, 1);
    log.mark(4096 * 15, 4096 * 18);
    log.mark(4096 * 40, 0);

    let expected: Vec<u64> = [3, 4, 9].into_iter().chain(15..33).collect();
    assert_eq!(marked(&fd, 8), expected);
}

#[test]
fn pages_past_the_end_of_a_log_are_left_out() {
    let (log, fd) = log(8);

    log.mark(4096 * 62, u64::MAX);
    log.mark(4096 * 64, 1);
    log.mark(u64::MAX, 1);

    assert_eq!(marked(&fd, 8), [62, 63]);
    assert!(Log::map(memfd(1), 1 << 40, 0).is_err());
}

#[test]
fn a_log_that_is_truncated_is_survived() {
    let (log, fd) = log(8192);
    ftruncate(&fd, 0).unwrap();

    log.mark(0, MIB);

    assert!(log.is_lost());
}
