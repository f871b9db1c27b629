//! What a client sees of each file operation on a served disk, errno by errno.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

use ringdisk_testkit::images::{self, pattern, piece};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, SeekFrom, Timespec, Timestamps, fallocate, seek, statvfs,
    utimensat,
};
use rustix::io::Errno;

use crate::common::tools::ringdisk;
use crate::common::{MIB, errno, mount, open, serve_raw};

const LEN: u64 = 4 * MIB;

fn both_times() -> Timestamps {
    let time = Timespec { tv_sec: 1, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}

#[test]
fn attributes_are_those_of_the_disk() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let stat = std::fs::metadata(disk.mounted.path()).expect("stat");
    assert_eq!((stat.len(), stat.mode() & 0o7777, stat.nlink()), (LEN, 0o600, 1));
    assert_eq!((stat.ino(), stat.uid(), stat.gid()), (1, 0, 0));
    assert!(stat.blksize() >= 4096 && stat.mtime() > 0 && stat.atime() > 0, "{stat:?}");
    assert_eq!(stat.blocks() * 512, images::allocated(&disk.image));
    assert!(stat.file_type().is_file());
}

#[test]
fn a_read_only_export_refuses_every_change_with_erofs() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &["--read-only"]);
    let path = disk.mounted.path();
    let mode = std::fs::metadata(path).expect("stat").mode() & 0o7777;
    assert_eq!(mode, 0o400);
    let rofs = Some(Errno::ROFS);
    assert_eq!(errno(File::options().write(true).open(path)), rofs);
    assert_eq!(errno(std::fs::set_permissions(path, PermissionsExt::from_mode(0o600))), rofs);
    assert_eq!(errno(std::os::unix::fs::chown(path, Some(1), None)), rofs);
    assert_eq!(utimensat(CWD, path, &both_times(), AtFlags::empty()), Err(Errno::ROFS));
    assert_eq!(piece(path, 12345, 1000), pattern(1, 12345, 1000));
}

#[test]
fn modes_for_the_owner_alone_may_be_set() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let path = disk.mounted.path();
    let set = |mode| errno(std::fs::set_permissions(path, PermissionsExt::from_mode(mode)));
    assert_eq!([set(0o400), set(0o500), set(0o600)], [None, None, None]);
    assert_eq!([set(0o644), set(0o660)], [Some(Errno::PERM), Some(Errno::PERM)]);
    assert_eq!(std::fs::metadata(path).expect("stat").mode() & 0o777, 0o600);
}

#[test]
fn owner_and_times_may_not_be_set() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let path = disk.mounted.path();
    assert_eq!(errno(std::os::unix::fs::chown(path, Some(1), Some(1))), Some(Errno::OPNOTSUPP));
    assert_eq!(utimensat(CWD, path, &both_times(), AtFlags::empty()), Err(Errno::OPNOTSUPP));
}

#[test]
fn allow_other_lets_mode_and_owner_be_set() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &["--allow-other"]);
    let path = disk.mounted.path();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o664)).expect("chmod");
    std::os::unix::fs::chown(path, Some(1), Some(2)).expect("chown");
    let stat = std::fs::metadata(path).expect("stat");
    assert_eq!((stat.mode() & 0o777, stat.uid(), stat.gid()), (0o664, 1, 2));
}

#[test]
fn reads_end_at_the_end_of_the_disk() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let file = open(disk.mounted.path());
    let mut bytes = vec![0; 100];
    assert_eq!(file.read_at(&mut bytes, LEN - 10).expect("read"), 10);
    assert_eq!(bytes[..10], pattern(1, LEN - 10, 10));
    assert_eq!(file.read_at(&mut bytes, LEN).expect("read"), 0);
    assert_eq!(file.read_at(&mut bytes, LEN + 5000).expect("read"), 0);
}

