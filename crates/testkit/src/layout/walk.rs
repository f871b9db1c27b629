//! Looking through an image: every reference, every refcount, and what does not fit.
//!
//! Promises: reads only; a damaged image gives a list of problems, of limited length.

use super::tables::{
    COMPRESSED, COPIED, OFFSET, compressed, extensions, header, number, number32, read, snapshots,
    words,
};
use super::{Bytes, Class, Header, Layout};

/// Problems that are kept: more help nobody.
const PROBLEMS_MAX: usize = 40;
const BITMAPS_EXTENSION: u32 = 0x2385_2875;

pub(super) fn walk(image: &(impl Bytes + ?Sized)) -> Layout {
    let mut layout = Layout::default();
    match header(image) {
        Ok(header) => layout.header = header,
        Err(problem) => {
            layout.problem(problem);
            return layout;
        }
    }
    let header = layout.header.clone();
    layout.end = image.size().div_ceil(header.cluster());
    layout.refer(Class::Header, 0, 1);
    layout.walk_refcounts(image);
    let counted = layout.refcounts.last_key_value().map_or(0, |(cluster, _)| cluster + 1);
    layout.end = layout.end.max(counted);
    layout.walk_l1(image, header.l1_offset, header.l1_size, true);
    match snapshots(image, &header) {
        Ok((list, bytes)) => {
            layout.refer(Class::SnapshotTable, header.snapshots_offset, bytes);
            layout.snapshots = list;
        }
        Err(problem) => layout.problem(problem),
    }
    for snapshot in layout.snapshots.clone() {
        layout.walk_l1(image, snapshot.l1_offset, snapshot.l1_size, false);
    }
    layout.walk_bitmaps(image);
    layout.compare_refcounts(image.size());
    layout.check_copied(image);
    layout
}

