//! A disk as clients see it: its name, its flags, and its contexts of block status.
//!
//! Promises: shared by all queue threads; after the start a disk changes in one way only: it leaves
//! the export, once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringdisk_disk::{ClientErrors, Disk};
use ringdisk_nbd_protocol::numbers::{context, export_flags};
use ringdisk_nbd_protocol::request::Style;

use crate::options::{DirtyBitmap, NamedDisk, NbdOptions};
use crate::peers::log_name;

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
    /// It leaves the export: requests that come are answered with ESHUTDOWN.
    is_leaving: AtomicBool,
    /// Another process has it and its clients, so their sockets are not shut down here.
    has_moved: AtomicBool,
}

impl Exported {
    /// * `options`: of all disks.
    pub(crate) fn new(named: NamedDisk, options: &NbdOptions) -> Exported {
        let NamedDisk { name, description, disk, bitmaps, allocation_depth, .. } = named;
        let shown = log_name(&name);
        let mut contexts = vec![Context::Allocation];
        if allocation_depth {
            contexts.push(Context::Depth);
        }
        contexts.extend(bitmaps.into_iter().map(Context::Dirty));
        let errors = ClientErrors::start(&shown, Arc::clone(disk.events()));
        errors.watch(&disk);
        Exported {
            name,
            description,
            is_read_only: options.common.read_only || named.read_only || disk.is_read_only(),
            // Where one connection is all there is, a client that takes it at its word waits for
            // ever for its second one.
            is_multi: options.max_connections > 1,
            contexts,
            preferred_block: preferred_block(disk.block_limits().physical_block),
            errors,
            disk,
            is_leaving: AtomicBool::new(false),
            has_moved: AtomicBool::new(false),
        }
    }

    /// Whether the disk leaves the export.
    pub(crate) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Acquire)
    }

    /// Whether another process has it and its clients.
    pub(crate) fn has_moved(&self) -> bool {
        self.has_moved.load(Ordering::Acquire)
    }

    /// The flags for a client.
    ///
    /// * `has_contexts`: it has chosen contexts, or may still do so.
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

/// The disks of an export, in the order in which they were given. Asked in handshakes and at the
/// end, never for a request.
#[derive(Debug)]
pub(crate) struct Exports {
    disks: Mutex<Vec<Arc<Exported>>>,
    /// One disk was given: the empty name stands for it, too.
    has_one: bool,
}

impl Exports {
    pub(crate) fn new(disks: Vec<Arc<Exported>>) -> Exports {
        Exports { has_one: disks.len() == 1, disks: Mutex::new(disks) }
    }

    /// A panic elsewhere leaves the list valid.
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Exported>>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that have not left.
    pub(crate) fn all(&self) -> Vec<Arc<Exported>> {
        self.lock().clone()
    }

    /// The disk with this name. The empty name stands for the only disk, too.
    pub(crate) fn find(&self, name: &[u8]) -> Option<Arc<Exported>> {
        let disks = self.lock();
        let named = disks.iter().find(|export| export.name.as_bytes() == name);
        named.or(if self.has_one && name.is_empty() { disks.first() } else { None }).cloned()
    }

    /// Takes a disk out: no client finds it any more, and requests of those that have are refused.
    /// `None`: it has left before.
    pub(crate) fn remove(&self, name: &str) -> Option<Arc<Exported>> {
        let mut disks = self.lock();
        let place = disks.iter().position(|export| export.name == name)?;
        let export = disks.remove(place);
        export.is_leaving.store(true, Ordering::Release);
        Some(export)
    }

    /// The same of a disk that another process has from now on.
    pub(crate) fn remove_moved(&self, name: &str) -> Option<Arc<Exported>> {
        let export = self.lock().iter().find(|export| export.name == name).cloned()?;
        export.has_moved.store(true, Ordering::Release);
        self.remove(name)
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
        let one = Exports::new(vec![Arc::new(exported(false))]);
        assert!(one.find(b"").is_some() && one.find(b"a").is_some() && one.find(b"b").is_none());
    }

    #[test]
    fn a_disk_that_has_left_is_found_by_no_name() {
        let exports = Exports::new(vec![Arc::new(exported(false))]);
        let known = exports.find(b"a").expect("it is there");
        assert!(!known.is_leaving());
        assert!(exports.remove("a").is_some() && exports.remove("a").is_none());
        assert!(known.is_leaving() && !known.has_moved());
        assert!(exports.find(b"").is_none() && exports.find(b"a").is_none());
        let exports = Exports::new(vec![Arc::new(exported(false))]);
        let moved = exports.remove_moved("a").expect("it was there");
        assert!(moved.is_leaving() && moved.has_moved() && exports.all().is_empty());
    }
}
