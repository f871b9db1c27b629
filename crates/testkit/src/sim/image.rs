//! Sparse memory with a length: the content of a simulated medium.
//!
//! Promises: pages are shared between copies until one of them changes, so a copy costs one
//! reference for each page: thousands of crash states of one storage fit into memory and are made
//! in microseconds.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of a page; also the unit of the allocation map.
pub(crate) const PAGE: u64 = 4096;

type Page = Arc<[u8; 4096]>;

#[derive(Clone, Debug, Default)]
pub(crate) struct Image {
    pages: BTreeMap<u64, Page>,
    len: u64,
    /// What nobody has written holds [`STALE`]: a block device that was used before. Else such
    /// pages are holes.
    is_stale: bool,
}

/// Every byte of a block device that nobody has written: no zero, no valid table entry, no stamp.
pub(crate) const STALE: u8 = 0xdb;

/// Page, offset in it, and bytes there, of each piece of a range.
fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, usize)> {
    let mut at = offset;
    let end = offset + len as u64;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let inside = at % PAGE;
            let count = (PAGE - inside).min(end - at);
            let piece = (at / PAGE, index(inside), index(count));
            at += count;
            piece
        })
    })
}

/// A number that is at most a page, or at most the length of something in memory.
fn index(number: u64) -> usize {
    usize::try_from(number).expect("fits in memory")
}

impl Image {
    pub(crate) fn new(len: u64) -> Image {
        Image { pages: BTreeMap::new(), len, is_stale: false }
    }

    /// As `new`, full of old bytes in place of zeroes.
    pub(crate) fn stale(len: u64) -> Image {
        Image { is_stale: true, ..Image::new(len) }
    }

    /// A page that nobody has written.
    fn blank(&self) -> Page {
        Arc::new([if self.is_stale { STALE } else { 0 }; 4096])
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Reads up to `len` bytes, fewer at the end.
    pub(crate) fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(index(len.min(self.len.saturating_sub(offset))));
        self.visit(offset, len, |_, piece| out.extend_from_slice(piece));
        out
    }

    /// Shows the bytes of a range piece by piece, with the place of each in the range; returns how
    /// many there are.
    pub(crate) fn visit(
        &self,
        offset: u64,
        len: u64,
        mut piece: impl FnMut(usize, &[u8]),
    ) -> usize {
        const UNWRITTEN: [[u8; 4096]; 2] = [[0; 4096], [STALE; 4096]];
        let unwritten = &UNWRITTEN[usize::from(self.is_stale)];
        let len = index(len.min(self.len.saturating_sub(offset)));
        let mut at = 0;
        for (page, inside, count) in pieces(offset, len) {
            let bytes = self.pages.get(&page).map_or(unwritten, |page| page);
            piece(at, &bytes[inside..inside + count]);
            at += count;
        }
        len
    }

    /// Writes and grows.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut done = 0;
        let blank = self.blank();
        for (page, inside, count) in pieces(offset, bytes.len()) {
            let page = Arc::make_mut(self.pages.entry(page).or_insert_with(|| blank.clone()));
            page[inside..inside + count].copy_from_slice(&bytes[done..done + count]);
            done += count;
        }
        self.len = self.len.max(offset + bytes.len() as u64);
    }

    /// Zeroes a range inside the length; whole pages become holes if `unmap`.
    pub(crate) fn zero(&mut self, offset: u64, len: u64, unmap: bool) {
        let end = offset.saturating_add(len).min(self.len);
        if self.is_stale {
            return self.write_zeroes(offset, end.saturating_sub(offset));
        }
        let touched: Vec<u64> = if offset < end {
            self.pages.range(offset / PAGE..end.div_ceil(PAGE)).map(|(&page, _)| page).collect()
        } else {
            Vec::new()
        };
        for page in touched {
            let (start, stop) = (page * PAGE, (page + 1) * PAGE);
            // What lies beyond the length counts as covered.
            let covered = offset <= start && (stop <= end || end == self.len);
            if unmap && covered {
                self.pages.remove(&page);
            } else if let Some(bytes) = self.pages.get_mut(&page) {
                let bytes = Arc::make_mut(bytes);
                bytes[index(offset.max(start) - start)..index(end.min(stop) - start)].fill(0);
            }
        }
    }

    /// Zeroes a range that has no holes, piece by piece. Whole pages share one page of zeroes.
    fn write_zeroes(&mut self, offset: u64, len: u64) {
        let zeroes: Page = Arc::new([0; 4096]);
        let blank = self.blank();
        for (page, inside, count) in pieces(offset, index(len)) {
            if count == zeroes.len() {
                self.pages.insert(page, zeroes.clone());
            } else {
                let page = Arc::make_mut(self.pages.entry(page).or_insert_with(|| blank.clone()));
                page[inside..inside + count].fill(0);
            }
        }
    }

    /// Reserves pages, so that they are no holes, and grows.
    pub(crate) fn reserve(&mut self, offset: u64, len: u64) {
        let blank = self.blank();
        for page in offset / PAGE..(offset + len).div_ceil(PAGE) {
            self.pages.entry(page).or_insert_with(|| blank.clone());
        }
        self.len = self.len.max(offset + len);
    }

    pub(crate) fn set_len(&mut self, len: u64) {
        if len < self.len {
            // The rest of the last page must read as zeroes when it grows again.
            self.zero(len, self.len - len, true);
            self.pages.split_off(&len.div_ceil(PAGE));
        }
        self.len = len;
    }

    /// Whether the page at `offset` exists, and where the run of equal pages ends.
    pub(crate) fn run(&self, offset: u64) -> (bool, u64) {
        let first = offset / PAGE;
        let exists = self.pages.contains_key(&first);
        let end = if exists {
            let mut expected = first;
            for (&page, _) in self.pages.range(first..) {
                if page != expected {
                    break;
                }
                expected += 1;
            }
            expected
        } else {
            self.pages.range(first..).next().map_or(u64::MAX / PAGE, |(&page, _)| page)
        };
        (exists, (end * PAGE).min(self.len))
    }

    pub(crate) fn allocated_bytes(&self) -> u64 {
        self.pages.len() as u64 * PAGE
    }

    pub(crate) fn to_vec(&self) -> Vec<u8> {
        self.read(0, self.len)
    }
}
