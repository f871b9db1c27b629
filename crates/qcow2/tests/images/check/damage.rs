//! Damage at random places that matter: entries, flags, refcounts, directories, the end of the
//! file.

use ringdisk_testkit::sim::Prng;

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
/// Type of the bitmaps extension.
const BITMAPS: u32 = 0x2385_2875;

/// An image that is being damaged.
pub(crate) struct Damage<'a> {
    pub(crate) bytes: Vec<u8>,
    prng: &'a mut Prng,
    cluster: u64,
    extended: bool,
    l1: u64,
    l1_entries: u64,
    refcount_table: u64,
    tables: Vec<u64>,
    blocks: Vec<u64>,
    /// Places of L2 entries that are in use.
    entries: Vec<u64>,
    /// Entries of the snapshot table, with the L1 table and its entries.
    snapshots: Vec<(u64, u64, u64)>,
}

/// Changes `image` in one to three ways; says how.
pub(crate) fn damage(image: &[u8], prng: &mut Prng) -> (Vec<u8>, Vec<&'static str>) {
    let mut damage = Damage::new(image, prng);
    let count = [1, 1, 1, 2, 3][damage.below(5) as usize];
    let what = (0..count).map(|_| damage.once()).collect();
    (damage.bytes, what)
}

impl Damage<'_> {
    fn new<'a>(image: &[u8], prng: &'a mut Prng) -> Damage<'a> {
        let mut damage = Damage {
            bytes: image.to_vec(),
            prng,
            cluster: 1 << image[23],
            extended: false,
            l1: 0,
            l1_entries: 0,
            refcount_table: 0,
            tables: Vec::new(),
            blocks: Vec::new(),
            entries: Vec::new(),
            snapshots: Vec::new(),
        };
        damage.extended = image[7] == 3 && damage.word(72) & 16 != 0;
        damage.l1 = damage.word(40);
        damage.l1_entries = u64::from(damage.half(36));
        damage.refcount_table = damage.word(48);
        damage.tables = damage.pointers(damage.l1, damage.l1_entries);
        let words = u64::from(damage.half(56)) * damage.cluster / 8;
        damage.blocks = damage.pointers(damage.refcount_table, words);
        let step = if damage.extended { 16 } else { 8 };
        for table in damage.tables.clone() {
            let places = (table..table + damage.cluster).step_by(step);
            damage.entries.extend(places.filter(|at| damage.word(*at) != 0).collect::<Vec<_>>());
        }
        let mut at = damage.word(64);
        for _ in 0..damage.half(60) {
            let (table, count) = (damage.word(at), u64::from(damage.half(at + 8)));
            damage.snapshots.push((at, table, count));
            let names = damage.half(at + 12);
            let len = u64::from((names >> 16) + (names & 0xffff) + damage.half(at + 36));
            at = (at + 40 + len).next_multiple_of(8);
        }
        damage
    }

    fn pointers(&self, at: u64, count: u64) -> Vec<u64> {
        let words = (0..count).map(|n| self.word(at + 8 * n) & OFFSET_MASK);
        words.filter(|word| *word != 0).collect()
    }

    fn word(&self, at: u64) -> u64 {
        let at = at as usize;
        self.bytes.get(at..at + 8).map_or(0, |b| u64::from_be_bytes(b.try_into().expect("8")))
    }

    fn half(&self, at: u64) -> u32 {
        let at = at as usize;
        self.bytes.get(at..at + 4).map_or(0, |b| u32::from_be_bytes(b.try_into().expect("4")))
    }

    fn put(&mut self, at: u64, word: u64) {
        if let Some(target) = self.bytes.get_mut(at as usize..at as usize + 8) {
            target.copy_from_slice(&word.to_be_bytes());
        }
    }

    fn flip(&mut self, at: u64) {
        let bit = self.below(8);
        if let Some(byte) = self.bytes.get_mut(at as usize) {
            *byte ^= 1 << bit;
        }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.prng.next_u64() % end.max(1)
    }

    fn pick(&mut self, from: &[u64]) -> u64 {
        let at = self.below(from.len() as u64);
        from.get(at as usize).copied().unwrap_or(0)
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// A place of a cluster, maybe past the end.
    fn place(&mut self) -> u64 {
        let clusters = self.len() * 2 / self.cluster;
        self.below(clusters) * self.cluster
    }

    fn metadata(&mut self) -> u64 {
        let mut all = self.tables.clone();
        all.extend([self.l1, self.refcount_table, 0]);
        all.extend(self.blocks.clone());
        self.pick(&all)
    }

    fn once(&mut self) -> &'static str {
        match self.below(12) {
            0..=3 => self.entry(),
            4 => self.l1_entry(),
            5 | 6 => self.refcount(),
            7 => self.table_entry(),
            8 => self.snapshot(),
            9 => self.bitmap(),
            10 => self.subclusters(),
            _ => self.file(),
        }
    }

    fn entry(&mut self) -> &'static str {
        let at = self.pick(&self.entries.clone());
        let (old, bit) = (self.word(at), self.below(64));
        let (new, what) = match self.below(9) {
            0 => (old ^ 1 << bit, "a bit of an entry"),
            1 => (old ^ COPIED, "COPIED"),
            2 => (old & (3 << 62) | self.place(), "the place of an entry"),
            3 => (self.word(self.entries.first().copied().unwrap_or(0)), "a double entry"),
            4 => (old ^ 512 << (bit % 4), "the alignment of an entry"),
            5 => (0, "a lost entry"),
            6 => (self.prng.next_u64(), "an entry"),
            7 => (old ^ 1, "the zero flag"),
            _ => (self.metadata() | (bit & 1) << 63, "an entry for metadata"),
        };
        self.put(at, new);
        what
    }

    fn l1_entry(&mut self) -> &'static str {
        let at = self.l1 + 8 * self.below(self.l1_entries);
        let (old, bit) = (self.word(at), self.below(64));
        let new = match self.below(4) {
            0 => old ^ 1 << bit,
            1 => old ^ COPIED,
            2 => COPIED | self.place(),
            _ => COPIED | self.pick(&self.tables.clone()),
        };
        self.put(at, new);
        "an L1 entry"
    }

    fn refcount(&mut self) -> &'static str {
        let block = self.pick(&self.blocks.clone());
        let near = self.len() / self.cluster * 2 + 2;
        let at = block + self.below(near.min(self.cluster));
        let value = [0, 1, 2, 3, 255][self.below(5) as usize];
        if let Some(byte) = self.bytes.get_mut(at as usize) {
            *byte = value;
        }
        "a refcount"
    }

    fn table_entry(&mut self) -> &'static str {
        let at = self.refcount_table + 8 * self.below(4);
        let (old, bit) = (self.word(at), self.below(64));
        let new = if bit < 32 { old ^ 1 << self.below(64) } else { self.place() };
        self.put(at, new);
        "the refcount table"
    }

    fn snapshot(&mut self) -> &'static str {
        let which = self.below(self.snapshots.len() as u64);
        let Some(&(at, table, count)) = self.snapshots.get(which as usize) else {
            return "nothing";
        };
        let entry = table + 8 * self.below(count);
        match self.below(4) {
            0 => {
                let byte = self.below(40);
                self.flip(at + byte);
            }
            1 => self.put(entry, 0),
            2 => {
                let bit = self.below(64);
                self.put(entry, self.word(entry) ^ 1 << bit);
            }
            _ => {
                let place = self.place();
                self.put(entry, place);
            }
        }
        "a snapshot"
    }

    fn bitmap(&mut self) -> &'static str {
        let head = &self.bytes[..1024.min(self.bytes.len())];
        let Some(extension) = head.windows(4).position(|w| w == BITMAPS.to_be_bytes()) else {
            return "nothing";
        };
        let directory = self.word(extension as u64 + 24);
        let table = self.word(directory);
        match self.below(3) {
            0 => {
                let byte = self.below(40);
                self.flip(directory + byte);
            }
            // Not the reserved field: QEMU refuses it when it opens the image.
            1 => {
                let byte = self.below(16);
                self.flip(extension as u64 + 16 + byte);
            }
            _ => {
                let bit = self.below(64);
                self.put(table, self.word(table) ^ 1 << bit);
            }
        }
        "a bitmap"
    }

    fn subclusters(&mut self) -> &'static str {
        if !self.extended {
            return self.refcount();
        }
        let at = self.pick(&self.entries.clone()) + 8;
        let (one, two) = (self.below(64), self.below(64));
        self.put(at, self.word(at) ^ 1 << one ^ 1 << two);
        "a subcluster bitmap"
    }

    fn file(&mut self) -> &'static str {
        let keep = self.cluster * 2;
        if self.below(2) == 0 {
            let cut = 1 + self.below((self.len() / 4).min(4 * self.cluster));
            self.bytes.truncate((self.len() - cut) as usize);
            return "the end of the file";
        }
        let at = (1 + self.below(self.len().saturating_sub(keep) / self.cluster)) * self.cluster;
        let end = (at + self.cluster).min(self.len());
        if let Some(cluster) = self.bytes.get_mut(at as usize..end as usize) {
            cluster.fill(0);
        }
        "a cluster of zeroes"
    }
}
