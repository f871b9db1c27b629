//! Errors of giving a disk's rings to the kernel, or of taking them back.
//!
//! Promises: each is one line with the object, the reason and what the user can do.

use std::fmt;

use ringdisk_ring::Errno;

use crate::layout::LayoutError;

/// Where the device is.
pub(crate) const DEVICE: &str = "/dev/vhost-blk";

/// What went wrong. `Display` is one line: the object, the reason, what can be done.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// There is no device: the module is not loaded.
    Missing {
        /// Whether the running kernel has the module in its directory; `None` where that cannot be
        /// read.
        is_installed: Option<bool>,
    },
    /// The device may not be opened by this user (`EACCES`, `EPERM`).
    NotAllowed {
        /// What open(2) said.
        errno: Errno,
    },
    /// The device could not be opened.
    Open {
        /// What open(2) said.
        errno: Errno,
    },
    /// The device does not know the ioctls: it belongs to another module.
    Foreign {
        /// What the kernel said to INFO.
        errno: Errno,
    },
    /// The module is of another version than this program.
    Version {
        /// That of the module.
        module: u32,
        /// That of this program.
        ours: u32,
    },
    /// The module was built for another vhost than the kernel's, or its layout cannot be read.
    Layout(LayoutError),
    /// The module does not make so many queues.
    Queues {
        /// How many were asked for.
        queues: u16,
        /// How many it makes at most.
        limit: u32,
    },
    /// The caller is not the process that opened the device (`EPERM`): a child of it, or it may not
    /// call ioctls.
    NotOwner {
        /// What was being done, as "stop queue 3".
        doing: String,
    },
    /// The guest has negotiated what the module does not do.
    Features {
        /// The bits that are too many; 0: VERSION_1 is missing.
        features: u64,
    },
    /// The memory has more regions than vhost takes.
    TooManyRegions {
        /// How many there are.
        regions: usize,
        /// How many vhost takes, parameter `max_mem_regions` of its module.
        limit: usize,
    },
    /// The disk cannot be served by the kernel.
    Disk {
        /// What the kernel said to SET_DISK.
        errno: Errno,
        /// Of which engine.
        bio: bool,
    },
    /// No worker could be made.
    Worker {
        /// What the kernel said.
        errno: Errno,
    },
    /// A ring cannot be served by the kernel: its size, or its memory.
    Ring {
        /// Which queue.
        queue: u16,
        /// Why.
        why: &'static str,
    },
    /// There is no such queue.
    NoQueue {
        /// Which one.
        queue: u16,
        /// How many there are.
        queues: u16,
    },
    /// The operation needs the queue, or all of them, to be stopped.
    Started {
        /// What was being done, as "start queue 3".
        doing: String,
    },
    /// The queue is not started.
    NotStarted {
        /// Which one.
        queue: u16,
    },
    /// There is no disk: SET_DISK has not been called.
    NoDisk,
    /// A system call failed for another reason.
    System {
        /// What was being done, as "start queue 3".
        doing: String,
        /// Why it failed.
        errno: Errno,
    },
}

impl Error {
    /// The error of an ioctl without a special meaning.
    pub(crate) fn of(doing: impl Into<String>, errno: Errno) -> Error {
        let doing = doing.into();
        match errno {
            Errno::PERM => Error::NotOwner { doing },
            Errno::BUSY => Error::Started { doing },
            _ => Error::System { doing, errno },
        }
    }

