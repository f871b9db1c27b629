//! The units of the format as types: places on the disk, places in the image file, and the numbers
//! of clusters on either side.
//!
//! Promises: a place on the disk and a place in the image file do not mix, nor do offsets and
//! cluster numbers: the compiler refuses it. The types are plain numbers at run time. What they
//! allow is what such numbers can mean: an offset and a length make an offset, two offsets make a
//! length, an offset shifted right by `cluster_bits` makes the number of its cluster, and a cluster
//! number shifted left makes the offset of its first byte. Lengths and counts are plain `u64`.
//!
//! The number inside (`.0`) is for the borders: words as they are on disk, system calls, messages.

use std::fmt;
use std::ops::{Add, AddAssign, Shl, Shr, Sub};

/// What all four units have.
macro_rules! unit {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The place `count` further on; `None` where the number would not fit.
            #[inline]
            pub const fn checked_add(self, count: u64) -> Option<$name> {
                match self.0.checked_add(count) {
                    Some(sum) => Some($name(sum)),
                    None => None,
                }
            }

            /// The place `count` further on, at most the largest number.
            #[inline]
            pub const fn saturating_add(self, count: u64) -> $name {
                $name(self.0.saturating_add(count))
            }

            /// How far it is from `start` to here; 0 where that lies past this place.
            #[inline]
            pub const fn saturating_sub(self, start: $name) -> u64 {
                self.0.saturating_sub(start.0)
            }

            /// All places from here up to `end`, which does not belong to them.
            #[inline]
            pub fn up_to(self, end: $name) -> impl DoubleEndedIterator<Item = $name> + use<> {
                (self.0..end.0).map($name)
            }
        }

        impl Add<u64> for $name {
            type Output = $name;

            #[inline]
            fn add(self, count: u64) -> $name {
                $name(self.0 + count)
            }
        }

        impl AddAssign<u64> for $name {
            #[inline]
            fn add_assign(&mut self, count: u64) {
                self.0 += count;
            }
        }

        impl Sub<u64> for $name {
            type Output = $name;

            #[inline]
            fn sub(self, count: u64) -> $name {
                $name(self.0 - count)
            }
        }

        impl Sub for $name {
            type Output = u64;

            #[inline]
            fn sub(self, start: $name) -> u64 {
                self.0 - start.0
            }
        }

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

/// What offsets have, and how they and the numbers of clusters lead to one another.
macro_rules! offset {
    ($offset:ident, $cluster:ident) => {
        impl $offset {
            /// Whether it is a multiple of `size`.
            #[inline]
            pub const fn is_multiple_of(self, size: u64) -> bool {
                self.0.is_multiple_of(size)
            }

            /// The first multiple of `size` from here on.
            #[inline]
            pub const fn next_multiple_of(self, size: u64) -> $offset {
                $offset(self.0.next_multiple_of(size))
            }

            /// The last multiple of `size` up to here.
            #[inline]
            pub const fn align_down(self, size: u64) -> $offset {
                $offset(self.0 / size * size)
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

unit! {
    /// A byte of the disk that the guest sees.
    GuestOffset
}
unit! {
    /// A byte of the image file, or of the external data file.
    HostOffset
}
unit! {
    /// Number of a cluster of the disk: guest offset / cluster size.
    GuestCluster
}
unit! {
    /// Number of a cluster of the image file: host offset / cluster size.
    HostCluster
}
offset!(GuestOffset, GuestCluster);
offset!(HostOffset, HostCluster);

#[cfg(test)]
mod tests {
    use super::{GuestCluster, GuestOffset, HostCluster, HostOffset};

    #[test]
    fn offsets_and_clusters_lead_to_one_another() {
        assert_eq!(HostOffset(0x2_1234) >> 16, HostCluster(2));
        assert_eq!(HostCluster(2) << 16, HostOffset(0x2_0000));
        assert_eq!((GuestOffset(0x1_ffff) >> 16) << 16, GuestCluster(1) << 16);
        assert_eq!(GuestOffset(700).align_down(512) + 512, GuestOffset(1024));
        assert_eq!(GuestOffset(700).next_multiple_of(512) - GuestOffset(700), 324);
    }

    #[test]
    fn numbers_that_do_not_fit_are_noticed() {
        assert_eq!(HostOffset(u64::MAX).checked_add(1), None);
        assert_eq!(HostOffset(u64::MAX).saturating_add(1), HostOffset(u64::MAX));
        assert_eq!(HostOffset(5).saturating_sub(HostOffset(7)), 0);
    }

    #[test]
    fn a_range_of_clusters_can_be_walked() {
        let walked: Vec<_> = HostCluster(3).up_to(HostCluster(6)).collect();
        assert_eq!(walked, [HostCluster(3), HostCluster(4), HostCluster(5)]);
        assert_eq!(HostCluster(6).up_to(HostCluster(3)).count(), 0);
    }
}
