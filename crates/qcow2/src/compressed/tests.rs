//! Sequential readers, shared loads, and compression, each on its own.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use rustix::io::Errno;

use super::clusters::{Clusters, Look, Ticket};
use super::streams::{Advice, Streams};
use super::{Compressed, compress, decompress};
use crate::CompressionType::{Zlib, Zstd};
use crate::sync::Arc;
use crate::units::{Bytes, GuestCluster, HostOffset};

const CLUSTER: usize = 4096;

fn place(number: u64) -> Compressed {
    Compressed::new(HostOffset(number * 1000 + 7), 900)
}

fn load(look: Look) -> Ticket {
    match look {
        Look::Load(ticket) => ticket,
        Look::Ready(_) => panic!("it is there"),
        Look::Wait(_) => panic!("somebody loads it"),
    }
}

fn byte(look: Look) -> Option<u8> {
    match look {
        Look::Ready(data) => data.get(0..1).map(|bytes| bytes[0]),
        Look::Load(_) | Look::Wait(_) => None,
    }
}

fn fill(ticket: Ticket, byte: u8) {
    ticket.fill(Vec::new(), |_, bytes| {
        bytes.fill(byte);
        Ok(())
    });
}

fn now<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

#[test]
fn a_cluster_is_loaded_once_and_then_kept() {
    let clusters = Arc::new(Clusters::new(CLUSTER, 4));
    let ticket = load(clusters.look(place(1), CLUSTER));
    assert!(clusters.begin(place(1)).is_none());
    let Look::Wait(follower) = clusters.look(place(1), CLUSTER) else { panic!("a second load") };
    let mut follower = pin!(follower);
    assert!(now(follower.as_mut()).is_none());
    fill(ticket, 3);
    let data = now(follower).flatten().expect("done").expect("no error");
    assert_eq!(data.get(0..CLUSTER), Some(&[3; CLUSTER][..]));
    assert_eq!(byte(clusters.look(place(1), CLUSTER)), Some(3));
}

#[test]
fn a_load_that_is_dropped_or_fails_leaves_nothing_behind() {
    let clusters = Arc::new(Clusters::new(CLUSTER, 4));
    let ticket = load(clusters.look(place(1), CLUSTER));
    let mut follower = pin!(ticket.follower().expect("not done"));
    drop(ticket);
    assert!(now(follower.as_mut()).expect("it ended").is_none());
    let ticket = load(clusters.look(place(1), CLUSTER));
    let mut follower = pin!(ticket.follower().expect("not done"));
    ticket.fill(Vec::new(), |_, _| Err(Errno::IO));
    assert!(matches!(now(follower.as_mut()), Some(Some(Err(Errno::IO)))));
    fill(load(clusters.look(place(1), CLUSTER)), 1);
}

#[test]
fn a_part_is_enough_for_its_reader_only() {
    let clusters = Arc::new(Clusters::new(CLUSTER, 4));
    fill(load(clusters.look(place(1), 100)), 1);
    assert_eq!(byte(clusters.look(place(1), 100)), Some(1));
    let Look::Load(ticket) = clusters.look(place(1), 101) else { panic!("not that much is there") };
    fill(ticket, 2);
    // The second load is for the whole cluster, since there is more than one reader.
    assert_eq!(byte(clusters.look(place(1), CLUSTER)), Some(2));
    assert_eq!(byte(clusters.look(place(1), 1)), Some(2));
}

#[test]
fn the_cluster_that_was_used_longest_ago_goes_first() {
    let clusters = Arc::new(Clusters::new(CLUSTER, 2));
    fill(load(clusters.look(place(1), CLUSTER)), 1);
    fill(load(clusters.look(place(2), CLUSTER)), 2);
    assert_eq!(byte(clusters.look(place(1), CLUSTER)), Some(1));
    fill(load(clusters.look(place(3), CLUSTER)), 3);
    assert_eq!(byte(clusters.look(place(1), CLUSTER)), Some(1));
    assert_eq!(byte(clusters.look(place(3), CLUSTER)), Some(3));
    assert_eq!(byte(clusters.look(place(2), CLUSTER)), None);
}

#[test]
fn what_is_forgotten_is_gone_and_loads_of_it_are_not_kept() {
    let clusters = Arc::new(Clusters::new(CLUSTER, 4));
    fill(load(clusters.look(place(1), CLUSTER)), 1);
    fill(load(clusters.look(place(2), CLUSTER)), 2);
    let running = load(clusters.look(place(3), CLUSTER));
    let mut waits = pin!(running.follower().expect("not done"));
    // From inside the first to inside the third.
    clusters.forget(&(place(1).host_offset() + Bytes(10)..place(3).host_offset() + Bytes(1)));
    let again = load(clusters.look(place(3), CLUSTER));
    fill(running, 3);
    // Who waited has the old bytes: that was its mapping.
    let data = now(waits.as_mut()).flatten().expect("done").expect("no error");
    assert_eq!(data.get(0..1), Some(&[3][..]));
    fill(again, 4);
    assert_eq!(byte(clusters.look(place(3), CLUSTER)), Some(4));
    assert_eq!(byte(clusters.look(place(1), CLUSTER)), None);
    assert_eq!(byte(clusters.look(place(2), CLUSTER)), None);
}

#[test]
fn a_range_beside_a_cluster_does_not_touch_it() {
    let clusters = Arc::new(Clusters::new(CLUSTER, 4));
    fill(load(clusters.look(place(1), CLUSTER)), 1);
    clusters.forget(&(HostOffset(0)..place(1).host_offset()));
    clusters.forget(&(place(1).host_end()..HostOffset(u64::MAX)));
    assert_eq!(byte(clusters.look(place(1), CLUSTER)), Some(1));
}

