//! Tables that are built here, byte by byte, and tables that mean harm.

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::Errno;
use ringdisk_testkit::sim::Prng;

use super::{Source, Table, table};
use crate::graph::Window;
use crate::{Error, ErrorKind};

/// Reads that one table may cost: a chain of boot records is the longest.
const READS_MAX: usize = 300;

/// A disk in memory that is mostly zeroes: its size, and pieces with content.
struct Memory {
    size: u64,
    sector: u64,
    pieces: Vec<(u64, Vec<u8>)>,
    reads: Cell<usize>,
}

impl Memory {
    fn new(size: u64) -> Memory {
        Memory { size, sector: 512, pieces: Vec::new(), reads: Cell::new(0) }
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.pieces.push((at, bytes.to_vec()));
    }

    fn table(&self) -> Result<Table, Error> {
        now(table(self))
    }

    fn window(&self, number: u32) -> Result<Window, Error> {
        self.table()?.window(number, Bytes(self.size))
    }

    fn refusal(&self, number: u32) -> String {
        self.window(number).expect_err("refused").to_string()
    }
}

impl Source for Memory {
    fn size(&self) -> Bytes {
        Bytes(self.size)
    }

    fn sector(&self) -> Bytes {
        Bytes(self.sector)
    }

    async fn read(&self, GuestOffset(offset): GuestOffset, len: usize) -> Result<Vec<u8>, Errno> {
        self.reads.set(self.reads.get() + 1);
        let inside = self.size.saturating_sub(offset).min(len as u64);
        let mut bytes = vec![0; usize::try_from(inside).expect("small")];
        for (at, piece) in &self.pieces {
            for (index, byte) in piece.iter().enumerate() {
                let place = (at + index as u64).checked_sub(offset);
                let place = place.and_then(|place| bytes.get_mut(usize::try_from(place).ok()?));
                if let Some(place) = place {
                    *place = *byte;
                }
            }
        }
        Ok(bytes)
    }
}

/// The result of a future that never waits.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("nothing to wait for"),
    }
}

