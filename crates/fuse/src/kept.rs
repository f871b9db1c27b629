//! What of an export outlives its process: for a mount that another process goes on with.
//!
//! Promises: [`Terms`] and the descriptors in [`Parked`] are all that [`crate::Export::start`]
//! needs to serve a mount of a process that is gone, with no request lost; [`FileRecord`] holds
//! what clients changed of the file itself, from the moment of the answer on. Control path, but for
//! the record, which OPEN, RELEASE and SETATTR write (a write to memory, of a few hundred bytes).
//!
//! The kernel keeps a connection as long as any of its descriptors is open somewhere, and each
//! descriptor keeps the requests that were read from it and not answered. So *all* of them are
//! parked. The next process asks for those requests again (NOTIFY_RESEND): each comes once more,
//! its `unique` marked by bit 63, which goes back in the reply. INIT does not come again.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::abi::flags::INIT_HAS_RESEND;
use crate::mount::{Mount, Unmount, was_aborted};
use crate::negotiate::{Negotiated, Profile};
use crate::reply::notify_resend;
use crate::{Error, ErrorKind, Transport, ZeroCopy};

/// Bytes at the start of the file that a [`FileRecord`] is kept in; what follows is the caller's.
pub const RECORD_BYTES: u64 = 4096;
/// Bit of `unique` in a request that the kernel sends again.
const UNIQUE_RESEND: u64 = 1 << 63;
/// OPENs and RELEASEs that are remembered as counted: more are not under way when a process dies.
const COUNTED: usize = 64;

/// What a mount was made with; the same for all processes that serve it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Absolute path of the file.
    pub mountpoint: PathBuf,
    /// Number of the connection.
    pub connection: u32,
    /// Sizes and caching.
    pub profile: Profile,
    /// The answer to INIT.
    pub negotiated: Negotiated,
    /// Queues; each has a descriptor of its own where cloning is allowed.
    pub queues: usize,
}

impl Terms {
    /// Whether the kernel sends unanswered requests again (Linux 6.9).
    #[must_use]
    pub fn can_resend(&self) -> bool {
        self.negotiated.offered & INIT_HAS_RESEND != 0
    }
}

/// A mount, ready to be kept by somebody else.
#[derive(Debug)]
pub struct Parked {
    /// What it was made with.
    pub terms: Terms,
    /// Every descriptor of the connection, in the order of the queues; one if they share it.
    pub devices: Vec<OwnedFd>,
}

/// How an export outlives its process.
#[derive(Clone, Debug)]
pub struct Keep {
    /// Where the state of the file is written.
    pub record: Arc<FileRecord>,
    /// The mount to go on with; `None`: a new one.
    pub resume: Option<Arc<Parked>>,
}

/// What clients can change of the file besides its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileState {
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Open files of all clients.
    pub open_files: u64,
    /// The time that a read-only file shows, after 1970.
    pub since: Duration,
}

/// The record as it lies in the file; native byte order, since no other machine ever reads it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    /// 1 once it was written.
    is_there: u32,
    mode: u32,
    uid: u32,
    gid: u32,
    open_files: u64,
    since_s: u64,
    since_ns: u64,
    /// `unique` of the OPENs and RELEASEs counted last.
    counted: [u64; COUNTED],
    /// Place of the next one.
    next: u64,
    /// Of the open files, those that can be written.
    writable_files: u64,
}

/// The state of a file, in memory that outlives the process (a memfd that somebody else holds too).
#[derive(Debug)]
pub struct FileRecord {
    file: File,
    raw: Mutex<Raw>,
}

impl FileRecord {
    /// Takes up what the first [`RECORD_BYTES`] of `file` hold; an empty file holds nothing yet.
    ///
    /// Errors: those of reading.
    pub fn new(file: File) -> std::io::Result<FileRecord> {
        let mut raw = Raw::new_zeroed();
        match file.read_exact_at(raw.as_mut_bytes(), 0) {
            Err(error) if error.kind() != std::io::ErrorKind::UnexpectedEof => return Err(error),
            Err(_) => raw = Raw::new_zeroed(),
            Ok(()) => {}
        }
        Ok(FileRecord { file, raw: Mutex::new(raw) })
    }

    /// What was recorded, if anything was.
    #[must_use]
    pub fn state(&self) -> Option<FileState> {
        let raw = self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        // The process that wrote it may have been taken over since: any number may stand here.
        let since = since_of(raw.since_s, raw.since_ns);
        (raw.is_there == 1).then_some(FileState {
            mode: raw.mode,
            uid: raw.uid,
            gid: raw.gid,
            open_files: raw.open_files,
            since,
        })
    }

    /// Records mode, owner and time.
    pub(crate) fn set(&self, mode: u32, uid: u32, gid: u32, since: SystemTime) {
        let since = since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        self.change(|raw| {
            (raw.is_there, raw.mode, raw.uid, raw.gid) = (1, mode, uid, gid);
            (raw.since_s, raw.since_ns) = (since.as_secs(), since.subsec_nanos().into());
        });
    }

