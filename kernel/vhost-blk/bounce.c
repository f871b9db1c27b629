// SPDX-License-Identifier: GPL-2.0-only
/*
 * Reads and writes of misaligned buffers: firmware and Windows send them, and direct I/O refuses
 * them.
 *
 * Data go through pages of ours, 256 KiB at a time. A queue has a limited number of such bounces;
 * requests beyond it wait for their turn, so a guest cannot make the host allocate without end. On
 * a worker (or the orphans' kworker), under vq->mutex.
 */
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "vblk.h"

/* Whether the guest's buffers are such that an engine would refuse them. */
bool vblk_bounce_needed(const struct vblk_req *req, const struct vblk_disk *disk)
{
	for (unsigned int i = 0; i < req->iovs; i++) {
		const struct iovec *iov = &req->iov[i];

		/*
		 * Linux 6.12 wants whole logical blocks of each segment, too; later ones of all
		 * together only.
		 */
		if ((unsigned long)iov->iov_base & disk->memory_mask ||
		    iov->iov_len & (disk->block_mask | disk->memory_mask))
			return true;
	}
	return false;
}

static void vblk_bounce_free(struct vblk_bounce *bounce)
{
	for (unsigned int i = 0; i < bounce->pages; i++)
		__free_page(bounce->vecs[i].bv_page);
	kfree(bounce);
}

/* A bounce for a request of `len` bytes, or NULL. */
static struct vblk_bounce *vblk_bounce_alloc(size_t len)
{
	unsigned int pages = min_t(size_t, DIV_ROUND_UP(len, PAGE_SIZE), VBLK_BOUNCE_PAGES);
	struct vblk_bounce *bounce = kmalloc(sizeof(*bounce), GFP_KERNEL_ACCOUNT);

	if (!bounce)
		return NULL;
	for (bounce->pages = 0; bounce->pages < pages; bounce->pages++) {
		struct page *page = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_NOWARN);

		if (!page) {
			vblk_bounce_free(bounce);
			return NULL;
		}
		bvec_set_page(&bounce->vecs[bounce->pages], page, PAGE_SIZE, 0);
	}
	return bounce;
}

/* Copies the first `len` bytes between the pages and the guest, which moves on. */
static bool vblk_bounce_copy(struct vblk_bounce *bounce, size_t len, bool to_guest)
{
	for (unsigned int i = 0; len > 0; i++) {
		struct page *page = bounce->vecs[i].bv_page;
		size_t part = min_t(size_t, len, PAGE_SIZE), done;

		if (to_guest)
			done = copy_page_to_iter(page, 0, part, &bounce->guest);
		else
			done = copy_page_from_iter(page, 0, part, &bounce->guest);
		if (done != part)
			return false;
		len -= part;
	}
	return true;
}

/* The next turn of a request. It is announced by vblk_req_done. */
static void vblk_bounce_turn(struct vblk_req *req)
{
	struct vblk_bounce *bounce = req->bounce;
	size_t chunk = min_t(size_t, req->len, bounce->pages * PAGE_SIZE);

	bounce->chunk = chunk;
	if (req->write && !vblk_bounce_copy(bounce, chunk, false)) {
		req->error = -EFAULT;
		req->dying = fatal_signal_pending(current);
		vblk_req_done(req);
		return;
	}
	iov_iter_bvec(&req->iter, req->write ? ITER_SOURCE : ITER_DEST, bounce->vecs,
		      DIV_ROUND_UP(chunk, PAGE_SIZE), chunk);
	vblk_kiocb_submit(req);
}

/* Begins a request, or lets it wait. */
void vblk_bounce_start(struct vblk_req *req)
{
	struct vblk_queue *q = req->queue;

	if (q->bounces < VBLK_BOUNCES_MAX)
		req->bounce = vblk_bounce_alloc(req->len);
	if (!req->bounce) {
		if (q->bounces) {
			/* One that ends takes it along. */
			q->stats.bounce_waits++;
			list_add_tail(&req->waiting, &q->bounce_waiting);
			return;
		}
		req->error = -ENOMEM;
		req->dying = fatal_signal_pending(current);
		vblk_req_done(req);
		return;
	}
	q->bounces++;
	q->stats.bounced++;
	iov_iter_init(&req->bounce->guest, req->write ? ITER_SOURCE : ITER_DEST, req->iov,
		      req->iovs, req->len);
	vblk_bounce_turn(req);
}

/* Gives the bounce of a request to one that waits. */
void vblk_bounce_drop(struct vblk_req *req)
{
	struct vblk_queue *q = req->queue;
	struct vblk_req *waiting;

	vblk_bounce_free(req->bounce);
	req->bounce = NULL;
	q->bounces--;
	/*
	 * One that cannot have memory, and was the only one, fails: then it is the next one's turn,
	 * as nobody else would take it along.
	 */
	do {
		waiting = list_first_entry_or_null(&q->bounce_waiting, struct vblk_req, waiting);
		if (!waiting)
			return;
		list_del(&waiting->waiting);
		vblk_bounce_start(waiting);
	} while (!q->bounces);
}

/*
 * A turn is done. True: it is announced once more, by another turn or from the beginning; false:
 * the request is done, with its error.
 */
bool vblk_bounce_goes_on(struct vblk_req *req)
{
	struct vblk_bounce *bounce = req->bounce;

	if (!req->error && !req->write && !vblk_bounce_copy(bounce, bounce->chunk, true)) {
		req->error = -EFAULT;
		req->dying = fatal_signal_pending(current);
		if (req->dying) {
			vblk_req_done(req);
			return true;
		}
	}
	req->pos += bounce->chunk;
	req->len -= bounce->chunk;
	if (!req->error && req->len) {
		vblk_bounce_turn(req);
		return true;
	}
	vblk_bounce_drop(req);
	return false;
}
