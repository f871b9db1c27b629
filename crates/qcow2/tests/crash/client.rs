//! One client of the disk: random operations, every read compared.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use ringdisk_qcow2::{Bytes, GuestOffset, Qcow2, WriteBack};
use ringdisk_ring::Ring;
use ringdisk_testkit::oracle::{Content, Oracle, SECTOR};
use ringdisk_testkit::sim::Prng;

use crate::config::{Config, index};
use crate::live::{Base, Shared, buffer, pack, read};

/// How the trace calls a write that was answered with less than was asked: something failed after
/// some progress.
pub(crate) const SHORT: &str = "short write";
/// How the trace calls a write-back, whose failure nobody is told.
pub(crate) const WRITE_BACK: &str = "write back";

/// What clients share.
#[derive(Debug)]
pub(crate) struct Shore {
    pub(crate) oracle: RefCell<Oracle>,
    /// What went wrong, first first.
    pub(crate) wrong: RefCell<Vec<String>>,
    /// Errors that operations returned.
    pub(crate) errors: RefCell<Vec<String>>,
    /// What happened, for a look at a failing seed.
    pub(crate) trace: RefCell<Vec<String>>,
    /// Storage operations may fail.
    pub(crate) faulty: bool,
}

impl Shore {
    pub(crate) fn new(oracle: Oracle, faulty: bool) -> Rc<Shore> {
        Rc::new(Shore {
            oracle: RefCell::new(oracle),
            wrong: RefCell::default(),
            errors: RefCell::default(),
            trace: RefCell::default(),
            faulty,
        })
    }

    pub(crate) fn note(&self, what: impl FnOnce() -> String) {
        self.trace.borrow_mut().push(what());
    }

    /// Notes the result of an operation; an error is wrong unless storage fails.
    fn result<T>(&self, what: &str, result: &Result<T, ringdisk_ring::Errno>) -> bool {
        if let Err(errno) = result {
            let text = format!("{what}: {errno}");
            self.note(|| text.clone());
            self.errors.borrow_mut().push(text.clone());
            if !self.faulty {
                self.wrong.borrow_mut().push(text);
            }
        }
        result.is_ok()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) ring: Ring,
    pub(crate) image: Shared,
    pub(crate) base: Base,
    pub(crate) shore: Rc<Shore>,
    pub(crate) config: Rc<Config>,
}

impl Client {
    /// Works to its end.
    pub(crate) async fn work(self, seed: u64) {
        let mut prng = Prng::new(seed);
        for _ in 0..self.config.operations {
            match prng.below(100) {
                0..=47 => self.write(&mut prng).await,
                48..=59 => self.zero(&mut prng).await,
                60..=71 => self.discard(&mut prng).await,
                72..=81 => self.flush().await,
                82..=93 => self.read(&mut prng).await,
                _ if self.config.compressed => self.write_packed(&mut prng).await,
                _ => self.write_back().await,
            }
            for _ in 0..prng.below(4) {
                self.ring.yield_now().await;
            }
        }
    }

    /// A range inside one of the regions and inside the disk.
    fn range(&self, prng: &mut Prng) -> Range<u64> {
        let regions = &self.config.regions;
        let size = self.shore.oracle.borrow().size();
        let region = &regions[index(prng, regions.len() as u64)];
        let (from, to) = (region.start.min(size - SECTOR), region.end.min(size));
        let cluster = self.config.cluster();
        let mut at = from + prng.below(to - from);
        let mut len = match prng.below(4) {
            0 => 1 + prng.below(SECTOR * 2),
            1 => 1 + prng.below(cluster),
            2 => cluster,
            _ => 1 + prng.below(cluster * 3),
        };
        if !self.config.odd || prng.coin() {
            at = at / SECTOR * SECTOR;
            len = len.next_multiple_of(SECTOR);
        }
        if prng.below(3) == 0 {
            at = (at / cluster * cluster).max(from);
        }
        let end = (at + len).min(size);
        // The end of the disk need not be a multiple of a sector.
        at..end
    }

