use std::mem::{offset_of, size_of};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

use ringdisk_guest::Layout;
use ringdisk_guest::driver::{Driver, DriverConfig, GuestRam};
use rustix::event::{EventfdFlags, eventfd};
use rustix::ioctl::opcode;

use super::*;

/// Headers of older systems do not have workers, nor a choice of what they are.
const WORKERS: &str = "
#ifndef VHOST_NEW_WORKER
struct vhost_worker_state { unsigned int worker_id; };
struct vhost_vring_worker { unsigned int index; unsigned int worker_id; };
#define VHOST_NEW_WORKER _IOR(VHOST_VIRTIO, 0x8, struct vhost_worker_state)
#define VHOST_FREE_WORKER _IOW(VHOST_VIRTIO, 0x9, struct vhost_worker_state)
#define VHOST_ATTACH_VRING_WORKER _IOW(VHOST_VIRTIO, 0x15, struct vhost_vring_worker)
#define VHOST_GET_VRING_WORKER _IOWR(VHOST_VIRTIO, 0x16, struct vhost_vring_worker)
#endif
#ifndef VHOST_SET_FORK_FROM_OWNER
#define VHOST_SET_FORK_FROM_OWNER _IOW(VHOST_VIRTIO, 0x84, __u8)
#endif
";

/// Values of C expressions, with the module's header and that of vhost.
fn in_c(expressions: &[String]) -> Vec<u64> {
    let directory = tempfile::tempdir().unwrap();
    let (source, program) = (directory.path().join("a.c"), directory.path().join("a"));
    let prints = expressions.iter().map(|each| format!("printf(\"%llu\\n\", P({each}));\n"));
    let prints: String = prints.collect();
    let text = format!(
        "#include <stddef.h>\n#include <stdio.h>\n#include \
         <linux/vhost.h>\n#include \"ringdisk_vhost_blk.h\"\n{WORKERS}\n\
         #define P(x) (unsigned long long)(x)\nint main(void) {{\n{prints}return 0; }}\n"
    );
    std::fs::write(&source, text).unwrap();
    let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel/vhost-blk");
    let mut compiler = Command::new("cc");
    compiler.args(["-Wall", "-Wextra", "-Werror", "-I"]).arg(headers);
    let compiled = compiler.arg(&source).arg("-o").arg(&program).output().expect("cc");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&program).output().unwrap().stdout;
    let printed = String::from_utf8(printed).unwrap();
    printed.lines().map(|line| line.parse().unwrap()).collect()
}

/// Compares C expressions with our values.
fn agree(pairs: &[(String, u64)]) {
    let expressions: Vec<String> = pairs.iter().map(|(expression, _)| expression.clone()).collect();
    let theirs = in_c(&expressions);
    assert_eq!(theirs.len(), pairs.len());
    let wrong: Vec<_> =
        pairs.iter().zip(theirs).filter(|((_, ours), theirs)| ours != theirs).collect();
    assert!(wrong.is_empty(), "expression, ours, that of the header: {wrong:?}");
}

/// Size of a structure, and the offset of each field (`ours: theirs` where the names differ).
macro_rules! layout {
    ($ours:ty, $theirs:literal, [$($field:ident),*]) => {{
        let mut pairs = vec![(format!("sizeof(struct {})", $theirs), size_of::<$ours>() as u64)];
        $(pairs.push((
            format!("offsetof(struct {}, {})", $theirs, stringify!($field)),
            offset_of!($ours, $field) as u64,
        ));)*
        pairs
    }};
}