impl Layout {
    fn problem(&mut self, problem: String) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(problem);
        }
    }

    /// Notes that `len` bytes at `offset` are referred to.
    fn refer(&mut self, class: Class, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        let bits = self.header.cluster_bits;
        let first = offset >> bits;
        let last = offset.saturating_add(len - 1) >> bits;
        for cluster in first..=last.min(self.end.max(first)) {
            let (known, count) = self.references.entry(cluster).or_insert((class, 0));
            *count += 1;
            let known = *known;
            if !may_share(known, class) {
                self.problem(format!("host cluster {cluster} is {known:?} and {class:?}"));
            }
        }
    }

    fn aligned(&mut self, what: &str, offset: u64) -> bool {
        let good = offset.is_multiple_of(self.header.cluster()) && offset != 0;
        if !good {
            self.problem(format!("{what} at {offset:#x} is not aligned"));
        }
        good
    }

    fn walk_refcounts(&mut self, image: &(impl Bytes + ?Sized)) {
        let Header { refcount_table_offset: table, refcount_order: order, .. } = self.header;
        let cluster = self.header.cluster();
        let table_bytes = u64::from(self.header.refcount_table_clusters) * cluster;
        self.refer(Class::RefcountTable, table, table_bytes);
        let in_block = (cluster * 8) >> order;
        for (index, entry) in (0u64..).zip(words(image, table, table_bytes / 8)) {
            if entry == 0 {
                continue;
            }
            if entry & 511 != 0 || !self.aligned("refcount block", entry) {
                continue;
            }
            self.refer(Class::RefcountBlock, entry, cluster);
            let block = read(image, entry, cluster);
            for place in 0..in_block {
                let count = refcount(&block, place, order);
                if count != 0 {
                    self.refcounts.insert(index * in_block + place, count);
                }
            }
        }
    }

    fn walk_l1(&mut self, image: &(impl Bytes + ?Sized), offset: u64, entries: u32, active: bool) {
        let (l1, l2) =
            if active { (Class::L1, Class::L2) } else { (Class::SnapshotL1, Class::SnapshotL2) };
        if entries > 0 && !self.aligned("L1 table", offset) {
            return;
        }
        self.refer(l1, offset, u64::from(entries) * 8);
        for (index, entry) in (0u64..).zip(words(image, offset, u64::from(entries))) {
            if entry & !(OFFSET | COPIED) != 0 {
                self.problem(format!("L1 entry {index}: reserved bits in {entry:#x}"));
            }
            let table = entry & OFFSET;
            if table == 0 || !self.aligned("L2 table", table) {
                continue;
            }
            self.refer(l2, table, self.header.cluster());
            self.walk_l2(image, index, table, active);
        }
    }

    fn walk_l2(&mut self, image: &(impl Bytes + ?Sized), index: u64, table: u64, active: bool) {
        let cluster = self.header.cluster();
        let step = usize::try_from(self.header.entry_bytes() / 8).unwrap_or(1);
        let table = words(image, table, cluster / 8);
        for (place, entry) in (0u64..).zip(table.chunks(step)) {
            let guest = index * self.header.l2_entries() + place;
            let bitmap = entry.get(1).copied().unwrap_or(0);
            self.entry(guest, entry[0], bitmap, active);
        }
    }

    fn entry(&mut self, guest: u64, entry: u64, bitmap: u64, active: bool) {
        if entry & COMPRESSED != 0 {
            let (start, end) = compressed(&self.header, entry);
            if entry & COPIED != 0 || bitmap != 0 {
                self.problem(format!(
                    "guest cluster {guest}: compressed with {entry:#x} {bitmap:#x}"
                ));
            }
            self.refer(Class::Compressed, start, end - start);
            return;
        }
        let zero_flag = u64::from(!self.header.extended() && self.header.version >= 3);
        if entry & !(OFFSET | COPIED | zero_flag) != 0 {
            self.problem(format!("guest cluster {guest}: reserved bits in {entry:#x}"));
        }
        if bitmap & (bitmap >> 32) & 0xffff_ffff != 0 {
            self.problem(format!("guest cluster {guest}: zero and allocated in {bitmap:#x}"));
        }
        let host = entry & OFFSET;
        if host == 0 && !(self.header.external() && entry & COPIED != 0) {
            if bitmap & 0xffff_ffff != 0 || entry & COPIED != 0 {
                self.problem(format!(
                    "guest cluster {guest}: no host cluster in {entry:#x}, {bitmap:#x}"
                ));
            }
            return;
        }
        if self.header.external() {
            self.external(guest, entry);
            return;
        }
        if !self.aligned(&format!("guest cluster {guest}"), host) {
            return;
        }
        let before = self.references.get(&(host >> self.header.cluster_bits)).map_or(0, |r| r.1);
        if active && before > 0 {
            self.problem(format!("guest cluster {guest} shares the host cluster at {host:#x}"));
        }
        self.refer(Class::Data, host, self.header.cluster());
    }

    /// A data cluster in the external data file: it has no refcount.
    fn external(&mut self, guest: u64, entry: u64) {
        let host = entry & OFFSET;
        if !host.is_multiple_of(self.header.cluster()) {
            self.problem(format!("guest cluster {guest} at {host:#x} is not aligned"));
        }
        if entry & COPIED == 0 {
            self.problem(format!("guest cluster {guest}: external, not marked COPIED"));
        }
        let raw = self.header.autoclear & 2 != 0;
        if raw && host != guest << self.header.cluster_bits {
            self.problem(format!("guest cluster {guest}: at {host:#x} of a raw data file"));
        }
    }

    fn walk_bitmaps(&mut self, image: &(impl Bytes + ?Sized)) {
        let header = self.header.clone();
        if header.autoclear & 1 == 0 {
            return;
        }
        let Some((_, e)) =
            extensions(image, &header).into_iter().find(|e| e.0 == BITMAPS_EXTENSION)
        else {
            return self.problem("the bitmaps bit is set and there is no extension".into());
        };
        let (count, bytes, offset) = (number32(&e, 0), number(&e, 8, 8), number(&e, 16, 8));
        if bytes > 1 << 24 || !self.aligned("bitmap directory", offset) {
            return self.problem(format!("a bitmap directory of {bytes} bytes"));
        }
        self.refer(Class::Bitmaps, offset, bytes);
        let directory = read(image, offset, bytes);
        let mut at = 0;
        for _ in 0..count {
            let (table, entries) = (number(&directory, at, 8), number(&directory, at + 8, 4));
            let sizes = number(&directory, at + 18, 2) + number(&directory, at + 20, 4);
            at = (at + 24 + usize::try_from(sizes).unwrap_or(0)).next_multiple_of(8);
            if !self.aligned("bitmap table", table) || at > directory.len() {
                return self.problem("the bitmap directory ends inside an entry".into());
            }
            self.refer(Class::Bitmaps, table, entries * 8);
            for entry in words(image, table, entries) {
                if entry & OFFSET != 0 {
                    self.refer(Class::Bitmaps, entry & OFFSET, header.cluster());
                }
            }
        }
    }

    fn compare_refcounts(&mut self, size: u64) {
        if self.header.dirty() {
            // The next process that opens it for writing counts anew.
            return;
        }
        for (cluster, (class, count)) in self.references.clone() {
            let refcount = self.refcounts.get(&cluster).copied().unwrap_or(0);
            if refcount < count {
                self.problem(format!(
                    "host cluster {cluster} ({class:?}): refcount {refcount}, references {count}"
                ));
            }
        }
        let referred = |c: &u64| self.references.get(c).map_or(0, |r| r.1);
        let above = self.refcounts.iter().filter(|(c, count)| **count > referred(c));
        let (inside, beyond): (Vec<u64>, Vec<u64>) =
            above.map(|(c, _)| *c).partition(|c| c << self.header.cluster_bits < size);
        self.leaks = inside.len() as u64;
        self.leaks_beyond = beyond.len() as u64;
    }

    /// In the active tables the COPIED flag says whether the refcount is 1.
    fn check_copied(&mut self, image: &(impl Bytes + ?Sized)) {
        let header = self.header.clone();
        if header.dirty() {
            return;
        }
        let step = usize::try_from(header.entry_bytes() / 8).unwrap_or(1);
        for (index, entry) in
            words(image, header.l1_offset, u64::from(header.l1_size)).iter().enumerate()
        {
            if entry & OFFSET == 0 {
                continue;
            }
            self.copied(&format!("L1 entry {index}"), *entry);
            for (place, entry) in
                words(image, entry & OFFSET, header.cluster() / 8).chunks(step).enumerate()
            {
                let data = entry[0] & COMPRESSED == 0 && entry[0] & OFFSET != 0;
                if data && !header.external() {
                    self.copied(&format!("L2 entry {index}/{place}"), entry[0]);
                }
            }
        }
    }

    fn copied(&mut self, what: &str, entry: u64) {
        let cluster = (entry & OFFSET) >> self.header.cluster_bits;
        let refcount = self.refcounts.get(&cluster).copied().unwrap_or(0);
        if (refcount == 1) != (entry & COPIED != 0) {
            self.problem(format!("{what}: {entry:#x} with refcount {refcount}"));
        }
    }
}

/// Whether two references to one cluster can be right.
fn may_share(known: Class, other: Class) -> bool {
    use Class::{Bitmaps, Compressed, Data, L2, SnapshotL2};
    let tables = [L2, SnapshotL2];
    match (known, other) {
        (Data | Compressed, _) => known == other,
        (L2 | SnapshotL2, _) => tables.contains(&other),
        // Directory and tables are told apart by nobody; a cluster of them has one reference all
        // the same.
        (Bitmaps, _) => known == other,
        _ => known == other,
    }
}

/// One refcount of a block.
fn refcount(block: &[u8], place: u64, order: u32) -> u64 {
    let bits = 1u64 << order;
    let at = usize::try_from(place * bits / 8).unwrap_or(usize::MAX);
    if order >= 3 {
        return number(block, at, usize::try_from(bits / 8).unwrap_or(1));
    }
    let byte = u64::from(block.get(at).copied().unwrap_or(0));
    byte >> (place * bits % 8) & ((1 << bits) - 1)
}
