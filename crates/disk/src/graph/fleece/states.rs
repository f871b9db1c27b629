//! The state of each granule of a checkpoint: two bits.
//!
//! Promises: no lock and no allocation; a look writes to no cache line. One writer at a time has a
//! granule that is being copied. A granule that is kept stays so.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use ringdisk_ring::Errno;
use zerocopy::FromZeros;

/// Granules in one word.
const PER_WORD: u64 = 32;
/// The high bit of each granule of a word: it is kept.
const HIGH: u64 = 0xaaaa_aaaa_aaaa_aaaa;

/// What is known about the old data of a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Granule {
    /// The disk has it, as it was at the instant.
    Untouched,
    /// As [`Granule::Untouched`], and a writer is copying it.
    Copying,
    /// It is zeroes.
    Zero,
    /// The fleecing file has it.
    Copied,
}

impl Granule {
    const fn bits(self) -> u64 {
        match self {
            Granule::Untouched => 0,
            Granule::Copying => 1,
            Granule::Zero => 2,
            Granule::Copied => 3,
        }
    }
}

/// Where the frozen state of a granule is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// On the disk, unless it is overwritten meanwhile.
    OnDisk,
    /// In the fleecing file.
    InFile,
    /// It is zeroes.
    Zero,
}

impl From<Granule> for Known {
    fn from(granule: Granule) -> Known {
        match granule {
            Granule::Untouched | Granule::Copying => Known::OnDisk,
            Granule::Copied => Known::InFile,
            Granule::Zero => Known::Zero,
        }
    }
}

/// The states of all granules; they begin untouched.
#[derive(Debug)]
pub(crate) struct States {
    words: Box<[AtomicU64]>,
    count: u64,
}

impl States {
    /// Errors: ENOMEM.
    pub(crate) fn new(count: u64) -> Result<States, Errno> {
        let words = usize::try_from(count.div_ceil(PER_WORD)).map_err(|_| Errno::NOMEM)?;
        let words = <[AtomicU64]>::new_box_zeroed_with_elems(words).map_err(|_| Errno::NOMEM)?;
        Ok(States { words, count })
    }

    /// The state of a granule. One past the end is zeroes.
    pub(crate) fn get(&self, granule: u64) -> Granule {
        let Some((word, shift)) = self.place(granule) else { return Granule::Zero };
        match (word.load(Ordering::SeqCst) >> shift) & 3 {
            0 => Granule::Untouched,
            1 => Granule::Copying,
            2 => Granule::Zero,
            _ => Granule::Copied,
        }
    }

    /// How many granules from the first on are alike.
    pub(crate) fn alike(&self, granules: Range<u64>, known: Known) -> u64 {
        self.count_while(granules, |word| {
            let low = (word << 1) & HIGH;
            match known {
                Known::OnDisk => !word,
                Known::InFile => word & low,
                Known::Zero => word & !low,
            }
        })
    }

    /// Whether all granules are kept.
    pub(crate) fn are_kept(&self, granules: Range<u64>) -> bool {
        let count = granules.end.saturating_sub(granules.start);
        self.count_while(granules, |word| word) >= count
    }

    /// How many granules from the first on have the high bit in what `pick` makes of their word.
    fn count_while(&self, granules: Range<u64>, pick: impl Fn(u64) -> u64) -> u64 {
        let mut at = granules.start;
        while at < granules.end {
            let Some((word, shift)) = self.place(at) else { break };
            let others = (!pick(word.load(Ordering::SeqCst)) & HIGH) >> shift;
            if others != 0 {
                at += u64::from(others.trailing_zeros()) / 2;
                break;
            }
            at += (64 - shift) / 2;
        }
        at.min(granules.end).saturating_sub(granules.start)
    }

    /// Takes an untouched granule to another state. Returns whether it was untouched.
    pub(crate) fn claim(&self, granule: u64, to: Granule) -> bool {
        let Some((word, shift)) = self.place(granule) else { return false };
        let claimed = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |bits| {
            ((bits >> shift) & 3 == Granule::Untouched.bits()).then_some(bits | to.bits() << shift)
        });
        claimed.is_ok()
    }

    /// Ends the copy of a granule that the caller has claimed as [`Granule::Copying`].
    pub(crate) fn settle(&self, granule: u64, to: Granule) {
        if let Some((word, shift)) = self.place(granule) {
            word.fetch_xor((Granule::Copying.bits() ^ to.bits()) << shift, Ordering::SeqCst);
        }
    }

    fn place(&self, granule: u64) -> Option<(&AtomicU64, u64)> {
        if granule >= self.count {
            return None;
        }
        let word = self.words.get(usize::try_from(granule / PER_WORD).ok()?)?;
        Some((word, granule % PER_WORD * 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_granule_has_a_state_of_its_own() {
        let states = States::new(70).expect("memory");
        for granule in 0..70 {
            assert_eq!(states.get(granule), Granule::Untouched);
        }
        assert!(states.claim(31, Granule::Copying) && states.claim(32, Granule::Zero));
        assert!(states.claim(33, Granule::Copying) && states.claim(69, Granule::Copying));
        assert!(!states.claim(31, Granule::Copying) && !states.claim(32, Granule::Copying));
        states.settle(31, Granule::Copied);
        states.settle(33, Granule::Untouched);
        states.settle(69, Granule::Zero);
        let found: Vec<Granule> = [30, 31, 32, 33, 34, 69].map(|at| states.get(at)).to_vec();
        use Granule::{Copied, Untouched, Zero};
        assert_eq!(found, [Untouched, Copied, Zero, Untouched, Untouched, Zero]);
        assert!(states.claim(33, Granule::Copying));
    }

    #[test]
    fn runs_are_counted_word_by_word() {
        let states = States::new(200).expect("memory");
        for granule in 10..100 {
            assert!(states.claim(granule, Granule::Zero));
        }
        for granule in 100..170 {
            assert!(states.claim(granule, Granule::Copying));
            states.settle(granule, Granule::Copied);
        }
        assert!(states.claim(180, Granule::Copying));
        let alike = |from, to, known| states.alike(from..to, known);
        assert_eq!(alike(0, 200, Known::OnDisk), 10);
        assert_eq!(alike(0, 5, Known::OnDisk), 5);
        assert_eq!(alike(0, 200, Known::Zero), 0);
        assert_eq!(alike(10, 200, Known::Zero), 90);
        assert_eq!(alike(33, 64, Known::Zero), 31);
        assert_eq!(alike(99, 200, Known::InFile), 0);
        assert_eq!(alike(100, 200, Known::InFile), 70);
        assert_eq!(alike(170, 200, Known::OnDisk), 30, "a copy under way is not kept");
        assert!(states.are_kept(10..170) && states.are_kept(64..128) && states.are_kept(7..7));
        assert!(!states.are_kept(9..20) && !states.are_kept(169..171));
        let all =
            |known: Known| (0..200).filter(|at| Known::from(states.get(*at)) == known).count();
        assert_eq!([Known::OnDisk, Known::Zero, Known::InFile].map(all), [40, 90, 70]);
    }

    #[test]
    fn nothing_is_past_the_end() {
        let states = States::new(3).expect("memory");
        assert_eq!(states.get(3), Granule::Zero);
        assert!(!states.claim(3, Granule::Copying));
        states.settle(u64::MAX, Granule::Copied);
    }
}
