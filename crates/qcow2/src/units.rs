//! The units of the format as types: places on the disk, places in the image file, the numbers of
//! clusters on either side, and lengths.
//!
//! Promises: a place on the disk and a place in the image file do not mix, nor do offsets and
//! cluster numbers, nor places and lengths: the compiler refuses it. The types are plain numbers at
//! run time. What they allow is what such numbers can mean: an offset and a length make an offset,
//! two offsets make a length, an offset shifted right by `cluster_bits` makes the number of its
//! cluster, and a cluster number shifted left makes the offset of its first byte.
//!
//! What stays a number: counts (of clusters, of entries, of bits: two cluster numbers have a count
//! between them), words as they are on disk, and lengths that are a `usize` because they index
//! memory or a `u32` because they are parts of one cluster.
//!
//! The number inside (`.0`) is for the borders: words as they are on disk, system calls, messages,
//! the storage (which has neither disk nor format), and crates above that speak another protocol.

use std::fmt;
use std::iter::Sum;
use std::num::TryFromIntError;
use std::ops::{Add, AddAssign, Div, Mul, Rem, Shl, Shr, Sub, SubAssign};

/// A length in bytes: of a disk, a file, a range, a cluster.
///
/// A length is no place, and two places make no sum:
///
/// ```
/// use ringdisk_qcow2::{Bytes, GuestOffset};
///
/// let end = GuestOffset(65536) + Bytes(512);
/// assert_eq!(end - GuestOffset(65536), Bytes(512));
/// ```
///
/// ```compile_fail,E0308
/// use ringdisk_qcow2::{Bytes, GuestOffset};
///
/// let place: GuestOffset = Bytes(512);
/// ```
///
/// ```compile_fail,E0308
/// use ringdisk_qcow2::{Bytes, GuestOffset};
///
/// fn discard(offset: GuestOffset, len: Bytes) {}
/// discard(Bytes(512), GuestOffset(65536));
/// ```
///
/// ```compile_fail,E0277
/// use ringdisk_qcow2::GuestOffset;
///
/// let end = GuestOffset(65536) + GuestOffset(512);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No byte.
    pub const ZERO: Bytes = Bytes(0);
    /// As long as can be said: "up to the end" in a request, "no limit" in an option.
    pub const MAX: Bytes = Bytes(u64::MAX);

    /// The length of `len` bytes of memory.
    #[inline]
    pub const fn of(len: usize) -> Bytes {
        Bytes(len as u64)
    }

    /// The length of `count` clusters (or other units of 2 to the power of `bits` bytes).
    #[inline]
    pub const fn of_clusters(count: u64, bits: u32) -> Bytes {
        Bytes(count << bits)
    }

    /// How many clusters of 2 to the power of `bits` bytes it takes: the last need not be full.
    #[inline]
    pub const fn clusters(self, bits: u32) -> u64 {
        self.0.div_ceil(1 << bits)
    }

    /// log2, rounded down. Panics on no byte.
    #[inline]
    pub const fn ilog2(self) -> u32 {
        self.0.ilog2()
    }

    /// Whether it is a power of two.
    #[inline]
    pub const fn is_power_of_two(self) -> bool {
        self.0.is_power_of_two()
    }

    /// Whether it is no byte.
    #[inline]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Both together; `None` where the number would not fit.
    #[inline]
    pub const fn checked_add(self, other: Bytes) -> Option<Bytes> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(Bytes(sum)),
            None => None,
        }
    }

    /// What is left without `other`; `None` where that is longer.
    #[inline]
    pub const fn checked_sub(self, other: Bytes) -> Option<Bytes> {
        match self.0.checked_sub(other.0) {
            Some(rest) => Some(Bytes(rest)),
            None => None,
        }
    }

    /// `count` times as long; `None` where the number would not fit.
    #[inline]
    pub const fn checked_mul(self, count: u64) -> Option<Bytes> {
        match self.0.checked_mul(count) {
            Some(product) => Some(Bytes(product)),
            None => None,
        }
    }

    /// The first multiple of `unit` from here on; `None` where the number would not fit.
    #[inline]
    pub const fn checked_next_multiple_of(self, unit: Bytes) -> Option<Bytes> {
        match self.0.checked_next_multiple_of(unit.0) {
            Some(rounded) => Some(Bytes(rounded)),
            None => None,
        }
    }

    /// Both together, at most the largest number.
    #[inline]
    pub const fn saturating_add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }

    /// What is left without `other`; nothing where that is longer.
    #[inline]
    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// By how much one is longer than the other.
    #[inline]
    pub const fn abs_diff(self, other: Bytes) -> Bytes {
        Bytes(self.0.abs_diff(other.0))
    }

    /// `count` times as long, at most the largest number.
    #[inline]
    pub const fn saturating_mul(self, count: u64) -> Bytes {
        Bytes(self.0.saturating_mul(count))
    }

    /// Whether it is a multiple of `unit`.
    #[inline]
    pub const fn is_multiple_of(self, unit: Bytes) -> bool {
        self.0.is_multiple_of(unit.0)
    }

    /// The first multiple of `unit` that is at least as long.
    #[inline]
    pub const fn next_multiple_of(self, unit: Bytes) -> Bytes {
        Bytes(self.0.next_multiple_of(unit.0))
    }

    /// The last multiple of `unit` that is at most as long.
    #[inline]
    pub const fn align_down(self, unit: Bytes) -> Bytes {
        Bytes(self.0 / unit.0 * unit.0)
    }

    /// How many of `unit` it takes: the last need not be full.
    #[inline]
    pub const fn div_ceil(self, unit: Bytes) -> u64 {
        self.0.div_ceil(unit.0)
    }
}

