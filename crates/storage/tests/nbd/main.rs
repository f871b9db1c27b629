//! Exports of NBD servers as storage: a server that does what each test says, and qemu-nbd.

#![allow(clippy::unwrap_used)]

mod hostile;
mod lost;
mod qemu;
mod requests;
mod server;

use ringdisk_ring::{Config, IoBuf, Ring, Runtime};

/// Runs a test on a ring.
fn on_ring<F: Future>(test: impl FnOnce(Ring) -> F) -> F::Output {
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    runtime.block_on(test(ring))
}

/// A buffer with bytes that differ from place to place.
fn pattern(len: usize, seed: usize) -> IoBuf {
    let buf = IoBuf::new(len, 4096);
    buf.copy_from_slice(0, &bytes(len, seed));
    buf
}

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    let byte = |at: usize| (at.wrapping_mul(31) / 7 + at / 256 + seed).to_le_bytes()[0];
    (0..len).map(byte).collect()
}
