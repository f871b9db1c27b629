//! The lists.
//!
//! From running every end-to-end test with a filter that writes down what it would refuse, and from reading libc and the standard
//! library for what they do when memory is short, a thread panics, or a signal comes.

use libc as c;

/// Allowed after the start.
pub(super) const ALLOWED: &[i64] = &[
    // The ring: everything that is served.
    c::SYS_io_uring_enter,
    c::SYS_io_uring_register,
    // Memory: the allocator, stacks of threads, buffers of guests, what a handler of SIGBUS maps; where it lies.
    c::SYS_mmap,
    c::SYS_munmap,
    c::SYS_mremap,
    c::SYS_mprotect,
    c::SYS_madvise,
    c::SYS_mincore,
    c::SYS_brk,
    c::SYS_mlock,
    c::SYS_munlock,
    c::SYS_msync,
    c::SYS_mbind,
    c::SYS_get_mempolicy,
    c::SYS_set_mempolicy,
    c::SYS_move_pages,
    c::SYS_memfd_create,
    c::SYS_membarrier,
    // Threads and their signals.
    c::SYS_clone,
    c::SYS_set_robust_list,
    c::SYS_get_robust_list,
    c::SYS_set_tid_address,
    c::SYS_rseq,
    c::SYS_futex,
    c::SYS_exit,
    c::SYS_exit_group,
    c::SYS_gettid,
    c::SYS_getpid,
    c::SYS_getppid,
    c::SYS_getcpu,
    c::SYS_sched_yield,
    c::SYS_sched_getaffinity,
    c::SYS_sched_setaffinity,
    c::SYS_sched_getparam,
    c::SYS_sched_getscheduler,
    c::SYS_prctl,
    c::SYS_tgkill,
    c::SYS_sigaltstack,
    c::SYS_rt_sigaction,
    c::SYS_rt_sigprocmask,
    c::SYS_rt_sigreturn,
    c::SYS_rt_sigtimedwait,
    c::SYS_restart_syscall,
    // Who we are, and how we do.
    c::SYS_getuid,
    c::SYS_geteuid,
    c::SYS_getgid,
    c::SYS_getegid,
    c::SYS_getrusage,
    c::SYS_prlimit64,
    c::SYS_sysinfo,
    c::SYS_uname,
    c::SYS_getrandom,
    c::SYS_capget,
    // Time.
    c::SYS_clock_gettime,
    c::SYS_clock_getres,
    c::SYS_clock_nanosleep,
    c::SYS_nanosleep,
    c::SYS_gettimeofday,
    c::SYS_timerfd_create,
    c::SYS_timerfd_settime,
    // Waiting for descriptors.
    c::SYS_ppoll,
    c::SYS_pselect6,
    c::SYS_epoll_create1,
    c::SYS_epoll_ctl,
    c::SYS_epoll_pwait,
    c::SYS_eventfd2,
    c::SYS_pipe2,
    // Bytes of files, pipes and devices.
    c::SYS_read,
    c::SYS_write,
    c::SYS_readv,
    c::SYS_writev,
    c::SYS_pread64,
    c::SYS_pwrite64,
    c::SYS_preadv,
    c::SYS_pwritev,
    c::SYS_preadv2,
    c::SYS_pwritev2,
    c::SYS_splice,
    c::SYS_tee,
    c::SYS_vmsplice,
    c::SYS_copy_file_range,
    c::SYS_lseek,
    c::SYS_fsync,
    c::SYS_fdatasync,
    c::SYS_sync_file_range,
    c::SYS_fallocate,
    c::SYS_ftruncate,
    c::SYS_fadvise64,
    c::SYS_readahead,
    c::SYS_ioctl,
    c::SYS_fcntl,
    c::SYS_flock,
    // Names. Landlock says which.
    c::SYS_openat,
    c::SYS_openat2,
    c::SYS_close,
    c::SYS_close_range,
    c::SYS_dup,
    c::SYS_dup3,
    c::SYS_newfstatat,
    c::SYS_fstat,
    c::SYS_statx,
    c::SYS_fstatfs,
    c::SYS_statfs,
    c::SYS_faccessat,
    c::SYS_faccessat2,
    c::SYS_readlinkat,
    c::SYS_getdents64,
    c::SYS_unlinkat,
    c::SYS_getcwd,
    c::SYS_chdir,
    c::SYS_umask,
    // Sockets that are there: of the control socket's clients, of the service manager, of a front end.
    c::SYS_accept4,
    c::SYS_sendto,
    c::SYS_recvfrom,
    c::SYS_sendmsg,
    c::SYS_recvmsg,
    c::SYS_shutdown,
    c::SYS_getsockopt,
    c::SYS_setsockopt,
    c::SYS_getsockname,
    c::SYS_getpeername,
    // The process that removes what we may not, at the end.
    c::SYS_wait4,
    c::SYS_waitid,
    // Older calls of this machine for the same.
    #[cfg(target_arch = "x86_64")]
    c::SYS_open,
    #[cfg(target_arch = "x86_64")]
    c::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    c::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    c::SYS_access,
    #[cfg(target_arch = "x86_64")]
    c::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    c::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    c::SYS_dup2,
    #[cfg(target_arch = "x86_64")]
    c::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    c::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    c::SYS_time,
];

