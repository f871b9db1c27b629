// SPDX-License-Identifier: GPL-2.0-only
/*
 * What blocks for long and is rare: flushes of files, discards, write zeroes. On kworkers, so that
 * rings go on meanwhile.
 *
 * They do not have the daemon's memory: ranges were copied. Credentials and charges are those of
 * the request's queue and disk.
 *
 * The workqueue is for all devices, and no device waits there for another one: each has two lanes,
 * with a limit of their own, and what is above it waits in the lane. All lanes together have
 * VBLK_KWORKERS_MAX. A lane that has none, and gets none, does its work on the worker of the ring,
 * which then waits for its own disk only.
 */
#include <linux/fs.h>
#include <linux/falloc.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>

#include "vblk.h"

/* Pages of zeroes in one write, 256 KiB. */
#define VBLK_ZERO_PAGES 64

static struct workqueue_struct *vblk_slow;
/* That lanes have. */
static atomic_t vblk_kworkers = ATOMIC_INIT(0);
/* Never changes. */
static struct bio_vec vblk_zeroes[VBLK_ZERO_PAGES];

/*
 * Not WQ_MEM_RECLAIM, which is a thread more: no memory of the host becomes free by what a guest
 * flushes.
 */
int vblk_slow_init(void)
{
	for (unsigned int i = 0; i < VBLK_ZERO_PAGES; i++)
		bvec_set_page(&vblk_zeroes[i], ZERO_PAGE(0), PAGE_SIZE, 0);
	vblk_slow = alloc_workqueue("vhost_blk", WQ_UNBOUND, WQ_MAX_ACTIVE);
	return vblk_slow ? 0 : -ENOMEM;
}

/* Waits for the last kworker to leave the module. */
void vblk_slow_exit(void)
{
	destroy_workqueue(vblk_slow);
}

static void vblk_lane_open(struct vblk_lane *lane, unsigned int kworkers_max)
{
	spin_lock_init(&lane->lock);
	INIT_LIST_HEAD(&lane->waiting);
	lane->kworkers_max = kworkers_max;
}

void vblk_slow_open(struct vblk_dev *dev)
{
	vblk_lane_open(&dev->flushes, VBLK_FLUSHES_MAX);
	vblk_lane_open(&dev->ranges, VBLK_RANGES_AT_WORK_MAX);
}

/* Makes all that was written durable. */
int vblk_slow_sync(const struct vblk_disk *disk)
{
	return disk->bdev ? blkdev_issue_flush(disk->bdev) : vfs_fsync(disk->file, 1);
}

/* Writes zeroes by direct I/O: for file systems that cannot zero a range. */
static int vblk_write_zeroes(struct file *file, const struct vblk_range *range)
{
	u64 done = 0;

	while (done < range->len) {
		size_t len = min_t(u64, range->len - done, VBLK_ZERO_PAGES * PAGE_SIZE);
		struct iov_iter iter;
		struct kiocb iocb;
		ssize_t wrote;

		iov_iter_bvec(&iter, ITER_SOURCE, vblk_zeroes, DIV_ROUND_UP(len, PAGE_SIZE), len);
		init_sync_kiocb(&iocb, file);
		iocb.ki_pos = range->offset + done;
		iocb.ki_flags |= IOCB_DIRECT;
		iocb.ki_flags &= ~IOCB_APPEND;
		wrote = vfs_iocb_iter_write(file, &iocb, &iter);
		if (wrote <= 0)
			return wrote ? wrote : -EIO;
		done += wrote;
		cond_resched();
	}
	return 0;
}

static int vblk_punch(struct file *file, const struct vblk_range *range)
{
	return vfs_fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, range->offset,
			     range->len);
}

/* A discard is a hint: where the backend cannot nothing happens. */
static int vblk_discard(const struct vblk_disk *disk, const struct vblk_range *range)
{
	int err;

	if (disk->bdev)
		err = blkdev_issue_discard(disk->bdev, range->offset >> SECTOR_SHIFT,
					   range->len >> SECTOR_SHIFT, GFP_NOIO);
	else
		err = vblk_punch(disk->file, range);
	return err == -EOPNOTSUPP ? 0 : err;
}

