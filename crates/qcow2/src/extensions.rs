//! Parses header extensions.
//!
//! Promises: pure, no I/O; their number and sizes are bounded; unknown ones are kept. Source: qcow2
//! specification, "Header extensions", "String header extensions", "Feature name table", "Bitmaps
//! extension", "Full disk encryption header pointer".

use crate::error::Error;
use crate::info::{FeatureClass, FeatureName, UnknownExtension};
use crate::limits::{
    EXTENSIONS_MAX, FEATURE_NAMES_MAX, FILE_NAME_BYTES_MAX, FORMAT_NAME_BYTES_MAX,
};
use crate::units::{Bytes, HostOffset};

const END: u32 = 0;
pub(crate) const BACKING_FORMAT: u32 = 0xe279_2aca;
pub(crate) const FEATURE_NAMES: u32 = 0x6803_f857;
pub(crate) const BITMAPS: u32 = 0x2385_2875;
const CRYPTO_HEADER: u32 = 0x0537_be77;
pub(crate) const DATA_FILE: u32 = 0x4441_5441;
/// A placeholder of ours, "rdsk": fills the place of the extensions while they move inside the
/// first cluster (module `header::write`). Its content means nothing.
pub(crate) const FILLER: u32 = 0x7264_736b;
/// One entry of the feature name table: class, bit, 46 bytes of name.
pub(crate) const FEATURE_NAME_BYTES: usize = 48;

/// Where the bitmap directory lies, as the extension says; checked by
/// [`bitmaps`](crate::bitmaps).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BitmapDirectory {
    pub(crate) count: u32,
    pub(crate) offset: HostOffset,
    pub(crate) len: Bytes,
}

impl BitmapDirectory {
    /// The content of the extension. `None` unless it has 24 bytes and its reserved field is 0.
    pub(crate) fn parse(data: &[u8]) -> Option<BitmapDirectory> {
        let data = <&[u8; 24]>::try_from(data).ok().filter(|data| u32_at(&data[..], 4) == 0)?;
        let (count, len, offset) = (u32_at(data, 0), u64_at(data, 8), u64_at(data, 16));
        Some(BitmapDirectory { count, offset: HostOffset(offset), len: Bytes(len) })
    }

    /// The content of the extension.
    pub(crate) fn to_bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..4].copy_from_slice(&self.count.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.len.0.to_be_bytes());
        bytes[16..].copy_from_slice(&self.offset.0.to_be_bytes());
        bytes
    }
}

/// All extensions of one header.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extensions {
    pub(crate) backing_format: Option<String>,
    pub(crate) data_file: Option<Vec<u8>>,
    pub(crate) feature_names: Vec<FeatureName>,
    pub(crate) bitmaps: Option<BitmapDirectory>,
    /// Why the bitmaps extension cannot be used, when it is there.
    pub(crate) bitmaps_bad: Option<String>,
    pub(crate) unknown: Vec<UnknownExtension>,
}

/// Parses the extensions.
///
/// * `area`: the bytes from the end of the header to the name of the backing file or the end of
///   the first cluster.
///
/// Errors: `Corrupt` for an extension that does not fit, or a second one of a kind.
pub(crate) fn parse(area: &[u8], file: &str) -> Result<Extensions, Error> {
    let mut found = Extensions::default();
    let mut seen: Vec<u32> = Vec::new();
    let mut rest = area;
    // Less than a whole head is left: the area ends without an end mark, which is allowed.
    while let Some((kind, after)) = take_u32(rest) {
        if kind == END {
            break;
        }
        let Some((len, after)) = take_u32(after) else {
            return Err(bad(file, kind, "its length is cut off"));
        };
        let Some(data) = after.get(..len as usize) else {
            let room = after.len();
            return Err(bad(file, kind, &format!("{len} bytes do not fit: {room} are left")));
        };
        if seen.len() >= EXTENSIONS_MAX {
            return Err(Error::too_large(
                file,
                format!("more than {EXTENSIONS_MAX} header extensions"),
            ));
        }
        if seen.contains(&kind) && is_known(kind) {
            return Err(bad(file, kind, "there are two of this type"));
        }
        seen.push(kind);
        found.add(kind, data, file)?;
        // Padded to 8 bytes; the padding of the last one may be cut.
        rest = after.get(data.len().next_multiple_of(8)..).unwrap_or_default();
    }
    Ok(found)
}

