// SPDX-License-Identifier: GPL-2.0-only
/*
 * Counters: by ioctl for the daemon, and in debugfs (directory vhost_blk, a file for each device)
 * for people.
 *
 * Workers count under vq->mutex, so nothing here costs an atomic operation. Who reads does not take
 * it: a worker holds it for as long as the disk makes it wait.
 */
#include <linux/atomic.h>
#include <linux/debugfs.h>
#include <linux/sched.h>
#include <linux/seq_file.h>

#include "vblk.h"

static struct dentry *vblk_debugfs;
static atomic_t vblk_number = ATOMIC_INIT(0);

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

static int vblk_stats_show(struct seq_file *file, void *unused)
{
	struct vblk_dev *dev = file->private;
	struct ringdisk_vblk_stats stats;

	for (unsigned int i = 0; i < dev->nr_queues; i++) {
		stats.queue = i;
		vblk_stats_read(dev->queues[i], &stats);
		seq_printf(file, "queue %u state %u in_flight %u", i, stats.state, stats.in_flight);
		for (unsigned int c = 0; c < ARRAY_SIZE(vblk_counters); c++)
			seq_printf(file, " %s %llu", vblk_counters[c].name,
				   *(u64 *)((void *)&stats + vblk_counters[c].at));
		seq_putc(file, '\n');
	}
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(vblk_stats);

void vblk_stats_init(void)
{
	/* Without debugfs all of this does nothing. */
	vblk_debugfs = debugfs_create_dir("vhost_blk", NULL);
}

void vblk_stats_exit(void)
{
	debugfs_remove(vblk_debugfs);
}

/* PID-NUMBER: a process may have several devices. */
void vblk_stats_add(struct vblk_dev *dev)
{
	char name[32];

	snprintf(name, sizeof(name), "%d-%u", task_tgid_nr(current),
		 (unsigned int)atomic_inc_return(&vblk_number));
	dev->debugfs = debugfs_create_file(name, 0400, vblk_debugfs, dev, &vblk_stats_fops);
}

/* Waits for readers. */
void vblk_stats_remove(struct vblk_dev *dev)
{
	debugfs_remove(dev->debugfs);
}
