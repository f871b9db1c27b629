// SPDX-License-Identifier: GPL-2.0-only
/*
 * The control interface. Callers may be hostile: any order, any numbers, several threads, other
 * processes.
 *
 * One call at a time: vhost.mutex. The core checks what belongs to it; here are the private calls,
 * and what the core would allow while requests are in flight but must not be.
 */
#include <linux/mutex.h>
#include <linux/nospec.h>
#include <linux/rcupdate.h>
#include <linux/uaccess.h>

#include "vblk.h"

static long vblk_ioctl_info(void __user *arg)
{
	struct ringdisk_vblk_info info = {
		.version = RINGDISK_VBLK_VERSION,
		.engines = BIT(RINGDISK_VBLK_ENGINE_KIOCB) | BIT(RINGDISK_VBLK_ENGINE_BIO),
		.queues_max = VBLK_QUEUES_MAX,
		.ring_max = VBLK_RING_MAX,
		.request_bytes_max = VBLK_REQUEST_BYTES_MAX,
		.ranges_max = VBLK_RANGES_MAX,
		.features = VBLK_FEATURES,
	};

	return copy_to_user(arg, &info, sizeof(info)) ? -EFAULT : 0;
}

static long vblk_ioctl_setup(struct vblk_dev *dev, void __user *arg)
{
	struct ringdisk_vblk_setup setup;
	long err;

	if (copy_from_user(&setup, arg, sizeof(setup)))
		return -EFAULT;
	if (setup.version != RINGDISK_VBLK_VERSION)
		return -EPROTONOSUPPORT;
	if (setup.reserved[0] || setup.reserved[1])
		return -EINVAL;
	mutex_lock(&dev->setup);
	err = vblk_dev_setup(dev, setup.queues);
	mutex_unlock(&dev->setup);
	return err;
}

/* The queue that the first word of an argument names. */
static struct vblk_queue *vblk_ioctl_queue(struct vblk_dev *dev, u32 index)
{
	if (index >= dev->nr_queues)
		return NULL;
	return dev->queues[array_index_nospec(index, dev->nr_queues)];
}

static bool vblk_all_idle(struct vblk_dev *dev)
{
	for (unsigned int i = 0; i < dev->nr_queues; i++)
		if (READ_ONCE(dev->queues[i]->state) != RINGDISK_VBLK_IDLE)
			return false;
	return true;
}

/*
 * A worker has its ring's mutex while it submits, for as long as the disk makes it wait: a file
 * system that is frozen, a device that does not answer. The core waits for these mutexes, and for
 * workers, without a way out; so it is waited here first, where a deadly signal is one.
 */
static int vblk_wait_workers(struct vblk_dev *dev)
{
	for (unsigned int i = 0; i < dev->nr_queues; i++) {
		if (mutex_lock_killable(&dev->vqs[i]->mutex))
			return -EINTR;
		mutex_unlock(&dev->vqs[i]->mutex);
	}
	return 0;
}

static long vblk_ioctl_features(struct vblk_dev *dev, void __user *arg)
{
	u64 features;

	if (copy_from_user(&features, arg, sizeof(features)))
		return -EFAULT;
	if (features & ~VBLK_FEATURES)
		return -EOPNOTSUPP;
	/*
	 * Without it headers and rings may be of another byte order and layout; such guests stay
	 * with the daemon.
	 */
	if (!(features & BIT_ULL(VIRTIO_F_VERSION_1)))
		return -EINVAL;
	if (!vblk_all_idle(dev))
		return -EBUSY;
	for (unsigned int i = 0; i < dev->nr_queues; i++) {
		struct vhost_virtqueue *vq = dev->vqs[i];

		mutex_lock(&vq->mutex);
		vq->acked_features = features;
		mutex_unlock(&vq->mutex);
	}
	dev->features = features;
	return 0;
}

static long vblk_ioctl_disk(struct vblk_dev *dev, void __user *arg)
{
	struct ringdisk_vblk_disk wanted;
	struct vblk_disk *disk = NULL;

	if (copy_from_user(&wanted, arg, sizeof(wanted)))
		return -EFAULT;
	if (!vblk_all_idle(dev))
		return -EBUSY;
	if (wanted.fd != -1) {
		disk = vblk_disk_open(&wanted);
		if (IS_ERR(disk))
			return PTR_ERR(disk);
		dev->write_cache = !(wanted.flags & RINGDISK_VBLK_DISK_WRITE_THROUGH);
	}
	vblk_disk_close(dev->disk);
	dev->disk = disk;
	return 0;
}

