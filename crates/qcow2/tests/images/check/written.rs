//! Images that are damaged at random and then written to: what nobody has written reads as before,
//! in the open image and in the next one, whatever the damage was. All tables are known to the
//! image (it was read once); where two entries share a cluster, or its count is lower than its
//! references, nothing can be promised.

use std::collections::BTreeSet;

use ringdisk_qcow2::{
    Bytes, ExtentKind, GuestOffset, Nothing, OpenOptions, Qcow2, Repair, check_bytes,
};
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_testkit::layout::Layout;
use ringdisk_testkit::sim::{Prng, SimStorage};

use crate::check::damage::damage;
use crate::check::{repair_on, seeds, shapes};
use crate::common::{Images, read, runtime};

/// Requests to one image.
const REQUESTS: u64 = 40;

/// The disk cluster by cluster; `None`: cannot be read.
async fn contents(ring: &Ring, image: &Qcow2, cluster: u64) -> Vec<Option<Vec<u8>>> {
    let mut all = Vec::new();
    for at in (0..image.virtual_size().0).step_by(cluster as usize) {
        all.push(read(ring, image, &[], at, cluster as usize).await.ok());
    }
    all
}

/// Clusters of the disk whose place in the file is theirs alone, or that have none.
async fn alone(ring: &Ring, image: &Qcow2, bytes: &[u8], cluster: u64) -> Vec<bool> {
    let layout = Layout::of(bytes);
    let is_sole = |host: u64| {
        let number = host / cluster;
        layout.references.get(&number).is_some_and(|(_, references)| *references == 1)
    };
    let mut all = Vec::new();
    for at in (0..image.virtual_size().0).step_by(cluster as usize) {
        let (mut from, end) = (GuestOffset(at), at + cluster);
        let end = GuestOffset(end).min(GuestOffset::after(image.virtual_size()));
        let mut sole = true;
        while from < end {
            let Ok(extent) = image.map(ring, from, end - from).await else {
                sole = false;
                break;
            };
            sole &= match extent.kind {
                ExtentKind::Data { offset } | ExtentKind::Zero { offset: Some(offset) } => {
                    is_sole(offset.0)
                }
                // Neighbours share its cluster.
                ExtentKind::Compressed(_) => false,
                ExtentKind::Zero { offset: None } | ExtentKind::Unallocated => true,
            };
            from += extent.len;
        }
        all.push(sole);
    }
    all
}

/// One request to a random place. Adds the clusters that it may have changed to `touched`.
async fn request(
    ring: &Ring,
    image: &Qcow2,
    cluster: u64,
    prng: &mut Prng,
    touched: &mut BTreeSet<u64>,
) -> Result<(), Errno> {
    let clusters = image.virtual_size() / cluster;
    let (at, count) = (prng.below(clusters.0), 1 + prng.below(3));
    let (from, len) = match prng.below(3) {
        0 => (at * cluster + prng.below(cluster / 512) * 512, 512),
        _ => (at * cluster, count * cluster),
    };
    touched.extend(from / cluster..(from + len).div_ceil(cluster));
    match prng.below(6) {
        0 => image.discard(ring, GuestOffset(from), Bytes(len), &Nothing).await,
        1 => image.write_zeroes(ring, GuestOffset(from), Bytes(len), prng.coin(), &Nothing).await,
        2 => image.flush(ring).await,
        _ => {
            let buf = IoBuf::new(len as usize, 4096);
            buf.fill(0x80 | prng.next_u64() as u8);
            image.write(ring, GuestOffset(from), &buf, &Nothing).await.map(drop)
        }
    }
}

