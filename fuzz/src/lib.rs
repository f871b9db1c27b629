//! What the targets share: sound images in simulated storage, damage, operations, all of it
//! decided by the input.

pub mod rings;
pub mod targets;

use std::cell::RefCell;

use ringdisk_qcow2::{
    Bytes, CheckVerdict, GuestOffset, ImageBytes, Nothing, OpenOptions, Qcow2, check_bytes,
};
use ringdisk_ring::{Config, Errno, IoBuf, Ring, Runtime};
use ringdisk_testkit::layout::Shape;
use ringdisk_testkit::sim::SimStorage;

thread_local! {
    static RUNTIME: RefCell<Runtime> =
        RefCell::new(Runtime::new(Config::default()).expect("io_uring is needed"));
}

/// Runs one input.
pub fn with_ring<F: Future>(work: impl FnOnce(Ring) -> F) -> F::Output {
    RUNTIME.with_borrow_mut(|runtime| {
        let ring = runtime.ring().clone();
        runtime.block_on(work(ring))
    })
}

/// The input, taken from its front; zeroes when it is used up.
#[derive(Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    pub fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    pub fn number(&mut self, bytes: u32) -> u64 {
        (0..bytes).fold(0, |number, _| number << 8 | u64::from(self.byte()))
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.number(3).checked_rem(bound).unwrap_or(0)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Most bytes of a disk.
const DISK_MAX: u64 = 192 << 10;

/// A small image of any shape.
pub fn shape(input: &mut Input<'_>) -> Shape {
    let extended = input.byte() % 6 == 0;
    let version = if input.byte() % 4 == 0 && !extended { 2 } else { 3 };
    Shape {
        version,
        cluster_bits: if extended { 14 } else { 9 + u32::from(input.byte() % 5) },
        refcount_order: if version == 2 { 4 } else { u32::from(input.byte() % 7) },
        size: 512 + input.below(DISK_MAX / 512) * 512,
        extended,
        lazy: version == 3 && input.byte() % 4 == 0,
        ..Shape::default()
    }
}

/// How the image is opened.
pub fn options(input: &mut Input<'_>) -> OpenOptions {
    let choice = input.byte();
    OpenOptions {
        writable: true,
        metadata_cache_bytes: (choice & 1 == 1).then_some(Bytes::ZERO),
        discard_no_unref: choice & 6 == 6,
        ..OpenOptions::default()
    }
}

/// One operation on the disk, and on `model` when it succeeded. Errors: those of the engine.
pub async fn operate(
    ring: &Ring,
    image: &Qcow2,
    input: &mut Input<'_>,
    model: &mut [u8],
) -> Result<(), Errno> {
    let size = image.virtual_size().0.min(model.len() as u64);
    let (kind, at) = (input.byte(), input.below(size));
    let len = (1 + input.below(20_000)).min(size - at);
    let range = at as usize..(at + len) as usize;
    let len = Bytes(len);
    let byte = input.byte();
    match kind % 8 {
        0..=3 => {
            let buf = IoBuf::new(range.len(), 512);
            buf.fill(byte);
            let done = image.write(ring, GuestOffset(at), &buf, &Nothing).await?;
            model[at as usize..at as usize + done].fill(byte);
        }
        4 => {
            image.write_zeroes(ring, GuestOffset(at), len, byte & 1 == 0, &Nothing).await?;
            model[range].fill(0);
        }
        5 => {
            image.discard(ring, GuestOffset(at), len, &Nothing).await?;
            model[range].fill(0);
        }
        6 => image.flush(ring).await?,
        _ => image.write_back(ring).await,
    }
    Ok(())
}

/// Overwrites some bytes of an image.
pub fn damage(sim: &SimStorage, input: &mut Input<'_>) {
    for _ in 0..1 + input.byte() % 8 {
        // Metadata is near the beginning; all of it is reached.
        let at = match input.byte() % 4 {
            0 => input.below(128),
            1 => input.below(4096),
            _ => input.below(sim.len()),
        };
        let bytes: Vec<u8> = (0..1 + input.byte() % 8).map(|_| input.byte()).collect();
        if at + bytes.len() as u64 <= sim.len() {
            sim.put(at, &bytes);
        }
    }
}

#[derive(Debug)]
struct Look<'a>(&'a SimStorage);

impl ImageBytes for Look<'_> {
    fn image_len(&self) -> Bytes {
        Bytes(self.0.len())
    }

    fn read_into(&self, offset: u64, out: &mut [u8]) {
        let count = self.0.peek(offset, out);
        out[count..].fill(0);
    }
}

/// What our check says; `None`: it is no image any more.
pub fn verdict(sim: &SimStorage) -> Option<CheckVerdict> {
    check_bytes(&Look(sim)).ok().map(|report| report.verdict())
}