#[test]
fn structures_are_as_in_the_headers() {
    let mut all = layout!(
        InfoWords,
        "ringdisk_vblk_info",
        [version, engines, queues_max, ring_max, request_bytes_max, ranges_max, features, reserved]
    );
    all.extend(layout!(SetupWords, "ringdisk_vblk_setup", [version, queues, reserved]));
    all.extend(layout!(
        DiskWords,
        "ringdisk_vblk_disk",
        [
            fd,
            flags,
            engine,
            block_bytes,
            memory_align,
            ranges_max,
            range_sectors_max,
            reserved0,
            capacity,
            id,
            reserved1
        ]
    ));
    all.extend(layout!(
        StatsWords,
        "ringdisk_vblk_stats",
        [
            queue,
            state,
            in_flight,
            reserved0,
            reads,
            writes,
            flushes,
            discards,
            write_zeroes,
            get_ids,
            read_bytes,
            write_bytes,
            errors,
            unsupported,
            rounds,
            batches,
            bounced,
            bounce_waits,
            bios,
            kiocbs,
            starved,
            orphans,
            broken,
            reserved1
        ]
    ));
    all.extend(layout!(
        MemoryRegion,
        "vhost_memory_region",
        [guest_phys_addr, memory_size, userspace_addr, flags_padding]
    ));
    all.extend(layout!(VringState, "vhost_vring_state", [index, num]));
    all.extend(layout!(VringFile, "vhost_vring_file", [index, fd]));
    all.extend(layout!(
        VringAddr,
        "vhost_vring_addr",
        [index, flags, desc_user_addr, used_user_addr, avail_user_addr, log_guest_addr]
    ));
    all.extend(layout!(WorkerState, "vhost_worker_state", [worker_id]));
    all.extend(layout!(VringWorker, "vhost_vring_worker", [index, worker_id]));
    let table = layout!(MemoryTable, "vhost_memory", [nregions, padding, regions]);
    // Its size is that of the regions, too.
    all.extend(table.into_iter().skip(1));

    agree(&all);
}

#[test]
fn numbers_of_ioctls_are_as_in_the_headers() {
    #[allow(clippy::unnecessary_cast, clippy::useless_conversion, reason = "the platform's type")]
    let number = |name: &str, number: Opcode| (name.to_owned(), number as u64);
    agree(&[
        number("RINGDISK_VBLK_INFO", uapi::INFO.0),
        number("RINGDISK_VBLK_SETUP", uapi::SETUP.0),
        number("RINGDISK_VBLK_SET_DISK", uapi::SET_DISK.0),
        number("RINGDISK_VBLK_START", uapi::START.0),
        number("RINGDISK_VBLK_STOP", uapi::STOP.0),
        number("RINGDISK_VBLK_SET_CACHE", uapi::SET_CACHE.0),
        number("RINGDISK_VBLK_STATS", uapi::STATS.0),
        number("VHOST_SET_FEATURES", uapi::SET_FEATURES.0),
        number("VHOST_SET_OWNER", uapi::SET_OWNER),
        number("VHOST_SET_MEM_TABLE", uapi::SET_MEM_TABLE.0),
        number("VHOST_NEW_WORKER", uapi::NEW_WORKER.0),
        number("VHOST_FREE_WORKER", uapi::FREE_WORKER.0),
        number("VHOST_SET_VRING_NUM", uapi::SET_VRING_NUM.0),
        number("VHOST_SET_VRING_ADDR", uapi::SET_VRING_ADDR.0),
        number("VHOST_SET_VRING_BASE", uapi::SET_VRING_BASE.0),
        number("VHOST_GET_VRING_BASE", uapi::GET_VRING_BASE.0),
        number("VHOST_ATTACH_VRING_WORKER", uapi::ATTACH_VRING_WORKER.0),
        number("VHOST_GET_VRING_WORKER", uapi::GET_VRING_WORKER.0),
        number("VHOST_SET_VRING_KICK", uapi::SET_VRING_KICK.0),
        number("VHOST_SET_VRING_CALL", uapi::SET_VRING_CALL.0),
        number("VHOST_SET_VRING_ERR", uapi::SET_VRING_ERR.0),
        number("VHOST_SET_FORK_FROM_OWNER", uapi::SET_FORK_FROM_OWNER.0),
    ]);
    assert_ne!(uapi::SET_MEM_TABLE.0, opcode::write::<MemoryTable>(0xAF, 3));
}

