//! Decompression of one cluster. Pure; runs on helper threads, which keep one decoder each.
//!
//! Promises: never more output than one cluster, no window beside it, no panic on rubbish.
//! Source: qcow2 specification, "Compressed Clusters Descriptor" and "compression_type".

use std::cell::RefCell;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress as inflate};
use rustix::io::Errno;

use crate::info::CompressionType;
use crate::sync::Arc;

/// The decoders of one thread: making them costs more than decompressing a small cluster (zstd's
/// has about 160 KiB).
struct Decoders {
    inflate: Box<DecompressorOxide>,
    zstd: Option<zstd_safe::DCtx<'static>>,
}

thread_local! {
    static DECODERS: RefCell<Decoders> =
        RefCell::new(Decoders { inflate: Box::default(), zstd: None });
}

/// Decompresses one cluster.
///
/// * `compressed`: its bytes and maybe more: the length is known in sectors only.
/// * `cluster_size`: bytes that must come out.
///
/// Errors: `EIO` when it is not a whole cluster of valid data.
pub(crate) fn decompress(
    kind: CompressionType,
    compressed: &[u8],
    cluster_size: usize,
) -> Result<Arc<Vec<u8>>, Errno> {
    let mut output = vec![0; cluster_size];
    DECODERS.with_borrow_mut(|decoders| match kind {
        CompressionType::Zlib => deflate(&mut decoders.inflate, compressed, &mut output),
        CompressionType::Zstd => zstd(&mut decoders.zstd, compressed, &mut output),
    })?;
    Ok(Arc::new(output))
}

/// Raw deflate. Writers use a window of 4 KiB (12 bits); a larger one is no harm, because the
/// output itself is the window.
fn deflate(
    decoder: &mut DecompressorOxide,
    compressed: &[u8],
    output: &mut [u8],
) -> Result<(), Errno> {
    decoder.init();
    let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, written) = inflate(decoder, compressed, output, 0, flags);
    let sound = match status {
        // The end of the stream, or more behind a full cluster: both are a cluster.
        TINFLStatus::Done | TINFLStatus::HasMoreOutput => true,
        // The end mark may be cut off when the file ends there.
        TINFLStatus::NeedsMoreInput | TINFLStatus::FailedCannotMakeProgress => true,
        _ => false,
    };
    if sound && written == output.len() { Ok(()) } else { Err(Errno::IO) }
}

/// Zstandard frames, usually one. Each is decoded in one step straight into the output, so the window
/// that a frame asks for (up to 2 GiB) is never allocated.
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
