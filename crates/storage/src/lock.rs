//! Image locks, as QEMU takes them.
//!
//! Promises: a lock is held exactly while its bytes are locked, and nothing here waits for one. The
//! users of an image agree through single bytes of the file, each locked *shared* on the open file
//! description (OFD locks):
//!
//! | byte | says |
//! |---|---|
//! | 100 + n | "I use permission n" |
//! | 200 + n | "I do not let others use permission n" |
//! | 300 | "I wait for this image"; ours alone, QEMU neither takes nor reads it |
//!
//! with the permission numbers of QMP's `BlockPermission`: 0 consistent-read, 1 write, 2
//! write-unchanged, 3 resize. A newcomer locks its own bytes first, then asks (`F_OFD_GETLK` for an
//! exclusive lock) whether another user has 200 + n for a permission it uses, or 100 + n for one it
//! does not share. So of two users that come at the same time at least one is refused.
//!
//! Found by tracing qemu-io, qemu-img 7.2 and qemu-storage-daemon 11.1: a raw writer that shares
//! all locks 100, 101; a qcow2 writer 100, 101, 103, 201, 203; a backing file 100, 201, 203;
//! force-share only 100; `qemu-img info` nothing. Block devices are locked on their device node, in
//! the same way.
//!
//! Called on the control thread, when storage is opened or its ownership moves.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use crate::cause::{Cause, OtherUse};
use crate::error::{Error, ErrorKind};
use crate::kinds::Lock;
use crate::{ffi, holders};

/// First byte of the permissions in use.
const USED: u32 = 100;
/// First byte of the permissions not shared.
const UNSHARED: u32 = 200;
/// Byte that a waiting process locks.
const WANTED: u32 = 300;

/// A permission, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Permission {
    ConsistentRead = 0,
    Write = 1,
    Resize = 3,
}

use Permission::{ConsistentRead, Resize, Write};

impl Permission {
    fn used_byte(self) -> u32 {
        USED + self as u32
    }

    fn unshared_byte(self) -> u32 {
        UNSHARED + self as u32
    }
}

/// Permissions used and not shared.
fn request(lock: Lock, read_only: bool) -> (&'static [Permission], &'static [Permission]) {
    match (lock, read_only) {
        (Lock::None, _) => (&[], &[]),
        (Lock::ForceShare | Lock::Inactive, _) => (&[ConsistentRead], &[]),
        (Lock::Shared, _) | (Lock::Auto, true) => (&[ConsistentRead], &[Write, Resize]),
        (Lock::Exclusive, _) | (Lock::Auto, false) => {
            (&[ConsistentRead, Write, Resize], &[Write, Resize])
        }
    }
}

/// A lock that was taken.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    used: &'static [Permission],
    unshared: &'static [Permission],
}

impl Held {
    /// Whether it is what this lock takes.
    pub(crate) fn is(self, lock: Lock, read_only: bool) -> bool {
        (self.used, self.unshared) == request(lock, read_only)
    }

    /// Takes the same lock for another descriptor of the file; does not ask for conflicts.
    pub(crate) fn copy_to(self, fd: BorrowedFd<'_>) {
        let _ = take(fd, self.used, self.unshared);
    }

    /// Gives the lock back.
    pub(crate) fn release(self, fd: BorrowedFd<'_>) {
        give_back_all_but(fd, self, Held::default());
    }
}

/// Takes the lock. It is held until [`Held::release`], or until the last reference on the open file
/// description is gone (the ring's operations have some).
///
/// Where the file system has no locks, nothing is locked and the log says so, as in QEMU.
///
/// Errors: kind `Locked` when another user excludes ours; the message says who that may be. The
/// bytes taken so far are given back then.
pub(crate) fn acquire(
    fd: BorrowedFd<'_>,
    name: &str,
    lock: Lock,
    read_only: bool,
) -> Result<Held, Error> {
    acquire_beside(fd, name, lock, read_only, Held::default())
}

/// As [`acquire`], while the descriptor has another lock, of which nothing is given back.
fn acquire_beside(
    fd: BorrowedFd<'_>,
    name: &str,
    lock: Lock,
    read_only: bool,
    old: Held,
) -> Result<Held, Error> {
    let (used, unshared) = request(lock, read_only);
    let wanted = Held { used, unshared };
    let taken = take(fd, used, unshared).and_then(|()| conflict(fd, used, unshared));
    match taken {
        Ok(None) => Ok(wanted),
        Ok(Some(conflict)) => {
            // Asked before our own bytes are given back, so that the answer is the one that
            // was refused.
            let error = refusal(fd, name, conflict);
            give_back_all_but(fd, wanted, old);
            Err(error)
        }
        Err(Errno::AGAIN | Errno::ACCESS) => {
            give_back_all_but(fd, wanted, old);
            Err(refusal(fd, name, Conflict { byte: None, used_by_other: false }))
        }
        Err(errno) => {
            give_back_all_but(fd, wanted, old);
            tracing::warn!(
                "'{name}' cannot be locked ({errno}): nothing stops another program from using it \
                 at the same time"
            );
            Ok(Held::default())
        }
    }
}

/// Turns one lock into another, on one descriptor: what the new one needs is taken first, what it
/// does not need is given back last.
///
/// Errors: as [`acquire`]; the old lock is held as it was then.
pub(crate) fn change(
    fd: BorrowedFd<'_>,
    name: &str,
    old: Held,
    lock: Lock,
    read_only: bool,
) -> Result<Held, Error> {
    let new = acquire_beside(fd, name, lock, read_only, old)?;
    give_back_all_but(fd, old, new);
    Ok(new)
}

