//! Several pieces of memory that act as one buffer: the data of a request whose segments lie apart.
//!
//! Promises: a [`Scatter`] that is used again allocates nothing once it had as many pieces; the
//! pieces of a buffer that is still held never change, so the kernel may read their array until an
//! operation has ended.

use std::rc::Rc;

use super::{IoBuf, Origin, Region};

/// Pieces in the order of their bytes. None is empty, each lies in one region, and no two
/// that follow one another could be one.
#[derive(Default)]
pub(super) struct Pieces {
    bufs: Vec<IoBuf>,
    /// The same, as the kernel reads them.
    vectors: Vec<libc::iovec>,
    /// Where each ends among the bytes of all.
    ends: Vec<usize>,
}

impl Pieces {
    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The piece that has byte `at`, or the number of pieces.
    fn find(&self, at: usize) -> usize {
        self.ends.partition_point(|end| *end <= at)
    }

    /// Where a piece begins among the bytes of all.
    fn start(&self, index: usize) -> usize {
        index.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    fn push(&mut self, buf: IoBuf) {
        let len = self.len() + buf.len;
        if let (Some(last), Some(vector), Some(end)) =
            (self.bufs.last_mut(), self.vectors.last_mut(), self.ends.last_mut())
            && Rc::ptr_eq(&last.region, &buf.region)
            && last.offset + last.len == buf.offset
        {
            last.len += buf.len;
            vector.iov_len = last.len;
            *end = len;
            return;
        }
        self.vectors.push(libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len });
        self.bufs.push(buf);
        self.ends.push(len);
    }

    fn clear(&mut self) {
        self.bufs.clear();
        self.vectors.clear();
        self.ends.clear();
    }
}

/// Makes one buffer of several pieces, again and again: one for each request in flight.
#[derive(Default)]
pub struct Scatter {
    /// `None` at first, and after pieces were released while a buffer of them was still held.
    region: Option<Rc<Region>>,
}

impl std::fmt::Debug for Scatter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pieces = self.region.as_ref().and_then(|region| region.pieces());
        let count = pieces.map_or(0, |pieces| pieces.bufs.len());
        f.debug_struct("Scatter").field("pieces", &count).finish_non_exhaustive()
    }
}

impl Scatter {
    /// Without pieces and without memory.
    pub fn new() -> Scatter {
        Scatter::default()
    }

    /// Without pieces, with memory for so many.
    pub fn with_capacity(pieces: usize) -> Scatter {
        let room = Pieces {
            bufs: Vec::with_capacity(pieces),
            vectors: Vec::with_capacity(pieces),
            ends: Vec::with_capacity(pieces),
        };
        let region = Region {
            start: std::ptr::null_mut(),
            len: 0,
            origin: Origin::Scattered(Box::new(room)),
            fixed: None,
        };
        Scatter { region: Some(Rc::new(region)) }
    }

    /// Start address and bytes of the memory for pieces.
    pub fn own_memory(&self) -> impl Iterator<Item = (usize, usize)> {
        let pieces = self.region.as_ref().and_then(|region| region.pieces());
        pieces.into_iter().flat_map(|pieces| {
            [
                (pieces.bufs.as_ptr().addr(), pieces.bufs.capacity() * size_of::<IoBuf>()),
                (
                    pieces.vectors.as_ptr().addr(),
                    pieces.vectors.capacity() * size_of::<libc::iovec>(),
                ),
                (pieces.ends.as_ptr().addr(), pieces.ends.capacity() * size_of::<usize>()),
            ]
        })
    }

    /// Releases all pieces. The memory for them is kept unless a buffer made of them is still
    /// held.
    pub fn clear(&mut self) {
        match self.region.as_mut().map(Rc::get_mut) {
            Some(Some(region)) => {
                region.pieces_mut().clear();
                region.len = 0;
            }
            Some(None) => self.region = None,
            None => {}
        }
    }

    /// Adds a piece behind the others. One that goes on where the last one ends becomes one with
    /// it; an empty one is left out. Panics for pages of a client, and while a buffer made of these
    /// pieces is held (programming errors).
    pub fn push(&mut self, piece: IoBuf) {
        let region = self.region.get_or_insert_with(|| {
            Rc::new(Region {
                start: std::ptr::null_mut(),
                len: 0,
                origin: Origin::Scattered(Box::default()),
                fixed: None,
            })
        });
        let region = Rc::get_mut(region).expect("nobody holds a buffer made of the pieces so far");
        let pieces = region.pieces_mut();
        if piece.is_contiguous() {
            if piece.len > 0 {
                pieces.push(piece);
            }
        } else {
            assert!(piece.is_ours(), "pages of a client are not ours to gather");
            piece.pieces().for_each(|part| pieces.push(part));
        }
        region.len = region.pieces().map_or(0, Pieces::len);
    }

