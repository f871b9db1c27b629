//! Commands that change the disk under its clients: its size, an overlay, a snapshot inside.

use super::*;

#[test]
fn the_size_changes_under_clients() {
    if !needs_root() {
        return;
    }
    let (disk, directory) = qcow2(&[]);
    let open = crate::common::open(disk.path());
    // The kernel hears of it a moment later.
    let becomes = |len: u64| {
        let seen = || fs::metadata(disk.path()).expect("mounted").len();
        assert!(until(LIMIT, || (seen() == len).then_some(())).is_some(), "{} not {len}", seen());
    };
    ctl(&disk, &["resize", "+16M"]).ok();
    becomes(32 * MIB);
    open.write_all_at(&[7; 4096], 31 * MIB).expect("the new part takes writes");
    ctl(&disk, &["resize", "40M", "--preallocation", "metadata"]).ok();
    becomes(40 * MIB);
    ctl(&disk, &["resize", "8M"]).ends(2).says("--shrink");
    ctl(&disk, &["resize", "--", "-100M"]).ends(2).says("cannot lose");
    ctl(&disk, &["resize", "8E"]).ends(2).says("too large");
    let raw = crate::common::serve_raw(MIB, &[]);
    let words = ["resize", "+1M", "--preallocation", "metadata"];
    ctl(&raw.mounted, &words).ends(2).says("write off, falloc or full");
    assert_eq!(raw.mounted.stop().code(), Some(0));
    ctl(&disk, &["resize", "--shrink", "8M"]).ok();
    becomes(8 * MIB);
    assert_pattern(disk.path(), 1, 0, MIB);
    drop(open);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&directory.path().join("base.qcow2"));
}

#[test]
fn an_overlay_takes_further_writes_and_a_commit_brings_them_back() {
    if !needs_root() {
        return;
    }
    let (disk, directory) = qcow2(&[]);
    let d = directory.path();
    let new = |name: &str| d.join(name).to_string_lossy().into_owned();
    ctl(&disk, &["snapshot", &new("one.qcow2")]).ok();
    write(&disk, 2, 4 * MIB, MIB);
    ctl(&disk, &["snapshot", &new("two.qcow2")]).ok();
    write(&disk, 3, 8 * MIB, MIB);
    ctl(&disk, &["snapshot", &new("two.qcow2")]).ends(3).says("exists already");
    ctl(&disk, &["snapshot", &new("no/such.qcow2")]).ends(3);
    ctl(&disk, &["snapshot", "json:x"]).ends(2).says("begins like a protocol");
    let layers = |disk: &Mounted| -> Vec<String> {
        let value = ctl(disk, &["stats", "--json"]).ok().json();
        let layers = value["layers"].as_array().expect("layers").clone();
        let name = |layer: &Value| layer["filename"].as_str().expect("a name").to_owned();
        let names = layers.iter().map(name);
        names.map(|name| name.rsplit('/').next().expect("a name").to_owned()).collect()
    };
    assert_eq!(layers(&disk), ["two.qcow2", "one.qcow2", "base.qcow2"]);
    // The middle one goes into the base.
    ctl(&disk, &["commit", "--top", &new("one.qcow2")]).ok();
    assert_eq!(layers(&disk), ["two.qcow2", "base.qcow2"]);
    ctl(&disk, &["commit", "--top", &new("one.qcow2")]).ends(2).says("not in the chain");
    ctl(&disk, &["commit", "--base", &new("two.qcow2")]).ends(2).says("below the top");
    // And then the top one.
    let ran = ctl(&disk, &["commit", "-p"]).ok();
    assert!(ran.out.contains("(100.00/100%)"), "{}", ran.out);
    assert!(ran.out.contains("Image committed."), "{}", ran.out);
    assert_eq!(layers(&disk), ["base.qcow2"]);
    ctl(&disk, &["commit"]).ends(2).says("no image below");
    write(&disk, 4, 12 * MIB, MIB);
    for seed in 1..=4 {
        assert_pattern(disk.path(), seed, 4 * MIB * (seed - 1), MIB);
    }
    assert_eq!(disk.stop().code(), Some(0));
    let base = d.join("base.qcow2");
    assert_clean(&base);
    let reference = images::reference(&base, "qcow2");
    for seed in 1..=4 {
        assert_pattern(&reference, seed, 4 * MIB * (seed - 1), MIB);
    }
    // What was committed is left empty, over the same base.
    qemu_img(d, &["compare", "base.qcow2", "two.qcow2"]).ok();
}

#[test]
fn a_snapshot_inside_the_image_keeps_the_state() {
    if !needs_root() {
        return;
    }
    let (disk, directory) = qcow2(&[]);
    let d = directory.path();
    ctl(&disk, &["snapshot", "--internal", "before"]).ok();
    write(&disk, 9, 0, MIB);
    ctl(&disk, &["snapshot", "--internal", ""]).ends(2);
    ctl(&disk, &["snapshot", "--internal", "a\nb"]).ends(2);
    ctl(&disk, &["snapshot"]).ends(2);
    assert_pattern(disk.path(), 9, 0, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&d.join("base.qcow2"));
    assert!(ringdisk(d, &["snapshot", "-l", "base.qcow2"]).ok().out.contains("before"));
    ringdisk(d, &["snapshot", "-a", "before", "base.qcow2"]).ok();
    assert_pattern(&images::reference(&d.join("base.qcow2"), "qcow2"), 1, 0, MIB);
}