#[test]
fn constants_are_as_in_the_header() {
    let word = |name: &str, value: u32| (format!("RINGDISK_VBLK_{name}"), u64::from(value));
    agree(&[
        word("VERSION", uapi::VERSION),
        word("ENGINE_DEFAULT", uapi::ENGINE_DEFAULT),
        word("ENGINE_KIOCB", uapi::ENGINE_KIOCB),
        word("ENGINE_BIO", uapi::ENGINE_BIO),
        word("DISK_RO", uapi::DISK_RO),
        word("DISK_WRITE_THROUGH", uapi::DISK_WRITE_THROUGH),
        word("ALL", uapi::ALL),
        word("IDLE", uapi::IDLE),
        word("RUNNING", uapi::RUNNING),
        word("BROKEN", uapi::BROKEN),
        word("DRAINING", uapi::DRAINING),
    ]);
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

/// A handle of something that is no such device, with a queue: every ioctl fails.
fn none() -> Handle {
    Handle { fd: event(), features: 0, memory: None, started: vec![None] }
}

fn areas(ram: &mut GuestRam, size: u16) -> Areas {
    let config = DriverConfig { layout: Layout::Split, size, event_idx: false, indirect: 0 };
    Driver::new(ram, config).unwrap().areas().clone()
}

#[test]
fn areas_are_as_long_as_the_features_want() {
    let mut ram = GuestRam::new(1 << 20).unwrap();
    let good = areas(&mut ram, 64);
    let mut handle = none();
    let short = |part: &RingMemory, by| part.part(0, part.len() - by);

    assert!(handle.is_large_enough(&good, 64) && handle.is_large_enough(&good, 32));
    assert!(!handle.is_large_enough(&good, 128) && !handle.is_large_enough(&good, 48));
    assert!(!handle.is_large_enough(&good, 0));
    let odd = Areas { device: ram.memory().part(2, 4096), ..good.clone() };
    assert!(!handle.is_large_enough(&odd, 64));
    for areas in [
        Areas { descriptors: short(&good.descriptors, 1), ..good.clone() },
        Areas { driver: short(&good.driver, 1), ..good.clone() },
        Areas { device: short(&good.device, 1), ..good.clone() },
    ] {
        assert!(!handle.is_large_enough(&areas, 64), "{areas:?}");
    }
    handle.features = EVENT_IDX;
    assert!(!handle.is_large_enough(&good, 64));
}

#[test]
fn a_start_that_fails_keeps_no_memory() {
    let mut ram = GuestRam::new(1 << 20).unwrap();
    let mut handle = none();
    assert_eq!(handle.start(0, 64, 0, areas(&mut ram, 64)), Err(Errno::INVAL), "without memory");
    handle.memory = Some(ram.table());

    assert_eq!(handle.start(0, 64, 0, areas(&mut ram, 64)), Err(Errno::NOTTY));
    assert_eq!(handle.start(0, 64, 0, areas(&mut ram, 32)), Err(Errno::INVAL));
    assert_eq!(handle.start(1, 64, 0, areas(&mut ram, 64)), Err(Errno::NOBUFS));

    assert!(!handle.is_started(0) && !handle.is_started(1));
}

#[test]
fn what_the_kernel_uses_is_not_replaced_while_a_queue_is_started() {
    let mut ram = GuestRam::new(1 << 20).unwrap();
    let mut handle = none();
    handle.started[0] = Some(areas(&mut ram, 64));
    handle.memory = Some(ram.table());

    assert_eq!(handle.set_memory(ram.table()), Err(Errno::BUSY));
    assert_eq!(handle.set_features(0), Err(Errno::BUSY));
    assert_eq!(handle.start(0, 64, 0, areas(&mut ram, 64)), Err(Errno::BUSY));
}

#[test]
fn memory_of_a_queue_that_cannot_be_stopped_is_never_unmapped() {
    let mut ram = GuestRam::new(1 << 20).unwrap();
    let memory = ram.table();
    let mut handle = none();
    handle.started[0] = Some(areas(&mut ram, 64));
    handle.memory = Some(Arc::clone(&memory));

    assert_eq!(handle.stop(0), Err(Errno::NOTTY));
    assert!(handle.is_started(0));
    drop(handle);

    assert_eq!(Arc::strong_count(&memory), 2);
}

#[test]
fn memory_of_a_device_without_started_queues_is_let_go() {
    let ram = GuestRam::new(1 << 20).unwrap();
    let memory = ram.table();
    let mut handle = none();
    handle.memory = Some(Arc::clone(&memory));

    drop(handle);

    assert_eq!(Arc::strong_count(&memory), 1);
}
