// SPDX-License-Identifier: GPL-2.0-only
/*
 * A ring: start, stop, and taking requests from it.
 *
 * The core's "backend" of a virtqueue is the disk from START until the queue is idle again, so also
 * while it drains or is broken: as long as requests may be in flight the core must refuse another
 * size or base, check addresses (it writes to them without further checks), and wait for a worker
 * that it takes the ring from. Whether requests are taken says the state.
 */
#include <linux/eventfd.h>
#include <linux/mutex.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "vblk.h"

/* Gives up on a ring. What is in flight is still finished. Under vq->mutex. */
void vblk_queue_break(struct vblk_queue *q, const char *why)
{
	struct vhost_virtqueue *vq = &q->vq;

	if (q->state != RINGDISK_VBLK_RUNNING && q->state != RINGDISK_VBLK_DRAINING)
		return;
	pr_debug("vhost_blk: a ring is broken: %s\n", why);
	WRITE_ONCE(q->state, RINGDISK_VBLK_BROKEN);
	q->stats.broken++;
	if (vq->error_ctx)
		eventfd_signal(vq->error_ctx);
}

/*
 * Whether a request has to wait for others of its queue. One of which nothing is in flight takes
 * any.
 */
static bool vblk_is_too_much(const struct vblk_queue *q, const struct vblk_req *req)
{
	return q->bytes + req->total > VBLK_QUEUE_BYTES_MAX ||
	       (req->nr_ranges && q->ranges >= VBLK_QUEUE_RANGES_MAX);
}

/* The rest stays in the ring. Kicks stay off; the next completion looks again. */
static void vblk_starve(struct vblk_queue *q)
{
	q->starved = true;
	q->stats.starved++;
}

/* Takes one request and gives it to the engine. Not 0: the ring is not to be looked at any more. */
static int vblk_pop(struct vblk_queue *q, u16 head, unsigned int out, unsigned int in)
{
	struct vblk_req *req = q->free;
	int err;

	req->head = head;
	err = vblk_request_parse(req, out, in);
	if (unlikely(fatal_signal_pending(current))) {
		/*
		 * What could not be read may be there: page faults fail. The request goes back into
		 * the ring, and its next server reads it anew. (Without IN_ORDER this is all
		 * that vhost_discard_vq_desc does.)
		 */
		vblk_request_clear(req);
		q->vq.last_avail_idx--;
		return -EINTR;
	}
	if (err) {
		/* Neither a header nor a place for a status: it cannot be answered. */
		vblk_request_clear(req);
		vblk_queue_break(q, "a request without header or status");
		return err;
	}
	if (unlikely(vblk_is_too_much(q, req))) {
		vblk_request_clear(req);
		q->vq.last_avail_idx--;
		vblk_starve(q);
		return -EAGAIN;
	}
	vblk_request_count(req);
	q->bytes += req->total;
	q->ranges += !!req->nr_ranges;
	q->free = req->next_free;
	atomic_inc(&q->in_flight);
	vblk_request_submit(req);
	return 0;
}

/* Takes what the ring has. Under vq->mutex, while the queue runs. */
static void vblk_round(struct vblk_queue *q)
{
	struct vhost_virtqueue *vq = &q->vq;
	unsigned int out, in;
	int head, taken = 0;

	q->stats.rounds++;
	vhost_disable_notify(&q->dev->vhost, vq);
	/* A worker that dies takes no more: the next server of the ring finds the rest there. */
	while (!fatal_signal_pending(current)) {
		if (!q->free) {
			vblk_starve(q);
			return;
		}
		head = vhost_get_vq_desc(vq, vq->iov, ARRAY_SIZE(vq->iov), &out, &in, NULL, NULL);
		if (head < 0) {
			/* Nothing was taken; to a worker that dies memory may only seem missing. */
			if (!fatal_signal_pending(current))
				vblk_queue_break(q, "a chain that is none");
			return;
		}
		if (head == vq->num) {
			if (likely(!vhost_enable_notify(&q->dev->vhost, vq)))
				return;
			/* Something came in between. */
			vhost_disable_notify(&q->dev->vhost, vq);
			continue;
		}
		if (vblk_pop(q, head, out, in))
			return;
		/* Other rings of this worker have their turn, then this one is looked at again. */
		if (vhost_exceeds_weight(vq, ++taken, 0))
			return;
	}
}

/* On a worker: the guest has kicked, or the module asks for another look. */
static void vblk_kick(struct vhost_work *work)
{
	struct vhost_poll *poll = container_of(work, struct vhost_poll, work);
	struct vblk_queue *q = container_of(poll->vq, struct vblk_queue, vq);
	struct blk_plug plug;

	mutex_lock(&q->vq.mutex);
	if (q->state == RINGDISK_VBLK_RUNNING) {
		const struct cred *old = override_creds(q->cred);

		blk_start_plug(&plug);
		vblk_round(q);
		blk_finish_plug(&plug);
		/* Some are done already: memory disks, errors. */
		vblk_collect(q);
		revert_creds(old);
	}
	mutex_unlock(&q->vq.mutex);
}

struct vblk_queue *vblk_queue_new(struct vblk_dev *dev)
{
	struct vblk_queue *q;

