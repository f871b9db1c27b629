// SPDX-License-Identifier: GPL-2.0-only
/*
 * What blocks for long and is rare: flushes of files, discards, write zeroes. On kworkers, so that
 * rings go on meanwhile.
 *
 * They have neither the daemon's memory nor its credentials: ranges were copied, and the
 * credentials are those of who opened the file (reserved blocks of a file system are for root
 * only).
 */
#include <linux/cred.h>
#include <linux/falloc.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/mm.h>

#include "vblk.h"

/* Pages of zeroes in one write, 256 KiB. */
#define VBLK_ZERO_PAGES 64

/*
 * The kworkers of a device. Not WQ_MEM_RECLAIM, which is a thread for each: no memory of the host
 * becomes free by what a guest flushes.
 */
int vblk_slow_open(struct vblk_dev *dev)
{
	int pid = task_tgid_nr(current);

	dev->flushes = alloc_workqueue("vhost_blk/%d", WQ_UNBOUND, VBLK_FLUSHES_MAX, pid);
	if (!dev->flushes)
		return -ENOMEM;
	dev->ranges = alloc_workqueue("vhost_blk_ranges/%d", WQ_UNBOUND, VBLK_RANGES_AT_WORK_MAX,
				      pid);
	if (!dev->ranges) {
		destroy_workqueue(dev->flushes);
		return -ENOMEM;
	}
	return 0;
}

void vblk_slow_close(struct vblk_dev *dev)
{
	destroy_workqueue(dev->ranges);
	destroy_workqueue(dev->flushes);
}

/* Makes all that was written durable. */
int vblk_slow_sync(const struct vblk_disk *disk)
{
	return disk->bdev ? blkdev_issue_flush(disk->bdev) : vfs_fsync(disk->file, 1);
}

/* Writes zeroes by direct I/O: for file systems that cannot zero a range. */
static int vblk_write_zeroes(struct file *file, const struct vblk_range *range)
{
	struct bio_vec *vecs;
	u64 done = 0;
	int err = 0;

	vecs = kmalloc_array(VBLK_ZERO_PAGES, sizeof(*vecs), GFP_KERNEL);
	if (!vecs)
		return -ENOMEM;
	for (unsigned int i = 0; i < VBLK_ZERO_PAGES; i++)
		bvec_set_page(&vecs[i], ZERO_PAGE(0), PAGE_SIZE, 0);
	while (done < range->len) {
		size_t len = min_t(u64, range->len - done, VBLK_ZERO_PAGES * PAGE_SIZE);
		struct iov_iter iter;
		struct kiocb iocb;
		ssize_t wrote;

		iov_iter_bvec(&iter, ITER_SOURCE, vecs, DIV_ROUND_UP(len, PAGE_SIZE), len);
		init_sync_kiocb(&iocb, file);
		iocb.ki_pos = range->offset + done;
		iocb.ki_flags |= IOCB_DIRECT;
		iocb.ki_flags &= ~IOCB_APPEND;
		wrote = vfs_iocb_iter_write(file, &iocb, &iter);
		if (wrote <= 0) {
			err = wrote ? wrote : -EIO;
			break;
		}
		done += wrote;
		cond_resched();
	}
	kfree(vecs);
	return err;
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

static void vblk_slow_work(struct work_struct *work)
{
	struct vblk_req *req = container_of(work, struct vblk_req, slow);
	const struct vblk_disk *disk = req->queue->dev->disk;
	const struct cred *old = override_creds(disk->file->f_cred);
	struct mem_cgroup *memcg = vblk_charge_begin(disk);

	if (req->type == VIRTIO_BLK_T_FLUSH)
		req->error = vblk_slow_sync(disk);
	else
		req->error = vblk_slow_ranges(req, disk);
	vblk_charge_end(memcg);
	revert_creds(old);
	vblk_req_done(req);
}

void vblk_slow_submit(struct vblk_req *req)
{
	struct vblk_dev *dev = req->queue->dev;

	INIT_WORK(&req->slow, vblk_slow_work);
	queue_work(req->type == VIRTIO_BLK_T_FLUSH ? dev->flushes : dev->ranges, &req->slow);
}