impl Add for Bytes {
    type Output = Bytes;

    #[inline]
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0 + other.0)
    }
}

impl AddAssign for Bytes {
    #[inline]
    fn add_assign(&mut self, other: Bytes) {
        self.0 += other.0;
    }
}

impl Sub for Bytes {
    type Output = Bytes;

    #[inline]
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0 - other.0)
    }
}

impl SubAssign for Bytes {
    #[inline]
    fn sub_assign(&mut self, other: Bytes) {
        self.0 -= other.0;
    }
}

impl Mul<u64> for Bytes {
    type Output = Bytes;

    #[inline]
    fn mul(self, count: u64) -> Bytes {
        Bytes(self.0 * count)
    }
}

impl Mul<Bytes> for u64 {
    type Output = Bytes;

    #[inline]
    fn mul(self, unit: Bytes) -> Bytes {
        Bytes(self * unit.0)
    }
}

impl Div for Bytes {
    type Output = u64;

    /// How many whole units of that length it has.
    #[inline]
    fn div(self, unit: Bytes) -> u64 {
        self.0 / unit.0
    }
}

impl Div<u64> for Bytes {
    type Output = Bytes;

    /// The length of one of `count` equal parts, rounded down.
    #[inline]
    fn div(self, count: u64) -> Bytes {
        Bytes(self.0 / count)
    }
}

impl Rem for Bytes {
    type Output = Bytes;

    #[inline]
    fn rem(self, unit: Bytes) -> Bytes {
        Bytes(self.0 % unit.0)
    }
}

impl Shr<u32> for Bytes {
    type Output = u64;

    /// How many whole clusters of 2 to the power of `bits` bytes it has.
    #[inline]
    fn shr(self, bits: u32) -> u64 {
        self.0 >> bits
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(lengths: I) -> Bytes {
        lengths.fold(Bytes::ZERO, Add::add)
    }
}

impl TryFrom<Bytes> for usize {
    type Error = TryFromIntError;

    #[inline]
    fn try_from(len: Bytes) -> Result<usize, TryFromIntError> {
        usize::try_from(len.0)
    }
}

impl TryFrom<Bytes> for u32 {
    type Error = TryFromIntError;

    #[inline]
    fn try_from(len: Bytes) -> Result<u32, TryFromIntError> {
        u32::try_from(len.0)
    }
}

impl From<u32> for Bytes {
    #[inline]
    fn from(len: u32) -> Bytes {
        Bytes(len.into())
    }
}

/// A distance as its number.
const fn number(count: u64) -> u64 {
    count
}

/// What numbers and texts have in common.
macro_rules! printable {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::LowerHex for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::LowerHex::fmt(&self.0, f)
            }
        }
    };
}