#[test]
fn what_nobody_writes_stays_whatever_is_damaged() {
    let images = Images::new();
    let mut shapes = shapes::make(&images);
    shapes.retain(|(name, _)| !["external", "large"].contains(name));
    let mut runtime = runtime();
    let (mut wrong, mut looked_at, mut refused) = (Vec::new(), 0u64, 0u64);
    for seed in seeds(150) {
        let mut prng = Prng::new(seed);
        let (name, good) = &shapes[prng.next_u64() as usize % shapes.len()];
        let (bytes, what) = damage(good, &mut prng);
        let cluster = 1u64 << bytes[23];
        let ring = runtime.ring().clone();
        let sim = SimStorage::from_image(&bytes, seed);
        let options = OpenOptions { writable: true, ..OpenOptions::default() };
        let texts = runtime.block_on(async {
            let Ok(image) = Qcow2::open(&ring, sim.storage(), &options).await else {
                return Vec::new();
            };
            let before = contents(&ring, &image, cluster).await;
            let alone = alone(&ring, &image, &sim.image(), cluster).await;
            let mut touched = BTreeSet::new();
            for _ in 0..REQUESTS {
                refused += u64::from(
                    request(&ring, &image, cluster, &mut prng, &mut touched).await.is_err(),
                );
            }
            let _ = image.flush(&ring).await;
            let live = contents(&ring, &image, cluster).await;
            let _ = image.close(&ring).await;
            let again = Qcow2::open(&ring, sim.storage(), &OpenOptions::default()).await;
            let again = match &again {
                Ok(image) => contents(&ring, image, cluster).await,
                Err(_) => Vec::new(),
            };
            let mut texts = Vec::new();
            for (at, old) in before.iter().enumerate() {
                if old.is_none() || !alone[at] || touched.contains(&(at as u64)) {
                    continue;
                }
                looked_at += 1;
                for (which, now) in [("the open image", &live), ("the next one", &again)] {
                    if now.get(at) != Some(old) {
                        texts.push(format!("cluster {at} in {which}"));
                    }
                }
            }
            texts
        });
        wrong.extend(texts.first().map(|text| {
            format!("seed {seed}: {name} with {what:?}, {} lost: {text}", texts.len())
        }));
    }
    assert!(wrong.is_empty(), "{}: {wrong:#?}", wrong.len());
    assert!(looked_at > 1000 && refused > 100, "{looked_at}, {refused}");
}

#[test]
fn a_table_that_two_parts_of_the_disk_share_is_copied_before_it_changes() {
    const CLUSTER: u64 = 4096;
    let images = Images::new();
    let mut runtime = runtime();
    let path = images.create("image", "cluster_size=4k", 4 << 20);
    images.qemu_io("image", &["write -q -P 1 0 40k".to_owned(), "write -q -P 2 2M 4k".to_owned()]);
    let mut bytes = std::fs::read(&path).expect("the image");
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().expect("8 bytes")) as usize;
    let first = bytes[l1..l1 + 8].to_vec();
    bytes[l1 + 8..l1 + 16].copy_from_slice(&first);
    let sim = SimStorage::from_image(&bytes, 1);
    // Both say that the table is theirs alone: nothing may be written before a repair.
    let ring = runtime.ring().clone();
    let options = OpenOptions { writable: true, ..OpenOptions::default() };
    let buf = IoBuf::new(CLUSTER as usize, 4096);
    buf.fill(7);
    runtime.block_on(async {
        let sim = SimStorage::from_image(&bytes, 1);
        let image = Qcow2::open(&ring, sim.storage(), &options).await.expect("an image");
        assert_eq!(image.write(&ring, GuestOffset(0), &buf, &Nothing).await, Err(Errno::IO));
    });
    // A repair may keep what was lost as leaks first.
    for _ in 0..2 {
        repair_on(&mut runtime, &sim, Repair::All).expect("a repair");
    }
    let report = check_bytes(&sim.image()[..]).expect("a check");
    assert!(report.is_clean(), "{report:?}");
    runtime.block_on(async {
        let image = Qcow2::open(&ring, sim.storage(), &options).await.expect("an image");
        assert_eq!(image.write(&ring, GuestOffset(0), &buf, &Nothing).await, Ok(CLUSTER as usize));
        assert_eq!(image.flush(&ring).await, Ok(()));
        assert_eq!(
            image.write(&ring, GuestOffset((2 << 20) + CLUSTER), &buf, &Nothing).await,
            Ok(4096)
        );
        assert_eq!(image.close(&ring).await, Ok(()));
        let image = Qcow2::open(&ring, sim.storage(), &options).await.expect("an image");
        for (at, value) in [(0, 7), (4096, 1), (2 << 20, 1), ((2 << 20) + CLUSTER, 7), (8192, 1)] {
            let got = read(&ring, &image, &[], at, CLUSTER as usize).await;
            assert_eq!(got, Ok(vec![value; CLUSTER as usize]), "{at}");
        }
    });
    // The entry of the other part does not know that it is alone now, so its cluster would be
    // copied once more: no harm.
    let report = check_bytes(&sim.image()[..]).expect("a check");
    assert!(
        report.messages.iter().all(|text| text.contains("COPIED flag is missing")),
        "{report:?}"
    );
    let report = repair_on(&mut runtime, &sim, Repair::All).expect("a repair");
    assert!(report.is_clean(), "{report:?}");
}
