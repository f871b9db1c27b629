//! Making empty images, of any shape that the format allows.
//!
//! Promises: written from the specification alone; shares no code with the engine.

/// What an image is to be like. `Default`: version 3, clusters of 64 KiB, refcounts of 16 bits, 1
/// MiB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// 2 or 3.
    pub version: u32,
    /// 9 to 21.
    pub cluster_bits: u32,
    /// Binary logarithm of the bits of a refcount, 0 to 6; 4 in version 2.
    pub refcount_order: u32,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Entries with subclusters; clusters of at least 16 KiB.
    pub extended: bool,
    /// Compression by zstd in place of zlib.
    pub zstd: bool,
    /// The compatible bit for lazy refcounts.
    pub lazy: bool,
    /// Name of the external data file.
    pub data_file: Option<String>,
    /// The data file is to be a raw image.
    pub data_file_raw: bool,
    /// Name and format of the backing file.
    pub backing: Option<(String, String)>,
    /// Clusters of the refcount table (one more gives room to grow).
    pub refcount_table_clusters: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Shape {
            version: 3,
            cluster_bits: 16,
            refcount_order: 4,
            size: 1 << 20,
            extended: false,
            zstd: false,
            lazy: false,
            data_file: None,
            data_file_raw: false,
            backing: None,
            refcount_table_clusters: 1,
        }
    }
}

impl Shape {
    /// The bytes of an image in which nothing is allocated. Its clusters: header, refcount table,
    /// first refcount blocks, L1 table.
    #[must_use]
    pub fn make(&self) -> Vec<u8> {
        let cluster = 1u64 << self.cluster_bits;
        let entry = if self.extended { 16 } else { 8 };
        let l1_entries = self.size.div_ceil(cluster).div_ceil(cluster / entry).max(1);
        let l1_clusters = (l1_entries * 8).div_ceil(cluster);
        let in_block = (cluster * 8) >> self.refcount_order;
        let table = u64::from(self.refcount_table_clusters);
        // Blocks for themselves too; a few rounds settle it.
        let mut blocks = 1;
        while blocks * in_block < 1 + table + blocks + l1_clusters {
            blocks += 1;
        }
        let used = 1 + table + blocks + l1_clusters;
        let mut image = vec![0; usize::try_from(used * cluster).expect("a small image")];
        let mut put = |at: u64, bytes: &[u8]| {
            let at = usize::try_from(at).expect("a small image");
            image[at..at + bytes.len()].copy_from_slice(bytes);
        };
        let l1_at = (1 + table + blocks) * cluster;
        put(0, &self.header(l1_entries, l1_at));
        for block in 0..blocks {
            put(cluster + block * 8, &((1 + table + block) * cluster).to_be_bytes());
        }
        let first_block = usize::try_from((1 + table) * cluster).expect("a small image");
        (0..used).for_each(|used| self.count_one(&mut image[first_block..], used));
        image
    }

    /// Sets one refcount to 1. The blocks follow each other, so they are one array.
    fn count_one(&self, blocks: &mut [u8], place: u64) {
        let bits = 1u64 << self.refcount_order;
        let last_byte = (place * bits + bits.max(8)) / 8 - u64::from(bits >= 8);
        let at = if bits >= 8 { last_byte } else { place * bits / 8 };
        blocks[usize::try_from(at).expect("a small image")] |=
            1 << if bits >= 8 { 0 } else { place * bits % 8 };
    }

    fn header(&self, l1_entries: u64, l1_at: u64) -> Vec<u8> {
        let mut extensions = Vec::new();
        let mut extension = |kind: u32, content: &[u8]| {
            extensions.extend(kind.to_be_bytes());
            extensions.extend(u32::try_from(content.len()).expect("short").to_be_bytes());
            extensions.extend(content);
            extensions.resize(extensions.len().next_multiple_of(8), 0);
        };
        if let Some((_, format)) = &self.backing {
            extension(0xe279_2aca, format.as_bytes());
        }
        if let Some(name) = &self.data_file {
            extension(0x4441_5441, name.as_bytes());
        }
        extension(0, &[]);
        let fixed = if self.version == 2 { 72 } else { 112 };
        let name_at = fixed + extensions.len() as u64;
        let name = self.backing.as_ref().map_or("", |b| &b.0);
        let mut h = Vec::new();
        h.extend(b"QFI\xfb");
        h.extend(self.version.to_be_bytes());
        h.extend(if name.is_empty() { 0 } else { name_at }.to_be_bytes());
        h.extend(u32::try_from(name.len()).expect("short").to_be_bytes());
        h.extend(self.cluster_bits.to_be_bytes());
        h.extend(self.size.to_be_bytes());
        h.extend(0u32.to_be_bytes());
        h.extend(u32::try_from(l1_entries).expect("a small image").to_be_bytes());
        h.extend(l1_at.to_be_bytes());
        h.extend((1u64 << self.cluster_bits).to_be_bytes());
        h.extend(self.refcount_table_clusters.to_be_bytes());
        h.extend([0; 12]);
        if self.version >= 3 {
            let external = u64::from(self.data_file.is_some());
            let incompatible =
                external << 2 | u64::from(self.zstd) << 3 | u64::from(self.extended) << 4;
            h.extend(incompatible.to_be_bytes());
            h.extend(u64::from(self.lazy).to_be_bytes());
            h.extend((u64::from(self.data_file_raw) << 1).to_be_bytes());
            h.extend(self.refcount_order.to_be_bytes());
            h.extend(112u32.to_be_bytes());
            h.extend([u8::from(self.zstd), 0, 0, 0, 0, 0, 0, 0]);
        }
        h.extend(extensions);
        h.extend(name.as_bytes());
        h
    }
}
