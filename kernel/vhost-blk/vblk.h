/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Shared by the files of the module.
 *
 * What runs where:
 *  - ioctls and release: the daemon's threads, one at a time (vblk_dev.vhost.mutex; release is
 *    alone by nature).
 *  - vblk_kick, vblk_done_work: a vhost worker, which is a thread of the daemon with its memory.
 *    Under vq->mutex.
 *  - vblk_orphan_work: a kworker that borrows the daemon's memory, once a worker was killed. Under
 *    vq->mutex.
 *  - slow operations: a kworker, without memory of the daemon, without vq->mutex; a vhost worker
 *    when there are too many.
 *  - vblk_req_done: any context, also hard interrupts.
 *
 * A request belongs to the worker from its pop to its submission, to the engine until
 * vblk_req_done, then to the worker again.
 */
#ifndef VBLK_H
#define VBLK_H

#include <linux/atomic.h>
#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/cred.h>
#include <linux/fs.h>
#include <linux/list.h>
#include <linux/llist.h>
#include <linux/sizes.h>
#include <linux/spinlock.h>
#include <linux/uio.h>
#include <linux/virtio_blk.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "compat.h"
#include "ringdisk_vhost_blk.h"

/*
 * As many as the daemon serves itself. A queue costs about 24 KiB before it is started (struct
 * vhost_virtqueue has 1088 iovecs).
 */
#define VBLK_QUEUES_MAX 64
/*
 * The largest ring that QEMU makes. Also the most that vq->heads holds: it has UIO_MAXIOV entries.
 */
#define VBLK_RING_MAX 1024
/*
 * Longest read or write. The guest's pages are pinned, never more than the guest has; this bounds
 * what the engine allocates for one.
 */
#define VBLK_REQUEST_BYTES_MAX (64u << 20)
/*
 * Ranges of a discard or of a request to write zeroes: 64 * 16 bytes are copied for each. The
 * daemon offers fewer.
 */
#define VBLK_RANGES_MAX 64
/* Length of a range, unless SET_DISK says less, as the daemon offers. */
#define VBLK_RANGE_SECTORS_MAX (SZ_1G >> SECTOR_SHIFT)
/* Requests that are taken from a ring before other rings of the same worker have their turn. */
#define VBLK_WEIGHT 256
/*
 * Bytes of reads and writes in flight of a queue: above that requests stay in the ring. What an
 * engine allocates grows with them, and no cgroup counts all of it.
 */
#define VBLK_QUEUE_BYTES_MAX VBLK_REQUEST_BYTES_MAX
/*
 * Discards and write zeroes in flight of a queue: above that requests stay in the ring. The
 * process that stops the queue, or dies, waits for them, and each may be for 64 GiB.
 */
#define VBLK_QUEUE_RANGES_MAX 4
/* Flushes of files at a time, of a device: each has a kworker. */
#define VBLK_FLUSHES_MAX 16
/* Discards and write zeroes at a time, of a device: kworkers, whose CPU time nobody limits. */
#define VBLK_RANGES_AT_WORK_MAX 2
/*
 * Kworkers for these, of all devices: no cgroup counts them. Few enough that none of them waits for
 * another one in the workqueue: nodes share WQ_MAX_ACTIVE (512 in Linux 6.12, 2048 in 7), and all
 * may be of one node.
 */
#define VBLK_KWORKERS_MAX 64
/* Segments that a request has room for; more of them are allocated. */
#define VBLK_FAST_IOVS 8
/* A bounced request moves 64 * 4 KiB = 256 KiB at a time … */
#define VBLK_BOUNCE_PAGES 64
/* … and a queue has 32 of them, 8 MiB. The others wait for one. */
#define VBLK_BOUNCES_MAX 32