/// The extensions of an area that [`parse`] accepted, as bytes, and how long they are with their
/// end mark.
pub(crate) fn raw(area: &[u8]) -> (Vec<(u32, Vec<u8>)>, usize) {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some((kind, after)) = take_u32(area.get(at..).unwrap_or_default()) {
        at += 8;
        if kind == END {
            break;
        }
        let len = take_u32(after).map_or(0, |(len, _)| len as usize);
        let data = area.get(at..at + len).unwrap_or_default();
        found.push((kind, data.to_vec()));
        at += len.next_multiple_of(8);
    }
    (found, at.min(area.len()))
}

impl Extensions {
    fn add(&mut self, kind: u32, data: &[u8], file: &str) -> Result<(), Error> {
        match kind {
            BACKING_FORMAT => {
                if data.len() > FORMAT_NAME_BYTES_MAX {
                    let rule =
                        format!("a backing format has at most {FORMAT_NAME_BYTES_MAX} bytes");
                    return Err(bad(file, kind, &rule));
                }
                // An empty one says as much as none.
                let format = String::from_utf8_lossy(data).into_owned();
                self.backing_format = (!format.is_empty()).then_some(format);
            }
            DATA_FILE => {
                if data.is_empty() || data.len() > FILE_NAME_BYTES_MAX || data.contains(&0) {
                    let rule = "the data file name must have 1 to 1023 bytes and no NUL";
                    return Err(bad(file, kind, rule));
                }
                self.data_file = Some(data.to_vec());
            }
            FEATURE_NAMES => self.feature_names = feature_names(data),
            BITMAPS => {
                self.bitmaps = BitmapDirectory::parse(data);
                if self.bitmaps.is_none() {
                    self.bitmaps_bad = Some(format!(
                        "header extension {kind:#010x}: the bitmaps extension must have 24 bytes, \
                         of which bytes 4 to 7 are 0"
                    ));
                }
            }
            CRYPTO_HEADER => {
                // Encrypted images were refused before. One that only lost its mark would be served
                // as ciphertext.
                let rule = "it is for images encrypted with LUKS, and the header does not say that \
                            this one is";
                return Err(bad(file, kind, rule));
            }
            FILLER => {}
            _ => self.unknown.push(UnknownExtension { kind, data: data.to_vec() }),
        }
        Ok(())
    }
}

fn is_known(kind: u32) -> bool {
    matches!(kind, BACKING_FORMAT | FEATURE_NAMES | BITMAPS | CRYPTO_HEADER | DATA_FILE)
}

fn bad(file: &str, kind: u32, rule: &str) -> Error {
    Error::corrupt(file, format!("header extension {kind:#010x}: {rule}"))
}

/// Entries of unknown class or with a bit over 63 are skipped.
fn feature_names(data: &[u8]) -> Vec<FeatureName> {
    data.chunks_exact(FEATURE_NAME_BYTES)
        .take(FEATURE_NAMES_MAX)
        .filter_map(|entry| {
            let class = match entry[0] {
                0 => FeatureClass::Incompatible,
                1 => FeatureClass::Compatible,
                2 => FeatureClass::Autoclear,
                _ => return None,
            };
            let name = entry[2..].split(|byte| *byte == 0).next().unwrap_or_default();
            let name = String::from_utf8_lossy(name).into_owned();
            (entry[1] < 64).then_some(FeatureName { class, bit: entry[1], name })
        })
        .collect()
}

fn take_u32(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (head, rest) = bytes.split_first_chunk::<4>()?;
    Some((u32::from_be_bytes(*head), rest))
}

/// The big-endian word at `at` of a table entry whose length was checked; missing bytes are 0.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|b| b.first_chunk()).copied().map_or(0, u64::from_be_bytes)
}

/// As [`u64_at`], 32 bits.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|b| b.first_chunk()).copied().map_or(0, u32::from_be_bytes)
}

/// As [`u64_at`], 16 bits.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(|b| b.first_chunk()).copied().map_or(0, u16::from_be_bytes)
}
