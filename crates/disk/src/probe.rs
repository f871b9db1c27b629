//! Probes the format of an image by its first bytes.
//!
//! Promises: pure; reads nothing but the bytes it is given. Used for the top image only, when the
//! user gave no format: the format of a backing file is never probed. The same test protects the
//! first sector of a probed raw image.
//! Source: the public format descriptions; each magic is the one that the format's own readers
//! check.

use crate::{Error, ErrorKind, Format};

/// Length of the probed bytes: one sector.
pub const PROBE_LEN: usize = 512;

/// The result of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probed {
    /// No known magic: raw bytes.
    Raw,
    /// qcow2 version 2 or later.
    Qcow2,
    /// A format that is known by name and cannot be opened.
    Other(&'static str),
}

/// Probes the first bytes of an image.
///
/// * `head`: the first [`PROBE_LEN`] bytes of the image, fewer if it is shorter.
pub fn probe(head: &[u8]) -> Probed {
    /// Formats with a magic at byte 0, by the name that QEMU's tools give them.
    const AT_START: [(&[u8], &str); 11] = [
        (b"QED\0", "qed"),
        (b"KDMV", "vmdk"),
        (b"COWD", "vmdk"),
        (b"conectix", "vpc"),
        (b"vhdxfile", "vhdx"),
        (b"LUKS\xba\xbe", "luks"),
        (b"WithoutFreeSpace", "parallels"),
        (b"WithouFreSpacExt", "parallels"),
        (b"Bochs Virtual HD Image", "bochs"),
        (b"#!/bin/sh\n#V2.0 Format\n", "cloop"),
        (b"OOOM", "cow"),
    ];
    /// "VirtualBox" images: magic at byte 64, little endian.
    const VDI_MAGIC: [u8; 4] = 0xbeda_107f_u32.to_le_bytes();

    if head.starts_with(b"QFI\xfb") {
        return match head.get(4..8) {
            Some([0, 0, 0, 1]) => Probed::Other("qcow"),
            _ => Probed::Qcow2,
        };
    }
    for (magic, name) in AT_START {
        if head.starts_with(magic) {
            return Probed::Other(name);
        }
    }
    if head.get(64..68) == Some(&VDI_MAGIC) {
        return Probed::Other("vdi");
    }
    if is_vmdk_descriptor(head) {
        return Probed::Other("vmdk");
    }
    Probed::Raw
}

/// A VMDK text descriptor: comment and empty lines, then `version=`.
fn is_vmdk_descriptor(head: &[u8]) -> bool {
    if head.starts_with(b"# Disk DescriptorFile") {
        return true;
    }
    if head.first() != Some(&b'#') {
        return false;
    }
    for line in head.split(|&byte| byte == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let blank = line.iter().all(|&byte| byte == b' ');
        if line.first() == Some(&b'#') || blank {
            continue;
        }
        return [&b"version=1"[..], b"version=2", b"version=3"].contains(&line);
    }
    false
}

/// The format to open a probed image with.
///
/// * `name`: the image's name, for the message.
///
/// Errors: `UnknownFormat` for a format that is known by name only.
pub fn choose(name: &str, probed: Probed) -> Result<Format, Error> {
    match probed {
        Probed::Raw => Ok(Format::Raw),
        Probed::Qcow2 => Ok(Format::Qcow2),
        Probed::Other(format) => Err(Error::new(
            ErrorKind::UnknownFormat,
            format!(
                "image '{name}' is in the format '{format}', which is not supported; convert it \
                 with `qemu-img convert -O qcow2 '{name}' new.qcow2`, or give `--format raw` to \
                 serve its bytes as they are"
            ),
        )),
    }
}
