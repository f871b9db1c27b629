//! A storage in memory that counts reads and can hold them back.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_storage::{Allocation, CustomStorage, Limits, LocalFuture, Preallocation, Storage};

/// What a test sees and decides.
#[derive(Debug, Default)]
pub struct Control {
    /// Ranges that were read: offset and length.
    pub reads: Mutex<Vec<(u64, usize)>>,
    /// Reads of this offset wait while it is set.
    pub held: Mutex<Option<u64>>,
    /// Reads of this offset fail with `EIO`.
    pub failing: Mutex<Option<u64>>,
    /// All reads give way to other tasks first.
    pub slow: AtomicBool,
    /// Reads that wait now.
    pub waiting: AtomicU64,
    wakers: Mutex<Vec<Waker>>,
}

impl Control {
    /// Lets all reads go on.
    pub fn release(&self) {
        *self.held.lock().expect("lock") = None;
        for waker in self.wakers.lock().expect("lock").drain(..) {
            waker.wake();
        }
    }

    /// Reads of the range that starts at `offset`.
    pub fn reads_at(&self, offset: u64) -> usize {
        self.reads.lock().expect("lock").iter().filter(|read| read.0 == offset).count()
    }

    fn is_held(&self, offset: u64) -> bool {
        *self.held.lock().expect("lock") == Some(offset)
    }
}

#[derive(Debug)]
struct Memory {
    bytes: Vec<u8>,
    control: Arc<Control>,
}

/// A storage with `bytes`, and the control over it.
pub fn memory(bytes: Vec<u8>) -> (Arc<Storage>, Arc<Control>) {
    let control = Arc::new(Control::default());
    let memory = Memory { bytes, control: control.clone() };
    (Arc::new(Storage::custom(Box::new(memory))), control)
}

fn unsupported<'a, T: 'a>() -> LocalFuture<'a, T> {
    Box::pin(async { Err(Errno::OPNOTSUPP) })
}

impl CustomStorage for Memory {
    fn name(&self) -> &'static str {
        "memory.qcow2"
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn limits(&self) -> Limits {
        Limits::byte_granular()
    }

    fn allocated_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read<'a>(&'a self, ring: &'a Ring, offset: u64, buf: &'a IoBuf) -> LocalFuture<'a, usize> {
        Box::pin(async move {
            self.control.reads.lock().expect("lock").push((offset, buf.len()));
            if self.control.slow.load(Ordering::SeqCst) {
                for _ in 0..5 {
                    ring.yield_now().await;
                }
            }
            self.control.waiting.fetch_add(1, Ordering::SeqCst);
            poll_fn(|context| {
                if self.control.is_held(offset) {
                    self.control.wakers.lock().expect("lock").push(context.waker().clone());
                    return Poll::Pending;
                }
                Poll::Ready(())
            })
            .await;
            self.control.waiting.fetch_sub(1, Ordering::SeqCst);
            if *self.control.failing.lock().expect("lock") == Some(offset) {
                return Err(Errno::IO);
            }
            let start = self.bytes.len().min(offset as usize);
            let end = self.bytes.len().min(start + buf.len());
            buf.copy_from_slice(0, &self.bytes[start..end]);
            Ok(end - start)
        })
    }

    fn write<'a>(&'a self, _: &'a Ring, _: u64, _: &'a IoBuf) -> LocalFuture<'a, usize> {
        unsupported()
    }

    fn flush<'a>(&'a self, _: &'a Ring) -> LocalFuture<'a, ()> {
        unsupported()
    }

    fn discard<'a>(&'a self, _: &'a Ring, _: u64, _: u64) -> LocalFuture<'a, ()> {
        unsupported()
    }

    fn write_zeroes<'a>(
        &'a self,
        _: &'a Ring,
        _: u64,
        _: u64,
        _: bool,
        _: bool,
    ) -> LocalFuture<'a, ()> {
        unsupported()
    }

    fn set_len<'a>(&'a self, _: &'a Ring, _: u64) -> LocalFuture<'a, ()> {
        unsupported()
    }

    fn preallocate<'a>(
        &'a self,
        _: &'a Ring,
        _: u64,
        _: u64,
        _: Preallocation,
    ) -> LocalFuture<'a, ()> {
        unsupported()
    }

    fn allocation<'a>(&'a self, _: &'a Ring, _: u64, _: u64) -> LocalFuture<'a, (Allocation, u64)> {
        unsupported()
    }
}
