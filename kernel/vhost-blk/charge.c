// SPDX-License-Identifier: GPL-2.0-only
/*
 * Who pays for what kworkers do.
 *
 * Workers are threads of the owner, so whatever they do counts for his cgroup. Kworkers are of no
 * cgroup: their I/O and memory are charged to the one in which the owner was when he handed the
 * disk over. Their CPU time cannot be; so few of them work at a time (slow.c).
 */
#include <linux/cgroup.h>
#include <linux/kthread.h>
#include <linux/memcontrol.h>
#include <linux/sched/mm.h>

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