static int vblk_zero(const struct vblk_disk *disk, const struct vblk_range *range)
{
	int err = -EOPNOTSUPP;

	if (disk->bdev)
		return blkdev_issue_zeroout(disk->bdev, range->offset >> SECTOR_SHIFT,
					    range->len >> SECTOR_SHIFT, GFP_NOIO,
					    range->unmap ? 0 : BLKDEV_ZERO_NOUNMAP);
	if (range->unmap)
		err = vblk_punch(disk->file, range);
	if (err == -EOPNOTSUPP)
		err = vfs_fallocate(disk->file, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE,
				    range->offset, range->len);
	if (err == -EOPNOTSUPP)
		err = vblk_write_zeroes(disk->file, range);
	return err;
}

static int vblk_slow_ranges(struct vblk_req *req, const struct vblk_disk *disk)
{
	bool is_discard = req->type == VIRTIO_BLK_T_DISCARD;
	int err = 0;

	if (vblk_disk_is_swap(disk))
		return -ETXTBSY;
	for (unsigned int i = 0; i < req->nr_ranges && !err; i++) {
		if (!req->ranges[i].len)
			continue;
		/*
		 * A process that was killed is gone when this is done. Discards are hints, and of
		 * zeroes one range is written: Linux sends no more at once.
		 */
		if (READ_ONCE(req->queue->dev->closing) && (is_discard || i))
			return is_discard ? 0 : -EINTR;
		if (is_discard)
			err = vblk_discard(disk, &req->ranges[i]);
		else
			err = vblk_zero(disk, &req->ranges[i]);
	}
	if (!err && req->queue->write_through)
		err = vblk_slow_sync(disk);
	return err;
}

static struct vblk_lane *vblk_lane_of(const struct vblk_req *req)
{
	struct vblk_dev *dev = req->queue->dev;

	return req->type == VIRTIO_BLK_T_FLUSH ? &dev->flushes : &dev->ranges;
}

static void vblk_slow_do(struct vblk_req *req)
{
	const struct vblk_disk *disk = req->queue->dev->disk;

	if (req->type == VIRTIO_BLK_T_FLUSH)
		req->error = vblk_slow_sync(disk);
	else
		req->error = vblk_slow_ranges(req, disk);
}

/* A kworker of the lane is free: for the next one, if there is one. */
static void vblk_lane_next(struct vblk_lane *lane)
{
	struct vblk_req *next;

	spin_lock(&lane->lock);
	next = list_first_entry_or_null(&lane->waiting, struct vblk_req, waiting);
	if (next) {
		list_del(&next->waiting);
		queue_work(vblk_slow, &next->slow);
	} else {
		lane->kworkers--;
		atomic_dec(&vblk_kworkers);
	}
	spin_unlock(&lane->lock);
}

static void vblk_slow_work(struct work_struct *work)
{
	struct vblk_req *req = container_of(work, struct vblk_req, slow);
	const struct cred *old = override_creds(req->queue->cred);
	struct mem_cgroup *memcg = vblk_charge_begin(req->queue->dev->disk);

	vblk_slow_do(req);
	vblk_charge_end(memcg);
	revert_creds(old);
	/* Before it is announced: then the device may go. */
	vblk_lane_next(vblk_lane_of(req));
	vblk_req_done(req);
}

/* On a worker (or the orphans' kworker), under vq->mutex, with the queue's credentials. */
void vblk_slow_submit(struct vblk_req *req)
{
	struct vblk_lane *lane = vblk_lane_of(req);
	bool here = false;

	INIT_WORK(&req->slow, vblk_slow_work);
	spin_lock(&lane->lock);
	if (lane->kworkers < lane->kworkers_max &&
	    atomic_add_unless(&vblk_kworkers, 1, VBLK_KWORKERS_MAX)) {
		lane->kworkers++;
		queue_work(vblk_slow, &req->slow);
	} else if (lane->kworkers) {
		/* One of them takes it along. */
		list_add_tail(&req->waiting, &lane->waiting);
	} else {
		here = true;
	}
	spin_unlock(&lane->lock);
	if (!here)
		return;
	vblk_slow_do(req);
	/* A deadly signal may be the reason of an error: it begins once more. */
	req->dying = fatal_signal_pending(current);
	vblk_req_done(req);
}