    /// Files that clients have open for writing, as far as OPENs and RELEASEs were served.
    fn writable_files(&self) -> u64 {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner).writable_files
    }

    /// Counts an OPEN or a RELEASE, unless the process before this one has counted it and was not
    /// able to say so.
    ///
    /// * `unique`: of the request, as delivered.
    /// * `can_write`: the file is open for writing.
    pub(crate) fn count(&self, unique: u64, is_open: bool, can_write: bool) {
        let number = unique & !UNIQUE_RESEND;
        self.change(|raw| {
            if unique & UNIQUE_RESEND != 0 && raw.counted.contains(&number) {
                return;
            }
            let change = if is_open { u64::checked_add } else { u64::checked_sub };
            let changed = |count: u64, by| change(count, by).unwrap_or(count);
            raw.open_files = changed(raw.open_files, 1);
            raw.writable_files = changed(raw.writable_files, can_write.into());
            let place = usize::try_from(raw.next).unwrap_or(0) % COUNTED;
            raw.counted[place] = number;
            raw.next = raw.next.wrapping_add(1);
        });
    }

    fn change(&self, change: impl FnOnce(&mut Raw)) {
        let mut raw = self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut raw);
        // Within one page and to memory: a kill leaves it whole, and there is nothing that could
        // fail but a lack of memory.
        if let Err(error) = self.file.write_all_at(raw.as_bytes(), 0) {
            tracing::warn!("the state of the file could not be recorded: {error}");
        }
    }
}

/// A time after 1970; one that the clock cannot show is 1970.
fn since_of(seconds: u64, nanoseconds: u64) -> Duration {
    let since = Duration::from_secs(seconds).checked_add(Duration::from_nanos(nanoseconds));
    since.filter(|since| SystemTime::UNIX_EPOCH.checked_add(*since).is_some()).unwrap_or_default()
}

/// Whether the mount has ended: it was removed, or its connection was aborted.
#[must_use]
pub fn is_over(parked: &Parked) -> bool {
    parked.devices.first().is_some_and(|device| {
        let mut device = [PollFd::new(device, PollFlags::empty())];
        let polled = poll(&mut device, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        polled.is_ok() && device[0].revents().contains(PollFlags::ERR)
    })
}

/// How a mount has ended that nobody served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was unmounted.
    Unmounted,
    /// Its connection was aborted, and requests that waited ended with errors.
    Aborted,
}

/// How a mount has ended that nobody serves; `None`: it has not.
///
/// An abort is known by one of these. Reading the device says so (after `ringdisk umount --force`,
/// and by fusectl; not after `umount -f`). The mount is still there: `umount -f` aborts at once,
/// and then leaves a mount in use where it is. A client had the file open for writing when the
/// process died: to close it he has to wait for a server. What is left, an abort by `umount -f`
/// (from Linux 7.3 on any abort) of a mount that was only read or that somebody waited to open,
/// looks like an unmount once it is unmounted and closed.
#[must_use]
pub fn ended(parked: &Parked, record: &FileRecord) -> Option<Ended> {
    let device = parked.devices.first().filter(|_| is_over(parked))?;
    let Terms { connection, mountpoint, .. } = &parked.terms;
    let place = Some((*connection, &**mountpoint));
    let is_aborted = was_aborted(device, place) || record.writable_files() > 0;
    Some(if is_aborted { Ended::Aborted } else { Ended::Unmounted })
}

/// Takes an aborted mount out of the tree, if it is there still.
///
/// Errors: those of [`Mount::unmount`].
pub fn remove(parked: &Parked) -> Result<(), Error> {
    adopt(parked)?.take_over().unmount(Unmount::Lazy)
}

/// What excludes keeping the mount; `None`: nothing does.
#[must_use]
pub fn refuse(transport: Transport, zero_copy: ZeroCopy, passthrough: bool) -> Option<Error> {
    if transport == Transport::Uring || zero_copy == ZeroCopy::On {
        return Some(no_rings());
    }
    passthrough.then(|| {
        Error::new(
            ErrorKind::Unsupported,
            "a mount with passthrough cannot be kept: between two processes the kernel would write the image while nobody holds its locks",
        )
        .hint("leave `--passthrough` or `--keep-mount` away")
    })
}

/// Why requests do not travel in rings, for a mount that leaves the choice to us.
pub(crate) fn why_dev() -> String {
    String::from("a mount that outlives its process (--keep-mount) cannot be served over io_uring")
}

fn no_rings() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "a mount over io_uring cannot be kept: the kernel ties its rings to the process and sends their requests to no other",
    )
    .hint("use `--transport dev`, or `auto`, which takes it with --keep-mount; or leave --keep-mount away: after a crash the next mount replaces the dead one")
}

/// Takes the mount of a process that is gone; not yet responsible for it.
pub(crate) fn adopt(parked: &Parked) -> Result<Mount, Error> {
    let device = duplicate(parked.devices.first())?;
    Ok(Mount::adopt(device, parked.terms.mountpoint.clone(), parked.terms.connection))
}