#[test]
fn writes_are_cut_at_the_end_of_the_disk() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let file = open(disk.mounted.path());
    assert_eq!(file.write_at(&[7; 100], LEN - 10).expect("write"), 10);
    for offset in [LEN, LEN + 1, LEN + 5000] {
        assert_eq!(errno(file.write_at(&[7; 100], offset)), Some(Errno::NOSPC), "{offset}");
    }
    assert_eq!(std::fs::metadata(&disk.image).expect("stat").len(), LEN);
    assert_eq!(piece(disk.mounted.path(), LEN - 10, 10), [7; 10]);
    // Some programs write again what was not written, for ever where that is nothing.
    for shell in ["sh", "bash"] {
        let line = format!("echo more >> {}", disk.mounted.text());
        let ran = process::run(process::command(&["timeout", "10", shell, "-c", &line]));
        assert!(![Some(0), Some(124)].contains(&ran.code()), "{shell}: {}", ran.output());
    }
    drop(file);
    let finished = disk.mounted.stop();
    assert!(!finished.stderr.contains("No space"), "no failure: {}", finished.stderr);
}

#[test]
fn a_growable_disk_grows_when_written_past_its_end() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &["--growable"]);
    let file = open(disk.mounted.path());
    assert_eq!(file.write_at(&[7; 100], LEN - 10).expect("write"), 100);
    assert_eq!(file.write_at(&[8; 5], LEN + MIB).expect("write"), 5);
    assert_eq!(file.metadata().expect("stat").len(), LEN + MIB + 5);
    assert_eq!(piece(disk.mounted.path(), LEN + 90, 3), [0; 3]);
    assert_eq!(piece(disk.mounted.path(), LEN + MIB, 5), [8; 5]);
    assert!(std::fs::metadata(&disk.image).expect("stat").len() >= LEN + MIB + 5);
}

#[test]
fn ftruncate_grows_and_shrinks_a_resizable_disk_and_everybody_sees_it() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &["--resizable"]);
    let (one, other) = (open(disk.mounted.path()), open(disk.mounted.path()));
    one.set_len(LEN + 3 * MIB).expect("grow");
    assert_eq!(other.metadata().expect("stat").len(), LEN + 3 * MIB);
    assert_eq!(piece(disk.mounted.path(), LEN + MIB, 100), [0; 100]);
    one.set_len(MIB).expect("shrink");
    assert_eq!(other.metadata().expect("stat").len(), MIB);
    assert_eq!(std::fs::metadata(&disk.image).expect("stat").len(), MIB);
    one.set_len(2 * MIB).expect("grow again");
    assert_eq!(piece(disk.mounted.path(), MIB, 100), [0; 100]);
}

#[test]
fn a_disk_keeps_its_size_against_the_usual_tools() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let (to, d) = (disk.mounted.text(), disk.directory.path());
    let small = d.join("small");
    let content = pattern(5, 0, 65536);
    std::fs::write(&small, &content).expect("a small file");
    let holes = d.join("holes");
    images::sparse(&holes, MIB);
    let size = || std::fs::metadata(&disk.image).expect("stat").len();
    let run = |words: &[&str]| {
        let finished = process::run(process::command(words));
        let code = finished.code().expect("an exit code");
        assert_eq!(size(), LEN, "{words:?}");
        (code, finished.output())
    };
    let (from, onto) = (format!("if={}", text(&small)), format!("of={to}"));
    // These mean the content.
    assert_eq!(run(&["cp", text(&small), to]).0, 0);
    assert_eq!(piece(&disk.image, 0, content.len()), content);
    assert_eq!(run(&["dd", &from, &onto, "bs=64K"]).0, 0);
    assert_eq!(run(&["dd", &from, &onto, "bs=64K", "seek=3", "conv=notrunc"]).0, 0);
    assert_eq!(piece(&disk.image, 3 * 65536, content.len()), content);
    // It complains that it could not cut the file, and writes where it should.
    let (_, said) = run(&["dd", &from, &onto, "bs=64K", "seek=5"]);
    assert!(said.contains("not permitted"), "{said}");
    assert_eq!(piece(&disk.image, 5 * 65536, content.len()), content);
    assert_eq!(run(&["sh", "-c", &format!("cat {} > {to}", text(&small))]).0, 0);
    assert_eq!(run(&["truncate", "-s", &LEN.to_string(), to]).0, 0);
    let copied = run(&["qemu-img", "convert", "-n", "-O", "raw", text(&small), to]);
    assert_eq!(copied.0, 0, "{}", copied.1);
    assert_eq!(piece(&disk.image, LEN - 100, 100), pattern(1, LEN - 100, 100));
    // And these the size, which is not theirs.
    for words in [
        &["truncate", "-s", "1M", to][..],
        &["truncate", "-s", "0", to],
        &["truncate", "-s", "+1M", to],
        &["cp", text(&holes), to],
        &["fallocate", "-l", "1M", "-o", "8M", to],
        &["qemu-img", "resize", "-f", "raw", "--shrink", to, "1M"],
        &["qemu-img", "convert", "-O", "raw", text(&small), to],
    ] {
        let (code, output) = run(words);
        assert_ne!(code, 0, "{words:?}");
        assert!(output.contains("not permitted"), "{words:?}: {output}");
    }
    // The owner of the mount may.
    ringdisk(d, &["ctl", to, "resize", "--shrink", "1M"]).ok();
    assert_eq!(size(), MIB);
}

