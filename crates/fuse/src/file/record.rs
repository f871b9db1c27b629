//! What clients changed of the file itself, recorded where the next process finds it.
//!
//! Promises: it is there from the moment of the answer on; what the record holds is taken without a
//! panic, whatever it is. OPEN, RELEASE and SETATTR write it: a write to memory, of a few hundred
//! bytes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Bytes at the start of the file that a [`FileRecord`] is kept in; what follows is the caller's.
pub const RECORD_BYTES: u64 = 4096;
/// Bit of `unique` in a request that the kernel sends again.
const UNIQUE_RESEND: u64 = 1 << 63;
/// OPENs and RELEASEs that are remembered as counted: more are not under way when a process dies.
const COUNTED: usize = 64;

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
    /// Of these, the ones that can be written; 0 where no record counts them.
    pub writable_files: u64,
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

/// The state of a file, in memory that outlives the process (a memfd that the helper process holds,
/// too).
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
            writable_files: raw.writable_files,
            since,
        })
    }

    /// Takes the state over that another process hands over.
    pub(crate) fn restore(&self, state: &FileState) {
        self.change(|raw| {
            (raw.is_there, raw.mode, raw.uid, raw.gid) = (1, state.mode, state.uid, state.gid);
            (raw.open_files, raw.writable_files) = (state.open_files, state.writable_files);
            (raw.since_s, raw.since_ns) =
                (state.since.as_secs(), state.since.subsec_nanos().into());
        });
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
    pub(crate) fn writable_files(&self) -> u64 {
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

/// A time after 1970, from seconds and nanoseconds; 1970 where `SystemTime` cannot represent it.
fn since_of(seconds: u64, nanoseconds: u64) -> Duration {
    let since = Duration::from_secs(seconds).checked_add(Duration::from_nanos(nanoseconds));
    representable_since(since.unwrap_or_default())
}

/// A time after 1970 as `SystemTime` can represent it; one that it cannot represent becomes 1970.
pub(super) fn representable_since(since: Duration) -> Duration {
    match SystemTime::UNIX_EPOCH.checked_add(since) {
        Some(_) => since,
        None => Duration::ZERO,
    }
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
        let (mode, uid, gid, open_files, writable_files) = (0o640, 3, 4, 1, 0);
        let expected = FileState { mode, uid, gid, open_files, writable_files, since };
        assert_eq!(state, expected);
        assert_eq!(record(&file).writable_files(), 0);
        let other = tempfile::tempfile().expect("file");
        record(&other).restore(&state);
        assert_eq!(record(&other).state(), Some(expected), "handed over");
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