/// A boot sector. Entries: place, type, first sector, sectors.
fn record(entries: &[(usize, u8, u32, u32)]) -> Vec<u8> {
    let mut sector = vec![0; 512];
    for &(place, kind, start, sectors) in entries {
        let entry = &mut sector[446 + 16 * place..][..16];
        entry[4] = kind;
        entry[8..12].copy_from_slice(&start.to_le_bytes());
        entry[12..].copy_from_slice(&sectors.to_le_bytes());
    }
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// A GPT with one header. Entries: number, first and last sector.
struct Gpt {
    sector: u64,
    at: u64,
    array_at: u64,
    sectors: u64,
    entry_bytes: u32,
    count: u32,
    entries: Vec<(u32, u64, u64)>,
}

impl Gpt {
    fn new(sector: u64, sectors: u64, entries: &[(u32, u64, u64)]) -> Gpt {
        let (at, array_at) = (1, 2);
        Gpt {
            sector,
            at,
            array_at,
            sectors,
            entry_bytes: 128,
            count: 128,
            entries: entries.to_vec(),
        }
    }

    fn array(&self) -> Vec<u8> {
        let mut array = vec![0; self.entry_bytes as usize * self.count as usize];
        for &(number, first, last) in &self.entries {
            let entry = &mut array[self.entry_bytes as usize * (number as usize - 1)..];
            entry[..16].fill(7);
            entry[32..40].copy_from_slice(&first.to_le_bytes());
            entry[40..48].copy_from_slice(&last.to_le_bytes());
        }
        array
    }

    fn header(&self, array: &[u8]) -> Vec<u8> {
        let mut header = vec![0; 92];
        header[..8].copy_from_slice(b"EFI PART");
        header[8..12].copy_from_slice(&[0, 0, 1, 0]);
        header[12..16].copy_from_slice(&92_u32.to_le_bytes());
        for (at, number) in [(24, self.at), (40, 34), (48, self.sectors - 34), (72, self.array_at)]
        {
            header[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        header[80..84].copy_from_slice(&self.count.to_le_bytes());
        header[84..88].copy_from_slice(&self.entry_bytes.to_le_bytes());
        header[88..92].copy_from_slice(&libdeflater::crc32(array).to_le_bytes());
        seal(&mut header);
        header
    }

    fn disk(&self) -> Memory {
        let mut disk = Memory::new(self.sector * self.sectors);
        let array = self.array();
        disk.put(0, &record(&[(0, 0xee, 1, u32::MAX)]));
        disk.put(self.at * self.sector, &self.header(&array));
        disk.put(self.array_at * self.sector, &array);
        disk
    }
}

/// Makes the checksum of a header true.
fn seal(header: &mut [u8]) {
    header[16..20].fill(0);
    let crc = libdeflater::crc32(header);
    header[16..20].copy_from_slice(&crc.to_le_bytes());
}

/// A disk of 10,000 sectors with primaries 1 and 3, the extended partition 2, and three logical
/// ones.
fn logicals() -> Memory {
    let mut disk = Memory::new(10_000 * 512);
    disk.put(0, &record(&[(0, 0x83, 100, 900), (1, 0x05, 1000, 4000), (2, 0x07, 6000, 1000)]));
    disk.put(1000 * 512, &record(&[(0, 0x83, 10, 490), (1, 0x05, 500, 1000)]));
    disk.put(1500 * 512, &record(&[(0, 0x82, 10, 990), (1, 0x05, 1500, 100)]));
    disk.put(2500 * 512, &record(&[(0, 0x83, 10, 90)]));
    disk
}

#[test]
fn primaries_and_logical_partitions_have_the_numbers_of_the_kernel() {
    let disk = logicals();
    for (number, start, sectors) in
        [(1, 100, 900), (3, 6000, 1000), (5, 1010, 490), (6, 1510, 990), (7, 2510, 90)]
    {
        let expected = Window::new(GuestOffset(start * 512), Some(Bytes(sectors * 512)));
        assert_eq!(disk.window(number).expect("a partition"), expected, "{number}");
    }
}

#[test]
fn the_sectors_of_an_mbr_are_those_of_the_device() {
    let small = logicals();
    let mut disk = Memory::new(10_000 * 4096);
    disk.sector = 4096;
    disk.pieces = small.pieces.iter().map(|(at, bytes)| (at * 8, bytes.clone())).collect();
    for (number, start, sectors) in [(1, 100, 900), (3, 6000, 1000), (5, 1010, 490), (7, 2510, 90)]
    {
        let expected = Window::new(GuestOffset(start * 4096), Some(Bytes(sectors * 4096)));
        assert_eq!(disk.window(number).expect("a partition"), expected, "{number}");
    }
    let own = disk.table().expect("a table").own;
    assert_eq!(own, [0, 4_096_000, 6_144_000, 10_240_000].map(|at| (GuestOffset(at), Bytes(4096))));
}

/// Source: the loop over records in the kernel's `block/partitions/msdos.c`.
#[test]
fn further_entries_of_a_record_count_where_the_kernel_counts_them() {
    let mut disk = logicals();
    // The record at 1500 and its partition have 1000 sectors, as the one before says.
    let third = |start, sectors| {
        let entries = [(0, 0x82, 10, 490), (1, 0x05, 1500, 100), (2, 0x83, start, sectors)];
        record(&entries)
    };
    disk.put(1500 * 512, &third(600, 400));
    assert_eq!(
        disk.window(7).expect("counted"),
        Window::new(GuestOffset(2100 * 512), Some(Bytes(400 * 512)))
    );
    assert_eq!(
        disk.window(8).expect("the next"),
        Window::new(GuestOffset(2510 * 512), Some(Bytes(90 * 512)))
    );
    disk.put(1500 * 512, &third(600, 401));
    assert_eq!(
        disk.window(7).expect("the next"),
        Window::new(GuestOffset(2510 * 512), Some(Bytes(90 * 512)))
    );
    assert!(disk.refusal(8).contains("no such partition"));
}

#[test]
fn a_missing_partition_is_told_with_those_that_are_there() {
    let disk = logicals();
    let text = disk.refusal(4);
    for part in [
        "no such partition",
        "1 (460800 bytes at 51200)",
        "2 (2048000 bytes at 512000, extended)",
        "7 (",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(disk.refusal(8).contains("no such partition"));
    assert!(disk.refusal(0).contains("no such partition"));
    let text = Gpt::new(512, 1000, &[(3, 40, 99)]).disk().refusal(1);
    assert!(text.contains("the GPT has 3 (30720 bytes at 20480)"), "{text}");
    let mut empty = Memory::new(10_000);
    empty.put(0, &record(&[]));
    assert!(empty.refusal(1).contains("the MBR is empty"));
}

#[test]
fn the_extended_partition_itself_is_refused() {
    assert!(logicals().refusal(2).contains("extended partition"));
}

#[test]
fn what_has_no_table_is_told_so() {
    let mut boot_sector = record(&[]);
    // Code of a file system's boot sector where flags would be.
    boot_sector[446] = 0xeb;
    for sector in [vec![], vec![0; 512], boot_sector] {
        let mut disk = Memory::new(100_000);
        disk.put(0, &sector);
        let error = disk.table().expect_err("no table");
        assert!(error.to_string().contains("no partition table"), "{error}");
    }
    assert!(Memory::new(511).table().is_err());
}

#[test]
fn partitions_whose_bytes_are_not_their_own_are_refused() {
    let mut disk = Memory::new(1000 * 512);
    let entries = [(0, 0x83, 10, 100), (1, 0x83, 50, 10), (2, 0x83, 900, 101), (3, 0x83, 0, 5)];
    disk.put(0, &record(&entries));
    assert!(disk.refusal(1).contains("shares bytes with partition 2"));
    assert!(disk.refusal(2).contains("shares bytes with partition 1"));
    let text = disk.refusal(3);
    assert!(text.contains("ends at byte 512512, past the end of the disk at 512000"), "{text}");
    assert!(disk.refusal(4).contains("over the partition table"));
    let mut over_extended = Memory::new(1000 * 512);
    over_extended.put(0, &record(&[(0, 0x83, 10, 100), (1, 0x0f, 100, 100)]));
    assert!(over_extended.refusal(1).contains("shares bytes with partition 2"));
}

#[test]
fn logical_partitions_that_lie_wrongly_are_refused() {
    let mut disk = logicals();
    // Over the next record, and past the extended partition.
    disk.put(1000 * 512, &record(&[(0, 0x83, 10, 491), (1, 0x05, 500, 1000)]));
    disk.put(1500 * 512, &record(&[(0, 0x82, 10, 3500), (1, 0x05, 1500, 100)]));
    assert!(disk.refusal(5).contains("over the partition table"));
    assert!(disk.refusal(6).contains("outside the extended partition"));
}

#[test]
fn a_chain_that_is_damaged_ends_and_says_so() {
    for (next, text) in [
        (4000, "outside the extended partition"),
        (500, "comes back to sector 1500"),
        (0, "comes back to sector 1000"),
        (77, "no boot record at sector 1077"),
    ] {
        let mut disk = logicals();
        disk.put(1500 * 512, &record(&[(0, 0x82, 10, 90), (1, 0x05, next, 100)]));
        assert!(disk.window(6).is_ok());
        let refusal = disk.refusal(7);
        assert!(refusal.contains(text), "{text} in {refusal}");
    }
    let mut cut = logicals();
    cut.size = 1000 * 512;
    assert!(cut.refusal(5).contains("no boot record at sector 1000"));
}

#[test]
fn a_chain_without_end_costs_bounded_reads() {
    let mut disk = Memory::new(1 << 40);
    disk.put(0, &record(&[(0, 0x05, 1000, u32::MAX)]));
    for index in 0..400 {
        let place = 1000 + u64::from(index) * 10;
        disk.put(place * 512, &record(&[(0, 0x83, 1, 5), (1, 0x05, (index + 1) * 10, 10)]));
    }
    let table = disk.table().expect("a table");
    assert_eq!(table.partitions.len(), 1 + 256);
    assert!(table.damage.expect("told").contains("more than 256"));
    assert!(disk.reads.get() < READS_MAX);
}

#[test]
fn an_extended_partition_with_nothing_in_it_is_no_damage() {
    let mut disk = Memory::new(1 << 20);
    disk.put(0, &record(&[(0, 0x05, 100, 100)]));
    assert_eq!(disk.table().expect("a table").damage, None);
}

#[test]
fn a_gpt_is_read_with_both_sizes_of_sectors_and_any_size_of_entries() {
    for (sector, entry_bytes) in [(512, 128), (4096, 128), (512, 256), (4096, 4096)] {
        let mut gpt = Gpt::new(sector, 2000, &[(1, 40, 40), (9, 1500, 1600)]);
        (gpt.entry_bytes, gpt.array_at, gpt.count) = (entry_bytes, 1900, 16);
        let disk = gpt.disk();
        assert_eq!(
            disk.window(1).expect("there"),
            Window::new(GuestOffset(40 * sector), Some(Bytes(sector)))
        );
        assert_eq!(
            disk.window(9).expect("there"),
            Window::new(GuestOffset(1500 * sector), Some(Bytes(101 * sector)))
        );
    }
}

#[test]
fn the_last_header_counts_where_the_first_is_damaged() {
    for sector in [512, 4096] {
        let mut gpt = Gpt::new(sector, 2000, &[(2, 40, 49)]);
        (gpt.at, gpt.array_at) = (1999, 1967);
        let mut disk = gpt.disk();
        disk.put(sector, b"EFI PART and then nothing that fits");
        assert_eq!(
            disk.window(2).expect("there"),
            Window::new(GuestOffset(40 * sector), Some(Bytes(10 * sector)))
        );
        disk.put(1999 * sector + 60, &[1]);
        let error = disk.table().expect_err("both damaged");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("both damaged"), "{error}");
    }
}

#[test]
fn a_partition_over_the_copy_of_the_table_is_refused() {
    for sector in [512, 4096] {
        let first = Gpt::new(sector, 2000, &[(1, 40, 60), (2, 1000, 1020)]);
        let mut copy = Gpt::new(sector, 2000, &[(1, 40, 60), (2, 1000, 1020)]);
        (copy.at, copy.array_at) = (1010, 50);
        let mut disk = first.disk();
        let array = first.array();
        let mut header = first.header(&array);
        header[32..40].copy_from_slice(&1010_u64.to_le_bytes());
        seal(&mut header);
        disk.put(sector, &header);
        disk.put(1010 * sector, &copy.header(&array));
        assert!(disk.refusal(1).contains("over the partition table"), "its array");
        assert!(disk.refusal(2).contains("over the partition table"), "its header");
    }
}

#[test]
fn a_gpt_whose_checksums_do_not_fit_is_not_believed() {
    let gpt = Gpt::new(512, 2000, &[(1, 40, 49)]);
    // Each byte that means something: header, then the array's first entry.
    for at in (512..512 + 92).chain(1024..1024 + 128) {
        let mut disk = gpt.disk();
        let byte = now(disk.read(GuestOffset(at), 1)).expect("memory")[0];
        disk.put(at, &[byte ^ 0x10]);
        assert_eq!(disk.table().expect_err("damaged").kind(), ErrorKind::Corrupt, "byte {at}");
    }
}

#[test]
fn a_gpt_with_absurd_numbers_is_refused_without_memory_for_them() {
    let absurd: [(usize, &[u8]); 6] = [
        (80, &u32::MAX.to_le_bytes()),
        (84, &u32::MAX.to_le_bytes()),
        (84, &0_u32.to_le_bytes()),
        (84, &192_u32.to_le_bytes()),
        (72, &u64::MAX.to_le_bytes()),
        (12, &u32::MAX.to_le_bytes()),
    ];
    for (at, bytes) in absurd {
        let gpt = Gpt::new(512, 2000, &[(1, 40, 49)]);
        let mut header = gpt.header(&gpt.array());
        header[at..at + bytes.len()].copy_from_slice(bytes);
        seal(&mut header);
        let mut disk = gpt.disk();
        disk.put(512, &header);
        assert_eq!(disk.table().expect_err("absurd").kind(), ErrorKind::Corrupt, "at {at}");
    }
}

#[test]
fn absurd_entries_of_a_gpt_are_refused_and_the_others_are_not() {
    let entries = [
        (1, 50, 40),
        (2, 40, u64::MAX),
        (3, 0, 40),
        (4, u64::MAX, u64::MAX),
        (5, 100, 200),
        (6, 200, 300),
        (7, 1900, 1990),
        (8, 400, 500),
    ];
    let disk = Gpt::new(512, 2000, &entries).disk();
    assert!(disk.refusal(1).contains("ends before it begins"));
    assert!(disk.refusal(2).contains("beyond any disk"));
    assert!(disk.refusal(3).contains("outside the part of the disk"));
    assert!(disk.refusal(4).contains("beyond any disk"));
    assert!(disk.refusal(5).contains("shares bytes with partition 6"));
    assert!(disk.refusal(7).contains("outside the part of the disk"));
    assert_eq!(
        disk.window(8).expect("good"),
        Window::new(GuestOffset(400 * 512), Some(Bytes(101 * 512)))
    );
}

#[test]
fn no_table_gives_a_window_that_is_not_its_own() {
    let mut prng = Prng::new(15);
    let mut windows = 0;
    for _ in 0..20_000 {
        let disk = random_disk(&mut prng);
        let Ok(table) = disk.table() else { continue };
        assert!(disk.reads.get() < READS_MAX);
        assert!(table.partitions.len() <= 8192);
        for each in &table.partitions {
            let Ok(window) = table.window(each.number, Bytes(disk.size)) else { continue };
            windows += 1;
            let (first, end) = (window.start, window.end);
            assert!(end <= GuestOffset(disk.size) && first < end);
            // Not over any other partition but the one that holds it, and not over the table.
            let others = table.partitions.iter().filter(|other| other.number != each.number);
            for other in others.filter(|other| !(other.is_extended && each.number > 4)) {
                let other_end = other.start.saturating_add(other.len);
                let apart = other.len.is_zero() || other_end <= first || end <= other.start;
                assert!(apart, "{window:?} and {other:?}");
            }
            for &(start, len) in &table.own {
                assert!(start + len <= first || end <= start);
            }
        }
    }
    // Without this the loop could pass by reading nothing.
    assert!(windows > 1000, "{windows}");
}

/// A table that is good but for some random bytes, whose checksums are made to fit again half of
/// the time.
fn random_disk(prng: &mut Prng) -> Memory {
    let small = |prng: &mut Prng| u32::try_from(prng.below(3000)).expect("small");
    if prng.coin() {
        let mut disk = logicals();
        for at in [0, 1000, 1500, 2500] {
            for _ in 0..prng.below(3) {
                let place = 446 + prng.below(66);
                disk.put(at * 512 + place, &[prng.next_u64().to_le_bytes()[0]]);
            }
            if prng.coin() {
                let entry = (0, 0x83, small(prng), small(prng));
                let next = (1, 0x05, small(prng), small(prng));
                disk.put(at * 512, &record(&[entry, next]));
            }
        }
        return disk;
    }
    let entries: Vec<_> = (1..=prng.below(6))
        .map(|number| {
            let first = u64::from(small(prng));
            (u32::try_from(number).expect("small"), first, first + prng.below(600))
        })
        .collect();
    let gpt = Gpt::new([512, 4096][usize::from(prng.coin())], 2500, &entries);
    let mut array = gpt.array();
    for _ in 0..prng.below(3) {
        let at = usize::try_from(prng.below(array.len() as u64)).expect("small");
        array[at] = prng.next_u64().to_le_bytes()[0];
    }
    let mut header = gpt.header(&array);
    for _ in 0..prng.below(2) {
        let at = usize::try_from(prng.below(92)).expect("small");
        header[at] = prng.next_u64().to_le_bytes()[0];
    }
    if prng.coin() {
        seal(&mut header);
    }
    let mut disk = gpt.disk();
    disk.put(gpt.sector, &header);
    disk.put(2 * gpt.sector, &array);
    disk
}
