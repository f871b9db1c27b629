//! Storage that keeps account of what is asked of it: where, how often, and by which request.
//!
//! A disk is a window of it, and no request may reach what lies beside the window. A request of one
//! sector is known by its place, if the test writes each sector once.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ringdisk_disk::{Bytes, Disk, ImageOptions};
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_storage::{
    Allocation, CustomStorage, Kind, Limits, LocalFuture, Preallocation, Storage,
};
use ringdisk_testkit::oracle::SECTOR;
use ringdisk_testkit::sim::Prng;

/// What a ledger knows.
#[derive(Debug)]
struct Book {
    /// Bytes, for a disk that is read again; none where nobody does.
    bytes: Vec<u8>,
    /// How often each sector was written, from the beginning of the window.
    writes: HashMap<u64, u32>,
    /// What was asked for beside the window.
    outside: Vec<String>,
    prng: Prng,
    /// Operations that wait for ever.
    frozen: u64,
}

/// The storage.
#[derive(Clone, Debug)]
pub(crate) struct Ledger(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    window: Range<u64>,
    len: u64,
    /// One operation of so many takes a while; 0: none.
    slow: u64,
    /// The longest while.
    while_us: u64,
    counts: bool,
    is_frozen: AtomicBool,
    is_over: AtomicBool,
    book: Mutex<Book>,
}

impl Ledger {
    /// Storage with a window of `size` bytes for the disk, and as much at either side that nobody
    /// may reach. Its bytes are kept.
    pub(crate) fn of_bytes(size: u64, slow: u64) -> Ledger {
        let window = size..2 * size;
        Ledger::new(window, 3 * size, slow, 50, true)
    }

    /// Storage without bytes, that counts writes of each sector.
    pub(crate) fn of_counts(size: u64, seed: u64) -> Ledger {
        let ledger = Ledger::new(0..size, size, 2, 2000, false);
        ledger.book().prng = Prng::new(seed);
        ledger
    }

    fn new(window: Range<u64>, len: u64, slow: u64, while_us: u64, keeps: bool) -> Ledger {
        let bytes = if keeps { vec![0; usize::try_from(len).expect("small")] } else { Vec::new() };
        let book = Book {
            bytes,
            writes: HashMap::new(),
            outside: Vec::new(),
            prng: Prng::new(1),
            frozen: 0,
        };
        Ledger(Arc::new(Shared {
            window,
            len,
            slow,
            while_us,
            counts: !keeps,
            is_frozen: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            book: Mutex::new(book),
        }))
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk of its window.
    pub(crate) fn disk(&self) -> Arc<Disk> {
        let Range { start, end } = self.0.window;
        let options = ImageOptions {
            window_offset: start,
            window_size: Some(Bytes(end - start)),
            ..ImageOptions::default()
        };
        let storage = Arc::new(Storage::custom(Box::new(self.clone())));
        Disk::from_storage(storage, &options)
    }

    /// What was asked for beside the window.
    pub(crate) fn outside(&self) -> Vec<String> {
        self.book().outside.clone()
    }

    /// How often a sector was written.
    pub(crate) fn writes(&self, sector: u64) -> u32 {
        self.book().writes.get(&sector).copied().unwrap_or(0)
    }

    /// From now on nothing has an effect or ends: as in a process that was killed.
    pub(crate) fn freeze(&self) {
        self.0.is_frozen.store(true, Ordering::SeqCst);
    }

    /// The test is over: what stands still fails.
    pub(crate) fn end(&self) {
        self.0.is_over.store(true, Ordering::SeqCst);
    }

    /// Operations that wait for ever.
    pub(crate) fn frozen(&self) -> u64 {
        self.book().frozen
    }

    /// Waits as long as chance has it.
    async fn pass(&self, ring: &Ring) -> Result<(), Errno> {
        self.stop_if_frozen(ring).await?;
        let pause = {
            let prng = &mut self.book().prng;
            let is_slow = self.0.slow > 0 && prng.below(self.0.slow) == 0;
            is_slow.then(|| Duration::from_micros(1 + prng.below(self.0.while_us)))
        };
        if let Some(pause) = pause {
            let _ = ring.sleep(pause).await;
            self.stop_if_frozen(ring).await?;
        }
        Ok(())
    }

    async fn stop_if_frozen(&self, ring: &Ring) -> Result<(), Errno> {
        if !self.0.is_frozen.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.book().frozen += 1;
        while !self.0.is_over.load(Ordering::SeqCst) {
            let _ = ring.sleep(Duration::from_millis(5)).await;
        }
        Err(Errno::IO)
    }

    /// Where bytes lie, if all of them belong to the disk.
    fn place(&self, what: &str, offset: u64, len: u64) -> Result<Range<usize>, Errno> {
        let Range { start, end } = self.0.window;
        if offset < start || offset.checked_add(len).is_none_or(|last| last > end) {
            self.book().outside.push(format!("{what} of {len} bytes at {offset}"));
            return Err(Errno::IO);
        }
        let at = |place: u64| usize::try_from(place).map_err(|_| Errno::IO);
        Ok(at(offset)?..at(offset + len)?)
    }

    fn zero(&self, what: &str, offset: u64, len: u64) -> Result<(), Errno> {
        let place = self.place(what, offset, len)?;
        if let Some(bytes) = self.book().bytes.get_mut(place) {
            bytes.fill(0);
        }
        Ok(())
    }
}

impl CustomStorage for Ledger {
    fn name(&self) -> &'static str {
        "ledger"
    }

