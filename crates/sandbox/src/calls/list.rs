//! The lists of system calls.
//!
//! Promises: each entry states the code that makes the call inside. For each one the question was
//! what an attacker who controls the process could do with it. The callers were found by running
//! the end-to-end tests with a filter that ends the process for everything else, and by reading
//! libc and the standard library for their behaviour when memory is short, a thread panics, or a
//! signal comes.

use libc as c;

use super::need::{Argument, Is, Need};

/// A list: `constant [arguments]: reason`. Without arguments: with any.
macro_rules! list {
    ($($(#[$only:meta])? $call:ident $([$arguments:expr])?: $why:literal,)*) => {
        &[$(
            $(#[$only])?
            Need {
                call: c::$call,
                constant: stringify!($call),
                why: $why,
                arguments: list!(@ $($arguments)?),
            },
        )*]
    };
    (@) => { &[] };
    (@ $arguments:expr) => { &$arguments };
}

const fn argument(index: u8, is: Is) -> Argument {
    Argument { index, is }
}

const fn among(index: u8, values: &'static [u32]) -> Argument {
    argument(index, Is::In(values))
}

/// None of these bits.
const fn without(index: u8, mask: u32) -> Argument {
    argument(index, Is::Bits { mask, value: 0 })
}

/// The same without a warning about the sign: the kernel takes flags as bits.
const fn bits(value: c::c_int) -> u32 {
    value.cast_unsigned()
}

/// `CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM |
/// CLONE_SETTLS | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID`: what pthread_create(3) of glibc and
/// musl asks for.
const THREAD: u32 = 0x003d_0f00;
/// `CLONE_DETACHED`, which means nothing and which musl adds.
const CLONE_DETACHED: u32 = 0x0040_0000;
/// `MFD_EXEC` of linux/memfd.h.
const MFD_EXEC: u32 = 0x10;
/// Bits of a mode that no file of this program has: set-user-ID, set-group-ID, sticky, and to be
/// run.
const NOT_A_FILE_OF_OURS: u32 = 0o7111;

/// Flags of one read or write, linux/fs.h.
const RWF_NOWAIT: u32 = 0x8;
const RWF_APPEND: u32 = 0x10;

/// Allowed after the start, in every plan.
pub(super) const ALLOWED: &[Need] = list![
    // The ring.
    SYS_io_uring_enter: "all that is served goes through rings; each was restricted to its \
        operations when it was made",
    SYS_io_uring_register [[&[among(1, REGISTRATIONS)]]]: "buffers and files of a ring that is \
        there",
    // Memory.
    SYS_mmap [[&[without(2, bits(c::PROT_EXEC))]]]: "the allocator, stacks of threads, memory of \
        guests, and what a SIGBUS puts in its place",
    SYS_munmap: "the same, given back",
    SYS_mremap: "the allocator: large blocks that grow",
    SYS_mprotect [[&[without(2, bits(c::PROT_EXEC))]]]: "guard pages, and heaps of threads that \
        grow",
    SYS_madvise [[&[among(2, ADVICE)]]]: "pages that are given back or made large; buffers and \
        memory of guests kept out of dumps and children",
    SYS_brk: "the allocator",
    SYS_mbind: "memory of queues comes from their node",
    SYS_get_mempolicy: "where memory of queues comes from",
    SYS_move_pages [[&[among(0, &[0])]]]: "on which node a guest's pages are; ours, not those of \
        another process",
    SYS_memfd_create [[&[without(1, MFD_EXEC)]]]: "the area of requests in flight, which a front \
        end asks for",
    SYS_membarrier: "the tables of qcow2 that are read without a lock",
    // Threads and their signals.
    SYS_clone [[&[argument(0, Is::Bits { mask: !CLONE_DETACHED, value: THREAD })]]]: "threads, and \
        neither processes nor name spaces (clone3 has its flags in memory, so libc takes this one)",
    SYS_set_robust_list: "each new thread",
    SYS_rseq: "each new thread",
    SYS_futex: "locks",
    SYS_exit: "the end of a thread",
    SYS_exit_group: "the end",
    SYS_gettid: "a thread that others may have to interrupt",
    SYS_getpid: "the same; a panic",
    SYS_sched_yield: "a thread that polls lets others run",
    SYS_sched_getaffinity: "CPUs of a thread; changes nothing",
    SYS_sched_setaffinity [[&[among(0, &[0])]]]: "a thread binds itself to the CPUs of a node",
    SYS_prctl [[&[among(0, PRCTLS)]]]: "names of threads and memory; where the vDSO is",
    SYS_tgkill [[&[argument(0, Is::OurPid)]]]: "a thread that waits is interrupted; abort(3)",
    SYS_sigaltstack: "each new thread",
    SYS_rt_sigaction: "a fault or abort(3) that ends the process as it would have without a \
        handler",
    SYS_rt_sigprocmask: "each new thread; abort(3)",
    SYS_rt_sigreturn: "the end of every handler",
    SYS_restart_syscall: "the kernel asks for it after a stop",
    // Identity of the process.
    SYS_geteuid: "whether a client of the control socket may do as much as we",
    SYS_prlimit64 [[&[among(0, &[0]), argument(2, Is::Null)]]]: "limits are read: of ourselves, \
        and not changed",
    SYS_uname: "the kernel's version, for a message",
    SYS_getrandom: "hash tables",
    // Time.
    SYS_clock_gettime: "clocks that the vDSO cannot read",
    SYS_clock_nanosleep: "control threads that wait",
    SYS_nanosleep: "the same, of an older libc",
    // Waiting for descriptors, and waking.
    SYS_ppoll: "control threads",
    SYS_epoll_create1: "the control thread of a disk for a machine",
    SYS_epoll_ctl: "the same",
    SYS_epoll_pwait: "the same",
    SYS_pipe2: "copies between pages of clients and files; the helper process that keeps a mount \
        answers through one",
    SYS_eventfd2: "waking between threads",
    // Bytes of files, pipes and sockets.
    SYS_read: "control threads",
    SYS_write: "control threads, messages",
    SYS_readv: "control threads",
    SYS_writev: "control threads, messages",
    SYS_pread64: "headers of images; the state of a kept mount",
    SYS_pwrite64: "the state of a kept mount",
    SYS_preadv2 [[&[among(5, &[RWF_NOWAIT])]]]: "the state of a device, from a front end that may \
        stop reading or writing",
    SYS_pwritev2 [[&[among(5, &[RWF_NOWAIT, RWF_APPEND])]]]: "the same; the end of a file that \
        others append to",
    SYS_lseek: "holes of images",
    SYS_fsync: "what a virtqueue in the kernel has written",
    SYS_fdatasync: "the same",
    SYS_fallocate: "space of images, where a ring cannot",
    SYS_ftruncate: "the area of requests in flight",
    SYS_fadvise64: "pages of an image that another machine has changed are dropped",
    SYS_ioctl [[&[among(1, IOCTLS)]]]: "block devices, and whether an output is a terminal",
    SYS_fcntl [[
        &[among(1, FCNTLS)],
        &[among(1, &[bits(c::F_SETFL)]), without(2, bits(c::O_ASYNC))]
    ]]: "copies of descriptors, byte locks of images, sizes of pipes, seals; nothing that makes \
        the kernel send signals",
    SYS_flock [[&[among(1, &[bits(c::LOCK_UN)])]]]: "the lock of a mount is let go; none is taken, \
        for which others would wait",
    // Names. Landlock restricts which.
    SYS_openat [[&[without(3, NOT_A_FILE_OF_OURS)]]]: "images, backing files step by step, \
        /proc/self, CPUs and nodes; no file that could be run or would run as another user is made \
        (openat2 has its mode in memory)",
    SYS_close: "descriptors",
    SYS_newfstatat: "names",
    SYS_fstat: "descriptors",
    SYS_statx: "names and descriptors",
    SYS_fstatfs: "what an image or a guest's memory lies on",
    SYS_faccessat: "why an image could not be opened",
    SYS_readlinkat: "names of open images",
    SYS_getdents64: "threads of ours, and nodes",
    SYS_unlinkat [[&[among(2, &[0])]]]: "an overlay that could not be made; no directories",
    SYS_getcwd: "names in commands",
    SYS_chdir: "the directory that a process in the background was started in is let go",
    SYS_dup3 [[&[among(1, STANDARD)]]]: "the terminal of a process in the background is let go",
    // Open sockets: no datagram socket is among them, so data reaches only the connected peer.
    SYS_accept4: "clients of the control socket, a front end, a successor",
    SYS_sendto [[&[argument(4, Is::Null)]]]: "words for them",
    SYS_recvfrom: "words of them",
    SYS_sendmsg: "orders to the helper process; descriptors for a front end, a successor and the \
        helper process",
    SYS_recvmsg: "descriptors of a front end, of `ringdisk ctl` and of the helper process",
    SYS_shutdown: "clients are sent away",
    SYS_getsockopt: "who a client is, and of what kind a descriptor",
    SYS_setsockopt [[&[among(1, &[bits(c::SOL_SOCKET)]), among(2, SOCKET_OPTIONS)]]]: "how \
        long a successor is waited for; what was looked at in the socket of a front end; how much \
        the socket of an NBD client holds",
    // The end of the helper process.
    SYS_wait4: "the helper process has ended",
    // Older calls of this machine for the same.
    #[cfg(target_arch = "x86_64")]
    SYS_open [[&[without(2, NOT_A_FILE_OF_OURS)]]]: "as openat",
    #[cfg(target_arch = "x86_64")]
    SYS_access: "as faccessat",
    #[cfg(target_arch = "x86_64")]
    SYS_readlink: "as readlinkat",
    #[cfg(target_arch = "x86_64")]
    SYS_unlink: "as unlinkat",
    #[cfg(target_arch = "x86_64")]
    SYS_dup2 [[&[among(1, STANDARD)]]]: "as dup3",
    #[cfg(target_arch = "x86_64")]
    SYS_poll: "as ppoll",
];

/// For a plan that makes Unix sockets: `--connect` without a helper process that connects.
pub(super) const SOCKETS: &[Need] = list![
    SYS_socket [[&[
        among(0, &[bits(c::AF_UNIX)]),
        argument(1, Is::Bits { mask: 0xf, value: bits(c::SOCK_STREAM) })
    ]]]: "a front end that was restarted, and no datagrams",
    SYS_connect: "a front end that was restarted",
];

/// For a plan that gives virtqueues to the kernel's module.
pub(super) const VHOST: &[Need] = list![
    SYS_ioctl [[&[among(1, VHOST_IOCTLS)]]]: "virtqueues are handed to the kernel and taken back",
    SYS_sched_setaffinity: "threads of the kernel that serve virtqueues are bound; their numbers \
        are not known before",
];

/// For a plan whose disks are kept for a successor.
pub(super) const KEPT: &[Need] = list![
    SYS_splice: "replies to the front end come from a pipe that is kept, too",
];

/// Operations of io_uring_register(2), `IORING_REGISTER_*` of linux/io_uring.h: those that rings
/// are restricted to themselves; of a ring that has a descriptor, and of one that is registered.
const REGISTRATIONS: &[u32] = &[
    1,  // UNREGISTER_BUFFERS
    6,  // FILES_UPDATE
    15, // BUFFERS2
    16, // BUFFERS_UPDATE
    20, // RING_FDS
    21, // UNREGISTER_RING_FDS
    REGISTERED_RING | 1,
    REGISTERED_RING | 6,
    REGISTERED_RING | 15,
    REGISTERED_RING | 16,
    REGISTERED_RING | 20,
    REGISTERED_RING | 21,
];

/// `IORING_REGISTER_USE_REGISTERED_RING`.
const REGISTERED_RING: u32 = 1 << 31;

/// Advice of madvise(2), asm-generic/mman-common.h.
const ADVICE: &[u32] = &[
    4,   // MADV_DONTNEED
    8,   // MADV_FREE
    10,  // MADV_DONTFORK
    14,  // MADV_HUGEPAGE
    15,  // MADV_NOHUGEPAGE
    16,  // MADV_DONTDUMP
    23,  // MADV_POPULATE_WRITE
    102, // MADV_GUARD_INSTALL: stacks of newer libcs
    103, // MADV_GUARD_REMOVE
];

/// Standard input, output and error.
const STANDARD: &[u32] = &[0, 1, 2];

/// Options of sockets: how long a call waits, how much was looked at, and how much is held.
const SOCKET_OPTIONS: &[u32] =
    &[bits(c::SO_RCVTIMEO), bits(c::SO_SNDTIMEO), bits(c::SO_PEEK_OFF), bits(c::SO_SNDBUF)];

/// Commands of ioctl(2): of terminals and sockets, and of block devices: sizes, whether it is
/// read-only, discard. (Those of /dev/fuse belong to the start.) Numbers: asm-generic/ioctls.h,
/// linux/fs.h.
const IOCTLS: &[u32] = &[
    0x5401,      // TCGETS
    0x802c_542a, // TCGETS2: isatty(3) of newer libcs
    0x5421,      // FIONBIO
    0x1268,      // BLKSSZGET
    0x1277,      // BLKDISCARD
    0x127b,      // BLKPBSZGET
    0x125e,      // BLKROGET
    0x8008_1272, // BLKGETSIZE64
];

/// Commands of ioctl(2) that give rings to the module vhost_blk and take them back: those of
/// include/uapi/linux/vhost.h, and of kernel/vhost-blk/ringdisk_vhost_blk.h.
const VHOST_IOCTLS: &[u32] = &[
    0x4008_af00, // VHOST_SET_FEATURES
    0x4008_af03, // VHOST_SET_MEM_TABLE
    0x8004_af08, // VHOST_NEW_WORKER
    0x4004_af09, // VHOST_FREE_WORKER
    0x4008_af10, // VHOST_SET_VRING_NUM
    0x4028_af11, // VHOST_SET_VRING_ADDR
    0x4008_af12, // VHOST_SET_VRING_BASE
    0xc008_af12, // VHOST_GET_VRING_BASE
    0x4008_af15, // VHOST_ATTACH_VRING_WORKER
    0xc008_af16, // VHOST_GET_VRING_WORKER
    0x4008_af20, // VHOST_SET_VRING_KICK
    0x4008_af21, // VHOST_SET_VRING_CALL
    0x4008_af22, // VHOST_SET_VRING_ERR
    0x4048_e802, // RINGDISK_VBLK_SET_DISK
    0x4004_e803, // RINGDISK_VBLK_START
    0x4004_e804, // RINGDISK_VBLK_STOP
    0x4004_e805, // RINGDISK_VBLK_SET_CACHE
    0xc0c8_e806, // RINGDISK_VBLK_STATS
];

/// Commands of fcntl(2): descriptors, their flags (F_SETFL is a set of its own), locks, sizes of
/// pipes, seals. None that makes the kernel send signals: F_SETOWN names any process, and F_SETSIG
/// any signal. Numbers: asm-generic/fcntl.h, linux/fcntl.h.
const FCNTLS: &[u32] = &[
    1,    // F_GETFD
    2,    // F_SETFD
    3,    // F_GETFL
    36,   // F_OFD_GETLK
    37,   // F_OFD_SETLK
    1030, // F_DUPFD_CLOEXEC
    1031, // F_SETPIPE_SZ
    1034, // F_GET_SEALS
];

/// Commands of prctl(2): names of threads and of memory, and where the vDSO is (rustix asks when it
/// first looks at a clock).
const PRCTLS: &[u32] = &[
    15,          // PR_SET_NAME
    16,          // PR_GET_NAME
    0x5356_4d41, // PR_SET_VMA
    0x4155_5856, // PR_GET_AUXV
];

/// Ends the process.
pub(super) const DEADLY: &[Need] = list![
    SYS_execve: "another program",
    SYS_execveat: "another program",
    SYS_ptrace: "another process's memory, descriptors and secrets",
    SYS_process_vm_readv: "another process's memory, descriptors and secrets",
    SYS_process_vm_writev: "another process's memory, descriptors and secrets",
    SYS_pidfd_getfd: "another process's memory, descriptors and secrets",
    SYS_kcmp: "another process's memory, descriptors and secrets",
    SYS_add_key: "another process's memory, descriptors and secrets",
    SYS_request_key: "another process's memory, descriptors and secrets",
    SYS_keyctl: "another process's memory, descriptors and secrets",
    SYS_setuid: "another user, another root, another set of names",
    SYS_setgid: "another user, another root, another set of names",
    SYS_setreuid: "another user, another root, another set of names",
    SYS_setregid: "another user, another root, another set of names",
    SYS_setresuid: "another user, another root, another set of names",
    SYS_setresgid: "another user, another root, another set of names",
    SYS_setfsuid: "another user, another root, another set of names",
    SYS_setfsgid: "another user, another root, another set of names",
    SYS_setgroups: "another user, another root, another set of names",
    SYS_capset: "another user, another root, another set of names",
    SYS_chroot: "another user, another root, another set of names",
    SYS_pivot_root: "another user, another root, another set of names",
    SYS_unshare: "another user, another root, another set of names",
    SYS_setns: "another user, another root, another set of names",
    SYS_open_by_handle_at: "another user, another root, another set of names",
    SYS_mount: "mounts",
    SYS_umount2: "mounts",
    SYS_open_tree: "mounts",
    SYS_move_mount: "mounts",
    SYS_fsopen: "mounts",
    SYS_fspick: "mounts",
    SYS_fsconfig: "mounts",
    SYS_fsmount: "mounts",
    SYS_mount_setattr: "mounts",
    SYS_init_module: "the kernel and the machine",
    SYS_finit_module: "the kernel and the machine",
    SYS_delete_module: "the kernel and the machine",
    SYS_kexec_load: "the kernel and the machine",
    SYS_reboot: "the kernel and the machine",
    SYS_swapon: "the kernel and the machine",
    SYS_swapoff: "the kernel and the machine",
    SYS_bpf: "the kernel and the machine",
    SYS_perf_event_open: "the kernel and the machine",
    SYS_userfaultfd: "the kernel and the machine",
    SYS_settimeofday: "the kernel and the machine",
    SYS_clock_settime: "the kernel and the machine",
    SYS_adjtimex: "the kernel and the machine",
    SYS_sethostname: "the kernel and the machine",
    SYS_setdomainname: "the kernel and the machine",
    SYS_acct: "the kernel and the machine",
    #[cfg(target_arch = "x86_64")]
    SYS_kexec_file_load: "the kernel and the machine",
    #[cfg(target_arch = "x86_64")]
    SYS_ioperm: "the kernel and the machine",
    #[cfg(target_arch = "x86_64")]
    SYS_iopl: "the kernel and the machine",
    #[cfg(target_arch = "x86_64")]
    SYS_modify_ldt: "the kernel and the machine",
];