/// Whether no other user excludes a lock at this moment; takes nothing. True also where nothing can
/// be locked.
pub(crate) fn is_free(fd: BorrowedFd<'_>, lock: Lock, read_only: bool) -> bool {
    let (used, unshared) = request(lock, read_only);
    matches!(conflict(fd, used, unshared), Ok(None) | Err(_))
}

/// The lock of a descriptor whose open file description has it already.
///
/// Errors: as [`acquire`], but nothing is given back: the lock is not only ours.
pub(crate) fn adopt(
    fd: BorrowedFd<'_>,
    name: &str,
    lock: Lock,
    read_only: bool,
) -> Result<Held, Error> {
    let (used, unshared) = request(lock, read_only);
    // Locks that are held stay; where there are no locks, this fails.
    if take(fd, used, unshared).is_err() {
        return Ok(Held::default());
    }
    match conflict(fd, used, unshared) {
        Ok(Some(conflict)) => Err(refusal(fd, name, conflict)),
        Ok(None) | Err(_) => Ok(Held { used, unshared }),
    }
}

/// As [`acquire`], for a descriptor that replaces another one of the same file, whose locks are
/// released. At each moment one of the two holds its lock, so no other user can lock in between.
///
/// Errors: kind `Locked`; the old descriptor holds its locks again then.
pub(crate) fn take_over(
    fd: BorrowedFd<'_>,
    name: &str,
    lock: Lock,
    read_only: bool,
    old: (BorrowedFd<'_>, Held),
) -> Result<Held, Error> {
    let (old_fd, old_held) = old;
    let (used, unshared) = request(lock, read_only);
    if take(fd, used, unshared).is_ok() {
        old_held.release(old_fd);
    }
    let result = acquire(fd, name, lock, read_only);
    if result.is_err() {
        // Shared locks on bytes that no program locks exclusively, so this is not refused. The
        // user that excludes the new lock was there before, beside the old descriptor.
        let _ = take(old_fd, old_held.used, old_held.unshared);
    }
    result
}

/// Moves locks back from another descriptor, which took them over before and is closed after this.
///
/// Errors: kind `Locked` when another user came meanwhile and excludes the lock.
pub(crate) fn take_back(
    fd: BorrowedFd<'_>,
    name: &str,
    held: Held,
    from: (BorrowedFd<'_>, Held),
) -> Result<(), Error> {
    let (from_fd, from_held) = from;
    if held.used.is_empty() || take(fd, held.used, held.unshared).is_err() {
        return Ok(());
    }
    from_held.release(from_fd);
    match conflict(fd, held.used, held.unshared) {
        Ok(Some(conflict)) => Err(refusal(fd, name, conflict)),
        Ok(None) | Err(_) => Ok(()),
    }
}

/// Tells the holder of the lock, on this host or another one, that this process waits for it, or no
/// longer waits. Excludes no other user.
pub(crate) fn want(fd: BorrowedFd<'_>, wanted: bool) {
    // A file system without locks has no holder to be told.
    let _ = if wanted { ffi::lock_shared(fd, WANTED) } else { ffi::unlock(fd, WANTED) };
}

/// Whether another open file description has said so.
pub(crate) fn is_wanted(fd: BorrowedFd<'_>) -> bool {
    ffi::is_locked_by_others(fd, WANTED).unwrap_or(false)
}

fn take(fd: BorrowedFd<'_>, used: &[Permission], unshared: &[Permission]) -> Result<(), Errno> {
    let used = used.iter().map(|permission| permission.used_byte());
    let unshared = unshared.iter().map(|permission| permission.unshared_byte());
    used.chain(unshared).try_for_each(|byte| ffi::lock_shared(fd, byte))
}

fn give_back_all_but(fd: BorrowedFd<'_>, old: Held, kept: Held) {
    for permission in old.used.iter().filter(|it| !kept.used.contains(it)) {
        let _ = ffi::unlock(fd, permission.used_byte());
    }
    for permission in old.unshared.iter().filter(|it| !kept.unshared.contains(it)) {
        let _ = ffi::unlock(fd, permission.unshared_byte());
    }
}

/// The lock of another user that excludes ours.
struct Conflict {
    /// The byte that the other user has locked; `None`: it holds an exclusive lock, which QEMU
    /// never takes.
    byte: Option<u32>,
    /// The other user uses what this process does not share; otherwise it does not share what this
    /// process uses.
    used_by_other: bool,
}

fn conflict(
    fd: BorrowedFd<'_>,
    used: &[Permission],
    unshared: &[Permission],
) -> Result<Option<Conflict>, Errno> {
    for permission in unshared {
        let byte = permission.used_byte();
        if ffi::is_locked_by_others(fd, byte)? {
            return Ok(Some(Conflict { byte: Some(byte), used_by_other: true }));
        }
    }
    for permission in used {
        let byte = permission.unshared_byte();
        if ffi::is_locked_by_others(fd, byte)? {
            return Ok(Some(Conflict { byte: Some(byte), used_by_other: false }));
        }
    }
    Ok(None)
}

fn refusal(fd: BorrowedFd<'_>, name: &str, conflict: Conflict) -> Error {
    let who = holders::describe(fd, conflict.byte);
    let by = if conflict.used_by_other {
        OtherUse::Writes
    } else if conflict.byte == Some(ConsistentRead.unshared_byte()) || conflict.byte.is_none() {
        OtherUse::Alone
    } else {
        OtherUse::NoOtherWriter
    };
    let how = match by {
        OtherUse::Writes => format!("is in use for writing by {who}"),
        OtherUse::Alone => format!("is in use by {who}, which shares it with nobody"),
        OtherUse::NoOtherWriter => {
            format!("is in use by {who}, which does not let others write to it")
        }
    };
    let error = Error::new(ErrorKind::Locked, format!("'{name}' {how}. Stop that first"));
    error.because(Cause::InUse { file: name.to_owned(), by })
}
