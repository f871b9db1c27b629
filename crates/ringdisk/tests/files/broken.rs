//! Broken, hostile and truncated qcow2 images: errors where bytes are missing, nowhere else; names
//! that lead nowhere or out; never a panic, a hang or a changed image.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use ringdisk_ring::Errno;
use ringdisk_testkit::images::{self, pattern, piece, qcow2, qemu_img, qemu_io};
use ringdisk_testkit::limits::{needs, needs_root};
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{command, has, run};

use crate::common::{
    MIB, assert_refused, errno, patch, program, raw_image, refused, sample, serve,
};

const CLUSTER: u64 = 64 << 10;

fn command_dd(path: &Path) -> Command {
    let input = format!("if={}", text(path));
    command(&["dd", &input, "of=/dev/null", "bs=64k", "count=200", "status=none"])
}

#[test]
fn every_header_field_broken_in_turn_is_survived() {
    if !needs_root() {
        return;
    }
    let (directory, image) = sample();
    let good = std::fs::read(&image).expect("read");
    let mountpoint = directory.path().join("disk");
    // Offset and width of each field. Source: qcow2 specification, "Header".
    let fields = [
        (0, 4),
        (4, 4),
        (8, 8),
        (16, 4),
        (20, 4),
        (24, 8),
        (32, 4),
        (36, 4),
        (40, 8),
        (48, 8),
        (56, 4),
        (60, 4),
        (64, 8),
        (72, 8),
        (96, 4),
        (100, 4),
        (104, 1),
    ];
    for (offset, width) in fields {
        for fill in [0xff_u8, 0x7f, 0x01] {
            std::fs::write(&image, &good).expect("write");
            patch(&image, offset, &vec![fill; width]);
            let broken = std::fs::read(&image).expect("read");
            let mut command = Command::new(program());
            let words = ["mount", "--read-only", "--format", "qcow2"];
            command.args(words).args([&image, &mountpoint]);
            let what = format!("field at {offset} filled with {fill:#x}");
            match ringdisk_testkit::mount::Mounted::try_from_command(&mut command, &mountpoint) {
                Ok(disk) => {
                    let _ = run(command_dd(disk.path()));
                    assert_eq!(disk.stop().code(), Some(0), "{what}");
                }
                Err(finished) => assert_refused(&finished, &[]),
            }
            assert!(std::fs::read(&image).expect("read") == broken, "{what}: the image changed");
        }
    }
}

#[test]
fn a_search_for_data_that_fails_is_in_the_log() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = sample();
    let l1 = u64::from_be_bytes(piece(&image, 40, 8).try_into().expect("8 bytes"));
    // A table that does not begin at a cluster.
    patch(&image, l1, &0x8000_0000_0005_0200_u64.to_be_bytes());
    let disk = serve(&image, &["--format", "qcow2"]);
    let file = std::fs::File::open(disk.path()).expect("open");
    let found = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(5 * MIB));
    assert_eq!(found, Err(Errno::IO));
    let past = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(1 << 40));
    assert_eq!(past, Err(Errno::NXIO), "nothing has failed");
    drop(file);
    let finished = disk.stop();
    let line = format!("a search for data or a hole of 0 bytes at {} failed for a client", 5 * MIB);
    assert!(finished.stderr.contains(&line), "{}", finished.output());
    assert_eq!(finished.stderr.matches("a search").count(), 1, "{}", finished.output());
}

#[test]
fn truncated_images_give_errors_where_bytes_are_missing() {
    if !needs_root() {
        return;
    }
    let (directory, image) = sample();
    let len = std::fs::metadata(&image).expect("stat").len();
    let good = std::fs::read(&image).expect("read");
    let mountpoint = directory.path().join("disk");
    for keep in [0, 3, 71, 103, 512, 65_536, 100_000, 196_608, 262_143, 300_000, len - 65_536] {
        std::fs::write(&image, &good[..usize::try_from(keep).expect("small")]).expect("write");
        let mut command = Command::new(program());
        let words = ["mount", "--read-only", "--format", "qcow2"];
        command.args(words).args([&image, &mountpoint]);
        match ringdisk_testkit::mount::Mounted::try_from_command(&mut command, &mountpoint) {
            Ok(disk) => {
                let _ = run(command_dd(disk.path()));
                assert_eq!(disk.stop().code(), Some(0), "{keep} bytes kept");
            }
            Err(finished) => assert_refused(&finished, &[]),
        }
    }
}

