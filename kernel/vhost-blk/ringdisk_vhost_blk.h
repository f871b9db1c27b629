/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * Control interface of ringdisk's vhost-blk: what /dev/vhost-blk takes besides the ioctls of
 * <linux/vhost.h>.
 *
 * Order: INFO, SETUP, VHOST_SET_OWNER, VHOST_SET_FEATURES, VHOST_SET_MEM_TABLE, SET_DISK; for each
 * ring VHOST_SET_VRING_NUM, _BASE, _ADDR, _CALL, _ERR, workers (VHOST_NEW_WORKER,
 * VHOST_ATTACH_VRING_WORKER), VHOST_SET_VRING_KICK, then START. Back: STOP, VHOST_SET_VRING_KICK
 * with -1, VHOST_GET_VRING_BASE.
 *
 * Only the process that set the owner may call what changes something. Fields called reserved must
 * be 0.
 */
#ifndef RINGDISK_VHOST_BLK_H
#define RINGDISK_VHOST_BLK_H

#include <linux/ioctl.h>
#include <linux/types.h>

/*
 * Grows by one with each change that an older daemon or module would misunderstand. SETUP refuses
 * another one.
 */
#define RINGDISK_VBLK_VERSION 1

/* A magic of its own: those of vhost (0xAF) are taken up to 0x85, and its list grows. */
#define RINGDISK_VBLK_MAGIC 0xE8

/* What the module is and can do. At any time, by anyone who has the device open. */
struct ringdisk_vblk_info {
	__u32 version;
	/* Bits of 1 << RINGDISK_VBLK_ENGINE_*. */
	__u32 engines;
	__u32 queues_max;
	/* Descriptors of a ring. */
	__u32 ring_max;
	/* Bytes of one read or write; longer ones are answered with VIRTIO_BLK_S_IOERR. */
	__u32 request_bytes_max;
	/*
	 * Ranges of one discard or of one request to write zeroes, at most, whatever SET_DISK says.
	 */
	__u32 ranges_max;
	/* Virtio features that VHOST_SET_FEATURES takes. */
	__u64 features;
	__u64 reserved[4];
};

/* First of all: makes the queues. Once. */
struct ringdisk_vblk_setup {
	/* RINGDISK_VBLK_VERSION of the caller. */
	__u32 version;
	__u32 queues;
	__u64 reserved[2];
};

/* Which mechanism carries reads and writes. */
/* Block devices: BIO, which costs less; files: KIOCB. */
#define RINGDISK_VBLK_ENGINE_DEFAULT 0
/* The file's own asynchronous direct I/O: block devices and files. */
#define RINGDISK_VBLK_ENGINE_KIOCB 1
/* Bios made here: block devices only. */
#define RINGDISK_VBLK_ENGINE_BIO 2

/* The disk is read-only for the guest; without it the file must be open for writing. */
#define RINGDISK_VBLK_DISK_RO 0x1
/* The write cache is off from the beginning (see SET_CACHE). */
#define RINGDISK_VBLK_DISK_WRITE_THROUGH 0x2

/* The disk behind all queues. Only while none is started. */
struct ringdisk_vblk_disk {
	/*
	 * A block device or a regular file that can do direct I/O; -1: none, and the others are not
	 * looked at.
	 */
	__s32 fd;
	/* RINGDISK_VBLK_DISK_*. */
	__u32 flags;
	/* RINGDISK_VBLK_ENGINE_*. */
	__u32 engine;
	/*
	 * Logical block as the guest knows it: bytes, a power of two, 512 to 4096, no smaller than
	 * the device's.
	 */
	__u32 block_bytes;
	/*
	 * Alignment that direct I/O wants of memory, bytes, a power of two up to 4096; misaligned
	 * buffers are copied. A device's own is added.
	 */
	__u32 memory_align;
	/* Limits of discards and of requests to write zeroes, as the guest knows them. */
	__u32 ranges_max;
	__u32 range_sectors_max;
	__u32 reserved0;
	/* Bytes, a multiple of block_bytes, no more than the file or device has. */
	__u64 capacity;
	/* What get-id answers; padded with zeroes. */
	__u8 id[20];
	__u8 reserved1[12];
};

