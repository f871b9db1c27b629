// SPDX-License-Identifier: GPL-2.0-only
/*
 * Reads and writes by the file's own asynchronous direct I/O: block devices and regular files, any
 * length, split by the block layer or the file system below.
 */
#include <linux/fs.h>
#include <linux/sched/signal.h>

#include "vblk.h"

static void vblk_kiocb_result(struct vblk_req *req, long result)
{
	if (result < 0)
		req->error = result;
	else if (result != req->submitted)
		/* The file ends before the disk, or is full. */
		req->error = -EIO;
	vblk_req_done(req);
}

/* Any context. */
static void vblk_kiocb_done(struct kiocb *iocb, long result)
{
	struct vblk_req *req = container_of(iocb, struct vblk_req, iocb);

	if (req->write)
		kiocb_end_write(iocb);
	vblk_kiocb_result(req, result);
}

/* Submits req->iter at req->pos. May sleep. */
void vblk_kiocb_submit(struct vblk_req *req)
{
	struct file *file = req->queue->dev->disk->file;
	ssize_t result;

	req->submitted = iov_iter_count(&req->iter);
	init_sync_kiocb(&req->iocb, file);
	req->iocb.ki_pos = req->pos;
	req->iocb.ki_complete = vblk_kiocb_done;
	/* Whatever the descriptor was opened with, or what was set since (F_SETFL). */
	req->iocb.ki_flags |= IOCB_DIRECT;
	req->iocb.ki_flags &= ~IOCB_APPEND;
	if (req->write) {
		if (req->queue->write_through)
			req->iocb.ki_flags |= IOCB_DSYNC;
		result = vfs_iocb_iter_write(file, &req->iocb, &req->iter);
	} else {
		result = vfs_iocb_iter_read(file, &req->iocb, &req->iter);
	}
	/*
	 * Pages cannot be pinned, or copied, when a deadly signal waits. What comes of that depends
	 * on the file: an error, a count that is too small, or, of a long request whose first part
	 * is on its way, -EIOCBQUEUED here and the error when that part is done. It may be
	 * announced by now; but nobody takes it before vq->mutex is free.
	 */
	if (unlikely(fatal_signal_pending(current)))
		req->dying = true;
	if (result == -EIOCBQUEUED)
		return;
	/* The limits that we were told were too wide: copy. */
	if (result == -EINVAL && !req->bounce) {
		vblk_bounce_start(req);
		return;
	}
	vblk_kiocb_result(req, result);
}
