// SPDX-License-Identifier: GPL-2.0-only
/*
 * From the engine back into the ring.
 *
 * Engines announce requests in any context, one by one. The worker takes all that were announced
 * meanwhile, writes their statuses, then one update of the used index and one call for all of them.
 *
 * A worker that was killed does nothing any more (a deadly signal for the daemon kills its workers,
 * as they are threads of it). Then a kworker does the same with the daemon's memory, which is there
 * as long as the device is open. So a popped request is always answered, and a daemon that starts
 * again can rely on that.
 */
#include <linux/kthread.h>
#include <linux/rcupdate.h>
#include <linux/sched/signal.h>
#include <linux/uaccess.h>

#include "vblk.h"

/* For orphans. Not that of slow operations: those may be waited for there. */
static struct workqueue_struct *vblk_orphans;

int vblk_complete_init(void)
{
	/* As many as can be: one that waits for memory of its guest must not keep others. */
	vblk_orphans = alloc_workqueue("vhost_blk_orphans", WQ_UNBOUND | WQ_MEM_RECLAIM,
				       WQ_MAX_ACTIVE);
	return vblk_orphans ? 0 : -ENOMEM;
}

void vblk_complete_exit(void)
{
	destroy_workqueue(vblk_orphans);
}

/*
 * A request is done, as its error says. Any context.
 *
 * The request may be taken and gone as soon as it is on the list, and once nothing is in flight the
 * queue may go, too: the one place that frees queues waits for a grace
 * period first.
 */
void vblk_req_done(struct vblk_req *req)
{
	struct vblk_queue *q = req->queue;

	rcu_read_lock();
	/* Only for the first of a batch: who added it wakes the worker for the others. */
	if (llist_add(&req->done, &q->done) && !vhost_vq_work_queue(&q->vq, &q->done_work))
		queue_work(vblk_orphans, &q->orphan);
	rcu_read_unlock();
}

/*
 * A batch: how many were answered with VIRTIO_BLK_S_IOERR and _UNSUPP, and what of it was in
 * flight.
 */
struct vblk_tally {
	unsigned int errors;
	unsigned int unsupported;
	size_t bytes;
	unsigned int ranges;
};

/*
 * Writes the status of a request that is done. False: not here, as the worker dies; it is announced
 * once more. May be called again with the same request.
 */
static bool vblk_finish(struct vblk_req *req, struct vring_used_elem *used,
			struct vblk_tally *tally)
{
	bool failed;
	u8 status;

	if (req->bio)
		vblk_bio_release(req);
	status = req->error ? VIRTIO_BLK_S_IOERR : req->status;
	failed = status != VIRTIO_BLK_S_OK;
	if (put_user(status, req->status_addr)) {
		if (fatal_signal_pending(current)) {
			vblk_req_done(req);
			return false;
		}
		/* Memory that went away is the guest's affair; the ring says that it was used. */
		failed = true;
	}
	if (status == VIRTIO_BLK_S_IOERR)
		tally->errors++;
	else if (status == VIRTIO_BLK_S_UNSUPP)
		tally->unsupported++;
	tally->bytes += req->total;
	tally->ranges += !!req->nr_ranges;
	used->id = (__force __virtio32)cpu_to_le32(req->head);
	used->len = (__force __virtio32)cpu_to_le32(failed ? req->written_error : req->written_ok);
	vblk_request_clear(req);
	return true;
}

/* Begins a request once more that failed, and whose worker was dying when it submitted it. */
static void vblk_again(struct vblk_req *req)
{
	if (req->bounce)
		vblk_bounce_drop(req);
	req->dying = false;
	req->error = 0;
	vblk_request_submit(req);
}

/* Announces all requests of a batch once more: the used ring could not be written. */
static void vblk_postpone(struct vblk_req *batch)
{
	struct vblk_req *next;

	for (; batch; batch = next) {
		next = batch->next_free;
		vblk_req_done(batch);
	}
}

