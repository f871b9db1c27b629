//! Overlays that the helper process of one process has made, in the hands of the next ones.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use ringdisk_testkit::images::{self, assert_clean, piece};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{ok_words, until};

use crate::common::{open, program};
use crate::keep::kept::Kept;

#[test]
fn overlays_beside_the_image_go_on_in_the_next_process() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "8M", "");
    let disk = Kept::start(&["--format", "qcow2", text(&image)]);
    let path = disk.path();
    let write = |byte: u8| {
        let at = u64::from(byte) * 4096;
        open(&path).write_all_at(&[byte; 4096], at).expect("write");
    };
    let ctl = |words: &[&str]| {
        let program = program();
        ok_words(&[&[program.as_str(), "ctl", text(&path)], words].concat());
    };
    let next = || {
        disk.kill_server();
        assert_eq!(until(Duration::from_secs(20), || disk.is_ready().then_some(())), Some(()));
    };
    let [a, b, c] = ["a", "b", "c"].map(|name| directory.path().join(name));
    write(1);
    ctl(&["snapshot", text(&a)]);
    write(2);
    next();
    ctl(&["snapshot", text(&b)]);
    write(3);
    ctl(&["commit"]);
    write(4);
    ctl(&["snapshot", text(&c)]);
    next();
    write(5);
    ctl(&["commit"]);
    ctl(&["commit"]);
    write(6);
    next();
    for byte in 1..=6 {
        assert_eq!(piece(&path, u64::from(byte) * 4096, 4096), [byte; 4096]);
    }
    disk.stop();
    for image in [&image, &a, &b, &c] {
        assert_clean(image);
    }
}
