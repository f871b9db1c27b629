//! Damaged images that are written: data never lands on metadata, a cluster that an entry names is
//! never handed out again, and a damaged entry stops requests at its own cluster only.

// Test images are small.
#![allow(clippy::cast_possible_truncation, clippy::large_futures)]

use ringdisk_qcow2::{Bytes, GuestOffset, Nothing, Qcow2};
use ringdisk_ring::{Errno, Ring, Runtime};
use ringdisk_testkit::sim::SimStorage;

use crate::common::{Images, KIB, MIB, runtime};
use crate::live::{buffer, read, writable};

const CLUSTER: u64 = 64 * KIB;
/// The first byte that the second L2 table maps.
const SECOND: u64 = 512 * MIB;
const COPIED: u64 = 1 << 63;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit 1 of the incompatible features.
const CORRUPT: u64 = 1 << 1;

/// An image of 2 GiB with data in its first four clusters (0x11, 0x22, 0x33, 0x44), to be damaged.
struct Damaged(Vec<u8>);

impl Damaged {
    fn new() -> Damaged {
        let images = Images::new();
        let path = images.create("image", "", 2 << 30);
        let write =
            |index: u64| format!("write -q -P {:#x} {}k 64k", 0x11 * (index + 1), 64 * index);
        images.qemu_io("image", &(0..4).map(write).collect::<Vec<_>>());
        let mut bytes = std::fs::read(path).expect("the image");
        bytes.resize(bytes.len().next_multiple_of(CLUSTER as usize), 0);
        Damaged(bytes)
    }

