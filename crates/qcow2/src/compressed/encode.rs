//! Compression of one cluster. Pure; runs on helper threads, which keep one encoder each.
//!
//! Promises: what comes out is smaller than the cluster and is read by QEMU, which wants raw
//! deflate with a window of 12 bits, or zstd frames.
//! Source: qcow2 specification, "Compressed Clusters Descriptor" and "compression_type".

use std::cell::RefCell;

use zlib_rs::{Deflate, DeflateConfig, DeflateFlush, Status};

use crate::info::CompressionType;

/// Window of raw deflate, bits; negative: no header. A reader may have no larger one.
const WINDOW_BITS: i32 = -12;
/// Memory of deflate: the largest, which is the fastest (256 KiB for its hash).
const MEMORY_LEVEL: i32 = 9;
/// What zlib takes where no level is given.
const ZLIB_LEVEL: i32 = 6;
/// What zstd takes where no level is given.
const ZSTD_LEVEL: i32 = 3;

/// The encoders of one thread: they have hundreds of KiB.
#[derive(Default)]
struct Encoders {
    /// With its level.
    deflate: Option<(i32, Deflate)>,
    zstd: Option<zstd_safe::CCtx<'static>>,
    /// Where a cluster goes while it is compressed.
    output: Vec<u8>,
}

thread_local! {
    static ENCODERS: RefCell<Encoders> = RefCell::default();
}

/// Compresses one cluster for [`Qcow2::write_compressed`](crate::Qcow2::write_compressed). Takes
/// long (0.2 ms for 64 KiB of zstd, 1 ms of zlib): for helper threads.
///
/// * `level`: `None`: 6 for zlib, 3 for zstd. Levels that there are not count as the nearest.
/// * `cluster`: one whole cluster.
///
/// `None`: it does not get smaller, write it as it is.
pub fn compress(kind: CompressionType, level: Option<i32>, cluster: &[u8]) -> Option<Vec<u8>> {
    ENCODERS.with_borrow_mut(|encoders| {
        let Encoders { deflate, zstd, output } = encoders;
        output.resize(cluster.len().saturating_sub(1), 0);
        let len = match kind {
            CompressionType::Zlib => {
                let level = level.unwrap_or(ZLIB_LEVEL).clamp(0, 9);
                compress_zlib(deflate, level, cluster, output)
            }
            CompressionType::Zstd => {
                let level = level.unwrap_or(ZSTD_LEVEL);
                compress_zstd(zstd, level, cluster, output)
            }
        }?;
        output.get(..len).map(<[u8]>::to_vec)
    })
}

/// The encoder is kept after a stream that ended only: `reset` of zlib-rs 0.6.8 forgets where the
/// output of an unfinished one stood, and a later stream then panics.
fn compress_zlib(
    kept: &mut Option<(i32, Deflate)>,
    level: i32,
    cluster: &[u8],
    output: &mut [u8],
) -> Option<usize> {
    let mut encoder = match kept.take() {
        Some((known, mut encoder)) if known == level => {
            encoder.reset();
            encoder
        }
        _ => Deflate::new_with_config(DeflateConfig {
            level,
            window_bits: WINDOW_BITS,
            mem_level: MEMORY_LEVEL,
            ..DeflateConfig::default()
        }),
    };
    match encoder.compress(cluster, output, DeflateFlush::Finish) {
        Ok(Status::StreamEnd) => {
            let len = usize::try_from(encoder.total_out()).ok();
            *kept = Some((level, encoder));
            len
        }
        // No room: it is not smaller.
        _ => None,
    }
}

fn compress_zstd(
    encoder: &mut Option<zstd_safe::CCtx<'static>>,
    level: i32,
    cluster: &[u8],
    output: &mut [u8],
) -> Option<usize> {
    if encoder.is_none() {
        *encoder = zstd_safe::CCtx::try_create();
    }
    // The library brings the level into its range.
    encoder.as_mut()?.compress(output, cluster, level).ok()
}
