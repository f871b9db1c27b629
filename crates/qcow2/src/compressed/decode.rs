//! Decompression of one cluster. Pure; runs on helper threads, which keep one decoder each.
//!
//! Promises: never more output than the caller has room for, no window that an image chooses, no
//! panic on damaged data.
//! Source: qcow2 specification, "Compressed Clusters Descriptor" and "compression_type".

use std::cell::RefCell;

use rustix::io::Errno;
use zlib_rs::{Inflate, InflateFlush};

use crate::info::CompressionType;

/// Window of raw deflate, bits. Writers use 12; a larger one is no harm to a reader.
const WINDOW_BITS: u8 = 15;

/// The decoders of one thread: making them costs more than decompressing a small cluster (inflate
/// has about 48 KiB, zstd about 160 KiB).
#[derive(Default)]
struct Decoders {
    inflate: Option<Inflate>,
    whole: Option<libdeflater::Decompressor>,
    zstd: Option<zstd_safe::DCtx<'static>>,
}

thread_local! {
    static DECODERS: RefCell<Decoders> = RefCell::default();
}

/// Whether the first bytes of a cluster can be had for less than the whole.
pub(super) fn stops_early(kind: CompressionType) -> bool {
    // A zstd block is decoded as a whole, and has up to 128 KiB.
    kind == CompressionType::Zlib
}

/// Decompresses the start of one cluster.
///
/// * `compressed`: its bytes and maybe more: the length is known in sectors only.
/// * `output`: is filled: the whole cluster, or the first part of it where the kind
///   [stops early](stops_early).
/// * `is_whole`: it is the whole cluster.
///
/// Errors: `EIO` when that many bytes of valid data do not come out.
pub(crate) fn decompress(
    kind: CompressionType,
    compressed: &[u8],
    output: &mut [u8],
    is_whole: bool,
) -> Result<(), Errno> {
    DECODERS.with_borrow_mut(|decoders| match kind {
        CompressionType::Zlib => {
            if is_whole && inflate_whole(&mut decoders.whole, compressed, output) {
                return Ok(());
            }
            // Whatever it did not like: the end mark may be cut off, and more may come out than a
            // cluster.
            inflate(&mut decoders.inflate, compressed, output)
        }
        CompressionType::Zstd => zstd(&mut decoders.zstd, compressed, output),
    })
}

/// Raw deflate that ends with the output, quicker. False when the stream is anything else.
fn inflate_whole(
    decoder: &mut Option<libdeflater::Decompressor>,
    compressed: &[u8],
    output: &mut [u8],
) -> bool {
    let decoder = decoder.get_or_insert_with(libdeflater::Decompressor::new);
    decoder.deflate_decompress(compressed, output) == Ok(output.len())
}

/// Raw deflate. What comes after a full output, the end mark included, does not matter: it may be
/// cut off when the file ends there.
fn inflate(
    decoder: &mut Option<Inflate>,
    compressed: &[u8],
    output: &mut [u8],
) -> Result<(), Errno> {
    let decoder = match decoder {
        Some(decoder) => {
            decoder.reset(false);
            decoder
        }
        None => decoder.insert(Inflate::new(false, WINDOW_BITS)),
    };
    decoder.decompress(compressed, output, InflateFlush::Finish).map_err(|_| Errno::IO)?;
    if decoder.total_out() == output.len() as u64 { Ok(()) } else { Err(Errno::IO) }
}

/// Zstandard frames, usually one. Each is decoded in one step straight into the output, so the
/// window that a frame asks for (up to 2 GiB) is never allocated.
fn zstd(
    decoder: &mut Option<zstd_safe::DCtx<'static>>,
    compressed: &[u8],
    output: &mut [u8],
) -> Result<(), Errno> {
    if decoder.is_none() {
        *decoder = zstd_safe::DCtx::try_create();
    }
    let decoder = decoder.as_mut().ok_or(Errno::NOMEM)?;
    let (mut input, mut written) = (compressed, 0);
    while written < output.len() {
        let frame_len = zstd_safe::find_frame_compressed_size(input).map_err(|_| Errno::IO)?;
        if frame_len == 0 {
            return Err(Errno::IO);
        }
        let (frame, rest) = input.split_at_checked(frame_len).ok_or(Errno::IO)?;
        written += decoder.decompress(&mut output[written..], frame).map_err(|_| Errno::IO)?;
        input = rest;
    }
    Ok(())
}
