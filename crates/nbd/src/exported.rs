//! A disk as clients see it: its name, its flags, and its contexts of block status.
//!
//! Promises: read-only after the start, shared by all queue threads.

use std::sync::Arc;

use ringdisk_disk::{ClientErrors, Disk};
use ringdisk_nbd_protocol::numbers::{context, export_flags};
use ringdisk_nbd_protocol::request::Style;

use crate::options::{DirtyBitmap, NamedDisk, NbdOptions};

/// What a context of block status says.
#[derive(Clone, Debug)]
pub(crate) enum Context {
    /// `base:allocation`.
    Allocation,
    /// `qemu:allocation-depth`.
    Depth,
    /// `qemu:dirty-bitmap:NAME`.
    Dirty(DirtyBitmap),
}

impl Context {
    /// Its name on the wire.
    pub(crate) fn name(&self) -> String {
        match self {
            Context::Allocation => String::from(context::ALLOCATION),
            Context::Depth => String::from(context::ALLOCATION_DEPTH),
            Context::Dirty(bitmap) => format!("{}{}", context::DIRTY_BITMAP_PREFIX, bitmap.name),
        }
    }
}

/// One disk of an export.
#[derive(Debug)]
pub(crate) struct Exported {
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) disk: Arc<Disk>,
    pub(crate) is_read_only: bool,
    /// A client may have several connections.
    is_multi: bool,
    pub(crate) contexts: Vec<Context>,
    /// Request size that suits the storage, bytes; a power of two.
    pub(crate) preferred_block: u32,
    /// Writes errors that clients get down.
    pub(crate) errors: ClientErrors,
}

impl Exported {
    /// * `options`: of all disks.
    pub(crate) fn new(named: NamedDisk, options: &NbdOptions) -> Exported {
        let NamedDisk { name, description, disk, bitmaps, allocation_depth, .. } = named;
        let shown = format!("NBD export '{}'", name.escape_debug());
        let mut contexts = vec![Context::Allocation];
        if allocation_depth {
            contexts.push(Context::Depth);
        }
        contexts.extend(bitmaps.into_iter().map(Context::Dirty));
        Exported {
            name,
            description,
            is_read_only: options.common.read_only || named.read_only || disk.is_read_only(),
            // Where one connection is all there is, a client that takes it at its word waits for
            // ever for its second one.
            is_multi: options.max_connections > 1,
            contexts,
            preferred_block: preferred_block(disk.block_limits().physical_block),
            errors: ClientErrors::start(&shown, Arc::clone(disk.events())),
            disk,
        }
    }

    /// The flags for a client.
    ///
    /// * `has_contexts`: it has chosen contexts.
    pub(crate) fn flags(&self, style: Style, has_contexts: bool) -> u16 {
        use export_flags as flags;
        // A disk has no memory of its own for each connection: what is answered on one is there on
        // all, and a flush covers all that was answered.
        let mut all = flags::HAS_FLAGS | flags::FLUSH | flags::FUA | flags::CACHE;
        all |= if self.is_multi { flags::CAN_MULTI_CONN } else { 0 };
        all |= if self.is_read_only {
            flags::READ_ONLY
        } else {
            flags::TRIM | flags::WRITE_ZEROES | flags::FAST_ZERO
        };
        if style != Style::Simple {
            all |= flags::DF;
        }
        if style == Style::Extended && has_contexts {
            all |= flags::BLOCK_STATUS_PAYLOAD;
        }
        all
    }

    /// The contexts that a query of a list names: an exact name, or the part up to a colon.
    pub(crate) fn contexts_like(&self, query: &[u8]) -> impl Iterator<Item = usize> {
        let is_prefix = query.ends_with(b":");
        self.contexts.iter().enumerate().filter_map(move |(index, context)| {
            let name = context.name();
            let fits = if is_prefix {
                name.as_bytes().starts_with(query)
            } else {
                name.as_bytes() == query
            };
            fits.then_some(index)
        })
    }
}

/// A block size that NBD allows as the preferred one: a power of two from 512 bytes to 32 MiB.
fn preferred_block(bytes: u32) -> u32 {
    bytes.next_power_of_two().clamp(4096, 32 << 20)
}

/// All disks of an export, in the order in which they were given.
#[derive(Debug)]
pub(crate) struct Exports(pub(crate) Vec<Arc<Exported>>);

impl Exports {
    /// The disk with this name. The empty name stands for the only disk, too.
    pub(crate) fn find(&self, name: &[u8]) -> Option<&Arc<Exported>> {
        let named = self.0.iter().find(|export| export.name.as_bytes() == name);
        named.or(match self.0.as_slice() {
            [only] if name.is_empty() => Some(only),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use ringdisk_disk::NullOptions;
    use ringdisk_export::CommonOptions;

    use super::*;

    fn exported(read_only: bool) -> Exported {
        let disk = Disk::null(&NullOptions::default());
        let bitmap = DirtyBitmap { name: String::from("b0"), ranges: Arc::new([]) };
        let named = NamedDisk { bitmaps: vec![bitmap], ..NamedDisk::new("a", disk) };
        let common = CommonOptions { read_only, ..CommonOptions::default() };
        Exported::new(named, &NbdOptions { common, ..NbdOptions::default() })
    }

    #[test]
    fn several_connections_are_offered_where_there_may_be_several() {
        let options = NbdOptions { max_connections: 1, ..NbdOptions::default() };
        let disk = Disk::null(&NullOptions::default());
        let one = Exported::new(NamedDisk::new("a", disk), &options);
        assert_eq!(one.flags(Style::Simple, false), 0x0c6d);
    }

    #[test]
    fn flags_follow_the_style_and_whether_writes_are_refused() {
        let (writable, read_only) = (exported(false), exported(true));
        assert_eq!(writable.flags(Style::Simple, false), 0x0d6d);
        assert_eq!(writable.flags(Style::Structured, true), 0x0ded);
        assert_eq!(writable.flags(Style::Extended, true), 0x1ded);
        assert_eq!(writable.flags(Style::Extended, false), 0x0ded);
        assert_eq!(read_only.flags(Style::Simple, false), 0x050f);
    }

    #[test]
    fn queries_name_contexts_exactly_or_up_to_a_colon() {
        let export = exported(false);
        let like = |query: &str| export.contexts_like(query.as_bytes()).collect::<Vec<_>>();
        assert_eq!(like("base:allocation"), [0]);
        assert_eq!(like("qemu:"), [1, 2]);
        assert_eq!(like("qemu:dirty-bitmap:"), [2]);
        assert_eq!(like("qemu:dirty-bitmap:b0"), [2]);
        assert!(like("base").is_empty() && like("other:").is_empty() && like("").is_empty());
    }

    #[test]
    fn the_only_disk_is_the_default_one() {
        let one = Exports(vec![Arc::new(exported(false))]);
        assert!(one.find(b"").is_some() && one.find(b"a").is_some() && one.find(b"b").is_none());
    }
}
