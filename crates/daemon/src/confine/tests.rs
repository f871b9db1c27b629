//! What is left of a directory of images to a process that serves one of them, tried in a process
//! of its own: a test that is left out by name is its body.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use ringdisk_disk::{Disk, Format, ImageOptions, Source};
use ringdisk_ring::{Config, Runtime};
use ringdisk_sandbox::Plan;
use ringdisk_testkit::limits::needs;

use super::*;

/// Where the body may play.
const PLACE: &str = "RINGDISK_TEST_PLACE";
/// What the body ends with when the kernel has no landlock.
const NO_LANDLOCK: i32 = 77;

#[test]
fn a_neighbour_of_the_images_can_be_neither_read_nor_changed() {
    let root = tempfile::tempdir().expect("a directory");
    let path = |name: &str| root.path().join(name);
    for name in ["below", "top", "allowed"] {
        fs::create_dir(path(name)).expect("mkdir");
        fs::write(path(&format!("{name}/neighbour")), "secret").expect("write");
    }
    fs::write(path("below/base"), vec![0; 1 << 20]).expect("write");
    symlink(path("top/neighbour"), path("top/link")).expect("a link");
    let listed = |name: &str| {
        let entries = fs::read_dir(path(name)).expect("a directory").flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
        names.sort();
        names
    };
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "confine::tests::the_body", "--ignored", "--nocapture"]);
    let output = command.env(PLACE, root.path()).output().expect("a process");
    if !needs("landlock in this kernel", output.status.code() != Some(NO_LANDLOCK)) {
        return;
    }
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert_eq!(listed("below"), ["base", "neighbour"]);
    assert_eq!(listed("top"), ["disk", "link", "neighbour"]);
    assert_eq!(listed("allowed"), ["neighbour"]);
    for name in ["below/neighbour", "top/neighbour", "allowed/neighbour"] {
        assert_eq!(fs::read(path(name)).expect("read"), b"secret");
    }
}

#[test]
#[ignore = "run by the other one"]
fn the_body() {
    let Some(place) = std::env::var_os(PLACE).map(PathBuf::from) else { return };
    let mut runtime = Runtime::new(Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    let options = ImageOptions {
        format: Some(Format::Raw),
        overlay: Some(place.join("top/disk")),
        ..ImageOptions::default()
    };
    let source = Source::Path(place.join("below/base"));
    let disk = runtime.block_on(Disk::open(&ring, source, &options)).expect("a disk");
    let allowed = [place.join("allowed"), place.join("below/base")];
    let plan = images(Plan::new(), &disk, &allowed, None);
    let in_force = plan.enter().expect("confined");
    if in_force.landlock.is_none() {
        std::process::exit(NO_LANDLOCK);
    }
    let mut all = fs::OpenOptions::new();
    let open = |name: &str, write: bool| {
        fs::OpenOptions::new().read(true).write(write).open(place.join(name))
    };
    // The images themselves: the one below may lie below the disks of others, too.
    open("top/disk", false).and_then(|_| open("top/disk", true)).expect("the image on top");
    open("below/base", false).expect("the image below");
    let denied = open("below/base", true).expect_err("the image below").kind();
    assert_eq!(denied, io::ErrorKind::PermissionDenied);
    for name in ["below/neighbour", "top/neighbour", "top/link"] {
        let denied = io::ErrorKind::PermissionDenied;
        assert_eq!(open(name, false).expect_err("read").kind(), denied, "{name}");
        assert_eq!(open(name, true).expect_err("write").kind(), denied, "{name}");
        let emptied = all.write(true).truncate(true).open(place.join(name));
        assert_eq!(emptied.expect_err("emptied").kind(), denied, "{name}");
        fs::remove_file(place.join(name)).expect_err("removed");
        fs::rename(place.join("top/disk"), place.join(name)).expect_err("replaced");
        fs::hard_link(place.join(name), place.join("top/new")).expect_err("linked");
    }
    // What --allow-path names is read, and no more.
    open("allowed/neighbour", false).expect("read");
    open("allowed/neighbour", true).expect_err("write");
    fs::remove_file(place.join("allowed/neighbour")).expect_err("removed");
    fs::rename(place.join("top/disk"), place.join("allowed/neighbour")).expect_err("replaced");
    for name in ["below", "top", "allowed"] {
        if name != "allowed" {
            fs::read_dir(place.join(name)).expect_err("listed");
        }
        fs::write(place.join(name).join("new"), "ours").expect_err("made");
        symlink("disk", place.join(name).join("new")).expect_err("a link");
        fs::create_dir(place.join(name).join("new")).expect_err("a directory");
        fs::remove_file(place.join(name).join("disk")).expect_err("removed");
    }
}
