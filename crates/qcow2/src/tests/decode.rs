use miniz_oxide::deflate::compress_to_vec;
use proptest::prelude::{any, prop, proptest};
use rustix::io::Errno;

use crate::CompressionType::{self, Zlib, Zstd};

const CLUSTER: usize = 65536;

/// A cluster in memory of its own.
fn decompress(kind: CompressionType, bytes: &[u8], len: usize) -> Result<Vec<u8>, Errno> {
    let mut output = vec![0; len];
    let whole = crate::compressed::decompress(kind, bytes, &mut output, true).map(|()| output);
    // Another decoder, the same answer.
    let mut output = vec![0; len];
    let part = crate::compressed::decompress(kind, bytes, &mut output, false).map(|()| output);
    assert_eq!(whole, part);
    whole
}

/// A cluster that compresses well, but not to nothing.
fn cluster() -> Vec<u8> {
    (0..CLUSTER).map(|i| (i / 7).to_le_bytes()[0] ^ (i / 1000).to_le_bytes()[0]).collect()
}

fn zstd(data: &[u8], level: i32) -> Vec<u8> {
    let mut out = vec![0; zstd_safe::compress_bound(data.len())];
    let len = zstd_safe::compress(out.as_mut_slice(), data, level).unwrap();
    out.truncate(len);
    out
}

#[test]
fn both_kinds_give_the_cluster_back() {
    assert_eq!(decompress(Zlib, &compress_to_vec(&cluster(), 6), CLUSTER).unwrap(), cluster());
    assert_eq!(decompress(Zstd, &zstd(&cluster(), 3), CLUSTER).unwrap(), cluster());
}

#[test]
fn deflate_gives_the_start_of_a_cluster() {
    let deflated = compress_to_vec(&cluster(), 6);
    for len in [1, 511, 4096, CLUSTER - 1] {
        assert_eq!(decompress(Zlib, &deflated, len).unwrap(), cluster()[..len], "{len}");
    }
}

#[test]
fn what_follows_the_stream_is_ignored() {
    let behind = [0xa5; 600];
    let deflated = [compress_to_vec(&cluster(), 6), behind.to_vec()].concat();
    let framed = [zstd(&cluster(), 3), behind.to_vec()].concat();
    assert_eq!(decompress(Zlib, &deflated, CLUSTER).unwrap(), cluster());
    assert_eq!(decompress(Zstd, &framed, CLUSTER).unwrap(), cluster());
}

#[test]
fn several_zstd_frames_make_a_cluster() {
    let cluster = cluster();
    let (first, second) = cluster.split_at(1000);
    let framed = [zstd(first, 3), zstd(second, 19)].concat();
    assert_eq!(decompress(Zstd, &framed, CLUSTER).unwrap(), cluster);
}

#[test]
fn less_than_a_cluster_is_an_error() {
    let half = &cluster()[..CLUSTER / 2];
    assert_eq!(decompress(Zlib, &compress_to_vec(half, 6), CLUSTER), Err(Errno::IO));
    assert_eq!(decompress(Zstd, &zstd(half, 3), CLUSTER), Err(Errno::IO));
}

#[test]
fn a_stream_that_is_cut_is_an_error() {
    let deflated = compress_to_vec(&cluster(), 6);
    let framed = zstd(&cluster(), 3);
    assert_eq!(decompress(Zlib, &deflated[..deflated.len() / 2], CLUSTER), Err(Errno::IO));
    assert_eq!(decompress(Zstd, &framed[..framed.len() / 2], CLUSTER), Err(Errno::IO));
    assert_eq!(decompress(Zlib, &[], CLUSTER), Err(Errno::IO));
    assert_eq!(decompress(Zstd, &[], CLUSTER), Err(Errno::IO));
}

#[test]
fn a_bomb_is_stopped_at_the_cluster() {
    let bomb = vec![0; 64 << 20];
    // Deflate: a full cluster came out, what is behind it does not matter. Zstd: one frame of 64
    // MiB is not a cluster.
    assert_eq!(decompress(Zlib, &compress_to_vec(&bomb, 6), CLUSTER).unwrap().len(), CLUSTER);
    assert_eq!(decompress(Zstd, &zstd(&bomb, 3), CLUSTER), Err(Errno::IO));
}

#[test]
fn a_zstd_frame_that_asks_for_a_huge_window_takes_no_memory_for_it() {
    // Magic, frame header without a content size, window of 2^41 bytes, one raw block of 4 bytes.
    let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xf8, 0x21, 0x00, 0x00, 1, 2, 3, 4];
    assert_eq!(decompress(Zstd, &frame, CLUSTER), Err(Errno::IO));
}

#[test]
fn the_decoder_works_again_after_rubbish() {
    assert_eq!(decompress(Zlib, &[0xff; 512], CLUSTER), Err(Errno::IO));
    assert_eq!(decompress(Zstd, &[0xff; 512], CLUSTER), Err(Errno::IO));
    both_kinds_give_the_cluster_back();
}

proptest! {
    #[test]
    fn rubbish_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..2048)) {
        let _ = decompress(Zlib, &bytes, CLUSTER);
        let _ = decompress(Zstd, &bytes, CLUSTER);
    }

    #[test]
    fn a_damaged_stream_never_panics(at in 0..3000usize, bit in 0..8u32) {
        for kind in [Zlib, Zstd] {
            let mut bytes = match kind {
                Zlib => compress_to_vec(&cluster(), 6),
                Zstd => zstd(&cluster(), 3),
            };
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            let _ = decompress(kind, &bytes, CLUSTER);
        }
    }
}
