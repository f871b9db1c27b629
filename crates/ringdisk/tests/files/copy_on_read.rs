//! `--copy-on-read` and `ctl copy-on-read`, on a mount.

use ringdisk_testkit::images::{self, assert_clean, pattern, piece};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::scratch;

use super::jobs::ctl;
use crate::common::tools::{qemu_img, ringdisk};
use crate::common::{MIB, serve};

#[test]
fn what_was_read_is_in_the_image_on_top() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    images::raw(&d.join("base.raw"), 16 * MIB, 3);
    let create = ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2"];
    qemu_img(d, &create).ok();
    let disk = serve(&d.join("top.qcow2"), &["--copy-on-read"]);
    assert!(piece(disk.path(), 2 * MIB, 1 << 20) == pattern(3, 2 * MIB, 1 << 20));
    let said = |word| ctl(&disk, &["copy-on-read", word]).ok().out;
    assert!(said("off").contains("kept no longer"));
    assert!(piece(disk.path(), 8 * MIB, 1 << 20) == pattern(3, 8 * MIB, 1 << 20));
    assert!(said("on").contains("is kept in the image on top now"));
    assert!(piece(disk.path(), 12 * MIB, 1 << 20) == pattern(3, 12 * MIB, 1 << 20));
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&d.join("top.qcow2"));
    qemu_img(d, &["rebase", "-u", "-f", "qcow2", "-b", "", "top.qcow2"]).ok();
    qemu_img(d, &["convert", "-f", "qcow2", "-O", "raw", "top.qcow2", "alone.raw"]).ok();
    for (at, is_kept) in [(2 * MIB, true), (8 * MIB, false), (12 * MIB, true)] {
        let there = piece(&d.join("alone.raw"), at, 1 << 20);
        let wanted = if is_kept { pattern(3, at, 1 << 20) } else { vec![0; 1 << 20] };
        assert!(there == wanted, "{at}");
    }
}

#[test]
fn a_disk_that_cannot_keep_what_is_read_says_so() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    images::raw(&d.join("base.raw"), MIB, 3);
    let disk = serve(&d.join("base.raw"), &["--format", "raw"]);
    ctl(&disk, &["copy-on-read", "on"]).ends(11).says("no qcow2 image");
    ctl(&disk, &["copy-on-read", "perhaps"]).ends(2);
    assert_eq!(disk.stop().code(), Some(0));
    let words = ["mount", "--read-only", "--copy-on-read", "base.raw", "disk"];
    ringdisk(d, &words).ends(2).says("--copy-on-read");
}