    async fn write(&self, prng: &mut Prng) {
        let range = self.range(prng);
        let begun = self.shore.oracle.borrow_mut().begin(range.clone(), Content::Stamped);
        self.shore.note(|| format!("write {} {range:x?}", begun.number));
        let buf = buffer(&self.shore.oracle.borrow().bytes(&begun));
        let mut done = 0;
        let mut good = true;
        while good && done < buf.len() {
            let rest = buf.slice(done..buf.len());
            let at = range.start + done as u64;
            let result = self.image.write(&self.ring, GuestOffset(at), &rest, &self.base).await;
            good = self.shore.result(&format!("write {} {range:x?}", begun.number), &result);
            if result.is_ok_and(|count| count < rest.len()) {
                self.shore.note(|| format!("{SHORT} {}", begun.number));
            }
            done += result.unwrap_or(0);
        }
        self.shore.note(|| format!("write {} done", begun.number));
        self.shore.oracle.borrow_mut().end(&begun, good);
    }

    async fn zero(&self, prng: &mut Prng) {
        let range = self.range(prng);
        let may_unmap = prng.coin();
        let begun = self.shore.oracle.borrow_mut().begin(range.clone(), Content::Zero);
        self.shore.note(|| format!("zero {} {range:x?} unmap {may_unmap}", begun.number));
        let len = range.end - range.start;
        let result = self
            .image
            .write_zeroes(&self.ring, GuestOffset(range.start), Bytes(len), may_unmap, &self.base)
            .await;
        let good = self.shore.result(&format!("zero {} {range:x?}", begun.number), &result);
        self.shore.note(|| format!("zero {} done", begun.number));
        self.shore.oracle.borrow_mut().end(&begun, good);
    }

    async fn discard(&self, prng: &mut Prng) {
        if self.config.options.discard == ringdisk_qcow2::Discard::Ignore {
            return;
        }
        let range = self.range(prng);
        let begun = self.shore.oracle.borrow_mut().begin(range.clone(), Content::Zero);
        self.shore.note(|| format!("discard {} {range:x?}", begun.number));
        let len = range.end - range.start;
        let result =
            self.image.discard(&self.ring, GuestOffset(range.start), Bytes(len), &self.base).await;
        let good = self.shore.result(&format!("discard {} {range:x?}", begun.number), &result);
        self.shore.note(|| format!("discard {} done", begun.number));
        self.shore.oracle.borrow_mut().end(&begun, good);
    }

    pub(crate) async fn flush(&self) {
        let begun = self.shore.oracle.borrow_mut().begin_flush();
        self.shore.note(|| "flush".into());
        let result = self.image.flush(&self.ring).await;
        self.shore.note(|| "flush done".into());
        if self.shore.result("flush", &result) {
            self.shore.oracle.borrow_mut().end_flush(&begun);
        }
    }

    pub(crate) async fn read(&self, prng: &mut Prng) {
        let range = self.range(prng);
        let begun = self.shore.oracle.borrow_mut().begin_read(range.clone());
        let mut bytes = vec![0; usize::try_from(range.end - range.start).expect("small")];
        let result = read(&self.ring, &self.image, &self.base, range.start, &mut bytes).await;
        if !self.shore.result(&format!("read {range:x?}"), &result) {
            return self.shore.oracle.borrow_mut().forget_read(&begun);
        }
        if let Err(mismatch) = self.shore.oracle.borrow_mut().end_read(&begun, &bytes) {
            self.shore.note(|| format!("read {range:x?}: {mismatch}"));
            self.shore.wrong.borrow_mut().push(format!("a read of {range:x?}: {mismatch}"));
        }
    }

    /// A compressed cluster. It is refused where there is something already.
    async fn write_packed(&self, prng: &mut Prng) {
        let cluster = self.config.cluster();
        let start = self.range(prng).start / cluster * cluster;
        if start + cluster > self.shore.oracle.borrow().size() {
            return;
        }
        let begun = self.shore.oracle.borrow_mut().begin(start..start + cluster, Content::Stamped);
        self.shore.note(|| format!("packed {} {start:x}", begun.number));
        let packed = pack(&self.image, &self.shore.oracle.borrow().bytes(&begun));
        let packed = packed.expect("stamps repeat themselves");
        let result = self.image.write_compressed(&self.ring, GuestOffset(start), &packed).await;
        self.shore.note(|| format!("packed {} {result:?}", begun.number));
        self.shore.oracle.borrow_mut().end(&begun, result.is_ok());
    }

    /// What the disk layer does now and then.
    async fn write_back(&self) {
        if self.image.wants_write_back() != WriteBack::Nothing {
            self.shore.note(|| WRITE_BACK.into());
            Qcow2::write_back(&self.image, &self.ring).await;
        }
    }
}