#[test]
fn broken_l1_and_l2_entries_give_eio_there_and_nowhere_else() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = sample();
    let l1 = u64::from_be_bytes(piece(&image, 40, 8).try_into().expect("8 bytes"));
    let entry = u64::from_be_bytes(piece(&image, l1, 8).try_into().expect("8 bytes"));
    let l2 = entry & 0x00ff_ffff_ffff_fe00;
    let good = std::fs::read(&image).expect("read");
    // Beyond the file, unaligned, reserved bits low and high: each in the L2 entry of the guest
    // cluster at 5 MiB.
    let bad = [
        0x80ff_ffff_ffff_0000_u64,
        0x8000_0000_0005_0200,
        0x8000_0000_0005_000c,
        0x0100_0000_0005_0000,
    ];
    for value in bad {
        std::fs::write(&image, &good).expect("write");
        patch(&image, l2 + 8 * 80, &value.to_be_bytes());
        let disk = serve(&image, &["--format", "qcow2"]);
        let file = std::fs::File::options().read(true).write(true).open(disk.path()).expect("open");
        let eio = |outcome| assert_eq!(errno(outcome), Some(Errno::IO), "{value:#x}");
        eio(file.read_exact_at(&mut [0; 512], 5 * MIB));
        assert_eq!(piece(disk.path(), 0, 512), [0x11; 512], "{value:#x}");
        // Its neighbours, in place or into new clusters; before anything of the table is known, and
        // later.
        for (at, fill) in [(5 * MIB + CLUSTER, 0x21), (5 * MIB - CLUSTER, 0x22), (0, 0x23)] {
            file.write_all_at(&[fill; 4096], at).expect("a good cluster takes writes");
            assert_eq!(piece(disk.path(), at, 4096), [fill; 4096], "{value:#x}");
        }
        eio(file.write_all_at(&[0x24; 512], 5 * MIB + 4096));
        // What comes before it in one request is written.
        let across = file.write_at(&[0x25; 128 << 10], 5 * MIB - CLUSTER).ok();
        assert_eq!(across, Some(64 << 10), "{value:#x}");
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, punch, 5 * MIB + CLUSTER, CLUSTER).expect("a good cluster");
        assert_eq!(piece(disk.path(), 5 * MIB + CLUSTER, 512), [0; 512], "{value:#x}");
        file.sync_all().expect("what was written is written");
        drop(file);
        let finished = disk.stop();
        assert_eq!(finished.code(), Some(0), "{value:#x}: {}", finished.output());
        assert_eq!(piece(&image, l2 + 8 * 80, 8), value.to_be_bytes(), "nobody touched the entry");
    }
}

#[test]
fn rubbish_in_a_compressed_cluster_is_eio() {
    if !needs_root() {
        return;
    }
    for kind in ["zlib", "zstd"] {
        let directory = scratch();
        let image = directory.path().join("disk.qcow2");
        qcow2(&image, "1M", &format!("compression_type={kind}"));
        qemu_io(&image, "qcow2", &["write -c -P 0x11 0 64k", "write -P 0x22 64k 64k"]);
        let l1 = u64::from_be_bytes(piece(&image, 40, 8).try_into().expect("8 bytes"));
        let l2 = u64::from_be_bytes(piece(&image, l1, 8).try_into().expect("8 bytes"))
            & 0x00ff_ffff_ffff_fe00;
        let entry = u64::from_be_bytes(piece(&image, l2, 8).try_into().expect("8 bytes"));
        // 64 KiB clusters: the low 54 bits are the offset. Source: specification, "Compressed
        // Clusters Descriptor".
        patch(&image, entry & ((1 << 54) - 1), &[0xa5; 64]);
        let disk = serve(&image, &["--read-only"]);
        let file = std::fs::File::open(disk.path()).expect("open");
        assert!(file.read_exact_at(&mut [0; 512], 0).is_err(), "{kind}");
        assert_eq!(piece(disk.path(), 65_536, 512), [0x22; 512], "{kind}");
    }
}

