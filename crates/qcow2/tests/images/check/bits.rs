//! Each bit of each kind of entry, turned over: what cannot be read then is damage that a check
//! names, and no repair loses a byte that could be read or gives a cluster back that the entry may
//! have named.

use ringdisk_qcow2::{CheckVerdict, OpenOptions, Qcow2, Repair, check_bytes};
use ringdisk_ring::Runtime;
use ringdisk_testkit::layout::Layout;
use ringdisk_testkit::sim::SimStorage;

use crate::check::repair_on;
use crate::common::{Images, MIB, read, runtime};

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
/// Guest clusters that have entries.
const CLUSTERS: u64 = 8;

/// Options and cluster size.
const SHAPES: [(&str, u64); 3] = [
    ("cluster_size=4k", 4096),
    ("cluster_size=4k,compat=0.10", 4096),
    ("cluster_size=16k,extended_l2=on", 16384),
];

/// An image with an entry of each kind in its first clusters.
fn make(images: &Images, (options, cluster): (&str, u64)) -> Vec<u8> {
    let path = images.create("bits", options, MIB);
    let commands = [
        format!("write -q -P 1 0 {}", 2 * cluster),
        format!("write -q -P 2 {} {cluster}", 2 * cluster),
        format!("write -q -z {} {cluster}", 2 * cluster),
        format!("write -q -c -P 3 {} {cluster}", 3 * cluster),
        format!("write -q -P 4 {} 512", 4 * cluster + 512),
        // Its clusters are free again, inside the file.
        format!("write -q -P 5 {} {cluster}", 5 * cluster),
        format!("write -q -P 6 {} {cluster}", 6 * cluster),
        format!("discard -q {} {cluster}", 5 * cluster),
    ];
    images.qemu_io("bits", &commands);
    std::fs::read(path).expect("the image")
}

fn word(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().expect("8 bytes"))
}

/// The first clusters of the disk; `None`: cannot be read.
fn contents(runtime: &mut Runtime, bytes: &[u8], cluster: u64) -> Vec<Option<Vec<u8>>> {
    let ring = runtime.ring().clone();
    let sim = SimStorage::from_image(bytes, 1);
    runtime.block_on(async {
        let opened = Qcow2::open(&ring, sim.storage(), &OpenOptions::default()).await;
        let mut all = Vec::new();
        for at in 0..CLUSTERS {
            all.push(match &opened {
                Ok(image) => read(&ring, image, &[], at * cluster, cluster as usize).await.ok(),
                Err(_) => None,
            });
        }
        all
    })
}

/// What is wrong with how one image is treated; empty: nothing.
///
/// * `named`: the cluster that the entry named before.
/// * `is_content`: it is said where compressed data begins, which a check does not decompress.
fn judge(
    runtime: &mut Runtime,
    bytes: &[u8],
    cluster: u64,
    named: Option<u64>,
    is_content: bool,
) -> Vec<String> {
    let mut wrong = Vec::new();
    let before = contents(runtime, bytes, cluster);
    let report = check_bytes(bytes).expect("it can be checked");
    let is_damaged = matches!(report.verdict(), CheckVerdict::Corrupt | CheckVerdict::Failed);
    if before.contains(&None) && !is_damaged && !is_content {
        wrong.push(format!("cannot be read, and the check says {:?}", report.verdict()));
    }
    for repair in [Repair::Leaks, Repair::All] {
        let sim = SimStorage::from_image(bytes, 1);
        repair_on(runtime, &sim, repair).expect("a report");
        let after = sim.image();
        let now = contents(runtime, &after, cluster);
        if before.iter().zip(&now).any(|(old, new)| old.is_some() && old != new) {
            wrong.push(format!("{repair:?}: what could be read is something else"));
        }
        let refcounts = Layout::of(&after[..]).refcounts;
        if let Some(named) = named.filter(|_| is_damaged)
            && refcounts.get(&(named / cluster)).is_none_or(|count| *count == 0)
        {
            wrong.push(format!("{repair:?}: the cluster at {named:#x} was given back"));
        }
    }
    wrong
}

#[test]
fn what_cannot_be_read_is_damage_and_what_an_entry_named_is_kept() {
    let mut runtime = runtime();
    let (mut wrong, mut unreadable) = (Vec::new(), 0);
    for shape in SHAPES {
        let (options, cluster) = shape;
        let images = Images::new();
        let good = make(&images, shape);
        assert!(check_bytes(&good[..]).expect("a good image").is_clean());
        let l1 = word(&good, 40);
        let l2 = word(&good, l1) & OFFSET_MASK;
        let bytes = if options.contains("extended") { 16 } else { 8 };
        let entries = (0..CLUSTERS * bytes / 8).map(|index| l2 + 8 * index);
        for at in std::iter::once(l1).chain(entries) {
            let old = word(&good, at);
            let is_bitmap = bytes == 16 && at != l1 && (at - l2) % 16 == 8;
            let place = old & OFFSET_MASK & !(cluster - 1);
            let is_place = !is_bitmap && old & COMPRESSED == 0 && place != 0;
            for bit in 0..64 {
                let new = old ^ 1 << bit;
                let mut image = good.clone();
                image[at as usize..at as usize + 8].copy_from_slice(&new.to_be_bytes());
                // One that names nothing any more says so.
                let named = (is_place && new & OFFSET_MASK != 0).then_some(place);
                unreadable += u32::from(contents(&mut runtime, &image, cluster).contains(&None));
                let is_content = !is_bitmap && old & new & COMPRESSED != 0;
                for text in judge(&mut runtime, &image, cluster, named, is_content) {
                    wrong.push(format!("{options}, {at:#x} {old:#x} bit {bit}: {text}"));
                }
            }
        }
    }
    assert!(unreadable > 500, "{unreadable}");
    assert!(wrong.is_empty(), "{}: {wrong:#?}", wrong.len());
}