static long vblk_ioctl_start(struct vblk_dev *dev, void __user *arg)
{
	struct vblk_queue *q;
	u32 index;

	if (get_user(index, (u32 __user *)arg))
		return -EFAULT;
	q = vblk_ioctl_queue(dev, index);
	return q ? vblk_queue_start(q) : -ENOBUFS;
}

/* Stops queues first to last, so that all of them drain at the same time. */
static long vblk_stop(struct vblk_dev *dev, unsigned int first, unsigned int end)
{
	unsigned int stopped = 0;
	int err;

	for (unsigned int i = first; i < end; i++) {
		if (READ_ONCE(dev->queues[i]->state) == RINGDISK_VBLK_IDLE)
			continue;
		err = vblk_queue_unplug(dev->queues[i], true);
		if (err)
			return err;
		stopped++;
	}
	if (!stopped)
		return 0;
	for (unsigned int i = first; i < end; i++) {
		err = vblk_queue_drain(dev->queues[i], true);
		if (err)
			return err;
	}
	/* The flush below has no way out. */
	err = vblk_wait_workers(dev);
	if (err)
		return err;
	/*
	 * Who announced the last request may still be about to wake the worker (vblk_req_done).
	 * Afterwards nothing of the queues runs, and their workers may be changed.
	 */
	synchronize_rcu();
	for (unsigned int i = first; i < end; i++)
		vblk_queue_settle(dev->queues[i]);
	vhost_dev_flush(&dev->vhost);
	return 0;
}

static long vblk_ioctl_stop(struct vblk_dev *dev, void __user *arg)
{
	u32 index;

	if (get_user(index, (u32 __user *)arg))
		return -EFAULT;
	if (index == RINGDISK_VBLK_ALL)
		return vblk_stop(dev, 0, dev->nr_queues);
	if (index >= dev->nr_queues)
		return -ENOBUFS;
	index = array_index_nospec(index, dev->nr_queues);
	return vblk_stop(dev, index, index + 1);
}

/*
 * Turns the write cache off or on. Requests that were taken before could be answered afterwards
 * without being durable, so all rings pause: what is in flight is finished, everything is flushed,
 * and they go on.
 */
static long vblk_ioctl_cache(struct vblk_dev *dev, void __user *arg)
{
	long err = 0;
	u32 on;

	if (get_user(on, (u32 __user *)arg))
		return -EFAULT;
	if (on > 1)
		return -EINVAL;
	if (!dev->disk)
		return -ENODEV;
	for (unsigned int i = 0; i < dev->nr_queues; i++)
		if (READ_ONCE(dev->queues[i]->state) == RINGDISK_VBLK_DRAINING)
			return -EBUSY;
	for (unsigned int i = 0; i < dev->nr_queues && !err; i++)
		if (READ_ONCE(dev->queues[i]->state) == RINGDISK_VBLK_RUNNING)
			err = vblk_queue_unplug(dev->queues[i], true);
	for (unsigned int i = 0; i < dev->nr_queues && !err; i++)
		/* Also of a broken one: it may have writes in flight. */
		err = vblk_queue_drain(dev->queues[i], true);
	if (!err && !on)
		err = vblk_slow_sync(dev->disk);
	if (!err)
		dev->write_cache = on;
	/* After an error, or a deadly signal, they go on as they did before. */
	for (unsigned int i = 0; i < dev->nr_queues; i++)
		vblk_queue_replug(dev->queues[i]);
	return err;
}

static long vblk_ioctl_stats(struct vblk_dev *dev, void __user *arg)
{
	struct ringdisk_vblk_stats stats;
	struct vblk_queue *q;

	if (get_user(stats.queue, (u32 __user *)arg))
		return -EFAULT;
	q = vblk_ioctl_queue(dev, stats.queue);
	if (!q)
		return -ENOBUFS;
	vblk_stats_read(q, &stats);
	return copy_to_user(arg, &stats, sizeof(stats)) ? -EFAULT : 0;
}

/*
 * Whether the core's call may wait for workers: not for those of idle queues, so that a queue is
 * made ready and started while others are busy.
 */
static bool vblk_core_waits(struct vblk_dev *dev, unsigned int cmd, void __user *arg)
{
	struct vblk_queue *q;
	u32 index;

	switch (cmd) {
	case VHOST_SET_VRING_NUM:
	case VHOST_SET_VRING_BASE:
	case VHOST_GET_VRING_BASE:
	case VHOST_SET_VRING_ADDR:
	case VHOST_SET_VRING_KICK:
	case VHOST_SET_VRING_CALL:
	case VHOST_SET_VRING_ERR:
		break;
	default:
		return true;
	}
	if (get_user(index, (u32 __user *)arg))
		return false;
	q = vblk_ioctl_queue(dev, index);
	if (!q)
		return false;
	/* A kick that there was before is followed by a flush of all workers. */
	return READ_ONCE(q->state) != RINGDISK_VBLK_IDLE ||
	       (cmd == VHOST_SET_VRING_KICK && q->vq.kick);
}

