//! Opens bytes as a qcow2 image, maps all over it and reads compressed clusters.
//!
//! Half of the inputs are taken as they are. The other half become an image with a sound header and
//! arbitrary tables, so that the deeper code is reached without a corpus.

use std::cell::RefCell;
use std::sync::Arc;

use ringdisk_qcow2::{Bytes, Extent, ExtentKind, GuestOffset, OpenOptions, Qcow2};
use ringdisk_ring::{Config, Errno, IoBuf, Ring, Runtime};
use ringdisk_storage::{Allocation, CustomStorage, Limits, LocalFuture, Preallocation, Storage};

/// Places that are mapped in each image.
const PLACES: u64 = 24;

thread_local! {
    static RUNTIME: RefCell<Runtime> =
        RefCell::new(Runtime::new(Config::default()).expect("io_uring is needed"));
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some((choice, rest)) = data.split_first() else { return };
    let bytes = if choice & 1 == 0 { rest.to_vec() } else { sound_header(*choice, rest) };
    RUNTIME.with_borrow_mut(|runtime| {
        let ring = runtime.ring().clone();
        runtime.block_on(visit(&ring, bytes, choice & 2 != 0));
    });
}

/// Clusters of the image that [`sound_header`] makes: header, refcount table, L1 table, L2 tables,
/// data.
const TABLES_AT: u64 = 3;
const TABLES: u64 = 4;
const DATA_AT: u64 = TABLES_AT + TABLES;
const DATA: u64 = 16;
/// Bytes of input for one L2 entry.
const ENTRY_INPUT: usize = 12;

/// An image whose header is right; its L1 and L2 entries, sizes and data come from `rest`.
fn sound_header(choice: u8, rest: &[u8]) -> Vec<u8> {
    let byte = |at: usize| rest.get(at).copied().unwrap_or(0);
    let extended = choice & 4 != 0;
    let cluster_bits = if extended { 14 } else { 9 + u32::from(byte(0) % 5) };
    let cluster = 1usize << cluster_bits;
    let entry_words = if extended { 2 } else { 1 };
    let l1_entries = 1 + u64::from(byte(1) % 16);
    let table_covers = (cluster / 8 / entry_words * cluster) as u64;
    let size = l1_entries * table_covers - u64::from(byte(2));
    let mut image = vec![0; (DATA_AT + DATA) as usize * cluster - usize::from(byte(2))];
    let data = &mut image[DATA_AT as usize * cluster..];
    for (target, source) in data.iter_mut().zip(rest.iter().cycle()) {
        *target = *source;
    }
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb");
    put(4, &3u32.to_be_bytes());
    put(20, &cluster_bits.to_be_bytes());
    put(24, &size.to_be_bytes());
    put(36, &(l1_entries as u32).to_be_bytes());
    put(40, &(2 * cluster as u64).to_be_bytes());
    put(48, &(cluster as u64).to_be_bytes());
    put(56, &1u32.to_be_bytes());
    let zstd = choice & 8 != 0;
    let external = choice & 16 != 0;
    let incompatible = u64::from(external) << 2 | u64::from(zstd) << 3 | u64::from(extended) << 4;
    put(72, &incompatible.to_be_bytes());
    put(96, &4u32.to_be_bytes());
    put(100, &112u32.to_be_bytes());
    put(104, &[u8::from(zstd)]);
    for entry in 0..l1_entries {
        let table = (TABLES_AT + entry % TABLES) * cluster as u64;
        // Some tables are missing, some entries broken.
        let table = match byte(3) >> (entry % 8) & 1 {
            0 => table,
            _ => table & u64::from(byte(4)) << 8 | u64::from(byte(5)) << 40,
        };
        put(2 * cluster + entry as usize * 8, &table.to_be_bytes());
    }
    let words = TABLES as usize * cluster / 8 / entry_words;
    for input in rest.get(6..).unwrap_or_default().chunks_exact(ENTRY_INPUT) {
        let index = usize::from(u16::from_be_bytes([input[0], input[1]])) % words;
        let host = (DATA_AT + u64::from(input[2]) % DATA) * cluster as u64;
        let raw = u64::from_be_bytes([
            input[4], input[5], input[6], input[7], input[8], input[9], input[10], input[11],
        ]);
        let entry = match input[3] % 6 {
            0 => host | 1 << 63,
            1 => host | 1,
            2 => 1,
            // Compressed: any length, any place inside the cluster.
            3 => 1 << 62 | host + raw % cluster as u64 | (raw >> 32) << (70 - cluster_bits),
            4 => 1 << 62 | host | 1 << (70 - cluster_bits),
            _ => raw,
        };
        let at = TABLES_AT as usize * cluster + index * 8 * entry_words;
        put(at, &(entry & !(u64::from(input[3] % 6 == 3) << 63)).to_be_bytes());
        if extended {
            let bitmap = if entry >> 62 & 1 == 0 { raw } else { 0 };
            put(at + 8, &bitmap.to_be_bytes());
        }
    }
    image
}