/// Making Unix sockets, for a plan that asks for it.
pub(super) const SOCKETS: [i64; 4] = [c::SYS_socket, c::SYS_bind, c::SYS_listen, c::SYS_connect];

/// Commands of ioctl(2): of terminals and sockets, and of block devices: sizes, whether it is read-only, discard and zeroes. (Those of
/// /dev/fuse belong to the start.) Numbers: asm-generic/ioctls.h, linux/fs.h.
pub(super) const IOCTLS: [u64; 14] = [
    0x5401,      // TCGETS
    0x5413,      // TIOCGWINSZ
    0x541b,      // FIONREAD
    0x5421,      // FIONBIO
    0x1268,      // BLKSSZGET
    0x1277,      // BLKDISCARD
    0x1278,      // BLKIOMIN
    0x1279,      // BLKIOOPT
    0x127a,      // BLKALIGNOFF
    0x127b,      // BLKPBSZGET
    0x127c,      // BLKDISCARDZEROES
    0x127f,      // BLKZEROOUT
    0x125e,      // BLKROGET
    0x8008_1272, // BLKGETSIZE64
];

/// Commands of ioctl(2) that hand rings to the module vhost_blk and take them back: those of include/uapi/linux/vhost.h, and of
/// kernel/vhost-blk/ringdisk_vhost_blk.h.
pub(super) const VHOST_IOCTLS: [u64; 18] = [
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

/// Commands of fcntl(2): descriptors, their flags (F_SETFL is a rule of its own), locks, sizes of pipes, seals. None that makes the kernel
/// send signals: F_SETOWN names any process, and F_SETSIG any signal. Numbers: asm-generic/fcntl.h, linux/fcntl.h.
pub(super) const FCNTLS: [u64; 13] = [
    0,    // F_DUPFD
    1,    // F_GETFD
    2,    // F_SETFD
    3,    // F_GETFL
    5,    // F_GETLK
    6,    // F_SETLK
    36,   // F_OFD_GETLK
    37,   // F_OFD_SETLK
    1030, // F_DUPFD_CLOEXEC
    1031, // F_SETPIPE_SZ
    1032, // F_GETPIPE_SZ
    1033, // F_ADD_SEALS
    1034, // F_GET_SEALS
];

/// Commands of prctl(2): names of threads and of memory, and where the vDSO is (rustix asks when it first looks at a clock).
pub(super) const PRCTLS: [u64; 4] = [
    15,          // PR_SET_NAME
    16,          // PR_GET_NAME
    0x5356_4d41, // PR_SET_VMA
    0x4155_5856, // PR_GET_AUXV
];

/// Ends the process.
pub(super) const DEADLY: &[i64] = &[
    // Another program.
    c::SYS_execve,
    c::SYS_execveat,
    // Another process's memory, descriptors and secrets.
    c::SYS_ptrace,
    c::SYS_process_vm_readv,
    c::SYS_process_vm_writev,
    c::SYS_pidfd_getfd,
    c::SYS_kcmp,
    c::SYS_add_key,
    c::SYS_request_key,
    c::SYS_keyctl,
    // Another user, another root, another set of names.
    c::SYS_setuid,
    c::SYS_setgid,
    c::SYS_setreuid,
    c::SYS_setregid,
    c::SYS_setresuid,
    c::SYS_setresgid,
    c::SYS_setfsuid,
    c::SYS_setfsgid,
    c::SYS_setgroups,
    c::SYS_capset,
    c::SYS_chroot,
    c::SYS_pivot_root,
    c::SYS_unshare,
    c::SYS_setns,
    c::SYS_open_by_handle_at,
    // Mounts.
    c::SYS_mount,
    c::SYS_umount2,
    c::SYS_open_tree,
    c::SYS_move_mount,
    c::SYS_fsopen,
    c::SYS_fspick,
    c::SYS_fsconfig,
    c::SYS_fsmount,
    c::SYS_mount_setattr,
    // The kernel and the machine.
    c::SYS_init_module,
    c::SYS_finit_module,
    c::SYS_delete_module,
    c::SYS_kexec_load,
    c::SYS_reboot,
    c::SYS_swapon,
    c::SYS_swapoff,
    c::SYS_bpf,
    c::SYS_perf_event_open,
    c::SYS_userfaultfd,
    c::SYS_settimeofday,
    c::SYS_clock_settime,
    c::SYS_adjtimex,
    c::SYS_sethostname,
    c::SYS_setdomainname,
    c::SYS_acct,
    #[cfg(target_arch = "x86_64")]
    c::SYS_kexec_file_load,
    #[cfg(target_arch = "x86_64")]
    c::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    c::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    c::SYS_modify_ldt,
];