    fn len(&self) -> u64 {
        self.0.len
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn kind(&self) -> Kind {
        Kind::Custom
    }

    fn limits(&self) -> Limits {
        Limits::byte_granular()
    }

    fn allocated_bytes(&self) -> u64 {
        self.0.len
    }

    fn read<'a>(&'a self, ring: &'a Ring, offset: u64, buf: &'a IoBuf) -> LocalFuture<'a, usize> {
        Box::pin(async move {
            self.pass(ring).await?;
            let place = self.place("a read", offset, buf.len() as u64)?;
            match self.book().bytes.get(place) {
                Some(bytes) => buf.copy_from_slice(0, bytes),
                None => buf.fill(0),
            }
            Ok(buf.len())
        })
    }

    fn write<'a>(&'a self, ring: &'a Ring, offset: u64, buf: &'a IoBuf) -> LocalFuture<'a, usize> {
        Box::pin(async move {
            self.pass(ring).await?;
            let place = self.place("a write", offset, buf.len() as u64)?;
            let mut book = self.book();
            if self.0.counts {
                let first = (offset - self.0.window.start) / SECTOR;
                for sector in first..first + buf.len() as u64 / SECTOR {
                    *book.writes.entry(sector).or_default() += 1;
                }
            }
            if let Some(bytes) = book.bytes.get_mut(place) {
                buf.copy_to_slice(0, bytes);
            }
            Ok(buf.len())
        })
    }

    fn flush<'a>(&'a self, ring: &'a Ring) -> LocalFuture<'a, ()> {
        Box::pin(async move {
            self.pass(ring).await?;
            Ok(())
        })
    }

    fn discard<'a>(&'a self, ring: &'a Ring, offset: u64, len: u64) -> LocalFuture<'a, ()> {
        Box::pin(async move {
            self.pass(ring).await?;
            self.zero("a discard", offset, len)
        })
    }

    fn write_zeroes<'a>(
        &'a self,
        ring: &'a Ring,
        offset: u64,
        len: u64,
        _may_unmap: bool,
        _fallback: bool,
    ) -> LocalFuture<'a, ()> {
        Box::pin(async move {
            self.pass(ring).await?;
            self.zero("zeroing", offset, len)
        })
    }

    fn set_len<'a>(&'a self, _ring: &'a Ring, _len: u64) -> LocalFuture<'a, ()> {
        Box::pin(async { Err(Errno::OPNOTSUPP) })
    }

    fn preallocate<'a>(
        &'a self,
        _ring: &'a Ring,
        _offset: u64,
        _len: u64,
        _mode: Preallocation,
    ) -> LocalFuture<'a, ()> {
        Box::pin(async { Err(Errno::OPNOTSUPP) })
    }

    fn allocation<'a>(
        &'a self,
        _ring: &'a Ring,
        offset: u64,
        len: u64,
    ) -> LocalFuture<'a, (Allocation, u64)> {
        let left = self.0.len.saturating_sub(offset);
        Box::pin(async move { Ok((Allocation::Data, len.min(left))) })
    }
}