/* Puts all requests that are done into the ring. Under vq->mutex, with the daemon's memory. */
void vblk_complete(struct vblk_queue *q)
{
	struct vhost_virtqueue *vq = &q->vq;
	/* The list is a stack. */
	struct llist_node *node = llist_reverse_order(llist_del_all(&q->done));
	struct vblk_req *req, *next, *batch = NULL, *first = NULL;
	struct vblk_tally tally = { 0 };
	u16 used_idx = vq->last_used_idx;
	unsigned int nr = 0;

	llist_for_each_entry_safe(req, next, node, done) {
		if (unlikely(req->error && req->dying)) {
			vblk_again(req);
			continue;
		}
		/* A long bounced request comes here several times. */
		if (req->bounce && vblk_bounce_goes_on(req))
			continue;
		/* There is room: no more are in flight than heads has (VBLK_RING_MAX). */
		if (!vblk_finish(req, &vq->heads[nr], &tally))
			continue;
		nr++;
		req->next_free = batch;
		batch = req;
		if (!first)
			first = req;
	}
	if (!nr)
		return;
	if (vblk_add_used(vq, vq->heads, nr)) {
		if (fatal_signal_pending(current)) {
			/* The guest has seen none of it: its index is what is written last. */
			vq->last_used_idx = used_idx;
			vblk_postpone(batch);
			return;
		}
		vblk_queue_break(q, "its used ring is gone");
	} else {
		vhost_signal(&q->dev->vhost, vq);
	}
	/* Only now: what is announced once more comes here again. */
	q->stats.errors += tally.errors;
	q->stats.unsupported += tally.unsupported;
	q->stats.batches++;
	q->bytes -= tally.bytes;
	q->ranges -= tally.ranges;
	first->next_free = q->free;
	q->free = batch;
	if (q->starved && q->state == RINGDISK_VBLK_RUNNING) {
		q->starved = false;
		vhost_poll_queue(&vq->poll);
	}
	if (atomic_sub_and_test(nr, &q->in_flight))
		wake_up(&q->idle);
}

/*
 * The same on a worker, if it may. One that dies may not: with a deadly signal pending page faults
 * fail, and the guest would be told of errors that there are none of.
 */
void vblk_collect(struct vblk_queue *q)
{
	if (!fatal_signal_pending(current))
		vblk_complete(q);
	else if (!llist_empty(&q->done))
		queue_work(vblk_orphans, &q->orphan);
}

/* On a worker. */
void vblk_done_work(struct vhost_work *work)
{
	struct vblk_queue *q = container_of(work, struct vblk_queue, done_work);

	mutex_lock(&q->vq.mutex);
	/* As long as something is in flight there are credentials; a bounce submits once more. */
	if (!llist_empty(&q->done)) {
		const struct cred *old = override_creds(q->cred);

		vblk_collect(q);
		revert_creds(old);
	}
	mutex_unlock(&q->vq.mutex);
}

/* On a kworker: the worker is dead. */
void vblk_orphan_work(struct work_struct *work)
{
	struct vblk_queue *q = container_of(work, struct vblk_queue, orphan);
	struct mem_cgroup *memcg;
	const struct cred *old;
	unsigned int before;

	/*
	 * The device holds the memory until its workers are gone, which release waits for after us.
	 * Disk and credentials are there as long as something is in flight; otherwise there is
	 * nothing to do.
	 */
	if (llist_empty(&q->done))
		return;
	kthread_use_mm(q->dev->vhost.mm);
	/* A request may begin once more: not with our rights. */
	old = override_creds(q->cred);
	memcg = vblk_charge_begin(q->dev->disk);
	mutex_lock(&q->vq.mutex);
	before = atomic_read(&q->in_flight);
	vblk_complete(q);
	/* Nothing is taken from the ring here: the difference is what was completed. */
	q->stats.orphans += before - atomic_read(&q->in_flight);
	mutex_unlock(&q->vq.mutex);
	vblk_charge_end(memcg);
	revert_creds(old);
	kthread_unuse_mm(q->dev->vhost.mm);
}