#[test]
fn chains_that_loop_or_have_no_end() {
    if !needs("qemu-img", has("qemu-img")) {
        return;
    }
    let directory = scratch();
    let at = |name: &str| directory.path().join(name);
    let overlay = |name: &str, on: &str| {
        let words = ["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", on];
        qemu_img(&[&words[..], &[text(&at(name)), "1M"]].concat());
    };
    overlay("a", "b");
    overlay("b", "a");
    overlay("self", "self");
    overlay("gone", "nowhere");
    refused(&["--read-only", text(&at("a"))], &["loop"]);
    refused(&["--read-only", text(&at("self"))], &["loop"]);
    refused(&["--read-only", text(&at("gone"))], &["nowhere"]);
}

#[test]
fn a_chain_of_two_hundred_files_is_served_or_refused_by_name() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let at = |number: u32| directory.path().join(format!("{number}.qcow2"));
    qcow2(&at(0), "1M", "cluster_size=4096");
    qemu_io(&at(0), "qcow2", &["write -P 0x5a 0 64k"]);
    for number in 1..200 {
        let base = format!("{}.qcow2", number - 1);
        let words = [
            "create",
            "-q",
            "-u",
            "-f",
            "qcow2",
            "-F",
            "qcow2",
            "-o",
            "cluster_size=4096",
            "-b",
            &base,
        ];
        qemu_img(&[&words[..], &[text(&at(number)), "1M"]].concat());
    }
    let mountpoint = directory.path().join("disk");
    let mut command = Command::new(program());
    command.args(["mount", "--read-only"]).args([&at(199), &mountpoint]);
    match ringdisk_testkit::mount::Mounted::try_from_command(&mut command, &mountpoint) {
        Ok(disk) => assert_eq!(piece(disk.path(), 1000, 8), [0x5a; 8]),
        Err(finished) => assert_refused(&finished, &["backing"]),
    }
}

#[test]
fn names_inside_an_image_do_not_lead_out_of_its_directory() {
    if !needs_root() {
        return;
    }
    let (secrets, secret) = raw_image(MIB, 7);
    let directory = scratch();
    let at = |name: &str| directory.path().join(name);
    std::os::unix::fs::symlink(&secret, at("link")).expect("a link");
    let up = format!(
        "../{}/disk.img",
        secrets.path().file_name().and_then(|n| n.to_str()).expect("a name")
    );
    for base in [text(&secret), up.as_str(), "link", "/etc/passwd"] {
        let image = at("disk.qcow2");
        let words = ["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", base];
        qemu_img(&[&words[..], &[text(&image), "1M"]].concat());
        refused(&["--read-only", text(&image)], &["allow-path"]);
    }
    // The last one again, allowed: an absolute name in another directory.
    let image = at("disk.qcow2");
    let words = ["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", text(&secret)];
    qemu_img(&[&words[..], &[text(&image), "1M"]].concat());
    let disk = serve(&image, &["--read-only", "--allow-path", text(secrets.path())]);
    assert_eq!(piece(disk.path(), 0, 64), pattern(7, 0, 64));
}

#[test]
fn a_backing_file_without_a_format_is_not_guessed() {
    let directory = scratch();
    let at = |name: &str| directory.path().join(name);
    images::raw(&at("base"), MIB, 1);
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base", text(&at("disk")), "1M"]);
    // Unlinks the header extension that names the format: its type becomes one that nobody knows.
    let head = piece(&at("disk"), 0, 512);
    let found =
        head.windows(4).position(|w| w == 0xe279_2aca_u32.to_be_bytes()).expect("the extension");
    patch(&at("disk"), found as u64, &0x1234_5678_u32.to_be_bytes());
    refused(&["--read-only", text(&at("disk"))], &["format"]);
}

#[test]
fn a_corrupt_bit_forbids_writing_but_not_reading() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = sample();
    patch(&image, 72, &2_u64.to_be_bytes());
    let disk = serve(&image, &["--read-only"]);
    assert_eq!(piece(disk.path(), 5 * MIB, 4), [0x22; 4]);
}

#[test]
fn encrypted_images_are_refused() {
    let (_directory, image) = sample();
    patch(&image, 32, &2_u32.to_be_bytes());
    refused(&["--read-only", text(&image)], &["encrypt"]);
}
