//! Each kind of request, the configuration space, and what makes a write durable.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ringdisk_disk::{Bytes, Format};
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::model::{Cut, Kind, Refused, Request, VmOptions, ask, bits, range};
use ringdisk_testkit::mount::scratch;
use ringdisk_testkit::sim::OpKind;

use crate::common::{MIB, open, serve, simulated};

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
/// `writeback` in the configuration space.
const WRITEBACK: u32 = 32;

fn options() -> VmOptions {
    VmOptions { indirect: 1026, slot_bytes: 1 << 20, slots: 4, ..VmOptions::default() }
}

#[test]
fn each_request_is_answered_as_the_specification_says() {
    let (sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(options());
    let end = MIB / 512;
    let ranges = |kind, list: &[[u8; 16]]| Request::ranges(kind, list);
    let (zero, discard) = (Kind::WriteZeroes, Kind::Discard);
    let many: Vec<[u8; 16]> = (0..64).map(|n| range(8 + n * 16, 8, 0)).collect();
    let more = [many.clone(), vec![range(0, 1, 0)]].concat();
    for (what, request, status) in [
        ("a write", Request::write(0, vec![7; 512]), OK),
        ("at the end", Request::write(end - 1, vec![8; 512]), OK),
        ("past the end", Request::write(end, vec![8; 512]), IO_ERROR),
        ("over the end", Request::write(end - 1, vec![8; 1024]), IO_ERROR),
        ("far away", Request::write(u64::MAX, vec![8; 512]), IO_ERROR),
        ("a sector whose offset is too large", Request::read(u64::MAX / 512, 512), IO_ERROR),
        ("reading past the end", Request::read(end, 512), IO_ERROR),
        ("reading over the end", Request::read(end - 1, 1024), IO_ERROR),
        ("reading nothing", Request::read(0, 0), OK),
        ("a part of a sector", Request::read(0, 100), IO_ERROR),
        ("writing a part of a sector", Request::write(0, vec![1; 513]), IO_ERROR),
        ("flush", Request::flush(), OK),
        ("unknown", Request { kind: Kind::Unknown, ..Request::flush() }, UNSUPPORTED),
        ("secure erase", ranges(Kind::SecureErase, &[range(0, 8, 0)]), UNSUPPORTED),
        ("zeroes", ranges(zero, &many), OK),
        ("zeroes with unmap", ranges(zero, &[range(0, 8, 1)]), OK),
        ("zeroes with unknown flags", ranges(zero, &[range(0, 8, 2)]), UNSUPPORTED),
        ("zeroes past the end", ranges(zero, &[range(end - 4, 8, 0)]), IO_ERROR),
        ("too many ranges", ranges(zero, &more), IO_ERROR),
        ("no range", ranges(zero, &[]), IO_ERROR),
        ("half a range", Request { out: vec![0; 24], ..ranges(zero, &[]) }, IO_ERROR),
        ("a range that is too long", ranges(zero, &[range(0, u32::MAX, 0)]), IO_ERROR),
        ("discard", ranges(discard, &many), OK),
        ("discard with unmap", ranges(discard, &[range(0, 8, 1)]), UNSUPPORTED),
        ("discard past the end", ranges(discard, &[range(end, 8, 0)]), IO_ERROR),
    ] {
        for request in [request.clone(), request.clone().cut(Cut::Anywhere(9)), request.indirect()]
        {
            assert_eq!(vm.status(0, request), status, "{what}");
        }
    }
    for (room, text) in [(20, &b"model\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"[..]), (3, b"mod")] {
        let done = vm.run(0, Request::get_id(room).cut(Cut::Anywhere(6)));
        assert_eq!((done.status, &done.data[..]), (OK, text));
    }
    assert_eq!(served.export.broken_reason(), None);
    assert_eq!(sim.image()[..4096], [0; 4096]);
    // Each was sent three times, and none of them reached the image.
    let health = served.export.health_reader()();
    assert_eq!((health.io_errors, health.refused, health.image_errors), (42, 42, 0));
}

#[test]
fn every_range_of_a_request_is_zeroed_or_discarded_and_nothing_else() {
    let (sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(options());
    for kind in [Kind::WriteZeroes, Kind::Discard] {
        sim.put(0, &vec![9; 1 << 20]);
        let list = [range(8, 8, 0), range(64, 16, 0), range(2040, 8, 0)];
        let request = Request::ranges(kind, &list).cut(Cut::Anywhere(12));
        assert_eq!(vm.status(0, request), OK);
        let image = sim.image();
        for (sector, bytes) in image.chunks(512).enumerate() {
            let inside = matches!(sector, 8..16 | 64..80 | 2040..);
            assert!(bytes.iter().all(|b| *b == if inside { 0 } else { 9 }), "sector {sector}");
        }
    }
}

#[test]
fn a_request_has_up_to_1024_segments_of_data() {
    let (sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    for packed in [0, bits::PACKED] {
        let features = VmOptions::default().features | packed;
        let mut vm = served.vm(VmOptions { features, size: 1024, ..options() });
        let bytes: Vec<u8> = (0..512 << 10).map(|n: u32| (n / 512).to_le_bytes()[0]).collect();
        for segments in [1024, 1022, 126] {
            let write = Request::write(3, bytes.clone()).cut(Cut::Pieces(segments)).indirect();
            assert_eq!(vm.status(0, write), OK);
            assert!(sim.image()[1536..][..bytes.len()] == bytes);
            let read = Request::read(3, bytes.len()).cut(Cut::Pieces(segments)).indirect();
            let done = vm.run(0, read);
            assert!(done.status == OK && done.data == bytes, "{segments} segments");
        }
        // All of a ring, without a table.
        let read = Request::read(3, bytes.len() / 2).cut(Cut::Pieces(512));
        assert_eq!(vm.run(0, read).data, bytes[..bytes.len() / 2]);
    }
}

#[test]
fn a_read_only_disk_is_read_and_not_changed() {
    let (sim, disk) = simulated(MIB);
    sim.put(512, &[5; 512]);
    let served = serve(disk, |options| options.common.read_only = true);
    let mut vm = served.vm(options());
    assert!(vm.has(bits::READ_ONLY));
    assert!(!vm.has(bits::DISCARD | bits::WRITE_ZEROES | bits::CONFIG_WCE));
    assert_eq!(vm.run(0, Request::read(1, 512)).data, [5; 512]);
    assert_eq!(vm.status(0, Request::write(1, vec![0; 512])), IO_ERROR);
    for kind in [Kind::Discard, Kind::WriteZeroes] {
        assert_eq!(vm.status(0, Request::ranges(kind, &[range(1, 1, 0)])), IO_ERROR);
    }
    assert_eq!(vm.status(0, Request::flush()), OK);
    assert_eq!(sim.count(OpKind::Write) + sim.count(OpKind::Discard), 0);
}

#[test]
fn logical_blocks_of_4096_bytes_are_the_smallest_unit() {
    let (_sim, disk) = simulated(MIB + 512);
    let served = serve(disk, |options| {
        (options.logical_block_size, options.physical_block_size) = (4096, Some(16384));
    });
    let mut vm = served.vm(options());
    let config = vm.front.config(0, 60).expect("the configuration");
    assert_eq!(config[..8], (MIB / 512).to_le_bytes(), "whole blocks only");
    assert_eq!(config[20..24], 4096_u32.to_le_bytes());
    assert_eq!(config[24], 2, "four logical blocks are a physical one");
    for (request, status) in [
        (Request::read(0, 512), IO_ERROR),
        (Request::read(1, 4096), IO_ERROR),
        (Request::read(8, 4096), OK),
        (Request::write(8, vec![1; 2048]), IO_ERROR),
        (Request::write(8, vec![1; 8192]), OK),
        (Request::ranges(Kind::WriteZeroes, &[range(8, 4, 0)]), IO_ERROR),
        (Request::ranges(Kind::WriteZeroes, &[range(8, 8, 0)]), OK),
    ] {
        assert_eq!(vm.status(0, request.cut(Cut::Anywhere(8))), status);
    }
}

/// Whether a write is durable once it was answered.
fn is_through(features: u64, cache: Option<u8>) -> bool {
    let (sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(VmOptions { features, ..options() });
    if let Some(cache) = cache {
        vm.front.set_config(WRITEBACK, &[cache]).expect("it can be written");
        assert_eq!(vm.front.config(WRITEBACK, 1), Ok(vec![cache]));
    }
    assert_eq!(vm.status(0, Request::write(0, vec![1; 4096])), OK);
    let through = sim.unflushed() == 0;
    if features & bits::WRITE_ZEROES != 0 {
        let zeroes = Request::ranges(Kind::WriteZeroes, &[range(0, 8, 0)]);
        assert_eq!(vm.status(0, zeroes), OK);
        assert_eq!(sim.unflushed() == 0, through, "zeroes are as writes");
    }
    through
}

#[test]
fn a_write_is_durable_at_once_where_the_driver_cannot_or_does_not_want_to_flush() {
    let all = VmOptions::default().features;
    let (no_flush, no_wce) = (!bits::FLUSH, !bits::CONFIG_WCE);
    assert!(!is_through(all, None), "a write cache, at first");
    assert!(is_through(all, Some(0)));
    assert!(!is_through(all, Some(1)));
    assert!(!is_through(all & no_wce, None), "the driver flushes");
    assert!(is_through(all & no_wce & no_flush, None), "SeaBIOS");
    assert!(!is_through(all & no_flush, None), "it can turn the cache off, and has not");
}

#[test]
fn turning_the_write_cache_off_makes_durable_what_was_written_before() {
    let (sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(options());
    assert_eq!(vm.status(0, Request::write(0, vec![1; 4096])), OK);
    assert!(sim.unflushed() > 0);
    vm.front.set_config(WRITEBACK, &[0]).expect("it can be written");
    assert_eq!(sim.unflushed(), 0);
    // A reset is no reason to have a cache again.
    vm.reset().expect("a reset");
    assert_eq!(vm.status(0, Request::write(0, vec![2; 4096])), OK);
    assert_eq!(sim.unflushed(), 0);
}

#[test]
fn the_configuration_can_be_read_at_any_place_and_of_any_length() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(options());
    let all = vm.front.config(0, 256).expect("all of it");
    assert_eq!(all[..8], (MIB / 512).to_le_bytes());
    assert_eq!(all[12..16], 126_u32.to_le_bytes(), "seg_max");
    assert_eq!((all[32], &all[34..36]), (1, &[8, 0][..]), "write cache and queues");
    let padded = |start: usize, len: usize| -> Vec<u8> {
        (start..start + len).map(|at| all.get(at).copied().unwrap_or(0)).collect()
    };
    for len in [1, 2, 7, 57, 60, 96, 255, 256, 257, 1024, 4096_usize] {
        for offset in [0, 1, 8, 31, 95, 200, 255, 256 + 4_usize] {
            let (start, wanted) = (u32::try_from(offset), u32::try_from(len));
            let got = vm.front.config(start.expect("small"), wanted.expect("small"));
            let from = if offset >= 256 { offset - 256 } else { offset };
            assert_eq!(got, Ok(padded(from, len)), "{len} bytes at {offset}");
        }
    }
    assert_eq!(vm.front.config(0, 0).err(), None, "nothing of it");
    assert_eq!(vm.front.config(0, 4097), Err(Refused::Gone));
}

#[test]
fn a_running_driver_is_told_of_another_size() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk.clone(), |_| {});
    let mut vm = served.vm(options());
    let (mut ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    ours.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    vm.front.tell(ask::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]).expect("a channel");
    assert_eq!(vm.status(0, Request::write(2048, vec![1; 512])), IO_ERROR);
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    runtime.block_on(disk.resize(&ring, Bytes(2 * MIB))).expect("resize");
    let mut message = [0; 12];
    ours.read_exact(&mut message).expect("a message");
    // CONFIG_CHANGE_MSG, version 1, no payload.
    assert_eq!(message[..4], 2_u32.to_ne_bytes());
    assert_eq!((message[4] & 0b111, &message[8..]), (1, &[0; 4][..]));
    let capacity = vm.front.config(0, 8).expect("the capacity");
    assert_eq!(capacity, (2 * MIB / 512).to_le_bytes());
    assert_eq!(vm.status(0, Request::write(2048, vec![1; 512])), OK);
}

#[test]
fn pinned_memory_of_the_guest_is_named_by_its_slots_in_operations_on_the_image() {
    // Root may lock as much as it likes; the guest has 256 MiB.
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let path = directory.path().join("raw");
    images::raw(&path, MIB, 1);
    for pinned in [true, false] {
        let served = serve(open(&path, Format::Raw), |options| options.pin_guest_memory = pinned);
        let mut vm = served.vm(options());
        assert_eq!(vm.status(0, Request::write(8, vec![7; 4096])), OK);
        assert_eq!(vm.run(0, Request::read(8, 4096)).data, vec![7; 4096]);
        let fixed = served.export.stats_reader()().total().fixed;
        assert_eq!(fixed, if pinned { 2 } else { 0 });
    }
}