/* For STOP: all queues that are started. */
#define RINGDISK_VBLK_ALL 0xffffffffu

/* State of a queue. */
#define RINGDISK_VBLK_IDLE 0
#define RINGDISK_VBLK_RUNNING 1
/*
 * The ring is not what the specification wants, or not there: nothing more is taken from it until
 * STOP and START.
 */
#define RINGDISK_VBLK_BROKEN 2
/*
 * STOP or SET_CACHE was ended by a deadly signal before the requests that were taken were done (the
 * memory of its process has other users, so the device lives on). STOP goes on with it.
 */
#define RINGDISK_VBLK_DRAINING 3

/* Counters of a queue since SETUP. */
struct ringdisk_vblk_stats {
	/* In: which queue. */
	__u32 queue;
	/* RINGDISK_VBLK_* of above. */
	__u32 state;
	__u32 in_flight;
	__u32 reserved0;
	/* Requests that were taken, also those that are refused. */
	__u64 reads;
	__u64 writes;
	__u64 flushes;
	__u64 discards;
	__u64 write_zeroes;
	__u64 get_ids;
	/* Of those that are not refused. */
	__u64 read_bytes;
	__u64 write_bytes;
	/* Answered with VIRTIO_BLK_S_IOERR, and with _UNSUPP. */
	__u64 errors;
	__u64 unsupported;
	/* Times that the worker looked at the ring. */
	__u64 rounds;
	/* Updates of the used index, each with one decision about a call. */
	__u64 batches;
	/*
	 * Reads and writes that were copied because the guest's buffers are misaligned, and times
	 * that one of them had to wait for memory.
	 */
	__u64 bounced;
	__u64 bounce_waits;
	/* Reads and writes that went as a bio, and as a kiocb. */
	__u64 bios;
	__u64 kiocbs;
	/* Times that the ring had more than it may have in flight. */
	__u64 starved;
	/* Requests that were completed after the death of their worker. */
	__u64 orphans;
	/* Times that the ring became broken. */
	__u64 broken;
	__u64 reserved1[4];
};

#define RINGDISK_VBLK_INFO	_IOR(RINGDISK_VBLK_MAGIC, 0x00, struct ringdisk_vblk_info)
#define RINGDISK_VBLK_SETUP	_IOW(RINGDISK_VBLK_MAGIC, 0x01, struct ringdisk_vblk_setup)
#define RINGDISK_VBLK_SET_DISK	_IOW(RINGDISK_VBLK_MAGIC, 0x02, struct ringdisk_vblk_disk)
/*
 * The index of a queue. From its return on requests are taken from the ring, also those that were
 * there before. The disk is read and written with the credentials of who calls.
 */
#define RINGDISK_VBLK_START	_IOW(RINGDISK_VBLK_MAGIC, 0x03, __u32)
/*
 * The index of a queue, or ALL. From its return on the ring, and memory of requests, is not touched
 * any more.
 */
#define RINGDISK_VBLK_STOP	_IOW(RINGDISK_VBLK_MAGIC, 0x04, __u32)
/*
 * 0: each write is durable before it is answered, and all that were answered before are when the
 * call returns. 1: the opposite. When it fails, or is ended by a deadly signal, the cache is as it
 * was and rings go on; one whose worker waits for the disk at that moment may stay DRAINING.
 */
#define RINGDISK_VBLK_SET_CACHE	_IOW(RINGDISK_VBLK_MAGIC, 0x05, __u32)
#define RINGDISK_VBLK_STATS	_IOWR(RINGDISK_VBLK_MAGIC, 0x06, struct ringdisk_vblk_stats)

#endif