#[test]
fn a_growable_disk_grows_and_does_not_shrink() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &["--growable"]);
    let file = open(disk.mounted.path());
    file.set_len(LEN + MIB).expect("grow");
    assert_eq!(errno(file.set_len(LEN)), Some(Errno::PERM));
    assert_eq!(file.metadata().expect("stat").len(), LEN + MIB);
    let truncated = File::options().write(true).truncate(true).open(disk.mounted.path());
    assert_eq!(truncated.expect("open").metadata().expect("stat").len(), LEN + MIB);
    assert_eq!(piece(disk.mounted.path(), 0, 100), pattern(1, 0, 100));
}

#[test]
fn a_growable_qcow2_reserves_what_fallocate_adds() {
    if !needs_root() {
        return;
    }
    let directory = ringdisk_testkit::mount::scratch();
    let image = directory.path().join("disk.qcow2");
    images::qemu_img(&["create", "-q", "-f", "qcow2", text(&image), "1049088"]);
    let disk = crate::common::serve(&image, &["--growable"]);
    let file = open(disk.path());
    fallocate(&file, FallocateFlags::empty(), 16 * MIB, 4 * MIB).expect("space");
    assert_eq!(file.metadata().expect("stat").len(), 20 * MIB);
    let taken = images::allocated(&image);
    assert!((4 * MIB..8 * MIB).contains(&taken), "{taken}");
    assert_eq!(fallocate(&file, FallocateFlags::empty(), 0, 4096), Err(Errno::OPNOTSUPP));
    drop(file);
    assert_eq!(disk.stop().code(), Some(0));
    images::qemu_img(&["check", "-q", text(&image)]);
}

#[test]
fn a_null_disk_cannot_change_its_size() {
    if !needs_root() {
        return;
    }
    let disk = mount(&["--null", "4M", "--resizable"]);
    let file = open(disk.path());
    let unsupported = Some(Errno::OPNOTSUPP);
    assert_eq!(errno(file.set_len(8 * MIB)), unsupported);
    assert_eq!(errno(file.set_len(MIB)), unsupported);
    assert_eq!(errno(file.write_at(&[1; 100], 4 * MIB)), unsupported);
    assert_eq!(file.write_at(&[1; 4096], 0).expect("write"), 4096);
    assert_eq!(file.metadata().expect("stat").len(), 4 * MIB);
}

#[test]
fn a_null_disk_has_no_holes_to_punch() {
    if !needs_root() {
        return;
    }
    let disk = mount(&["--null", "4M"]);
    let file = open(disk.path());
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(&file, punch, 0, 4096), Err(Errno::OPNOTSUPP));
    assert_eq!(fallocate(&file, FallocateFlags::ZERO_RANGE, 0, 4096), Ok(()));
    assert_eq!(fallocate(&file, FallocateFlags::empty(), 8 * MIB, 4096), Err(Errno::PERM));
}