/// What all four places have; `$distance` is what lies between two of them, `$make` and `$number`
/// lead from a number to it and back.
macro_rules! place {
    ($(#[$doc:meta])* $name:ident, $distance:ty, $make:path, $count:ident => $number:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The first.
            pub const ZERO: $name = $name(0);

            /// The place `count` further on; `None` where the number would not fit.
            #[inline]
            pub const fn checked_add(self, $count: $distance) -> Option<$name> {
                match self.0.checked_add($number) {
                    Some(sum) => Some($name(sum)),
                    None => None,
                }
            }

            /// The place `count` further on, at most the largest number.
            #[inline]
            pub const fn saturating_add(self, $count: $distance) -> $name {
                $name(self.0.saturating_add($number))
            }

            /// How far it is from `start` to here; 0 where that lies past this place.
            #[inline]
            pub const fn saturating_sub(self, start: $name) -> $distance {
                $make(self.0.saturating_sub(start.0))
            }

            /// All places from here up to `end`, which does not belong to them.
            #[inline]
            pub fn up_to(self, end: $name) -> impl DoubleEndedIterator<Item = $name> + use<> {
                (self.0..end.0).map($name)
            }
        }

        impl Add<$distance> for $name {
            type Output = $name;

            #[inline]
            fn add(self, $count: $distance) -> $name {
                $name(self.0 + $number)
            }
        }

        impl AddAssign<$distance> for $name {
            #[inline]
            fn add_assign(&mut self, $count: $distance) {
                self.0 += $number;
            }
        }

        impl Sub<$distance> for $name {
            type Output = $name;

            #[inline]
            fn sub(self, $count: $distance) -> $name {
                $name(self.0 - $number)
            }
        }

        impl Sub for $name {
            type Output = $distance;

            #[inline]
            fn sub(self, start: $name) -> $distance {
                $make(self.0 - start.0)
            }
        }

        printable!($name);
    };
}

/// What offsets have, and how they and the numbers of clusters lead to one another.
macro_rules! offset {
    ($offset:ident, $cluster:ident) => {
        impl $offset {
            /// The place after `len` bytes: where a disk or a file of that length ends.
            #[inline]
            pub const fn after(len: Bytes) -> $offset {
                $offset(len.0)
            }

            /// How many bytes lie before it.
            #[inline]
            pub const fn from_start(self) -> Bytes {
                Bytes(self.0)
            }

            /// Whether it is a multiple of `size`.
            #[inline]
            pub const fn is_multiple_of(self, size: Bytes) -> bool {
                self.0.is_multiple_of(size.0)
            }

            /// The first multiple of `size` from here on.
            #[inline]
            pub const fn next_multiple_of(self, size: Bytes) -> $offset {
                $offset(self.0.next_multiple_of(size.0))
            }

            /// The last multiple of `size` up to here.
            #[inline]
            pub const fn align_down(self, size: Bytes) -> $offset {
                $offset(self.0 / size.0 * size.0)
            }
        }

        impl Rem<Bytes> for $offset {
            type Output = Bytes;

            /// How far it lies past the last multiple of `size`.
            #[inline]
            fn rem(self, size: Bytes) -> Bytes {
                Bytes(self.0 % size.0)
            }
        }

        impl Shr<u32> for $offset {
            type Output = $cluster;

            /// The number of the cluster that the byte lies in.
            #[inline]
            fn shr(self, cluster_bits: u32) -> $cluster {
                $cluster(self.0 >> cluster_bits)
            }
        }

        impl Shl<u32> for $cluster {
            type Output = $offset;

            /// The offset of the first byte of the cluster.
            #[inline]
            fn shl(self, cluster_bits: u32) -> $offset {
                $offset(self.0 << cluster_bits)
            }
        }
    };
}

place! {
    /// A byte of the disk that the guest sees.
    GuestOffset, Bytes, Bytes, len => len.0
}
place! {
    /// A byte of the image file, or of the external data file.
    HostOffset, Bytes, Bytes, len => len.0
}
place! {
    /// Number of a cluster of the disk: guest offset / cluster size.
    GuestCluster, u64, number, count => count
}
place! {
    /// Number of a cluster of the image file: host offset / cluster size.
    HostCluster, u64, number, count => count
}
offset!(GuestOffset, GuestCluster);
offset!(HostOffset, HostCluster);
printable!(Bytes);

