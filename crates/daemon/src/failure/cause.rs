//! Why a command failed, for programs.
//!
//! Promises: has what a program needs to act on a failure, or to say it in words of its own (as
//! `qemu-img` does); the text for people is the message of the [`Failure`](super::Failure).

use std::error::Error as StdError;

/// Why a command failed, where something depends on that.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// An image could not be opened, read or changed.
    Image(ringdisk_disk::Cause),
    /// A new image has no size.
    SizeMissing,
    /// Images of that format have no such option.
    UnknownOption {
        /// Its name, for people.
        name: String,
    },
    /// A file could not be made.
    NotCreated {
        /// Its name.
        file: String,
        /// Why, in words.
        why: String,
    },
    /// Bitmaps were to be copied into a raw image.
    RawWithoutBitmaps,
    /// A bitmap was to be copied that is inconsistent.
    BitmapNotCopied {
        /// Its name, for people.
        name: String,
    },
    /// A bitmap was to be shown that is not there.
    BitmapNotFound {
        /// Its name.
        name: String,
    },
    /// A bitmap was to be shown that is inconsistent.
    BitmapUnusable {
        /// Its name.
        name: String,
    },
    /// The format has no metadata that could be checked.
    NothingToCheck,
    /// A disk would become smaller, which nobody allowed.
    WouldShrink,
    /// Nothing would be left of a disk.
    NothingLeft,
    /// The pid file could not be made.
    PidFile {
        /// The file and the reason, in words.
        why: String,
    },
    /// The host of an address where clients shall connect is not known.
    NoHost {
        /// The address, as it was given.
        place: String,
        /// What the resolver says.
        why: String,
    },
    /// Clients cannot connect at an address of TCP, for another reason.
    NotListening,
}

impl Cause {
    /// What an error says of an image, it or one of those that caused it.
    pub(super) fn of(error: &(dyn StdError + 'static)) -> Option<Cause> {
        let mut next = Some(error);
        let mut is_part = false;
        while let Some(this) = next {
            if let Some(cause) = of_image(this) {
                return Some(Cause::Image(if is_part { cause.of_part() } else { cause }));
            }
            next = this.source();
            is_part = true;
        }
        None
    }

    /// The same, of a part of what a failure is about.
    pub(super) fn of_part(self) -> Cause {
        match self {
            Cause::Image(cause) => Cause::Image(cause.of_part()),
            cause => cause,
        }
    }
}

/// What one error says of an image.
fn of_image(error: &(dyn StdError + 'static)) -> Option<ringdisk_disk::Cause> {
    use ringdisk_disk::Cause as Image;
    if let Some(error) = error.downcast_ref::<ringdisk_disk::Error>() {
        return Some(error.cause().cloned().unwrap_or(Image::Other));
    }
    if let Some(error) = error.downcast_ref::<ringdisk_storage::Error>() {
        return Some(Image::of_storage(error).unwrap_or(Image::Other));
    }
    error.downcast_ref::<ringdisk_qcow2::Error>().map(Image::of_qcow2)
}