#[test]
fn open_with_truncation_keeps_the_size_of_a_fixed_disk() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let file = File::options().write(true).truncate(true).open(disk.mounted.path());
    assert_eq!(file.expect("open").metadata().expect("stat").len(), LEN);
    assert_eq!(piece(disk.mounted.path(), 0, 100), pattern(1, 0, 100));
}

#[test]
fn open_with_truncation_empties_a_resizable_disk() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &["--resizable"]);
    let file = File::options().write(true).truncate(true).open(disk.mounted.path());
    assert_eq!(file.expect("open").metadata().expect("stat").len(), 0);
    assert_eq!(std::fs::metadata(&disk.image).expect("stat").len(), 0);
}

#[test]
fn fallocate_grows_but_reserves_nothing_inside() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &["--growable"]);
    let file = open(disk.mounted.path());
    let none = FallocateFlags::empty();
    let unsupported = Err(Errno::OPNOTSUPP);
    assert_eq!(fallocate(&file, none, 0, 4096), unsupported);
    assert_eq!(fallocate(&file, none, LEN - 4096, 8192), unsupported);
    assert_eq!(fallocate(&file, FallocateFlags::KEEP_SIZE, LEN, 4096), unsupported);
    assert_eq!(fallocate(&file, none, LEN + 4096, 4096), Ok(()));
    assert!(images::allocated(&disk.image) >= LEN + 4096);
    assert_eq!(file.metadata().expect("stat").len(), LEN + 8192);
    assert_eq!(piece(disk.mounted.path(), LEN, 8192), [0; 8192]);
}

#[test]
fn punched_holes_read_as_zeroes_and_give_space_back() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let file = open(disk.mounted.path());
    let before = images::allocated(&disk.image);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(&file, punch, MIB, MIB), Ok(()));
    assert_eq!(fallocate(&file, punch, LEN + MIB, MIB), Ok(()));
    assert_eq!(fallocate(&file, FallocateFlags::PUNCH_HOLE, 0, 4096), Err(Errno::OPNOTSUPP));
    assert!(images::allocated(&disk.image) < before);
    assert_eq!(piece(disk.mounted.path(), MIB - 1, 2), [pattern(1, MIB - 1, 1)[0], 0]);
    assert_eq!(piece(disk.mounted.path(), 2 * MIB - 1, 2), [0, pattern(1, 2 * MIB, 1)[0]]);
    assert_eq!(file.metadata().expect("stat").len(), LEN);
}

#[test]
fn zeroed_ranges_read_as_zeroes_and_may_grow() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &["--growable"]);
    let file = open(disk.mounted.path());
    let keep = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(&file, keep, 1000, 5000), Ok(()));
    assert_eq!(piece(disk.mounted.path(), 999, 3), [pattern(1, 999, 1)[0], 0, 0]);
    assert_eq!(piece(disk.mounted.path(), 6000, 1), pattern(1, 6000, 1));
    assert_eq!(file.metadata().expect("stat").len(), LEN);
    assert_eq!(fallocate(&file, FallocateFlags::ZERO_RANGE, LEN - 4096, 8192), Ok(()));
    assert_eq!(file.metadata().expect("stat").len(), LEN + 4096);
    assert_eq!(piece(disk.mounted.path(), LEN - 4096, 8192), [0; 8192]);
}

#[test]
fn other_modes_of_fallocate_are_not_supported() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let file = open(disk.mounted.path());
    let modes = [
        FallocateFlags::COLLAPSE_RANGE,
        FallocateFlags::INSERT_RANGE,
        FallocateFlags::UNSHARE_RANGE,
    ];
    let results = modes.map(|mode| fallocate(&file, mode, 0, 4096));
    assert_eq!(results, [Err(Errno::OPNOTSUPP); 3]);
    assert_eq!(piece(disk.mounted.path(), 0, 8192), pattern(1, 0, 8192));
}

