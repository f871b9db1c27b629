//! What a power cut leaves.
//!
//! Promises: a crash state is what was flushed and any part of the rest. Most subsets of many
//! changes look alike (about half of everything), and the states that hurt are the lopsided ones:
//! only the last change arrived, or all but one. So the seed chooses the shape of the subset first
//! and its members second.

use ringdisk_storage::Kind;

use super::image::Image;
use super::operation::{Action, Change};
use super::prng::Prng;
use super::state::State;
use crate::oracle::SECTOR;

/// How much of one change arrives.
#[derive(Clone, Copy)]
enum Luck {
    All,
    Nothing,
    Torn,
}

/// Which changes arrive. Numbers are places in the list of changes.
enum Shape {
    /// Each has luck of its own.
    Any,
    /// Those before this one; this one is torn.
    Prefix(u64),
    /// Those after this one; this one is torn.
    Suffix(u64),
    /// All but this one.
    AllBut(u64),
    /// This one alone.
    Only(u64),
    /// Each that begins in this range of the medium (a table, as likely as not), or each that does
    /// not.
    Place { start: u64, end: u64, inside: bool },
}

/// The durable image with any part of the changes that were not flushed, in their order, and of
/// those that were running, in any order.
pub(crate) fn crash_image(state: &State, seed: u64) -> Image {
    let settled = state.journal.iter().map(|(_, change)| change.clone()).collect();
    compose(state.durable.clone(), settled, running(state), seed)
}

/// The same as if the last flush had passed over the changes for which `lost` holds: each of them
/// may be missing, whatever came after it.
pub(crate) fn without_last_flush(
    state: &State,
    seed: u64,
    lost: &dyn Fn(u64, u64) -> bool,
) -> Option<Image> {
    let flushed = state.flushed.as_ref()?;
    let is_lost = |change: &&Change| lost(change.range().0, change.range().1);
    let mut durable = flushed.before.clone();
    // In their order: what is lost may come back over what is not, as in a disk that writes late.
    flushed.changes.iter().filter(|c| !is_lost(c)).for_each(|change| change.apply(&mut durable));
    let later = state.journal.iter().map(|(_, change)| change);
    let settled = flushed.changes.iter().filter(is_lost).chain(later).cloned().collect();
    Some(compose(durable, settled, running(state), seed))
}

/// Changes of operations that have begun and not ended.
fn running(state: &State) -> Vec<Change> {
    let len = state.image.len();
    let is_device = state.kind == Kind::BlockDevice;
    let change = |action: &Action| match *action {
        // A device does not grow, and a write that ends past its end is cut.
        Action::SetLen(_) if is_device => None,
        Action::Write { offset, ref bytes } if is_device && offset + bytes.len() as u64 > len => {
            let count = usize::try_from(len.saturating_sub(offset)).unwrap_or(0).min(bytes.len());
            Some(Change::Write { offset, bytes: bytes[..count].into() })
        }
        Action::Write { offset, ref bytes } => Some(Change::Write { offset, bytes: bytes.clone() }),
        Action::Zero { offset, len, unmap, .. } => Some(Change::Zero { offset, len, unmap }),
        Action::SetLen(len) => Some(Change::SetLen(len)),
        _ => None,
    };
    // One that has its outcome is in the journal already.
    state.pending.values().filter(|p| p.is_waiting()).filter_map(|p| change(&p.action)).collect()
}

fn compose(durable: Image, settled: Vec<Change>, mut running: Vec<Change>, seed: u64) -> Image {
    let mut prng = Prng::new(seed);
    prng.shuffle(&mut running);
    let (mut image, changes) = (durable, [settled, running].concat());
    let shape = shape(&mut prng, &changes);
    for (place, change) in (0..).zip(&changes) {
        match luck(&shape, &mut prng, place, change) {
            Luck::All => change.apply(&mut image),
            Luck::Nothing => {}
            Luck::Torn => {
                sectors(change).into_iter().filter(|_| prng.coin()).for_each(|sector| {
                    sector.apply(&mut image);
                });
            }
        }
    }
    image
}

fn shape(prng: &mut Prng, changes: &[Change]) -> Shape {
    let place = prng.below(changes.len() as u64);
    match prng.below(10) {
        0..=3 => Shape::Any,
        4 => Shape::Prefix(place),
        5 => Shape::Suffix(place),
        6 => Shape::AllBut(place),
        7 => Shape::Only(place),
        _ => {
            let at = usize::try_from(place).ok().and_then(|place| changes.get(place));
            let start = at.map_or(0, |change| change.range().0);
            // A few sectors to a large cluster.
            let span = SECTOR << prng.below(8);
            Shape::Place { start, end: start + span, inside: prng.coin() }
        }
    }
}

fn luck(shape: &Shape, prng: &mut Prng, place: u64, change: &Change) -> Luck {
    let whole = |arrives| if arrives { Luck::All } else { Luck::Nothing };
    match *shape {
        Shape::Any => match prng.below(4) {
            0 => Luck::All,
            1 => Luck::Nothing,
            _ => Luck::Torn,
        },
        Shape::Prefix(last) | Shape::Suffix(last) if place == last => Luck::Torn,
        Shape::Prefix(last) => whole(place < last),
        Shape::Suffix(first) => whole(place > first),
        Shape::AllBut(lost) => whole(place != lost),
        Shape::Only(kept) => whole(place == kept),
        Shape::Place { start, end, inside } => {
            whole((start..end).contains(&change.range().0) == inside)
        }
    }
}

/// The pieces of a change that arrive independently.
fn sectors(change: &Change) -> Vec<Change> {
    let cut = |offset: u64, len: u64| {
        let mut at = offset;
        std::iter::from_fn(move || {
            let end = offset + len;
            (at < end).then(|| {
                let stop = ((at / SECTOR + 1) * SECTOR).min(end);
                let piece = (at, stop - at);
                at = stop;
                piece
            })
        })
    };
    match change {
        Change::Write { offset, bytes } => cut(*offset, bytes.len() as u64)
            .map(|(at, len)| {
                let start = usize::try_from(at - offset).expect("inside the write");
                let stop = start + usize::try_from(len).expect("a sector");
                Change::Write { offset: at, bytes: bytes[start..stop].into() }
            })
            .collect(),
        // The kept part of a zeroed range is never torn inside a page by the unmapping.
        Change::Zero { offset, len, .. } => cut(*offset, *len)
            .map(|(offset, len)| Change::Zero { offset, len, unmap: false })
            .collect(),
        whole => vec![whole.clone()],
    }
}
