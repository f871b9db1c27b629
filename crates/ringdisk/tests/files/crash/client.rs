//! Clients of a mounted disk that know what must be there: threads that write stamps, flush and
//! compare.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use ringdisk_testkit::oracle::{Begun, Below, Content, Oracle};
use ringdisk_testkit::sim::Prng;

/// Number of the disk in its stamps.
const DISK: u16 = 5;

/// What a client said to the oracle.
#[derive(Clone, Debug)]
enum Word {
    Begin(Range<u64>),
    End(u64, bool),
    BeginFlush,
    EndFlush(usize),
}

/// An oracle for threads, and what was said to it when.
pub(crate) struct Witness {
    state: Mutex<(Oracle, Vec<(usize, Word)>)>,
    /// How far the storage below is.
    moment: Box<dyn Fn() -> usize + Send + Sync>,
}

impl Witness {
    pub(crate) fn new(size: u64, moment: impl Fn() -> usize + Send + Sync + 'static) -> Witness {
        let oracle = Oracle::new(DISK, size, Below::NOTHING);
        Witness { state: Mutex::new((oracle, Vec::new())), moment: Box::new(moment) }
    }

    fn say<T>(&self, word: impl FnOnce(&T) -> Word, act: impl FnOnce(&mut Oracle) -> T) -> T {
        let mut state = self.state.lock().expect("no panic while it is held");
        let result = act(&mut state.0);
        let moment = (self.moment)();
        state.1.push((moment, word(&result)));
        result
    }

    fn begin(&self, range: Range<u64>) -> (Begun, Vec<u8>) {
        let of = range.clone();
        self.say(
            |_| Word::Begin(range),
            |oracle| {
                let begun = oracle.begin(of, Content::Stamped);
                let bytes = oracle.bytes(&begun);
                (begun, bytes)
            },
        )
    }

    fn end(&self, begun: &Begun, good: bool) {
        self.say(|()| Word::End(begun.number, good), |oracle| oracle.end(begun, good));
    }

    /// Returns the flush and its place among all that was said.
    fn begin_flush(&self) -> (Begun, usize) {
        let mut state = self.state.lock().expect("no panic while it is held");
        let begun = state.0.begin_flush();
        let moment = (self.moment)();
        state.1.push((moment, Word::BeginFlush));
        (begun, state.1.len() - 1)
    }

    fn end_flush(&self, begun: &Begun, place: usize) {
        self.say(|()| Word::EndFlush(place), |oracle| oracle.end_flush(begun));
    }

    /// The oracle as it is now.
    pub(crate) fn oracle(&self) -> Oracle {
        self.state.lock().expect("no panic while it is held").0.clone()
    }

    /// The run from its beginning.
    pub(crate) fn again(&self) -> Again {
        let state = self.state.lock().expect("no panic while it is held");
        Again {
            oracle: Oracle::new(DISK, state.0.size(), Below::NOTHING),
            words: state.1.clone(),
            at: 0,
            writes: Vec::new(),
            flushes: Vec::new(),
        }
    }
}

/// The oracle at some moment of the run.
pub(crate) struct Again {
    pub(crate) oracle: Oracle,
    words: Vec<(usize, Word)>,
    at: usize,
    writes: Vec<Begun>,
    flushes: Vec<(usize, Begun)>,
}

impl Again {
    /// Hears everything that was said before `moment` of the storage was over.
    pub(crate) fn advance_to(&mut self, moment: usize) {
        while let Some((_, word)) = self.words.get(self.at).filter(|(when, _)| *when <= moment) {
            match word {
                Word::Begin(range) => {
                    self.writes.push(self.oracle.begin(range.clone(), Content::Stamped));
                }
                Word::End(number, good) => {
                    let begun = self.writes.iter().find(|begun| begun.number == *number);
                    self.oracle.end(begun.expect("it began"), *good);
                }
                Word::BeginFlush => self.flushes.push((self.at, self.oracle.begin_flush())),
                Word::EndFlush(place) => {
                    let begun = self.flushes.iter().find(|(at, _)| at == place);
                    self.oracle.end_flush(&begun.expect("it began").1);
                }
            }
            self.at += 1;
        }
    }
}

/// Writes and flushes at random until it has made its steps, or `stop` is set, or an error comes.
/// Everything lies in the first `span` bytes.
///
/// * `file`: the mounted disk.
pub(crate) fn work(
    file: &File,
    witness: &Witness,
    seed: u64,
    steps: u64,
    span: u64,
    stop: &AtomicBool,
) {
    let mut prng = Prng::new(seed);
    for _ in 0..steps {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let good = match prng.below(8) {
            0 => {
                let (begun, place) = witness.begin_flush();
                let flushed = file.sync_data().is_ok();
                if flushed {
                    witness.end_flush(&begun, place);
                }
                flushed
            }
            _ => {
                let at = prng.below(span / 512) * 512;
                let end = (at + 512 * (1 + prng.below(40))).min(span);
                let (begun, bytes) = witness.begin(at..end);
                let written = file.write_all_at(&bytes, at).is_ok();
                witness.end(&begun, written);
                written
            }
        };
        if !good {
            return;
        }
    }
}
