// SPDX-License-Identifier: GPL-2.0-only
/*
 * Who pays: for what kworkers do, and for the core's tables.
 *
 * Workers are threads of the owner, so whatever they do counts for his cgroup. Kworkers are of no
 * cgroup: their I/O and memory are charged to the one in which the owner was when he handed the
 * disk over. Their CPU time cannot be; so few of them work at a time (slow.c).
 *
 * What the module allocates for a device is charged to who calls (GFP_KERNEL_ACCOUNT). The core
 * does not do that with its tables, 42 KiB for each queue, so they are replaced.
 */
#include <linux/cgroup.h>
#include <linux/kthread.h>
#include <linux/memcontrol.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "vblk.h"

/* By the owner. */
void vblk_charge_open(struct vblk_disk *disk)
{
#ifdef CONFIG_BLK_CGROUP
	disk->blkcg = task_get_css(current, io_cgrp_id);
#endif
	disk->memcg = get_mem_cgroup_from_mm(current->mm);
}

void vblk_charge_close(struct vblk_disk *disk)
{
#ifdef CONFIG_BLK_CGROUP
	css_put(disk->blkcg);
#endif
	mem_cgroup_put(disk->memcg);
}

/* On a kworker, around what it does for a disk. Gives what vblk_charge_end wants. */
struct mem_cgroup *vblk_charge_begin(const struct vblk_disk *disk)
{
	kthread_associate_blkcg(disk->blkcg);
	return set_active_memcg(disk->memcg);
}

void vblk_charge_end(struct mem_cgroup *before)
{
	set_active_memcg(before);
	kthread_associate_blkcg(NULL);
}

/* Those of a queue (vhost_dev_alloc_iovecs). The core frees them, by kfree. */
struct vblk_tables {
	struct iovec *indirect;
	struct vring_used_elem *heads;
#ifdef VBLK_IN_ORDER
	u16 *nheads;
#endif
};

static bool vblk_tables_alloc(struct vblk_tables *tables)
{
	tables->indirect = kmalloc_array(UIO_MAXIOV, sizeof(*tables->indirect), GFP_KERNEL_ACCOUNT);
	tables->heads = kmalloc_array(UIO_MAXIOV, sizeof(*tables->heads), GFP_KERNEL_ACCOUNT);
#ifdef VBLK_IN_ORDER
	tables->nheads = kmalloc_array(UIO_MAXIOV, sizeof(*tables->nheads), GFP_KERNEL_ACCOUNT);
	if (!tables->nheads)
		return false;
#endif
	return tables->indirect && tables->heads;
}

static void vblk_tables_free(struct vblk_tables *tables)
{
	kfree(tables->indirect);
	kfree(tables->heads);
#ifdef VBLK_IN_ORDER
	kfree(tables->nheads);
#endif
}

/* Gives ours to the core and takes its own. No ring has been started. */
static void vblk_tables_swap(struct vhost_virtqueue *vq, struct vblk_tables *tables)
{
	mutex_lock(&vq->mutex);
	swap(vq->indirect, tables->indirect);
	swap(vq->heads, tables->heads);
#ifdef VBLK_IN_ORDER
	swap(vq->nheads, tables->nheads);
#endif
	/* For migration, which is not offered. */
	kfree(vq->log);
	vq->log = NULL;
	mutex_unlock(&vq->mutex);
}

/* VHOST_SET_OWNER. Under the device's mutex. */
long vblk_charge_owner(struct vblk_dev *dev)
{
	struct vblk_tables *tables;
	long err = -ENOMEM;

	tables = kcalloc(dev->nr_queues, sizeof(*tables), GFP_KERNEL_ACCOUNT);
	if (!tables)
		return -ENOMEM;
	for (unsigned int i = 0; i < dev->nr_queues; i++)
		if (!vblk_tables_alloc(&tables[i]))
			goto free;
	err = vhost_dev_ioctl(&dev->vhost, VHOST_SET_OWNER, NULL);
	if (err)
		goto free;
	for (unsigned int i = 0; i < dev->nr_queues; i++)
		vblk_tables_swap(dev->vqs[i], &tables[i]);
free:
	for (unsigned int i = 0; i < dev->nr_queues; i++)
		vblk_tables_free(&tables[i]);
	kfree(tables);
	return err;
}
