//! Parts of mounting that are not public.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

use ringdisk_testkit::limits::{needs, needs_root};
use rustix::io::Errno;

use super::table::{self, FSTYPE};
use super::{Method, MountOptions, Unmount, detach, device, direct};

fn options() -> MountOptions {
    MountOptions {
        source: "a,b c".into(),
        read_only: true,
        allow_other: true,
        max_read: 1 << 20,
        method: Method::Direct,
    }
}

/// A directory, and a regular file in it to mount on.
fn mountpoint() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().canonicalize().expect("exists").join("disk");
    File::create(&path).expect("a file");
    (directory, path)
}

fn can_mount() -> bool {
    needs_root() && needs("/dev/fuse", device::open_raw().is_ok())
}

#[test]
fn both_system_interfaces_make_the_same_mount() {
    if !can_mount() {
        return;
    }
    type Attach = for<'a> fn(BorrowedFd<'a>, BorrowedFd<'a>, &MountOptions) -> Result<(), Errno>;
    let by_descriptors: Attach = |at, device, options| {
        direct::mount_by_descriptors(at, device, options).map_err(|failure| failure.errno)
    };
    let entries = [direct::mount_classic as Attach, by_descriptors].map(|attach| {
        let (_directory, path) = mountpoint();
        let device = device::open_for_mount().expect("opens");
        let at = super::mountpoint::hold(&path).expect("there");
        attach(at.as_fd(), device.as_fd(), &options()).expect("mounts");
        let entry = table::at(&path).expect("readable").expect("mounted");
        detach(&entry, Unmount::Normal).expect("unmounts");
        assert!(table::at(&path).expect("readable").is_none());
        (entry.fstype, entry.source, entry.options, entry.super_options)
    });
    assert_eq!(entries[0], entries[1]);
    assert_eq!(entries[0].0, FSTYPE);
    assert!(entries[0].2.split(',').any(|word| word == "ro"));
    assert!(entries[0].3.split(',').any(|word| word == "allow_other"));
}

/// A user who may write a directory of the path changes it after the check.
#[test]
fn a_name_that_leads_elsewhere_by_now_is_not_mounted_on() {
    let (directory, path) = mountpoint();
    let root = directory.path().canonicalize().expect("exists");
    let folder = root.join("folder");
    std::fs::create_dir(&folder).expect("a directory");
    std::fs::rename(&path, folder.join("disk")).expect("moved");
    let checked = super::mountpoint::check(&folder.join("disk")).expect("fine");
    std::fs::rename(&folder, root.join("other")).expect("moved");
    std::os::unix::fs::symlink("other", &folder).expect("a link");
    assert!(super::mountpoint::hold(&checked).is_err(), "by a directory");
    let checked = super::mountpoint::check(&folder.join("disk")).expect("fine");
    assert_eq!(checked, root.join("other/disk"));
    std::fs::rename(&checked, root.join("disk")).expect("moved");
    std::os::unix::fs::symlink("../disk", &checked).expect("a link");
    assert!(super::mountpoint::hold(&checked).is_err(), "by the name itself");
}

#[test]
fn what_the_kernel_says_is_part_of_the_error() {
    if !can_mount() {
        return;
    }
    let (_directory, path) = mountpoint();
    let other = File::open("/dev/null").expect("opens");
    let at = super::mountpoint::hold(&path).expect("there");
    let error = direct::mount(at.as_fd(), &path, other.as_fd(), &options());
    let error = error.expect_err("not a FUSE device");
    assert!(error.with_hint().to_string().contains(&path.display().to_string()), "{error}");
}
