//! What the guest sees of an image, read by hand.
//!
//! Promises: shares no code with the engine; what makes no sense is an error with its place, not a
//! panic.

use super::tables::{COMPRESSED, OFFSET, compressed, header, read, words};
use super::{Bytes, Header};

/// The disk inside an image: the active one or that of a snapshot.
#[derive(Debug)]
pub struct Guest<'a, I: Bytes + ?Sized> {
    image: &'a I,
    data: &'a I,
    header: Header,
    l1: Vec<u64>,
    /// Size in bytes.
    pub size: u64,
}

/// Where the bytes of a piece of a guest cluster come from.
enum Source {
    Host(u64),
    Zero,
    Below,
}

impl<'a, I: Bytes + ?Sized> Guest<'a, I> {
    /// The active disk. `data`: the external data file, or the image again.
    pub fn active(image: &'a I, data: &'a I) -> Result<Self, String> {
        let header = header(image)?;
        let l1 = words(image, header.l1_offset, header.l1_size.into());
        Ok(Guest { image, data, l1, size: header.size, header })
    }

    /// The disk of an internal snapshot.
    pub fn snapshot(image: &'a I, snapshot: &super::Snapshot) -> Result<Self, String> {
        let header = header(image)?;
        let l1 = words(image, snapshot.l1_offset, snapshot.l1_size.into());
        Ok(Guest { image, data: image, l1, size: snapshot.size, header })
    }

    /// Reads inside the disk. `below` gives what lies under unallocated parts.
    ///
    /// Errors: why it cannot be read.
    pub fn read(
        &self,
        offset: u64,
        bytes: &mut [u8],
        below: &dyn Fn(u64, &mut [u8]),
    ) -> Result<(), String> {
        let cluster = self.header.cluster();
        // A subcluster, or the smallest cluster: nothing changes inside it.
        let unit = (cluster / if self.header.extended() { 32 } else { 1 }).max(512);
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let left = usize::try_from(unit - at % unit).unwrap_or(1);
            let len = left.min(bytes.len() - done);
            self.piece(at, &mut bytes[done..done + len], below)?;
            done += len;
        }
        Ok(())
    }

    fn piece(&self, at: u64, out: &mut [u8], below: &dyn Fn(u64, &mut [u8])) -> Result<(), String> {
        let bits = self.header.cluster_bits;
        let inside = at & ((1 << bits) - 1);
        let (entry, bitmap) = self.entry(at >> bits);
        if entry & COMPRESSED != 0 {
            let cluster =
                self.decompress(entry).ok_or(format!("{at:#x}: {entry:#x} is rubbish"))?;
            let start = usize::try_from(inside).unwrap_or(0);
            out.copy_from_slice(&cluster[start..start + out.len()]);
            return Ok(());
        }
        match self.source(entry, bitmap, inside) {
            Source::Host(host) => {
                let count = self.data.read_at(host, out);
                out[count..].fill(0);
            }
            Source::Zero => out.fill(0),
            Source::Below => below(at, out),
        }
        Ok(())
    }

    fn entry(&self, cluster: u64) -> (u64, u64) {
        let entries = self.header.l2_entries();
        let index = usize::try_from(cluster / entries).unwrap_or(usize::MAX);
        let table = self.l1.get(index).map_or(0, |entry| entry & OFFSET);
        if table == 0 {
            return (0, 0);
        }
        let step = self.header.entry_bytes();
        let entry = words(self.image, table + cluster % entries * step, step / 8);
        (entry[0], entry.get(1).copied().unwrap_or(0))
    }

    fn source(&self, entry: u64, bitmap: u64, inside: u64) -> Source {
        let host = entry & OFFSET;
        let allocated = host != 0 || self.header.external() && entry >> 63 == 1;
        if self.header.extended() {
            let sub = inside / (self.header.cluster() / 32);
            if bitmap >> (32 + sub) & 1 == 1 {
                Source::Zero
            } else if bitmap >> sub & 1 == 1 {
                Source::Host(host + inside)
            } else {
                Source::Below
            }
        } else if self.header.version >= 3 && entry & 1 == 1 {
            Source::Zero
        } else if allocated {
            Source::Host(host + inside)
        } else {
            Source::Below
        }
    }

    fn decompress(&self, entry: u64) -> Option<Vec<u8>> {
        let (start, end) = compressed(&self.header, entry);
        let input = read(self.image, start, end - start);
        let mut out = vec![0; usize::try_from(self.header.cluster()).ok()?];
        if self.header.compression == 1 {
            let mut context = zstd_safe::DCtx::create();
            let mut input = zstd_safe::InBuffer::around(&input);
            let mut output = zstd_safe::OutBuffer::around(&mut out[..]);
            while output.pos() < output.capacity() {
                let before = (input.pos(), output.pos());
                context.decompress_stream(&mut output, &mut input).ok()?;
                if before == (input.pos(), output.pos()) {
                    return None;
                }
            }
        } else {
            let mut state = miniz_oxide::inflate::core::DecompressorOxide::new();
            let flags =
                miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
            let (_, _, count) =
                miniz_oxide::inflate::core::decompress(&mut state, &input, &mut out, 0, flags);
            if count != out.len() {
                return None;
            }
        }
        Some(out)
    }
}