    /// The cause, where it is one of the system.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Error::NotAllowed { errno }
            | Error::Open { errno }
            | Error::Foreign { errno }
            | Error::Disk { errno, .. }
            | Error::Worker { errno }
            | Error::System { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Missing { is_installed } => {
                let advice = load(*is_installed);
                write!(f, "{DEVICE}: there is none, the module vhost_blk is not loaded; {advice}")
            }
            Error::NotAllowed { errno } => write!(
                f,
                "{DEVICE}: not allowed ({errno}); give this user read and write permission on it, \
                 by a group that only the daemon is in: write KERNEL==\"vhost-blk\", \
                 SUBSYSTEM==\"misc\", GROUP=\"ringdisk\", MODE=\"0660\" into \
                 /etc/udev/rules.d/60-ringdisk-vhost-blk.rules, then udevadm trigger {DEVICE}"
            ),
            Error::Open { errno } => write!(f, "{DEVICE}: could not be opened: {errno}"),
            Error::Foreign { errno } => write!(
                f,
                "{DEVICE}: not that of ringdisk ({errno}); another module has made it: rmmod that, \
                 then modprobe vhost_blk"
            ),
            Error::Version { module, ours } => write!(
                f,
                "{DEVICE}: the module speaks version {module}, this program version {ours}; build \
                 both from the same sources, then rmmod vhost_blk and modprobe vhost_blk"
            ),
            Error::Layout(error) => write!(f, "{DEVICE}: {error}"),
            Error::Queues { queues, limit } => write!(
                f,
                "{DEVICE}: {queues} queues cannot be made, 1 to {limit} can; ask for fewer queues"
            ),
            Error::NotOwner { doing } => write!(
                f,
                "{DEVICE}: could not {doing}: not allowed; only the process that opened it may, \
                 not its children, and no filter of system calls may forbid it"
            ),
            Error::Features { features: 0 } => {
                write!(
                    f,
                    "{DEVICE}: the guest has not negotiated VERSION_1, which the module needs"
                )
            }
            Error::Features { features } => {
                write!(
                    f,
                    "{DEVICE}: the module does not know the features {features:#x} of the guest"
                )
            }
            Error::TooManyRegions { regions, limit } => write!(
                f,
                "{DEVICE}: the guest's memory has {regions} regions, vhost takes {limit}; give the \
                 guest fewer, or load vhost with max_mem_regions={regions}"
            ),
            Error::Disk { errno, bio } => {
                write!(f, "{DEVICE}: the disk cannot be served: {}", disk(*errno, *bio))
            }
            Error::Worker { errno } => write!(
                f,
                "{DEVICE}: no worker could be made: {errno}; look at the limits of threads (ulimit \
                 -u, pids.max of the cgroup)"
            ),
            Error::Ring { queue, why } => write!(f, "{DEVICE}: queue {queue}: {why}"),
            Error::NoQueue { queue, queues } => {
                write!(f, "{DEVICE}: there is no queue {queue} of {queues}")
            }
            Error::Started { doing } => {
                write!(f, "{DEVICE}: could not {doing}: a queue is started; stop it first")
            }
            Error::NotStarted { queue } => write!(f, "{DEVICE}: queue {queue} is not started"),
            Error::NoDisk => write!(f, "{DEVICE}: there is no disk yet"),
            Error::System { doing, errno } => write!(f, "{DEVICE}: could not {doing}: {errno}"),
        }
    }
}

/// How the module is loaded.
fn load(is_installed: Option<bool>) -> &'static str {
    match is_installed {
        Some(true) => "load it: modprobe vhost_blk",
        Some(false) => {
            "this kernel does not have it: install the package ringdisk-vhost-blk-dkms or build it \
             (docs/vhost-blk.md, \"Install\"), then modprobe vhost_blk"
        }
        None => {
            "load it: modprobe vhost_blk (when there is no such module: package \
             ringdisk-vhost-blk-dkms, or docs/vhost-blk.md, \"Install\")"
        }
    }
}

/// Why SET_DISK refuses (`kernel/vhost-blk/disk.c`).
fn disk(errno: Errno, bio: bool) -> String {
    let why = match errno {
        Errno::OPNOTSUPP => "its file system has no direct I/O; put it on another one",
        Errno::BADF => "it is not open for reading, or for writing while the guest may write",
        Errno::FBIG => "it is shorter than the guest was told; align its size, or open it again",
        Errno::INVAL if bio => {
            "it is no block device, as the engine bio needs, or its blocks are larger than the \
             guest was told"
        }
        Errno::INVAL => {
            "it is neither a file nor a block device, or its blocks are larger than the guest was \
             told"
        }
        _ => return errno.to_string(),
    };
    why.to_owned()
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Layout(error) => Some(error),
            _ => None,
        }
    }
}