#[cfg(test)]
mod tests {
    use super::{Bytes, GuestCluster, GuestOffset, HostCluster, HostOffset};

    #[test]
    fn offsets_and_clusters_lead_to_one_another() {
        assert_eq!(HostOffset(0x2_1234) >> 16, HostCluster(2));
        assert_eq!(HostCluster(2) << 16, HostOffset(0x2_0000));
        assert_eq!((GuestOffset(0x1_ffff) >> 16) << 16, GuestCluster(1) << 16);
        assert_eq!(GuestOffset(700).align_down(Bytes(512)) + Bytes(512), GuestOffset(1024));
        assert_eq!(GuestOffset(700) % Bytes(512), Bytes(188));
        let sector = GuestOffset(700).next_multiple_of(Bytes(512));
        assert_eq!(sector - GuestOffset(700), Bytes(324));
    }

    #[test]
    fn numbers_that_do_not_fit_are_noticed() {
        assert_eq!(HostOffset(u64::MAX).checked_add(Bytes(1)), None);
        assert_eq!(HostOffset(u64::MAX).saturating_add(Bytes(1)), HostOffset(u64::MAX));
        assert_eq!(HostOffset(5).saturating_sub(HostOffset(7)), Bytes::ZERO);
        assert_eq!(HostCluster(5).saturating_sub(HostCluster(3)), 2);
        assert_eq!(Bytes::MAX.checked_add(Bytes(1)), None);
        assert_eq!(Bytes::MAX.saturating_add(Bytes(1)), Bytes::MAX);
        assert_eq!(Bytes(1 << 63).checked_mul(2), None);
        assert_eq!(Bytes(1 << 63).saturating_mul(2), Bytes::MAX);
        assert_eq!(Bytes(5).checked_sub(Bytes(7)), None);
        assert_eq!(Bytes(5).saturating_sub(Bytes(7)), Bytes::ZERO);
        assert_eq!(Bytes::MAX.checked_next_multiple_of(Bytes(512)), None);
        assert!(u32::try_from(Bytes(1 << 32)).is_err());
    }

    #[test]
    fn a_length_is_counted_in_clusters_and_units() {
        let len = Bytes(0x2_1234);
        assert_eq!((len >> 16, len.clusters(16)), (2, 3));
        assert_eq!(Bytes::of_clusters(3, 16), Bytes(0x3_0000));
        assert_eq!((len / Bytes(0x1_0000), len % Bytes(0x1_0000)), (2, Bytes(0x1234)));
        assert_eq!(len.div_ceil(Bytes(0x1_0000)), 3);
        assert_eq!(len.next_multiple_of(Bytes(512)), Bytes(0x2_1400));
        assert_eq!(len.align_down(Bytes(512)), Bytes(0x2_1200));
        assert!(Bytes(1024).is_multiple_of(Bytes(512)) && !len.is_multiple_of(Bytes(512)));
        assert_eq!(3 * Bytes(512), Bytes(1024) + Bytes(1536) / 3);
    }

    #[test]
    fn lengths_are_summed_and_shown_as_numbers() {
        let sum: Bytes = [Bytes(3), Bytes(4)].into_iter().sum();
        assert_eq!((format!("{sum}"), format!("{sum:>4}")), ("7".into(), "   7".into()));
        assert_eq!(format!("{:#x}", Bytes(512)), "0x200");
        assert_eq!(Bytes::of([0; 5].len()), Bytes(5));
        assert_eq!(Bytes(3).abs_diff(Bytes(5)), Bytes(5).abs_diff(Bytes(3)));
    }

    #[test]
    fn the_end_of_a_disk_lies_after_its_length() {
        assert_eq!(GuestOffset::after(Bytes(512)), GuestOffset::ZERO + Bytes(512));
        assert_eq!(GuestOffset(512).from_start(), Bytes(512));
    }

    #[test]
    fn a_range_of_clusters_can_be_walked() {
        let walked: Vec<_> = HostCluster(3).up_to(HostCluster(6)).collect();
        assert_eq!(walked, [HostCluster(3), HostCluster(4), HostCluster(5)]);
        assert_eq!(HostCluster(6).up_to(HostCluster(3)).count(), 0);
    }
}