#define VBLK_FEATURES (BIT_ULL(VIRTIO_F_VERSION_1) | BIT_ULL(VIRTIO_RING_F_INDIRECT_DESC) |	\
		       BIT_ULL(VIRTIO_RING_F_EVENT_IDX) | BIT_ULL(VIRTIO_BLK_F_SEG_MAX) |	\
		       BIT_ULL(VIRTIO_BLK_F_SIZE_MAX) | BIT_ULL(VIRTIO_BLK_F_RO) |		\
		       BIT_ULL(VIRTIO_BLK_F_BLK_SIZE) | BIT_ULL(VIRTIO_BLK_F_FLUSH) |		\
		       BIT_ULL(VIRTIO_BLK_F_TOPOLOGY) | BIT_ULL(VIRTIO_BLK_F_CONFIG_WCE) |	\
		       BIT_ULL(VIRTIO_BLK_F_MQ) | BIT_ULL(VIRTIO_BLK_F_DISCARD) |		\
		       BIT_ULL(VIRTIO_BLK_F_WRITE_ZEROES))

struct vblk_queue;

/* A backend. Does not change while a queue is started. */
struct vblk_disk {
	struct file *file;
	/* NULL for a regular file. */
	struct block_device *bdev;
	u64 capacity;
	u32 block_mask;
	u32 memory_mask;
	u32 ranges_max;
	u32 range_sectors_max;
	bool read_only;
	bool use_bio;
	u8 id[VIRTIO_BLK_ID_BYTES];
	/* What kworkers do for it is charged to them. */
	struct cgroup_subsys_state *blkcg;
	struct mem_cgroup *memcg;
};

/* Copies between misaligned buffers of the guest and pages of ours. */
struct vblk_bounce {
	/* The guest's buffers, as far as they are not copied yet. */
	struct iov_iter guest;
	/* Bytes of this turn. */
	size_t chunk;
	unsigned int pages;
	struct bio_vec vecs[VBLK_BOUNCE_PAGES];
};

struct vblk_range {
	u64 offset;
	u64 len;
	bool unmap;
};

struct vblk_req {
	struct vblk_queue *queue;
	/* Free ones: the next. */
	struct vblk_req *next_free;
	/* Done ones. */
	struct llist_node done;
	/* Those that wait for a bounce, or in a lane. */
	struct list_head waiting;
	/* As the ring names it. */
	u16 head;
	/* VIRTIO_BLK_S_*, unless error says otherwise. */
	u8 status;
	bool write;
	/* VIRTIO_BLK_T_*, as the driver says; refused: no engine has it, status says why. */
	u32 type;
	bool refused;
	/* Negative errno of the engine, or 0. */
	int error;
	/* What the used element says when it succeeds, and when it does not. */
	u32 written_ok;
	u32 written_error;
	u8 __user *status_addr;

	/* Reads and writes: place and length, and what is left of them. */
	loff_t place;
	size_t total;
	loff_t pos;
	size_t len;
	/*
	 * A deadly signal waited for its worker when it was submitted: an error may be of that, so
	 * then it begins once more.
	 */
	bool dying;
	/* The guest's buffers: fast_iov or allocated. */
	struct iovec *iov;
	unsigned int iovs;
	struct iovec fast_iov[VBLK_FAST_IOVS];
	/* What the engine reads from or writes to. */
	struct iov_iter iter;
	/* Bytes given to the engine. */
	size_t submitted;
	struct vblk_bounce *bounce;
	struct bio *bio;
	union {
		struct kiocb iocb;
		struct work_struct slow;
	};

	/* Discards and write zeroes. */
	struct vblk_range *ranges;
	unsigned int nr_ranges;
};

struct vblk_queue {
	struct vhost_virtqueue vq;
	struct vblk_dev *dev;
	/*
	 * RINGDISK_VBLK_IDLE and so on. Changes under vq->mutex, to and from idle also under
	 * vhost.mutex; ioctls look at it without the former.
	 */
	u32 state;
	/*
	 * Of who started it, from START until it is idle: with them the disk is read and written,
	 * wherever that is done.
	 */
	const struct cred *cred;
	/* Requests, as many as the ring has descriptors. */
	struct vblk_req *reqs;
	struct vblk_req *free;
	/* The ring has more, but too much is in flight: look again when something is done. */
	bool starved;
	/* In flight: bytes of reads and writes, and how many discards and write zeroes. */
	size_t bytes;
	unsigned int ranges;
	/* A write is durable before it is answered. */
	bool write_through;
	atomic_t in_flight;
	wait_queue_head_t idle;
	/* From any context. */
	struct llist_head done;
	struct vhost_work done_work;
	struct work_struct orphan;
	struct list_head bounce_waiting;
	unsigned int bounces;
	/* Under vq->mutex. */
	struct ringdisk_vblk_stats stats;
};

