//! Formats by their first bytes.

use crate::probe::{PROBE_LEN, Probed, choose, probe};
use crate::{ErrorKind, Format};

fn head(at: usize, magic: &[u8]) -> [u8; PROBE_LEN] {
    let mut head = [0; PROBE_LEN];
    head[at..at + magic.len()].copy_from_slice(magic);
    head
}

#[test]
fn known_magics_are_named() {
    let cases: [(usize, &[u8], &str); 14] = [
        (0, b"QFI\xfb\0\0\0\x01", "qcow"),
        (0, b"QED\0", "qed"),
        (0, b"KDMV", "vmdk"),
        (0, b"COWD", "vmdk"),
        (0, b"# Disk DescriptorFile\n", "vmdk"),
        (0, b"# x\n\n  \r\nversion=1\n", "vmdk"),
        (0, b"conectix", "vpc"),
        (0, b"vhdxfile", "vhdx"),
        (0, b"LUKS\xba\xbe\0\x01", "luks"),
        (0, b"WithoutFreeSpace", "parallels"),
        (0, b"WithouFreSpacExt", "parallels"),
        (0, b"Bochs Virtual HD Image", "bochs"),
        (0, b"#!/bin/sh\n#V2.0 Format\n", "cloop"),
        (64, b"\x7f\x10\xda\xbe", "vdi"),
    ];
    for (at, magic, name) in cases {
        assert_eq!(probe(&head(at, magic)), Probed::Other(name));
    }
}

#[test]
fn every_later_qcow2_version_is_qcow2() {
    for version in [2, 3, 4, 255] {
        assert_eq!(probe(&head(0, &[b'Q', b'F', b'I', 0xfb, 0, 0, 0, version])), Probed::Qcow2);
    }
}

#[test]
fn anything_else_is_raw() {
    let boot_sector = head(510, b"\x55\xaa");
    for bytes in [&b""[..], b"QFI", b"# text\nversion=9\n", b"#", b"\0", &boot_sector] {
        assert_eq!(probe(bytes), Probed::Raw);
    }
}

#[test]
fn a_format_that_cannot_be_opened_is_refused_with_advice() {
    let error = choose("a.vmdk", Probed::Other("vmdk")).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::UnknownFormat);
    for part in ["a.vmdk", "'vmdk'", "qemu-img convert", "--format raw"] {
        assert!(error.message().contains(part), "{error}");
    }
    assert_eq!(choose("x", Probed::Raw).expect("raw"), Format::Raw);
    assert_eq!(choose("x", Probed::Qcow2).expect("qcow2"), Format::Qcow2);
}
