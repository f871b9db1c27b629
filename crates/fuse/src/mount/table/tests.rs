//! The mount table from text.

use std::path::{Path, PathBuf};

use super::{MountEntry, parse, top};

const TABLE: &[u8] = b"\
22 27 0:21 / /proc rw,nosuid - proc proc rw
36 27 0:33 /x /mnt/a\\040b\\134c rw,noatime shared:1 master:2 - ext4 /dev/vda1 rw
90 27 0:41 / /tmp/disk.raw rw,nosuid,nodev - fuse.other over rw
91 90 0:42 / /tmp/disk.raw rw,nosuid,nodev,noatime - fuse.ringdisk my\\040disk.qcow2 rw,user_id=0
garbage
92 x 0:43 / /tmp/y rw - fuse z rw
93 27 0:44 / /tmp/y rw no-dash fuse z rw
";

#[test]
fn lines_are_parsed_and_rubbish_is_left_out() {
    let entries = parse(TABLE);
    assert_eq!(entries.iter().map(|entry| entry.id).collect::<Vec<_>>(), [22, 36, 90, 91]);
    assert_eq!(entries[1].mountpoint, Path::new("/mnt/a b\\c"));
    let expected = MountEntry {
        id: 91,
        parent: 90,
        device: (0, 42),
        mountpoint: PathBuf::from("/tmp/disk.raw"),
        options: "rw,nosuid,nodev,noatime".to_owned(),
        fstype: "fuse.ringdisk".to_owned(),
        source: "my disk.qcow2".into(),
        super_options: "rw,user_id=0".to_owned(),
    };
    assert_eq!(entries[3], expected);
    assert!(entries[3].is_ours());
    assert_eq!(entries[3].connection(), Some(42));
    assert_eq!(entries[0].connection(), None);
}

#[test]
fn the_last_mount_at_a_path_is_the_one_on_top() {
    let entry = top(parse(TABLE), Path::new("/tmp/disk.raw")).expect("mounted");
    assert_eq!(entry.id, 91);
    assert!(top(parse(TABLE), Path::new("/tmp")).is_none());
}