/* Slow operations of a kind, of a device (slow.c). */
struct vblk_lane {
	/* Of what follows. */
	spinlock_t lock;
	/* Until a kworker of the lane is free. Only while there are some. */
	struct list_head waiting;
	unsigned int kworkers;
	unsigned int kworkers_max;
};

struct vblk_dev {
	struct vhost_dev vhost;
	/* For SETUP, before vhost.mutex is there. */
	struct mutex setup;
	/* 0 before SETUP. */
	unsigned int nr_queues;
	struct vblk_queue **queues;
	struct vhost_virtqueue **vqs;
	struct vblk_disk *disk;
	/* For slow operations: others' disks must not wait for this one's. */
	struct vblk_lane flushes;
	struct vblk_lane ranges;
	/* Nobody has it open any more. */
	bool closing;
	u64 features;
	bool write_cache;
	/* Among all devices that were set up, and its name there (stats.c). */
	struct list_head listed;
	pid_t pid;
	unsigned int number;
};

/* disk.c */
struct vblk_disk *vblk_disk_open(const struct ringdisk_vblk_disk *wanted);
void vblk_disk_close(struct vblk_disk *disk);
bool vblk_disk_is_swap(const struct vblk_disk *disk);

/* charge.c */
long vblk_charge_owner(struct vblk_dev *dev);
void vblk_charge_open(struct vblk_disk *disk);
void vblk_charge_close(struct vblk_disk *disk);
struct mem_cgroup *vblk_charge_begin(const struct vblk_disk *disk);
void vblk_charge_end(struct mem_cgroup *before);

/* queue.c */
struct vblk_queue *vblk_queue_new(struct vblk_dev *dev);
void vblk_queue_free(struct vblk_queue *q);
int vblk_queue_start(struct vblk_queue *q);
int vblk_queue_unplug(struct vblk_queue *q, bool killable);
void vblk_queue_replug(struct vblk_queue *q);
int vblk_queue_drain(struct vblk_queue *q, bool killable);
void vblk_queue_settle(struct vblk_queue *q);
void vblk_queue_break(struct vblk_queue *q, const char *why);

/* request.c */
int vblk_request_parse(struct vblk_req *req, unsigned int out, unsigned int in);
void vblk_request_count(const struct vblk_req *req);
void vblk_request_submit(struct vblk_req *req);
void vblk_request_transfer(struct vblk_req *req);
void vblk_request_clear(struct vblk_req *req);

/* complete.c */
int vblk_complete_init(void);
void vblk_complete_exit(void);
void vblk_req_done(struct vblk_req *req);
void vblk_complete(struct vblk_queue *q);
void vblk_collect(struct vblk_queue *q);
void vblk_done_work(struct vhost_work *work);
void vblk_orphan_work(struct work_struct *work);

/* kiocb.c */
void vblk_kiocb_submit(struct vblk_req *req);

/* bio.c */
int vblk_bio_init(void);
void vblk_bio_exit(void);
bool vblk_bio_submit(struct vblk_req *req);
bool vblk_bio_flush(struct vblk_req *req);
void vblk_bio_release(struct vblk_req *req);

/* bounce.c */
bool vblk_bounce_needed(const struct vblk_req *req, const struct vblk_disk *disk);
void vblk_bounce_start(struct vblk_req *req);
bool vblk_bounce_goes_on(struct vblk_req *req);
void vblk_bounce_drop(struct vblk_req *req);

/* slow.c */
int vblk_slow_init(void);
void vblk_slow_exit(void);
void vblk_slow_open(struct vblk_dev *dev);
void vblk_slow_submit(struct vblk_req *req);
int vblk_slow_sync(const struct vblk_disk *disk);

/* ioctl.c */
long vblk_ioctl(struct file *file, unsigned int cmd, unsigned long arg);

/* main.c */
int vblk_dev_setup(struct vblk_dev *dev, unsigned int queues);

/* stats.c */
void vblk_stats_read(struct vblk_queue *q, struct ringdisk_vblk_stats *stats);
void vblk_stats_init(void);
void vblk_stats_exit(void);
void vblk_stats_add(struct vblk_dev *dev);
void vblk_stats_remove(struct vblk_dev *dev);

#endif