/// The descriptors of a parked mount, one for each queue.
pub(crate) fn devices(parked: &Parked) -> Result<Vec<Arc<OwnedFd>>, Error> {
    let own = parked.devices.iter().map(|device| duplicate(Some(device)).map(Arc::new));
    let mut devices: Vec<_> = own.collect::<Result<_, _>>()?;
    let first = devices.first().cloned();
    devices
        .extend(first.into_iter().cycle().take(parked.terms.queues.saturating_sub(devices.len())));
    Ok(devices)
}

/// What somebody else has to keep.
///
/// Errors: [`ErrorKind::TransportMissing`] for a kernel that does not send requests again.
pub(crate) fn park(
    mount: &Mount,
    devices: &[Arc<OwnedFd>],
    profile: Profile,
    negotiated: Negotiated,
) -> Result<Parked, Error> {
    let connection = mount.connection().ok_or_else(|| {
        Error::new(ErrorKind::NotMounted, format!("{} was unmounted", mount.mountpoint().display()))
    })?;
    let mountpoint = mount.mountpoint().to_owned();
    let terms = Terms { mountpoint, connection, profile, negotiated, queues: devices.len() };
    if !terms.can_resend() {
        return Err(Error::new(
            ErrorKind::TransportMissing,
            "this kernel cannot send unanswered requests to another process",
        )
        .hint("use Linux 6.9 or newer, or leave --keep-mount away"));
    }
    let mut own: Vec<OwnedFd> = Vec::with_capacity(devices.len());
    for (index, device) in devices.iter().enumerate() {
        if index == 0 || !Arc::ptr_eq(device, &devices[0]) {
            own.push(duplicate(Some(&**device))?);
        }
    }
    Ok(Parked { terms, devices: own })
}

fn duplicate(device: Option<&OwnedFd>) -> Result<OwnedFd, Error> {
    let none = std::io::Error::from(std::io::ErrorKind::NotFound);
    device.map_or(Err(none), OwnedFd::try_clone).map_err(|source| {
        Error::new(ErrorKind::System, "cannot duplicate the FUSE descriptor").source(source)
    })
}

/// Makes the kernel send again what a process that is gone has read and not answered, oldest first.
/// Before anybody reads: it would send the requests of living threads again too.
pub(crate) fn ask_again(mount: &Mount) -> Result<(), Error> {
    rustix::io::write(mount.device(), &notify_resend()).map(drop).map_err(|errno| {
        Error::new(ErrorKind::System, "the kernel did not send the unanswered requests again")
            .errno(errno)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(file: &File) -> FileRecord {
        FileRecord::new(file.try_clone().expect("clone")).expect("read")
    }

    fn open_files(record: &FileRecord) -> u64 {
        record.raw.lock().expect("no panic").open_files
    }

    #[test]
    fn the_record_is_what_the_next_process_finds() {
        let file = tempfile::tempfile().expect("file");
        let first = record(&file);
        assert_eq!(first.state(), None);
        let since = SystemTime::UNIX_EPOCH + Duration::new(1000, 7);
        first.set(0o640, 3, 4, since);
        first.count(10, true, true);
        first.count(12, true, false);
        first.count(14, false, true);
        let state = record(&file).state().expect("recorded");
        let since = Duration::new(1000, 7);
        assert_eq!(state, FileState { mode: 0o640, uid: 3, gid: 4, open_files: 1, since });
        assert_eq!(record(&file).writable_files(), 0);
    }

    #[test]
    fn what_was_counted_before_the_kill_is_not_counted_again() {
        let file = tempfile::tempfile().expect("file");
        record(&file).count(10, true, true);
        let next = record(&file);
        next.count(10 | UNIQUE_RESEND, true, true);
        assert_eq!((open_files(&next), next.writable_files()), (1, 1), "counted, and not answered");
        next.count(12 | UNIQUE_RESEND, true, false);
        assert_eq!((open_files(&next), next.writable_files()), (2, 1), "read, and not counted");
        next.count(14 | UNIQUE_RESEND, false, false);
        next.count(14 | UNIQUE_RESEND, false, false);
        assert_eq!((open_files(&next), next.writable_files()), (1, 1));
    }

    #[test]
    fn a_record_of_any_bytes_is_taken() {
        let file = tempfile::tempfile().expect("file");
        let mut bytes = [0xff; 4096];
        bytes[..4].copy_from_slice(&1_u32.to_ne_bytes());
        file.write_all_at(&bytes, 0).expect("write");
        let record = record(&file);
        let state = record.state().expect("recorded");
        assert_eq!((state.since, state.open_files), (Duration::ZERO, u64::MAX));
        record.count(1, true, true);
        record.count(2, false, true);
        let latest = i64::MAX.cast_unsigned();
        assert_eq!(since_of(latest, 7), Duration::new(latest, 7));
        assert_eq!(since_of(latest + 1, 0), Duration::ZERO);
    }

    #[test]
    fn the_record_fits_its_place() {
        assert!(size_of::<Raw>() as u64 <= RECORD_BYTES);
    }
}
