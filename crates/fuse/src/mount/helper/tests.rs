//! What is said to the helper, and what it says.

use std::path::Path;

use super::{explain, option_text};
use crate::ErrorKind;
use crate::mount::{Method, MountOptions};

fn options(source: &str) -> MountOptions {
    MountOptions {
        source: source.into(),
        read_only: false,
        allow_other: false,
        max_read: 1 << 20,
        method: Method::Helper,
    }
}

#[test]
fn commas_and_backslashes_in_the_name_are_protected() {
    let text = option_text(&options("a,b\\c"));
    assert_eq!(
        text.to_str().expect("ASCII"),
        "fsname=a\\,b\\\\c,subtype=ringdisk,max_read=1048576,default_permissions,\
         noatime,nosuid,nodev,rw"
    );
}

#[test]
fn read_only_and_allow_other_are_passed_on() {
    let options = MountOptions { read_only: true, allow_other: true, ..options("x") };
    let text = option_text(&options).into_string().expect("ASCII");
    assert!(text.ends_with(",ro,allow_other"));
}

#[test]
fn refusals_are_put_into_our_words() {
    let cases = [
        (
            "fusermount3: option allow_other only allowed if 'user_allow_other' is set in \
             /etc/fuse.conf",
            ErrorKind::AllowOtherDenied,
        ),
        (
            "fusermount3: user has no write access to mountpoint /etc/passwd",
            ErrorKind::PermissionDenied,
        ),
        ("fusermount3: failed to open /dev/fuse: Permission denied", ErrorKind::DeviceForbidden),
        ("fusermount3: fuse device not found, try 'modprobe fuse' first", ErrorKind::DeviceMissing),
    ];
    for (said, kind) in cases {
        assert_eq!(explain(Path::new("/m"), said).kind(), kind, "{said}");
    }
}