	q = kvzalloc_obj(*q, GFP_KERNEL_ACCOUNT);
	if (!q)
		return NULL;
	q->dev = dev;
	q->vq.handle_kick = vblk_kick;
	atomic_set(&q->in_flight, 0);
	init_waitqueue_head(&q->idle);
	init_llist_head(&q->done);
	vhost_work_init(&q->done_work, vblk_done_work);
	INIT_WORK(&q->orphan, vblk_orphan_work);
	INIT_LIST_HEAD(&q->bounce_waiting);
	return q;
}

void vblk_queue_free(struct vblk_queue *q)
{
	if (!q)
		return;
	kvfree(q->reqs);
	kvfree(q);
}

/*
 * Makes as many requests as the ring has descriptors. A guest that publishes more than it has waits
 * (starved).
 */
static int vblk_queue_alloc(struct vblk_queue *q, unsigned int nr)
{
	q->reqs = kvcalloc(nr, sizeof(*q->reqs), GFP_KERNEL_ACCOUNT);
	if (!q->reqs)
		return -ENOMEM;
	q->free = NULL;
	for (unsigned int i = nr; i-- > 0;) {
		q->reqs[i].queue = q;
		q->reqs[i].next_free = q->free;
		q->free = &q->reqs[i];
	}
	return 0;
}

/* What START made. Under vq->mutex, while nothing is in flight. */
static void vblk_queue_clear(struct vblk_queue *q)
{
	kvfree(q->reqs);
	q->reqs = NULL;
	q->free = NULL;
	put_cred(q->cred);
	q->cred = NULL;
}

/* Whether each write is to be durable before it is answered (virtio 1.3, section 5.2.5.2). */
static bool vblk_is_write_through(const struct vblk_dev *dev)
{
	if (dev->features & BIT_ULL(VIRTIO_BLK_F_CONFIG_WCE))
		return !dev->write_cache;
	return !dev->write_cache || !(dev->features & BIT_ULL(VIRTIO_BLK_F_FLUSH));
}

/* Lets the worker take requests, of a queue that drains or is idle. Under vq->mutex. */
static void vblk_queue_run(struct vblk_queue *q)
{
	q->write_through = vblk_is_write_through(q->dev);
	q->starved = false;
	WRITE_ONCE(q->state, RINGDISK_VBLK_RUNNING);
	/* The guest may have kicked before: eventfds are polled for edges. */
	vhost_poll_queue(&q->vq.poll);
}

/* Under the device's mutex. */
int vblk_queue_start(struct vblk_queue *q)
{
	struct vblk_dev *dev = q->dev;
	struct vhost_virtqueue *vq = &q->vq;
	unsigned int nr = vq->num;
	int err;

	if (READ_ONCE(q->state) != RINGDISK_VBLK_IDLE)
		return -EBUSY;
	if (!dev->disk)
		return -ENODEV;
	if (!(dev->features & BIT_ULL(VIRTIO_F_VERSION_1)))
		return -EINVAL;
	if (!nr || nr > VBLK_RING_MAX)
		return -E2BIG;
	if (!vhost_vq_access_ok(vq))
		return -EFAULT;
	err = vblk_queue_alloc(q, nr);
	if (err)
		return err;
	mutex_lock(&vq->mutex);
	q->cred = get_current_cred();
	vhost_vq_set_backend(vq, dev->disk);
	err = vhost_vq_init_access(vq);
	if (!err) {
		vblk_queue_run(q);
	} else {
		vhost_vq_set_backend(vq, NULL);
		vblk_queue_clear(q);
	}
	mutex_unlock(&vq->mutex);
	return err;
}

/* No request is taken from now on. Under the device's mutex, or in release. */
int vblk_queue_unplug(struct vblk_queue *q, bool killable)
{
	/* The worker has it while it submits, for as long as the disk lets it wait. */
	if (!killable)
		mutex_lock(&q->vq.mutex);
	else if (mutex_lock_killable(&q->vq.mutex))
		return -EINTR;
	if (q->state != RINGDISK_VBLK_IDLE)
		WRITE_ONCE(q->state, RINGDISK_VBLK_DRAINING);
	mutex_unlock(&q->vq.mutex);
	return 0;
}

/*
 * The opposite, of one that did not break meanwhile. Under the device's mutex. One whose worker
 * waits for the disk when a deadly signal comes stays as it is, for STOP or release.
 */
void vblk_queue_replug(struct vblk_queue *q)
{
	if (READ_ONCE(q->state) != RINGDISK_VBLK_DRAINING || mutex_lock_killable(&q->vq.mutex))
		return;
	if (q->state == RINGDISK_VBLK_DRAINING)
		vblk_queue_run(q);
	mutex_unlock(&q->vq.mutex);
}

/* Waits for all that was taken. */
int vblk_queue_drain(struct vblk_queue *q, bool killable)
{
	if (killable)
		return wait_event_killable(q->idle, !atomic_read(&q->in_flight)) ? -EINTR : 0;
	wait_event(q->idle, !atomic_read(&q->in_flight));
	return 0;
}

/* After the drain and a grace period: nothing is left but maybe a work that finds nothing. */
void vblk_queue_settle(struct vblk_queue *q)
{
	flush_work(&q->orphan);
	/* The last completion may be at its end still, with the mutex. */
	mutex_lock(&q->vq.mutex);
	WRITE_ONCE(q->state, RINGDISK_VBLK_IDLE);
	vhost_vq_set_backend(&q->vq, NULL);
	vblk_queue_clear(q);
	mutex_unlock(&q->vq.mutex);
}