    fn word(&self, at: u64) -> u64 {
        let at = at as usize;
        u64::from_be_bytes(self.0[at..at + 8].try_into().expect("8 bytes"))
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.0[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    /// Where the L2 entry of a cluster of the first table is.
    fn entry_at(&self, cluster: u64) -> u64 {
        (self.word(self.word(40)) & OFFSET) + cluster * 8
    }

    fn host(&self, cluster: u64) -> u64 {
        self.word(self.entry_at(cluster)) & OFFSET
    }

    fn set_entry(&mut self, cluster: u64, entry: u64) {
        self.put(self.entry_at(cluster), &entry.to_be_bytes());
    }

    fn first_block(&self) -> u64 {
        self.word(self.word(48))
    }

    /// Counts have 16 bits.
    fn set_count(&mut self, host: u64, count: u16) {
        self.put(self.first_block() + host / CLUSTER * 2, &count.to_be_bytes());
    }
}

async fn open(ring: &Ring, damaged: &Damaged) -> (SimStorage, Qcow2) {
    let sim = SimStorage::from_image(&damaged.0, 1);
    let image = crate::live::open(ring, &sim, None, &writable()).await.expect("the header is good");
    (sim, image)
}

/// Writes `len` bytes of `value`.
async fn write(
    ring: &Ring,
    image: &Qcow2,
    offset: u64,
    len: u64,
    value: u8,
) -> Result<usize, Errno> {
    image.write(ring, GuestOffset(offset), &buffer(&vec![value; len as usize]), &Nothing).await
}

/// Reads a few bytes.
async fn look(ring: &Ring, image: &Qcow2, offset: u64) -> Result<[u8; 16], Errno> {
    let mut bytes = [0; 16];
    read(ring, image, &Nothing, offset, &mut bytes).await.map(|()| bytes)
}

fn is_marked_corrupt(sim: &SimStorage) -> bool {
    let header = sim.image();
    u64::from_be_bytes(header[72..80].try_into().expect("8 bytes")) & CORRUPT != 0
}

fn with_ring(test: impl AsyncFnOnce(&Ring)) {
    let mut runtime: Runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(test(&ring));
}

#[test]
fn a_cluster_that_a_loaded_entry_names_is_never_taken_for_a_table() {
    let mut damaged = Damaged::new();
    let host = damaged.host(1);
    damaged.set_count(host, 0);
    with_ring(async |ring| {
        let (sim, image) = open(ring, &damaged).await;
        assert_eq!(look(ring, &image, CLUSTER).await, Ok([0x22; 16]));
        // Needs a second L2 table, for which the cluster looks free.
        assert_eq!(write(ring, &image, SECOND, 4096, 0x77).await, Err(Errno::IO));
        assert!(is_marked_corrupt(&sim));
        assert_eq!(write(ring, &image, CLUSTER, 4096, 0x99).await, Err(Errno::ROFS));
        assert_eq!(look(ring, &image, CLUSTER).await, Ok([0x22; 16]));
        assert!(image.fault().expect("it says why").contains("refcount is 0"));
    });
}

#[test]
fn a_cluster_that_a_loaded_entry_names_is_never_taken_for_data() {
    let mut damaged = Damaged::new();
    let host = damaged.host(1);
    damaged.set_count(host, 0);
    with_ring(async |ring| {
        let (sim, image) = open(ring, &damaged).await;
        assert_eq!(write(ring, &image, 10 * CLUSTER, 4096, 0x77).await, Err(Errno::IO));
        assert!(is_marked_corrupt(&sim));
        assert_eq!(look(ring, &image, CLUSTER).await, Ok([0x22; 16]));
    });
}

#[test]
fn a_table_that_took_a_cluster_which_an_entry_still_names_is_not_overwritten() {
    let mut damaged = Damaged::new();
    let host = damaged.host(1);
    damaged.set_count(host, 0);
    with_ring(async |ring| {
        let (sim, image) = open(ring, &damaged).await;
        // Nothing of the first table is known yet.
        assert_eq!(write(ring, &image, SECOND, 4096, 0x77).await, Ok(4096));
        assert_eq!(image.flush(ring).await, Ok(()));
        let l1 = damaged.word(40) as usize;
        let table = sim.image()[l1 + 8..l1 + 16].to_vec();
        assert_eq!(table, (host | COPIED).to_be_bytes(), "the table lies on the data");
        assert_eq!(write(ring, &image, CLUSTER, CLUSTER, 0x99).await, Err(Errno::IO));
        assert!(is_marked_corrupt(&sim));
        assert_eq!(look(ring, &image, SECOND).await, Ok([0x77; 16]));
        let again = Qcow2::open(ring, sim.storage(), &Default::default()).await;
        assert_eq!(look(ring, &again.expect("for reading"), SECOND).await, Ok([0x77; 16]));
    });
}

#[test]
fn an_entry_whose_cluster_was_freed_by_another_one_does_not_overwrite_the_table_there() {
    let mut damaged = Damaged::new();
    let host = damaged.host(1);
    // Two entries, one count.
    damaged.set_entry(2, host | COPIED);
    with_ring(async |ring| {
        let (sim, image) = open(ring, &damaged).await;
        assert_eq!(look(ring, &image, 2 * CLUSTER).await, Ok([0x22; 16]));
        assert_eq!(
            image.discard(ring, GuestOffset(CLUSTER), Bytes(CLUSTER), &Nothing).await,
            Ok(())
        );
        assert_eq!(image.flush(ring).await, Ok(()));
        assert_eq!(write(ring, &image, SECOND, 4096, 0x77).await, Ok(4096));
        assert_eq!(image.flush(ring).await, Ok(()));
        let l1 = damaged.word(40) as usize;
        assert_eq!(sim.image()[l1 + 8..l1 + 16], (host | COPIED).to_be_bytes());
        // The mapping is cached, and nothing says that it is wrong but the mark of the table.
        assert_eq!(write(ring, &image, 2 * CLUSTER, 4096, 0x99).await, Err(Errno::IO));
        assert!(is_marked_corrupt(&sim));
        assert_eq!(look(ring, &image, SECOND).await, Ok([0x77; 16]));
    });
}

#[test]
fn an_entry_that_names_metadata_overwrites_and_frees_none_of_it() {
    let good = Damaged::new();
    let table = good.entry_at(0);
    let targets = [
        ("an L2 table", table),
        ("a refcount block", good.first_block()),
        ("the L1 table", good.word(40)),
    ];
    for (what, target) in targets {
        for entry in [target | COPIED, target, target | COPIED | 1, target | 1] {
            let mut damaged = Damaged(good.0.clone());
            damaged.set_entry(2, entry);
            let case = format!("{what}, entry {entry:#x}");
            with_ring(async |ring| {
                for change in 0..4 {
                    let (sim, image) = open(ring, &damaged).await;
                    let done = match change {
                        0 => write(ring, &image, 2 * CLUSTER, 512, 0x99).await.map(drop),
                        1 => {
                            image
                                .discard(ring, GuestOffset(2 * CLUSTER), Bytes(CLUSTER), &Nothing)
                                .await
                        }
                        2 => {
                            image
                                .write_zeroes(
                                    ring,
                                    GuestOffset(2 * CLUSTER),
                                    Bytes(CLUSTER),
                                    true,
                                    &Nothing,
                                )
                                .await
                        }
                        _ => {
                            image
                                .write_zeroes(
                                    ring,
                                    GuestOffset(2 * CLUSTER),
                                    Bytes(CLUSTER),
                                    false,
                                    &Nothing,
                                )
                                .await
                        }
                    };
                    assert_eq!(done, Err(Errno::IO), "{case}, change {change}");
                    let _ = image.flush(ring).await;
                    let _ = image.close(ring).await;
                    let (now, at) = (sim.image(), target as usize);
                    let range = at..at + CLUSTER as usize;
                    assert!(now[range.clone()] == damaged.0[range], "{case}, change {change}");
                }
            });
        }
    }
}

/// Entries of the cluster at 128 KiB that cannot be right.
fn bad_entries(damaged: &Damaged) -> Vec<(&'static str, u64)> {
    let good = damaged.word(damaged.entry_at(2));
    vec![
        ("unaligned", good | 512),
        ("past the end of the file", COPIED | (damaged.0.len() as u64 + 16 * CLUSTER)),
        ("far past the end of the file", COPIED | 0x00ff_ffff_ffff_0000),
        ("reserved low", good | 2),
        ("reserved high", good | 1 << 60),
        ("on the refcount table, not its own", damaged.word(48)),
        ("on the header, compressed and copied", COPIED | 1 << 62 | 100),
        ("all ones", u64::MAX),
    ]
}

/// Clusters that are shared are copied, and the old ones counted down, together with their
/// neighbours.
#[test]
fn a_neighbour_that_names_metadata_is_not_freed_with_a_sound_cluster() {
    for (what, place) in [("a refcount block", 48), ("the L1 table", 40)] {
        let mut damaged = Damaged::new();
        let target = if place == 48 { damaged.first_block() } else { damaged.word(40) };
        damaged.set_entry(2, damaged.host(2));
        damaged.set_entry(3, target);
        with_ring(async |ring| {
            let (sim, image) = open(ring, &damaged).await;
            let written = write(ring, &image, 2 * CLUSTER, 2 * CLUSTER, 0x94).await;
            assert_eq!(written, Ok(CLUSTER as usize), "{what}: the first one only");
            // One of them marks the image corrupt, so it takes no change any more.
            let _ = image.flush(ring).await;
            let _ = image.close(ring).await;
            let count = (damaged.first_block() + target / CLUSTER * 2) as usize;
            assert_eq!(sim.image()[count..count + 2], [0, 1], "{what}: its count");
        });
    }
}

/// The first cluster that is not there any more: a write to it would lengthen the file.
#[test]
fn an_entry_that_names_the_end_of_the_file_takes_no_write() {
    let mut damaged = Damaged::new();
    let len = damaged.0.len();
    damaged.set_entry(2, COPIED | len as u64);
    with_ring(async |ring| {
        let (sim, image) = open(ring, &damaged).await;
        for bytes in [512, CLUSTER] {
            let written = write(ring, &image, 2 * CLUSTER, bytes, 0x94).await;
            assert_eq!(written, Err(Errno::IO), "{bytes}");
        }
        assert_eq!(look(ring, &image, 2 * CLUSTER).await, Err(Errno::IO));
        assert_eq!(sim.image().len(), len);
        // Nor is it given to another one, which lies behind it.
        assert_eq!(write(ring, &image, 4 * CLUSTER, 512, 0x95).await, Ok(512));
        assert_eq!(image.flush(ring).await, Ok(()));
        assert_eq!(look(ring, &image, 4 * CLUSTER).await, Ok([0x95; 16]));
        assert!(sim.image()[len..len + CLUSTER as usize].iter().all(|byte| *byte == 0));
    });
}

#[test]
fn a_damaged_entry_stops_writes_at_its_own_cluster_only() {
    let good = Damaged::new();
    for (case, entry) in bad_entries(&good) {
        let mut damaged = Damaged(good.0.clone());
        damaged.set_entry(2, entry);
        with_ring(async |ring| {
            for cached in [false, true] {
                let (sim, image) = open(ring, &damaged).await;
                if cached {
                    assert_eq!(look(ring, &image, 0).await, Ok([0x11; 16]), "{case}");
                }
                let case = format!("{case}, cached {cached}");
                // Behind it, in place and into a new cluster.
                assert_eq!(write(ring, &image, 3 * CLUSTER, 512, 0x91).await, Ok(512), "{case}");
                assert_eq!(write(ring, &image, 4 * CLUSTER, 512, 0x92).await, Ok(512), "{case}");
                // Before it, and up to it.
                let across = write(ring, &image, CLUSTER, 2 * CLUSTER, 0x93).await;
                assert_eq!(across, Ok(CLUSTER as usize), "{case}");
                assert_eq!(
                    write(ring, &image, 2 * CLUSTER, 512, 0x94).await,
                    Err(Errno::IO),
                    "{case}"
                );
                for (at, value) in [(0, 0x11), (1, 0x93), (3, 0x91), (4, 0x92)] {
                    assert_eq!(look(ring, &image, at * CLUSTER).await, Ok([value; 16]), "{case}");
                }
                assert_eq!(look(ring, &image, 2 * CLUSTER).await, Err(Errno::IO), "{case}");
                assert_eq!(image.flush(ring).await, Ok(()), "{case}");
                let at = damaged.entry_at(2) as usize;
                assert_eq!(sim.image()[at..at + 8], entry.to_be_bytes(), "{case}");
            }
        });
    }
}

#[test]
fn a_damaged_entry_stops_discards_and_zeroes_at_its_own_cluster_only() {
    let good = Damaged::new();
    for (case, entry) in bad_entries(&good) {
        let mut damaged = Damaged(good.0.clone());
        damaged.set_entry(2, entry);
        with_ring(async |ring| {
            for zeroes in [false, true] {
                let (_, image) = open(ring, &damaged).await;
                let clear = async |offset, len| match zeroes {
                    true => image.write_zeroes(ring, offset, len, true, &Nothing).await,
                    false => image.discard(ring, offset, len, &Nothing).await,
                };
                let case = format!("{case}, zeroes {zeroes}");
                assert_eq!(clear(GuestOffset(3 * CLUSTER), Bytes(CLUSTER)).await, Ok(()), "{case}");
                assert_eq!(
                    clear(GuestOffset(2 * CLUSTER), Bytes(CLUSTER)).await,
                    Err(Errno::IO),
                    "{case}"
                );
                // What lies before it is cleared.
                assert_eq!(
                    clear(GuestOffset(CLUSTER), Bytes(2 * CLUSTER)).await,
                    Err(Errno::IO),
                    "{case}"
                );
                for (at, value) in [(0, 0x11), (1, 0), (3, 0)] {
                    assert_eq!(look(ring, &image, at * CLUSTER).await, Ok([value; 16]), "{case}");
                }
                assert_eq!(image.close(ring).await, Ok(()), "{case}");
            }
        });
    }
}

/// Entries of the cluster at 128 KiB that name a place past the end, whether they are read from
/// there or not.
fn entries_past_the_end(damaged: &Damaged) -> Vec<(&'static str, u64)> {
    let past = (damaged.0.len() as u64).next_multiple_of(CLUSTER) + 16 * CLUSTER;
    vec![
        ("data", COPIED | past),
        ("data that a snapshot has too", past),
        ("space that reads as zeroes", COPIED | past | 1),
        ("such space that a snapshot has too", past | 1),
        ("compressed data", 1 << 62 | 1 << 54 | past),
        ("far away", COPIED | 0x00ff_ffff_ffff_0000),
        ("zeroes far away", COPIED | 0x00ff_ffff_ffff_0001),
        ("a cluster that has no refcount block", 1 << 40),
    ]
}

#[test]
fn an_entry_that_names_a_place_past_the_end_costs_the_rest_of_the_disk_nothing() {
    let good = Damaged::new();
    for (case, entry) in entries_past_the_end(&good) {
        let mut damaged = Damaged(good.0.clone());
        damaged.set_entry(2, entry);
        for change in 0..5 {
            let case = format!("{case}, change {change}");
            with_ring(async |ring| {
                let (sim, image) = open(ring, &damaged).await;
                let at = 2 * CLUSTER;
                let done = match change {
                    0 => write(ring, &image, at, 512, 0x99).await.map(drop),
                    1 => write(ring, &image, at, CLUSTER, 0x99).await.map(drop),
                    2 => image.discard(ring, GuestOffset(at), Bytes(CLUSTER), &Nothing).await,
                    3 => {
                        image
                            .write_zeroes(ring, GuestOffset(at), Bytes(CLUSTER), true, &Nothing)
                            .await
                    }
                    _ => {
                        image
                            .write_zeroes(ring, GuestOffset(at), Bytes(CLUSTER), false, &Nothing)
                            .await
                    }
                };
                assert_eq!(done, Err(Errno::IO), "{case}");
                assert_eq!(image.flush(ring).await, Ok(()), "{case}");
                // Twice, so that what was freed is counted down.
                for at in [CLUSTER, 7 * CLUSTER] {
                    assert_eq!(write(ring, &image, at, 512, 0x91).await, Ok(512), "{case}");
                    assert_eq!(image.flush(ring).await, Ok(()), "{case}");
                }
                assert_eq!(image.close(ring).await, Ok(()), "{case}");
                assert!(!is_marked_corrupt(&sim) && image.fault().is_none(), "{case}");
                let (after, at) = (sim.image(), damaged.entry_at(2) as usize);
                assert_eq!(after[at..at + 8], entry.to_be_bytes(), "{case}");
                let grown = after.len() as u64 - damaged.0.len() as u64;
                assert!(grown <= 4 * CLUSTER, "{case}: the file grew by {grown} bytes");
            });
        }
    }
}