/* What the core knows. */
static long vblk_ioctl_core(struct vblk_dev *dev, unsigned int cmd, void __user *arg)
{
	struct vblk_queue *q;
	u32 index;
	long err;

	switch (cmd) {
#ifdef VHOST_SET_FORK_FROM_OWNER
	case VHOST_SET_FORK_FROM_OWNER: {
		u8 is_fork;

		/* Workers are threads of the owner, with his rights, and die with him. */
		if (get_user(is_fork, (u8 __user *)arg))
			return -EFAULT;
		if (is_fork != 1)
			return -EOPNOTSUPP;
		break;
	}
#endif
	case VHOST_RESET_OWNER:
	case VHOST_SET_BACKEND_FEATURES:
	case VHOST_GET_BACKEND_FEATURES:
	/* F_LOG_ALL is not offered: rings that are to be logged go back to the daemon. */
	case VHOST_SET_LOG_BASE:
	case VHOST_SET_LOG_FD:
		return -EOPNOTSUPP;
	case VHOST_SET_VRING_NUM:
	case VHOST_SET_VRING_BASE:
	case VHOST_GET_VRING_BASE:
	case VHOST_SET_VRING_ADDR:
		/*
		 * A clear answer; nothing relies on it. The core reads the index once more, and a
		 * caller that changed it meanwhile meets the core's own checks: a queue has a
		 * backend until it is idle (queue.c).
		 */
		if (get_user(index, (u32 __user *)arg))
			return -EFAULT;
		q = vblk_ioctl_queue(dev, index);
		if (!q)
			return -ENOBUFS;
		if (READ_ONCE(q->state) != RINGDISK_VBLK_IDLE)
			return -EBUSY;
		break;
	}
	if (vblk_core_waits(dev, cmd, arg)) {
		err = vblk_wait_workers(dev);
		if (err)
			return err;
	}
	if (cmd == VHOST_SET_OWNER)
		return vblk_charge_owner(dev);
	err = vhost_dev_ioctl(&dev->vhost, cmd, arg);
	if (err == -ENOIOCTLCMD)
		err = vhost_worker_ioctl(&dev->vhost, cmd, arg);
	if (err == -ENOIOCTLCMD)
		err = vhost_vring_ioctl(&dev->vhost, cmd, arg);
	return err == -ENOIOCTLCMD ? -ENOTTY : err;
}

static long vblk_ioctl_locked(struct vblk_dev *dev, unsigned int cmd, void __user *arg)
{
	long err;

	switch (cmd) {
	case VHOST_SET_FEATURES:
	case RINGDISK_VBLK_SET_DISK:
	case RINGDISK_VBLK_START:
	case RINGDISK_VBLK_STOP:
	case RINGDISK_VBLK_SET_CACHE:
		err = vhost_dev_check_owner(&dev->vhost);
		if (err)
			return err;
		break;
	}
	switch (cmd) {
	case VHOST_SET_FEATURES:
		return vblk_ioctl_features(dev, arg);
	case RINGDISK_VBLK_SET_DISK:
		return vblk_ioctl_disk(dev, arg);
	case RINGDISK_VBLK_START:
		return vblk_ioctl_start(dev, arg);
	case RINGDISK_VBLK_STOP:
		return vblk_ioctl_stop(dev, arg);
	case RINGDISK_VBLK_SET_CACHE:
		return vblk_ioctl_cache(dev, arg);
	default:
		return vblk_ioctl_core(dev, cmd, arg);
	}
}

long vblk_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct vblk_dev *dev = file->private_data;
	void __user *argp = (void __user *)arg;
	u64 features = VBLK_FEATURES;
	long err;

	switch (cmd) {
	case RINGDISK_VBLK_INFO:
		return vblk_ioctl_info(argp);
	case RINGDISK_VBLK_SETUP:
		return vblk_ioctl_setup(dev, argp);
	case VHOST_GET_FEATURES:
		return copy_to_user(argp, &features, sizeof(features)) ? -EFAULT : 0;
	}
	/* With the number come the queues (vblk_dev_setup). */
	if (!smp_load_acquire(&dev->nr_queues))
		return -EINVAL;
	/* Queues stay. Nothing that waits for the disk is waited for. */
	if (cmd == RINGDISK_VBLK_STATS)
		return vblk_ioctl_stats(dev, argp);
	if (mutex_lock_killable(&dev->vhost.mutex))
		return -EINTR;
	err = vblk_ioctl_locked(dev, cmd, argp);
	mutex_unlock(&dev->vhost.mutex);
	return err;
}