async fn visit(ring: &Ring, bytes: Vec<u8>, tiny_cache: bool) {
    let storage = Arc::new(Storage::custom(Box::new(Memory(bytes))));
    let metadata_cache_bytes = tiny_cache.then_some(Bytes::ZERO);
    let options = OpenOptions { metadata_cache_bytes, ..OpenOptions::default() };
    let mut image = match Qcow2::open(ring, storage.clone(), &options).await {
        Ok(image) => image,
        Err(error) => {
            assert!(error.to_string().contains("fuzz.qcow2"));
            return;
        }
    };
    let _ = format!("{:?}", image.info());
    if image.info().external_data_file {
        image.set_data_file(storage).expect("one is wanted");
    }
    let size = image.virtual_size().0;
    for place in 0..PLACES {
        // The first clusters, the end, and places in between.
        let scattered = place.wrapping_mul(0x9e37_79b9_7f4a_7c15) % size.max(1);
        let offset = match place {
            0 => size.saturating_sub(1),
            place if place % 2 == 0 => place / 2 * image.info().cluster_size().0 - 512,
            _ => scattered,
        };
        let len = if place % 3 == 0 { Bytes::MAX } else { Bytes(1 + place * 700) };
        if let Ok(extent) = image.map(ring, GuestOffset(offset), len).await {
            look_at(ring, &image, offset, len, extent).await;
        }
    }
}

/// What every extent must keep.
async fn look_at(ring: &Ring, image: &Qcow2, offset: u64, len: Bytes, extent: Extent) {
    assert!(extent.len >= Bytes(1) && extent.len <= len);
    assert!(offset + extent.len.0 <= image.virtual_size().0);
    match extent.kind {
        ExtentKind::Data { offset } => {
            assert!((offset + extent.len).0 <= image.data_storage().len());
        }
        ExtentKind::Compressed(cluster) => {
            let end = cluster.host_offset() + Bytes::from(cluster.host_len());
            assert!(end.0 <= image.file().len());
            let buf = IoBuf::new(extent.len.0.min(4096) as usize, 512);
            let _ = image.read_compressed(ring, cluster, GuestOffset(offset), &buf).await;
        }
        ExtentKind::Zero { .. } | ExtentKind::Unallocated => {}
    }
}

/// The image file.
#[derive(Debug)]
struct Memory(Vec<u8>);

fn unsupported<'a, T: 'a>() -> LocalFuture<'a, T> {
    Box::pin(async { Err(Errno::OPNOTSUPP) })
}

impl CustomStorage for Memory {
    fn name(&self) -> &str {
        "fuzz.qcow2"
    }

    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn limits(&self) -> Limits {
        Limits::byte_granular()
    }

    fn allocated_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read<'a>(&'a self, _: &'a Ring, offset: u64, buf: &'a IoBuf) -> LocalFuture<'a, usize> {
        Box::pin(async move {
            let start = self.0.len().min(usize::try_from(offset).unwrap_or(usize::MAX));
            let end = self.0.len().min(start + buf.len());
            buf.copy_from_slice(0, &self.0[start..end]);
            Ok(end - start)
        })
    }

    fn write<'a>(&'a self, _: &'a Ring, _: u64, _: &'a IoBuf) -> LocalFuture<'a, usize> {
        unsupported()
    }

    fn flush<'a>(&'a self, _: &'a Ring) -> LocalFuture<'a, ()> {
        unsupported()
    }

    fn discard<'a>(&'a self, _: &'a Ring, _: u64, _: u64) -> LocalFuture<'a, ()> {
        unsupported()
    }

    fn write_zeroes<'a>(
        &'a self,
        _: &'a Ring,
        _: u64,
        _: u64,
        _: bool,
        _: bool,
    ) -> LocalFuture<'a, ()> {
        unsupported()
    }

    fn set_len<'a>(&'a self, _: &'a Ring, _: u64) -> LocalFuture<'a, ()> {
        unsupported()
    }

    fn preallocate<'a>(
        &'a self,
        _: &'a Ring,
        _: u64,
        _: u64,
        _: Preallocation,
    ) -> LocalFuture<'a, ()> {
        unsupported()
    }

    fn allocation<'a>(&'a self, _: &'a Ring, _: u64, _: u64) -> LocalFuture<'a, (Allocation, u64)> {
        unsupported()
    }
}
