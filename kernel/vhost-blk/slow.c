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
 * The kworkers of a device, or NULL. Not WQ_MEM_RECLAIM, which is a thread for each: no memory of
 * the host becomes free by what a guest flushes.
 */
struct workqueue_struct *vblk_slow_new(void)
{
	return alloc_workqueue("vhost_blk/%d", WQ_UNBOUND, VBLK_SLOW_MAX, task_tgid_nr(current));
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
	int err = 0;

	for (unsigned int i = 0; i < req->nr_ranges && !err; i++) {
		if (!req->ranges[i].len)
			continue;
		if (req->type == VIRTIO_BLK_T_DISCARD)
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

	if (req->type == VIRTIO_BLK_T_FLUSH)
		req->error = vblk_slow_sync(disk);
	else
		req->error = vblk_slow_ranges(req, disk);
	revert_creds(old);
	vblk_req_done(req);
}

void vblk_slow_submit(struct vblk_req *req)
{
	INIT_WORK(&req->slow, vblk_slow_work);
	queue_work(req->queue->dev->slow, &req->slow);
}