#[test]
fn data_and_holes_are_found() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let file = open(disk.mounted.path());
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, punch, MIB, MIB).expect("punch");
    assert_eq!(seek(&file, SeekFrom::Hole(0)), Ok(MIB));
    assert_eq!(seek(&file, SeekFrom::Data(0)), Ok(0));
    assert_eq!(seek(&file, SeekFrom::Data(MIB + 10)), Ok(2 * MIB));
    assert_eq!(seek(&file, SeekFrom::Hole(2 * MIB)), Ok(LEN));
    assert_eq!(seek(&file, SeekFrom::Data(LEN)), Err(Errno::NXIO));
    assert_eq!(seek(&file, SeekFrom::Data(LEN + 1)), Err(Errno::NXIO));
    assert_eq!(seek(&file, SeekFrom::Hole(LEN + 1)), Err(Errno::NXIO));
}

#[test]
fn an_empty_disk_is_one_hole() {
    if !needs_root() {
        return;
    }
    let directory = ringdisk_testkit::mount::scratch();
    let image = directory.path().join("sparse.img");
    images::sparse(&image, LEN);
    let disk = crate::common::serve(&image, &["--format", "raw"]);
    let file = open(disk.path());
    assert_eq!(seek(&file, SeekFrom::Data(0)), Err(Errno::NXIO));
    assert_eq!(seek(&file, SeekFrom::Hole(0)), Ok(0));
}

#[test]
fn the_file_system_has_no_blocks_of_its_own() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let stat = statvfs(disk.mounted.path()).expect("statfs");
    assert!(stat.f_bsize >= 512, "{}", stat.f_bsize);
    assert_eq!((stat.f_blocks, stat.f_bfree, stat.f_namemax), (0, 0, 255));
}

#[test]
fn extended_attributes_are_not_supported() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let path = disk.mounted.path();
    let mut value = [0_u8; 16];
    let get = rustix::fs::getxattr(path, "user.x", &mut value[..]);
    let set = rustix::fs::setxattr(path, "user.x", b"1", rustix::fs::XattrFlags::empty());
    assert_eq!((get.err(), set.err()), (Some(Errno::OPNOTSUPP), Some(Errno::OPNOTSUPP)));
}

#[test]
fn written_bytes_are_in_the_image_after_fsync() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN, &[]);
    let file = open(disk.mounted.path());
    let bytes = pattern(99, 0, 300_001);
    file.write_all_at(&bytes, 777).expect("write");
    file.sync_all().expect("fsync");
    file.sync_data().expect("fdatasync");
    assert_eq!(piece(&disk.image, 777, bytes.len()), bytes);
    assert_eq!(piece(&disk.image, 776, 1), pattern(1, 776, 1));
}

#[test]
fn locks_of_files_work() {
    if !needs_root() {
        return;
    }
    use rustix::fs::{FlockOperation, fcntl_lock, flock};
    let disk = serve_raw(LEN, &[]);
    let (one, other) = (open(disk.mounted.path()), open(disk.mounted.path()));
    assert_eq!(flock(&one, FlockOperation::NonBlockingLockExclusive), Ok(()));
    assert_eq!(flock(&other, FlockOperation::NonBlockingLockExclusive), Err(Errno::AGAIN));
    assert_eq!(fcntl_lock(&one, FlockOperation::NonBlockingLockExclusive), Ok(()));
}

#[test]
fn copies_by_the_usual_tools_are_complete() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(LEN + 1234, &[]);
    let copy = disk.directory.path().join("copy");
    ringdisk_testkit::process::ok_words(&["cp", disk.mounted.text(), copy.to_str().expect("text")]);
    images::assert_same(&copy, &disk.image, "cp");
    let other = disk.directory.path().join("other");
    let (from, to) = (disk.mounted.text(), other.to_str().expect("text"));
    images::qemu_img(&["convert", "-f", "raw", "-O", "raw", from, to]);
    // QEMU counts in sectors: its copy ends at a whole one.
    open(&other).set_len(LEN + 1234).expect("cut to the same size");
    images::assert_same(&other, &copy, "qemu-img convert");
}
