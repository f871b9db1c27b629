//! When virtqueues may be in the host kernel: the conditions, in one place.
//!
//! Promises: pure; the caller has looked ([`Look`]), and the answer is the first condition that is
//! not met, those first that last longest. What is not named here keeps no virtqueue out of the
//! kernel.

use std::fmt;

use crate::blk::features::{LOG_ALL, RING_PACKED, VERSION_1};

use crate::device::OnError;

/// Why virtqueues are with their queue threads, though they could be in the kernel. `Display` is a
/// clause that follows "since".
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The module cannot be used; why, and what would help.
    Module(String),
    /// `ctl … accel off`.
    SwitchedOff,
    /// The disk is more than the bytes of a file, or it is being changed.
    Disk(String),
    /// Another process has the block device, too; why.
    InUse(String),
    /// Errors of the image end the export, and the kernel does not ask.
    StopsOnError,
    /// Blocks that the module does not know, bytes.
    Blocks(u32),
    /// The file wants requests of whole blocks that are larger than those of the guest, bytes.
    Align(u32),
    /// The engine that was asked for is one of block devices.
    Engine,
    /// The image's length is no whole number of blocks.
    Odd {
        /// Bytes.
        size: u64,
        /// Bytes.
        block: u32,
    },
    /// The driver negotiated a layout of rings that the kernel does not know.
    Packed,
    /// The driver is a legacy one.
    Legacy,
    /// What is written to the guest's memory is logged: it is being migrated.
    Logged,
    /// More regions of memory than vhost takes.
    Regions {
        /// How many there are.
        regions: usize,
        /// How many it takes.
        max: usize,
    },
    /// A virtqueue with more descriptors than the module takes.
    Size {
        /// How many it has.
        size: u16,
        /// How many it may have.
        max: u32,
    },
    /// The device needs a reset.
    Broken,
    /// The kernel refused something; what, and why.
    Trouble(String),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Module(why)
            | Obstacle::Disk(why)
            | Obstacle::InUse(why)
            | Obstacle::Trouble(why) => f.write_str(why),
            Obstacle::SwitchedOff => f.write_str("it was switched off (`ctl … accel on`)"),
            Obstacle::StopsOnError => {
                f.write_str("an error of the image is to end it (--on-error stop)")
            }
            Obstacle::Blocks(bytes) => {
                write!(f, "blocks of {bytes} bytes are not known there (at most 4096)")
            }
            Obstacle::Align(bytes) => write!(
                f,
                "direct I/O on the image wants blocks of {bytes} bytes (--logical-block-size \
                 {bytes})"
            ),
            Obstacle::Engine => f.write_str(
                "bios are for block devices, and the image is a file (--accel-engine kiocb)",
            ),
            Obstacle::Odd { size, block } => write!(
                f,
                "the image has {size} bytes, which is no multiple of its blocks of {block} \
                 (`ringdisk resize` mends that)"
            ),
            Obstacle::Packed => f.write_str("the driver has packed virtqueues (--packed off)"),
            Obstacle::Legacy => f.write_str("the driver does not know VIRTIO_F_VERSION_1"),
            Obstacle::Logged => f.write_str("the guest is being migrated"),
            Obstacle::Regions { regions, max } => write!(
                f,
                "the guest's memory has {regions} regions, and vhost takes {max} (its parameter \
                 max_mem_regions)"
            ),
            Obstacle::Size { size, max } => {
                write!(f, "a virtqueue has {size} descriptors, and the module takes {max}")
            }
            Obstacle::Broken => f.write_str("the device needs a reset"),
        }
    }
}

impl Obstacle {
    /// Whether it goes away by itself, or the user wanted it: what must be accelerated (`--accel
    /// require`) is served all the same meanwhile.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(
            self,
            Obstacle::SwitchedOff | Obstacle::Disk(_) | Obstacle::Logged | Obstacle::Broken
        )
    }
}

/// What decides, as it is at this moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look<'a> {
    pub(crate) unusable: Option<&'a str>,
    pub(crate) is_switched_off: bool,
    pub(crate) trouble: Option<&'a str>,
    pub(crate) on_error: OnError,
    /// Bytes, as the guest knows it.
    pub(crate) logical_block: u32,
    /// Bytes.
    pub(crate) size: u64,
    /// Alignment that the file wants of offsets and lengths, bytes; or why the disk is not the
    /// bytes of a file.
    pub(crate) disk: Result<u32, &'a str>,
    /// Those that were agreed on; `None`: no driver yet.
    pub(crate) features: Option<u64>,
    pub(crate) regions: usize,
    pub(crate) regions_max: usize,
    /// Descriptors of the largest virtqueue.
    pub(crate) ring_size: u16,
    pub(crate) ring_max: u32,
    pub(crate) is_broken: bool,
    /// The image is a file, and the engine wants a block device.
    pub(crate) wants_device: bool,
}

