//! What a power cut leaves of discards that the host's storage heard of: clusters that keep their
//! place, and those of a data file.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use ringdisk_qcow2::{Bytes, GuestOffset, Nothing, OpenOptions, check_bytes};
use ringdisk_testkit::layout::Shape;
use ringdisk_testkit::oracle::Below;
use ringdisk_testkit::sim::SimStorage;

use super::common::runtime;
use super::live::{self, Base, buffer, open, writable};
use super::{CLUSTER, COVERED};

/// Bytes of the device behind what the image takes at first.
const ROOM: u64 = 64 * CLUSTER;
/// What the clusters hold.
const CLUSTERS: u64 = 4;

fn device(content: &[u8], seed: u64) -> SimStorage {
    let device = SimStorage::device(content.len() as u64 + ROOM, seed);
    device.put(0, content);
    device
}

/// Until the tables are on stable storage the old entries may come back; what a device leaves of a
/// discard may be any bytes.
#[test]
fn a_power_cut_after_a_discard_leaves_the_old_bytes_or_zeroes() {
    for (in_data_file, discard_no_unref) in [(false, true), (true, false), (true, true)] {
        for seed in 0..30 {
            let case = format!("data file: {in_data_file}, seed {seed}");
            let data_file = in_data_file.then(|| "data".to_owned());
            let shape = Shape { cluster_bits: 12, size: COVERED, data_file, ..Shape::default() };
            let file = device(&shape.make(), seed);
            let data = in_data_file.then(|| device(&[], seed));
            let options = OpenOptions { discard_no_unref, ..writable() };
            let mut runtime = runtime();
            let ring = runtime.ring().clone();
            runtime.block_on(async {
                let image = open(&ring, &file, data.as_ref(), &options).await.expect("sound");
                let len = CLUSTERS * CLUSTER;
                let bytes = buffer(&vec![7; usize::try_from(len).expect("small")]);
                assert_eq!(
                    image.write(&ring, GuestOffset(0), &bytes, &Nothing).await,
                    Ok(bytes.len())
                );
                image.flush(&ring).await.expect("a flush");
                for cluster in 0..CLUSTERS {
                    let discarded = image.discard(
                        &ring,
                        GuestOffset(cluster * CLUSTER),
                        Bytes(CLUSTER),
                        &Nothing,
                    );
                    discarded.await.expect("a discard");
                }
                for cut in 0..4 {
                    let file = file.crash_state(cut);
                    let data = data.as_ref().map(|data| data.crash_state(cut));
                    let image = open(&ring, &file, data.as_ref(), &options).await.expect("sound");
                    let mut seen = vec![0; bytes.len()];
                    let base = Base(Below::NOTHING);
                    live::read(&ring, &image, &base, 0, &mut seen).await.expect("a read");
                    let foreign = seen.iter().find(|byte| ![0, 7].contains(*byte));
                    assert_eq!(foreign, None, "{case}, cut {cut}");
                }
            });
        }
    }
}

/// The task that lowers the counts of freed clusters may go with its ring, as when a thread ends.
#[test]
fn a_ring_that_ends_while_clusters_are_freed_leaks_none() {
    const SIZE: u64 = 4 * COVERED;
    let shape = Shape { cluster_bits: 12, size: SIZE, ..Shape::default() };
    let mut given_up = 0;
    for turns in 0..40 {
        let file = device(&shape.make(), 1);
        file.become_regular();
        let mut first = runtime();
        let ring = first.ring().clone();
        let ended = Rc::new(Cell::new(false));
        let flag = Rc::clone(&ended);
        let image = first.block_on(async {
            let image = open(&ring, &file, None, &writable()).await.expect("sound");
            let image = Arc::new(image);
            let bytes = buffer(&vec![7; usize::try_from(SIZE).expect("small")]);
            let written = image.write(&ring, GuestOffset(0), &bytes, &Nothing).await;
            assert_eq!(written, Ok(bytes.len()));
            image.flush(&ring).await.expect("a flush");
            let all = image.discard(&ring, GuestOffset(0), Bytes(SIZE), &Nothing);
            all.await.expect("a discard");
            let (own, flushed) = (ring.clone(), Arc::clone(&image));
            ring.spawn(async move {
                flushed.flush(&own).await.expect("a flush");
                flag.set(true);
            });
            for _ in 0..turns {
                ring.yield_now().await;
            }
            image
        });
        drop((ring, first));
        given_up += u32::from(!ended.get());
        let mut second = runtime();
        let ring = second.ring().clone();
        second.block_on(async { image.close(&ring).await.expect("a close") });
        let report = check_bytes(file.image().as_slice()).expect("it can be checked");
        let found = (report.corruptions, report.leaks);
        assert_eq!(found, (0, 0), "after {turns} turns: {:?}", report.messages);
    }
    assert!(given_up > 0, "each flush had ended");
}
