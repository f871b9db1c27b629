//! Changes a thread to another user.
//!
//! Promises: a thread that [`User::put_on`] has changed has this user and this group in all places
//! (real, effective, saved, file system), no other groups and no capabilities, and no way back. The
//! kernel does this for each thread; [`crate::Plan::user`] and [`crate::become_user`] do it for all
//! of them.

use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Gid, Uid, dumpable_behavior, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, CapabilitySets, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

/// A user and one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    uid: u32,
    gid: u32,
}

impl User {
    /// `None`: one of the numbers means "no change" for the kernel (`-1`), or the user is root, who
    /// loses no rights by this.
    #[must_use]
    pub fn new(uid: u32, gid: u32) -> Option<User> {
        (uid != 0 && uid != u32::MAX && gid != u32::MAX).then_some(User { uid, gid })
    }

    /// Number of the user.
    #[must_use]
    pub fn uid(self) -> u32 {
        self.uid
    }

    /// Number of the group.
    #[must_use]
    pub fn gid(self) -> u32 {
        self.gid
    }

    /// Changes the calling thread to this user. Bare system calls, also for a signal handler.
    ///
    /// Errors: `PERM` without CAP_SETUID and CAP_SETGID, `INVAL` where this user namespace has no
    /// such user; the thread may have lost its groups then.
    pub(crate) fn put_on(self) -> Result<(), Errno> {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        set_thread_groups(&[])?;
        set_thread_res_gid(gid, gid, gid)?;
        // The last call, since it ends the right to make the others.
        set_thread_res_uid(uid, uid, uid)?;
        // The kernel has cleared them already, unless SECBIT_NO_SETUID_FIXUP is set.
        let none = CapabilitySet::empty();
        set_capabilities(
            None,
            CapabilitySets { effective: none, permitted: none, inheritable: none },
        )
    }

    /// Runs `look` with the rights of this user, on a thread of its own.
    ///
    /// Errors: those of becoming that user; no thread (`AGAIN`).
    pub fn look<T: Send>(self, look: impl FnOnce() -> T + Send) -> Result<T, Errno> {
        // The change of one thread's credentials clears the dumpable flag of the whole process,
        // which is set again afterwards.
        let before = dumpable_behavior();
        let result = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name(String::from("other-user"));
            let thread = thread.spawn_scoped(scope, || self.put_on().map(|()| look()));
            thread.map_err(|_| Errno::AGAIN)?.join().unwrap_or(Err(Errno::IO))
        });
        if before == Ok(DumpableBehavior::Dumpable) {
            set_dumpable_behavior(DumpableBehavior::Dumpable)?;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_mean_no_change_and_root_are_refused() {
        assert_eq!(User::new(0, 5), None);
        assert_eq!(User::new(u32::MAX, 5), None);
        assert_eq!(User::new(5, u32::MAX), None);
        assert_eq!(User::new(5, 0).map(|user| (user.uid(), user.gid())), Some((5, 0)));
    }
}