/// What keeps virtqueues out of the kernel; the first of all reasons, those first that last
/// longest.
pub(crate) fn obstacle(look: &Look<'_>) -> Option<Obstacle> {
    if let Some(why) = look.unusable {
        return Some(Obstacle::Module(why.to_owned()));
    }
    if look.on_error == OnError::Stop {
        return Some(Obstacle::StopsOnError);
    }
    if look.logical_block > 4096 {
        return Some(Obstacle::Blocks(look.logical_block));
    }
    match look.disk {
        Err(why) => return Some(Obstacle::Disk(why.to_owned())),
        Ok(align) if align > look.logical_block => return Some(Obstacle::Align(align)),
        Ok(_) => {}
    }
    if look.wants_device {
        return Some(Obstacle::Engine);
    }
    if !look.size.is_multiple_of(u64::from(look.logical_block)) {
        return Some(Obstacle::Odd { size: look.size, block: look.logical_block });
    }
    if look.is_switched_off {
        return Some(Obstacle::SwitchedOff);
    }
    if let Some(features) = look.features {
        if features & RING_PACKED != 0 {
            return Some(Obstacle::Packed);
        }
        if features & VERSION_1 == 0 {
            return Some(Obstacle::Legacy);
        }
        if features & LOG_ALL != 0 {
            return Some(Obstacle::Logged);
        }
    }
    if look.regions > look.regions_max {
        return Some(Obstacle::Regions { regions: look.regions, max: look.regions_max });
    }
    if u32::from(look.ring_size) > look.ring_max {
        return Some(Obstacle::Size { size: look.ring_size, max: look.ring_max });
    }
    if look.is_broken {
        return Some(Obstacle::Broken);
    }
    look.trouble.map(|why| Obstacle::Trouble(why.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Look<'static> = Look {
        unusable: None,
        is_switched_off: false,
        trouble: None,
        on_error: OnError::Report,
        logical_block: 512,
        size: 1 << 20,
        disk: Ok(512),
        features: Some(VERSION_1),
        regions: 64,
        regions_max: 64,
        ring_size: 1024,
        ring_max: 1024,
        is_broken: false,
        wants_device: false,
    };

    #[test]
    fn each_condition_has_its_reason() {
        assert_eq!(obstacle(&GOOD), None);
        assert_eq!(obstacle(&Look { features: None, ..GOOD }), None);
        let passing = [
            (Look { is_switched_off: true, ..GOOD }, "switched off"),
            (Look { disk: Err("the image is not raw"), ..GOOD }, "not raw"),
            (Look { features: Some(VERSION_1 | LOG_ALL), ..GOOD }, "migrated"),
            (Look { is_broken: true, ..GOOD }, "reset"),
        ];
        let lasting = [
            (Look { unusable: Some("there is no /dev/vhost-blk"), ..GOOD }, "/dev/vhost-blk"),
            (Look { on_error: OnError::Stop, ..GOOD }, "--on-error stop"),
            (Look { logical_block: 8192, ..GOOD }, "8192"),
            (Look { disk: Ok(4096), ..GOOD }, "--logical-block-size 4096"),
            (Look { wants_device: true, ..GOOD }, "block devices"),
            (Look { size: 1000, ..GOOD }, "multiple"),
            (Look { features: Some(VERSION_1 | RING_PACKED), ..GOOD }, "packed"),
            (Look { features: Some(0), ..GOOD }, "VERSION_1"),
            (Look { regions: 65, ..GOOD }, "65 regions"),
            (Look { ring_max: 512, ..GOOD }, "1024 descriptors"),
            (Look { trouble: Some("START: EFAULT"), ..GOOD }, "EFAULT"),
        ];
        for (is_passing, cases) in [(true, &passing[..]), (false, &lasting[..])] {
            for (look, text) in cases {
                let obstacle = obstacle(look).expect(text);
                assert!(obstacle.to_string().contains(text), "{obstacle}");
                assert_eq!(obstacle.is_passing(), is_passing, "{obstacle}");
            }
        }
    }
}