#[test]
fn a_decoder_that_panics_is_an_error_for_those_who_wait() {
    let clusters = Arc::new(Clusters::new(CLUSTER, 4));
    let ticket = load(clusters.look(place(1), CLUSTER));
    let mut follower = pin!(ticket.follower().expect("not done"));
    let work =
        std::thread::spawn(move || ticket.fill(Vec::new(), |_, _| panic!("as the test wants")));
    assert!(work.join().is_err());
    assert!(matches!(now(follower.as_mut()), Some(Some(Err(Errno::IO)))));
}

#[test]
fn random_reads_load_nothing_ahead() {
    let mut streams = Streams::new(32, 128);
    for step in 0..1000u64 {
        let at = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        assert_eq!(
            streams.access(GuestCluster(at), GuestCluster(at)),
            Advice { alone: true, load: GuestCluster(at + 1)..GuestCluster(at + 1) }
        );
    }
}

#[test]
fn a_request_over_several_clusters_loads_them_at_once_and_no_more() {
    let mut streams = Streams::new(32, 128);
    assert_eq!(
        streams.access(GuestCluster(100), GuestCluster(115)),
        Advice { alone: false, load: GuestCluster(101)..GuestCluster(116) }
    );
    for at in 101..116 {
        assert!(streams.access(GuestCluster(at), GuestCluster(115)).load.is_empty(), "{at}");
    }
    // A huge one: as much as there is room for.
    assert_eq!(
        streams.access(GuestCluster(5000), GuestCluster(9000)).load,
        GuestCluster(5001)..GuestCluster(5128)
    );
}

#[test]
fn a_sequential_reader_has_each_cluster_loaded_once_and_ahead_of_it() {
    let mut streams = Streams::new(32, 128);
    let mut loaded = std::collections::BTreeSet::new();
    let mut late = 0;
    for at in 0..1000u64 {
        for _ in 0..4 {
            late += u32::from(at > 0 && !loaded.contains(&GuestCluster(at)));
            let advice = streams.access(GuestCluster(at), GuestCluster(at));
            for cluster in advice.load.start.up_to(advice.load.end) {
                assert!(loaded.insert(cluster), "cluster {cluster} twice");
            }
            loaded.insert(GuestCluster(at));
        }
    }
    assert!(late <= 2, "{late} clusters were not loaded ahead");
    assert!(loaded.last().is_some_and(|last| *last < GuestCluster(1000 + 32)));
}

#[test]
fn several_sequential_readers_do_not_disturb_each_other() {
    let mut streams = Streams::new(32, 128);
    for at in 0..100u64 {
        for reader in 0..8u64 {
            streams.access(GuestCluster(reader * 10_000 + at), GuestCluster(reader * 10_000 + at));
        }
    }
    for reader in 0..8u64 {
        let at = reader * 10_000 + 100;
        assert!(!streams.access(GuestCluster(at), GuestCluster(at)).alone, "reader {reader}");
    }
}

/// Text that compresses, another one for each seed.
fn text(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 7).to_le_bytes()[0] ^ ((at + seed) / 900).to_le_bytes()[0]).collect()
}

#[test]
fn what_was_compressed_comes_back() {
    for kind in [Zlib, Zstd] {
        for len in [512, 4096, 65536, 2 << 20] {
            for level in [None, Some(1), Some(9), Some(-1), Some(100), Some(i32::MIN)] {
                let cluster = text(len, len);
                let Some(compressed) = compress(kind, level, &cluster) else {
                    // Level 0 of deflate stores, and the least of zstd nearly does.
                    assert!(level.is_some_and(|level| level < 0), "{kind:?} {len} {level:?}");
                    continue;
                };
                assert!(compressed.len() < len);
                let mut output = vec![0; len];
                decompress(kind, &compressed, &mut output, true).expect("our own");
                assert!(output == cluster, "{kind:?} {len} {level:?}");
            }
        }
    }
}

#[test]
fn what_does_not_get_smaller_is_not_compressed() {
    let mut state = 1u64;
    let noise: Vec<u8> = (0..65536)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        })
        .collect();
    assert_eq!(compress(Zlib, None, &noise), None);
    assert_eq!(compress(Zstd, None, &noise), None);
    assert_eq!(compress(Zlib, None, &[]), None);
    assert_eq!(compress(Zstd, None, &[]), None);
}

#[test]
fn an_encoder_works_again_after_what_it_could_not_compress() {
    for kind in [Zlib, Zstd] {
        for round in 0..20u64 {
            let len = 1usize << (9 + round % 8);
            let noise: Vec<u8> = (0..len as u64)
                .map(|at| (at * at + round).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0])
                .collect();
            let _ = compress(kind, None, &noise);
            let half = [&noise[..len / 2], &text(3, len / 2)].concat();
            if let Some(compressed) = compress(kind, None, &half) {
                let mut output = vec![0; len];
                decompress(kind, &compressed, &mut output, true).expect("our own");
                assert!(output == half, "{kind:?} {len}");
            }
        }
    }
}

#[test]
fn a_window_of_12_bits_is_enough_to_read_what_zlib_wrote() {
    // The same 8000 bytes of noise again and again: matches lie further back than the window.
    let noise: Vec<u8> = (0..8000u64)
        .map(|at| (at * at).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0])
        .collect();
    let cluster: Vec<u8> = noise.iter().copied().cycle().take(65536).collect();
    let wide = miniz_oxide::deflate::compress_to_vec(&cluster, 9).len();
    let narrow = compress(Zlib, Some(9), &cluster).map_or(cluster.len(), |bytes| bytes.len());
    assert!(narrow > 2 * wide, "{narrow} against {wide} with a large window");
}
