//! `--config FILE`, and mount(8) with a line of fstab.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use ringdisk_testkit::images::{self, assert_clean, qemu_io};
use ringdisk_testkit::limits::{mount_at, needs, needs_root};
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, command, has, ok, until};

use crate::common::program;
use crate::common::tools::ringdisk;

fn image(directory: &Path) -> std::path::PathBuf {
    let image = directory.join("disk.qcow2");
    images::qcow2(&image, "4M", "");
    qemu_io(&image, "qcow2", &["write -P 0x11 0 64k"]);
    image
}

#[test]
fn a_file_says_what_is_mounted_and_how() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = image(d);
    let disk = d.join("disk");
    let text_of_file = format!(
        "image = '{}'\nmountpoint = '{}'\nread-only = true\nthreads = 1\nlimit = ['iops=9000']\n",
        text(&image),
        text(&disk)
    );
    fs::write(d.join("disk.toml"), text_of_file).expect("written");
    let good = ringdisk(d, &["mount", "--check-config", "--config", "disk.toml"]).ok();
    assert_eq!(good.out, "'disk.toml' is good.\n");
    assert!(!disk.exists());
    ringdisk(d, &["mount", "--daemonize", "--config=disk.toml"]).ok();
    assert_eq!(fs::read(&disk).expect("read")[..4096], [0x11; 4096]);
    assert!(fs::OpenOptions::new().write(true).open(&disk).is_err());
    assert_eq!(ringdisk(d, &["ctl", text(&disk), "limit"]).ok().out, "iops=9000\n");
    ringdisk(d, &["umount", text(&disk)]).ok();
    assert_clean(&image);
}

#[test]
fn a_file_that_is_not_understood_serves_nothing() {
    let directory = scratch();
    let d = directory.path();
    let refused = |name: &str, content: &str, reason: &str| {
        fs::write(d.join("bad.toml"), content).expect("written");
        for more in [&["--check-config"][..], &[]] {
            let words = [&[name, "--config", "bad.toml"], more].concat();
            ringdisk(d, &words).ends(2).says("bad.toml").says(reason);
        }
    };
    refused("mount", "cahce = 'none'", "did you mean 'cache'?");
    refused("mount", "image = 'a'\nmountpoint = 'b'\ncache = 'fast'", "invalid value 'fast'");
    refused("mount", "image = 'a", "TOML parse error");
    refused("serve", "[[disk]]\nimage = 'a'\nsokcet = 'b'", "did you mean 'socket'?");
    let none = ringdisk(d, &["mount", "--config", "none.toml"]).ends(2);
    assert!(!none.says("cannot be read: No such file").err.contains("os error"));
    fs::write(d.join("bad.toml"), [0xff, 0xfe, 0x80]).expect("write");
    ringdisk(d, &["mount", "--config", "bad.toml"]).ends(2).says("it is no text in UTF-8");
    // Nothing of it is opened or made.
    assert_eq!(crate::common::tools::names(d), ["bad.toml"]);
}

#[test]
fn a_line_of_fstab_is_mounted() {
    if !(needs_root() && needs("unshare", has("unshare"))) {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let (image, disk, sbin) = (image(d), d.join("disk"), d.join("sbin"));
    fs::create_dir(&sbin).expect("a directory");
    symlink(program(), sbin.join("mount.fuse.ringdisk")).expect("a link");
    // What mount(8) finds as /sbin is ours, in a mount namespace of its own.
    let script = format!(
        "set -e; mount --bind {sbin} \"$(realpath /sbin)\"
         mount -t fuse.ringdisk -o nofail,ro,threads=1,limit=iops=9000 {image} {disk}
         cmp -n 65536 {disk} {pattern}; ! dd if=/dev/zero of={disk} bs=512 count=1 2>/dev/null
         umount {disk}",
        sbin = text(&sbin),
        image = text(&image),
        disk = text(&disk),
        pattern = {
            fs::write(d.join("pattern"), [0x11; 65536]).expect("written");
            text(&d.join("pattern")).to_owned()
        },
    );
    ok(command(&["unshare", "--mount", "sh", "-c", &script]));
    assert!(mount_at(&disk).is_none());
    // The server has ended, and let go of the image.
    until(LIMIT, || (ringdisk(d, &["check", text(&image)]).code == 0).then_some(()))
        .expect("the server ends");
    let wrong = sbin.join("mount.fuse.ringdisk");
    let mut refused = command(&[text(&wrong), text(&image)]);
    let refused = refused.output().expect("it starts");
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.starts_with("mount.fuse.ringdisk: an image and the file"), "{said}");
}

#[test]
fn units_are_what_systemd_understands() {
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    if !needs("systemd-analyze", has("systemd-analyze")) {
        return;
    }
    for unit in ["ringdisk@.service", "ringdisk-vm@.service"] {
        // An instance, and a program that is there.
        let content = fs::read_to_string(units.join(unit)).expect("the unit");
        let directory = scratch();
        let instance = directory.path().join(unit.replace('@', "@x"));
        fs::write(&instance, content.replace("/usr/bin/ringdisk", &program())).expect("written");
        let said = command(&["systemd-analyze", "verify", "--man=no", text(&instance)]).output();
        let said = said.expect("it starts");
        let text = String::from_utf8_lossy(&said.stderr).into_owned();
        let about_us = text.lines().filter(|line| line.contains("ringdisk")).count();
        assert!(said.status.success() && about_us == 0, "{text}");
    }
}
