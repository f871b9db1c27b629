// SPDX-License-Identifier: GPL-2.0-only
/*
 * Counters: by ioctl for the daemon, and in debugfs (vhost_blk/devices, one file for all devices:
 * what a device costs is its opener's) for people.
 *
 * Workers count under vq->mutex, so nothing here costs an atomic operation. Who reads does not take
 * it: a worker holds it for as long as the disk makes it wait.
 */
#include <linux/debugfs.h>
#include <linux/mutex.h>
#include <linux/sched.h>
#include <linux/seq_file.h>

#include "vblk.h"

static struct dentry *vblk_debugfs;
static LIST_HEAD(vblk_devices);
/* Of the list. A reader has it for as long as it writes the lines of a few devices. */
static DEFINE_MUTEX(vblk_devices_lock);
static unsigned int vblk_number;

static const struct {
	const char *name;
	size_t at;
} vblk_counters[] = {
#define COUNTER(field) { #field, offsetof(struct ringdisk_vblk_stats, field) }
	COUNTER(reads), COUNTER(writes), COUNTER(flushes), COUNTER(discards),
	COUNTER(write_zeroes), COUNTER(get_ids), COUNTER(read_bytes), COUNTER(write_bytes),
	COUNTER(errors), COUNTER(unsupported), COUNTER(rounds), COUNTER(batches),
	COUNTER(bounced), COUNTER(bounce_waits), COUNTER(bios), COUNTER(kiocbs),
	COUNTER(starved), COUNTER(orphans), COUNTER(broken),
#undef COUNTER
};

/* stats->queue is kept. Each counter is whole, and they may be of different moments. */
void vblk_stats_read(struct vblk_queue *q, struct ringdisk_vblk_stats *stats)
{
	const u64 *from = (const u64 *)&q->stats;
	u32 queue = stats->queue;

	BUILD_BUG_ON(sizeof(*stats) % sizeof(u64));
	for (size_t i = 0; i < sizeof(*stats) / sizeof(u64); i++)
		((u64 *)stats)[i] = READ_ONCE(from[i]);
	stats->queue = queue;
	stats->state = READ_ONCE(q->state);
	stats->in_flight = atomic_read(&q->in_flight);
}

static void *vblk_stats_start(struct seq_file *file, loff_t *pos)
{
	mutex_lock(&vblk_devices_lock);
	return seq_list_start(&vblk_devices, *pos);
}

static void *vblk_stats_next(struct seq_file *file, void *at, loff_t *pos)
{
	return seq_list_next(at, &vblk_devices, pos);
}

static void vblk_stats_stop(struct seq_file *file, void *at)
{
	mutex_unlock(&vblk_devices_lock);
}

/* A line for each queue. PID-NUMBER: a process may have several devices. */
static int vblk_stats_show(struct seq_file *file, void *at)
{
	struct vblk_dev *dev = list_entry(at, struct vblk_dev, listed);
	struct ringdisk_vblk_stats stats;

	for (unsigned int i = 0; i < dev->nr_queues; i++) {
		stats.queue = i;
		vblk_stats_read(dev->queues[i], &stats);
		seq_printf(file, "%d-%u queue %u state %u in_flight %u", dev->pid, dev->number, i,
			   stats.state, stats.in_flight);
		for (unsigned int c = 0; c < ARRAY_SIZE(vblk_counters); c++)
			seq_printf(file, " %s %llu", vblk_counters[c].name,
				   *(u64 *)((void *)&stats + vblk_counters[c].at));
		seq_putc(file, '\n');
	}
	return 0;
}

static const struct seq_operations vblk_stats_sops = {
	.start = vblk_stats_start,
	.next = vblk_stats_next,
	.stop = vblk_stats_stop,
	.show = vblk_stats_show,
};
DEFINE_SEQ_ATTRIBUTE(vblk_stats);

void vblk_stats_init(void)
{
	/* Without debugfs all of this does nothing. */
	vblk_debugfs = debugfs_create_dir("vhost_blk", NULL);
	debugfs_create_file("devices", 0400, vblk_debugfs, NULL, &vblk_stats_fops);
}

void vblk_stats_exit(void)
{
	debugfs_remove(vblk_debugfs);
}

void vblk_stats_add(struct vblk_dev *dev)
{
	dev->pid = task_tgid_nr(current);
	mutex_lock(&vblk_devices_lock);
	dev->number = ++vblk_number;
	list_add_tail(&dev->listed, &vblk_devices);
	mutex_unlock(&vblk_devices_lock);
}

/* Waits for readers. */
void vblk_stats_remove(struct vblk_dev *dev)
{
	mutex_lock(&vblk_devices_lock);
	list_del(&dev->listed);
	mutex_unlock(&vblk_devices_lock);
}
