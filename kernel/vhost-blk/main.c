// SPDX-License-Identifier: GPL-2.0-only
/*
 * The device /dev/vhost-blk: open, set-up, release.
 *
 * Each open file is a device of its own. It holds the memory of its owner (vhost takes a reference
 * to the mm), so what was popped from a ring can be finished after the owner was killed: release
 * waits for that, and then nothing is left.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>

#include "vblk.h"

static int vblk_open(struct inode *inode, struct file *file)
{
	struct vblk_dev *dev;

	dev = kvzalloc_obj(*dev, GFP_KERNEL_ACCOUNT);
	if (!dev)
		return -ENOMEM;
	mutex_init(&dev->setup);
	dev->write_cache = true;
	file->private_data = dev;
	return 0;
}

static void vblk_free_queues(struct vblk_queue **queues, struct vhost_virtqueue **vqs,
			     unsigned int nr)
{
	for (unsigned int i = 0; queues && i < nr; i++)
		vblk_queue_free(queues[i]);
	kfree(queues);
	kfree(vqs);
}

/* Makes the queues. Under dev->setup. */
int vblk_dev_setup(struct vblk_dev *dev, unsigned int nr)
{
	struct vblk_queue **queues;
	struct vhost_virtqueue **vqs;

	if (dev->nr_queues)
		return -EBUSY;
	if (!nr || nr > VBLK_QUEUES_MAX)
		return -EINVAL;
	queues = kcalloc(nr, sizeof(*queues), GFP_KERNEL_ACCOUNT);
	vqs = kcalloc(nr, sizeof(*vqs), GFP_KERNEL_ACCOUNT);
	if (!queues || !vqs)
		goto no_memory;
	for (unsigned int i = 0; i < nr; i++) {
		queues[i] = vblk_queue_new(dev);
		if (!queues[i])
			goto no_memory;
		vqs[i] = &queues[i]->vq;
	}
	dev->queues = queues;
	dev->vqs = vqs;
	vblk_slow_open(dev);
	/*
	 * No byte weight: the length of a request says little about the work that it is for the
	 * worker.
	 */
	vhost_dev_init(&dev->vhost, vqs, nr, UIO_MAXIOV, VBLK_WEIGHT, 0, true, NULL);
	/* Sees the queues who sees the number. */
	smp_store_release(&dev->nr_queues, nr);
	vblk_stats_add(dev);
	return 0;

no_memory:
	vblk_free_queues(queues, vqs, nr);
	return -ENOMEM;
}

static int vblk_release(struct inode *inode, struct file *file)
{
	struct vblk_dev *dev = file->private_data;
	unsigned int nr = dev->nr_queues;

	if (nr) {
		WRITE_ONCE(dev->closing, true);
		/* Before all else: its readers look at the queues. */
		vblk_stats_remove(dev);
		for (unsigned int i = 0; i < nr; i++)
			vblk_queue_unplug(dev->queues[i], false);
		/* No kick comes any more. */
		vhost_dev_stop(&dev->vhost);
		for (unsigned int i = 0; i < nr; i++)
			vblk_queue_drain(dev->queues[i], false);
		/*
		 * Who announced the last request may still be about to wake the worker
		 * (vblk_req_done).
		 */
		synchronize_rcu();
		for (unsigned int i = 0; i < nr; i++)
			vblk_queue_settle(dev->queues[i]);
		vhost_dev_flush(&dev->vhost);
		vhost_dev_cleanup(&dev->vhost);
		vblk_free_queues(dev->queues, dev->vqs, nr);
		vblk_disk_close(dev->disk);
	}
	mutex_destroy(&dev->setup);
	kvfree(dev);
	return 0;
}

static const struct file_operations vblk_fops = {
	.owner = THIS_MODULE,
	.open = vblk_open,
	.release = vblk_release,
	.unlocked_ioctl = vblk_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

static struct miscdevice vblk_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "vhost-blk",
	.fops = &vblk_fops,
	/* The administrator gives it to the daemon's group; nobody has it by default. */
	.mode = 0600,
};

static int __init vblk_init(void)
{
	int err;

	err = vblk_bio_init();
	if (err)
		return err;
	err = vblk_complete_init();
	if (err)
		goto no_complete;
	err = vblk_slow_init();
	if (err)
		goto no_slow;
	vblk_stats_init();
	err = misc_register(&vblk_misc);
	if (err)
		goto no_misc;
	return 0;

no_misc:
	vblk_stats_exit();
	vblk_slow_exit();
no_slow:
	vblk_complete_exit();
no_complete:
	vblk_bio_exit();
	return err;
}

static void __exit vblk_exit(void)
{
	misc_deregister(&vblk_misc);
	vblk_stats_exit();
	vblk_slow_exit();
	vblk_complete_exit();
	vblk_bio_exit();
}

module_init(vblk_init);
module_exit(vblk_exit);

MODULE_LICENSE("GPL");
MODULE_AUTHOR("the ringdisk authors");
MODULE_DESCRIPTION("virtio-blk rings of ringdisk, served in the kernel");
MODULE_VERSION("1");