    /// The pieces as one buffer; a single piece as itself.
    pub fn buffer(&self) -> IoBuf {
        let Some(region) = &self.region else { return IoBuf::new(0, 1) };
        match region.pieces().map(|pieces| &pieces.bufs[..]) {
            Some([only]) => only.clone(),
            _ => IoBuf { region: Rc::clone(region), offset: 0, len: region.len },
        }
    }

    /// All of it in one call: the former pieces go, these come.
    ///
    /// Allocates the first time, for more pieces than ever before, and while the buffer that was
    /// made last is still held.
    pub fn fill(&mut self, pieces: impl IntoIterator<Item = IoBuf>) -> IoBuf {
        self.clear();
        pieces.into_iter().for_each(|piece| self.push(piece));
        self.buffer()
    }
}

impl Region {
    fn pieces(&self) -> Option<&Pieces> {
        match &self.origin {
            Origin::Scattered(pieces) => Some(pieces),
            _ => None,
        }
    }

    fn pieces_mut(&mut self) -> &mut Pieces {
        match &mut self.origin {
            Origin::Scattered(pieces) => pieces,
            _ => unreachable!("the region of a scatter is one of pieces"),
        }
    }
}

/// The kernel's description of a scattered buffer.
pub(crate) enum Vectors {
    /// All of an array, or a part of it: address and number of entries.
    Array(*const libc::iovec, usize),
    /// Its ends lie inside pieces: so many of them.
    Cut(usize),
}

impl IoBuf {
    /// The parts of a slice of a scattered buffer, or the part of one piece that it is. The caller
    /// has checked the range.
    #[cold]
    #[inline(never)]
    pub(super) fn slice_scattered(&self, offset: usize, len: usize) -> IoBuf {
        let pieces = self.region.pieces().expect("a scattered buffer");
        let index = pieces.find(offset);
        match pieces.bufs.get(index) {
            Some(piece) if offset + len <= pieces.ends[index] => {
                let from = offset - pieces.start(index);
                piece.slice(from..from + len)
            }
            _ => IoBuf { region: Rc::clone(&self.region), offset, len },
        }
    }

    /// The contiguous parts, in order: the buffer itself unless it is scattered. None for an empty
    /// one.
    pub fn pieces(&self) -> impl Iterator<Item = IoBuf> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let left = self.len - at;
            if left == 0 {
                return None;
            }
            let len = match self.region.pieces() {
                Some(pieces) => {
                    let offset = self.offset + at;
                    left.min(pieces.ends[pieces.find(offset)] - offset)
                }
                None => left,
            };
            let piece = self.slice(at..at + len);
            at += len;
            Some(piece)
        })
    }

    /// The description of a scattered buffer for the kernel; `None` for any other buffer.
    pub(crate) fn vectors(&self) -> Option<Vectors> {
        let pieces = self.region.pieces()?;
        let end = self.offset + self.len;
        let (first, last) = (pieces.find(self.offset), pieces.ends.partition_point(|e| *e < end));
        if self.len == 0 {
            return Some(Vectors::Array(pieces.vectors.as_ptr(), 0));
        }
        let count = last - first + 1;
        let is_whole = pieces.start(first) == self.offset && pieces.ends[last] == end;
        Some(if is_whole {
            Vectors::Array(pieces.vectors[first..=last].as_ptr(), count)
        } else {
            Vectors::Cut(count)
        })
    }

    /// The same bytes with an array of their own. Allocates.
    pub(crate) fn with_own_vectors(&self) -> IoBuf {
        Scatter::new().fill(self.pieces())
    }

    /// Calls `each` for what lies in one place: bytes before it in the range, address, and length.
    /// The caller has checked the range.
    #[cold]
    #[inline(never)]
    pub(super) fn each_part(
        &self,
        at: usize,
        len: usize,
        each: &mut dyn FnMut(usize, *mut u8, usize),
    ) {
        if self.is_contiguous() {
            return each(0, self.as_mut_ptr().wrapping_add(at), len);
        }
        let pieces = self.region.pieces().expect("pages of a client are not ours to touch");
        let mut index = pieces.find(self.offset + at);
        let mut skip = self.offset + at - pieces.start(index);
        let mut done = 0;
        while done < len {
            let piece = &pieces.bufs[index];
            let part = (piece.len - skip).min(len - done);
            each(done, piece.as_mut_ptr().wrapping_add(skip), part);
            (done, skip, index) = (done + part, 0, index + 1);
        }
    }
}
