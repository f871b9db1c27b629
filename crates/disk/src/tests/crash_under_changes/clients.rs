//! Clients of a disk that changes: what they ask for, and what they tell the oracle.

use ringdisk_qcow2::Bytes;
use std::cell::Cell;
use std::fmt::Debug;
use std::ops::Range;
use std::rc::Rc;

use ringdisk_ring::IoBuf;
use ringdisk_testkit::oracle::{Begun, Content, SECTOR};
use ringdisk_testkit::sim::Prng;

use super::{CLUSTER_BITS, Change, SIZE, SMALL, Shore, Stage, buffer};

/// Operations of a client at least.
const OPERATIONS: u64 = 40;

/// A change of the bytes that has begun.
struct Write {
    begun: Begun,
    at: Range<u64>,
    /// It began after the change of the graph.
    is_after: bool,
}

impl Shore {
    fn begin(&self, at: &Range<u64>, content: Content) -> Write {
        self.look();
        let begun = self.oracle.borrow_mut().begin(at.clone(), content);
        Write { begun, at: at.clone(), is_after: self.is_put() }
    }

    /// * `is_done`: all of it.
    fn end(&self, write: &Write, is_done: bool, what: &dyn Debug) {
        self.look();
        assert!(is_done || self.may_be_cut(&write.at), "{what:?} {:?}", write.at);
        // A snapshot that was applied meanwhile may have undone it.
        let may_be_undone = self.what == Change::Apply && write.is_after != self.is_put();
        self.oracle.borrow_mut().end(&write.begun, is_done && !may_be_undone);
    }

    /// Whether the disk may have lost a part of this range.
    fn may_be_cut(&self, at: &Range<u64>) -> bool {
        self.what == Change::Shrink && self.stage.get() != Stage::Before && at.end > SMALL
    }

    async fn read(&self, at: &Range<u64>) {
        let len = usize::try_from(at.end - at.start).expect("small");
        self.look();
        let is_after = self.is_put();
        let begun = self.oracle.borrow_mut().begin_read(at.clone());
        let buf = IoBuf::new(len, 512);
        let read = self.disk.read(&self.ring, at.start, &buf).await;
        self.look();
        let done = read.unwrap_or_else(|errno| panic!("read {at:?}: {errno}"));
        assert!(done == len || self.may_be_cut(at), "read {at:?}: {done}");
        let mut oracle = self.oracle.borrow_mut();
        if self.what == Change::Apply && is_after != self.is_put() {
            oracle.forget_read(&begun);
            return;
        }
        let mut bytes = buf.to_vec();
        // What was cut off meanwhile is forgotten.
        let known = usize::try_from(oracle.size().saturating_sub(at.start)).expect("small");
        bytes.truncate(done.min(known));
        let judged = oracle.end_read(&begun, &bytes);
        judged.unwrap_or_else(|wrong| panic!("read {at:?}: {wrong}"));
    }
}

/// A range of whole sectors; often a whole cluster.
fn range(prng: &mut Prng) -> Range<u64> {
    let cluster = 1 << CLUSTER_BITS;
    if prng.below(3) == 0 {
        let at = prng.below(SIZE / cluster) * cluster;
        return at..at + cluster;
    }
    let at = prng.below(SIZE / SECTOR) * SECTOR;
    at..(at + (1 + prng.below(24)) * SECTOR).min(SIZE)
}

/// One client: at least its operations, and until the change is over.
pub(super) async fn client(shore: Rc<Shore>, is_over: Rc<Cell<bool>>, seed: u64) {
    let mut prng = Prng::new(seed);
    let mut done = 0;
    while done < OPERATIONS || !is_over.get() {
        done += 1;
        request(&shore, &mut prng).await;
        for _ in 0..prng.below(3) {
            shore.ring.yield_now().await;
        }
    }
}

async fn request(shore: &Shore, prng: &mut Prng) {
    let (ring, disk, at) = (&shore.ring, &shore.disk, range(prng));
    let len = at.end - at.start;
    match prng.below(12) {
        0..=4 => {
            let write = shore.begin(&at, Content::Stamped);
            let buf = buffer(&shore.oracle.borrow().bytes(&write.begun));
            let written = disk.write(ring, at.start, &buf).await;
            shore.end(&write, written == Ok(buf.len()), &("write", written));
        }
        5 => {
            let write = shore.begin(&at, Content::Zero);
            let zeroed = disk.write_zeroes(ring, at.start, Bytes(len), prng.coin()).await;
            shore.end(&write, zeroed.is_ok(), &("zero", zeroed));
        }
        6 => {
            let write = shore.begin(&at, Content::Zero);
            // In a qcow2 image what is discarded reads as zeroes, too.
            let given = match prng.coin() {
                true => disk.discard(ring, at.start, Bytes(len)).await,
                false => disk.punch(ring, at.start, Bytes(len)).await,
            };
            shore.end(&write, given.is_ok(), &("discard", given));
        }
        7 | 8 => {
            shore.look();
            let begun = shore.oracle.borrow_mut().begin_flush();
            assert_eq!(disk.flush(ring).await, Ok(()), "flush");
            shore.look();
            shore.oracle.borrow_mut().end_flush(&begun);
        }
        _ => shore.read(&at).await,
    }
}
