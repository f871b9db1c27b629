/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A guest that is none: memory, split rings and requests of a virtio-blk driver, on /dev/vhost-blk
 * itself. For tests of the module; no daemon takes part.
 *
 * Every call ends the program with a message when something is not as it must be.
 */
#ifndef GUEST_H
#define GUEST_H

#include <linux/vhost.h>
#include <linux/virtio_blk.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../../kernel/vhost-blk/ringdisk_vhost_blk.h"

/* Address of the guest where its memory begins: not 0, and not ours. */
#define GUEST_BASE 0x40000000ull
#define MEMORY_BYTES (96u << 20)
#define QUEUES_MAX 8
#define RING_SIZE 256
#define ENTRIES_MAX 64

#define BLK_FEATURES                                                                               \
	(1ull << VIRTIO_F_VERSION_1 | 1ull << VIRTIO_RING_F_INDIRECT_DESC |                        \
		1ull << VIRTIO_RING_F_EVENT_IDX | 1ull << VIRTIO_BLK_F_FLUSH |                     \
		1ull << VIRTIO_BLK_F_CONFIG_WCE | 1ull << VIRTIO_BLK_F_MQ |                        \
		1ull << VIRTIO_BLK_F_DISCARD | 1ull << VIRTIO_BLK_F_WRITE_ZEROES)

/* Headers of Debian 12 are older than workers. */
#ifndef VHOST_NEW_WORKER
struct vhost_worker_state { unsigned int worker_id; };
struct vhost_vring_worker { unsigned int index, worker_id; };
#define VHOST_NEW_WORKER _IOR(VHOST_VIRTIO, 0x8, struct vhost_worker_state)
#define VHOST_ATTACH_VRING_WORKER _IOW(VHOST_VIRTIO, 0x15, struct vhost_vring_worker)
#define VHOST_GET_VRING_WORKER _IOWR(VHOST_VIRTIO, 0x16, struct vhost_vring_worker)
#endif

void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
#define CHECK(condition, ...) do { if (!(condition)) fail(__VA_ARGS__); } while (0)

void nap_ms(unsigned ms);

/* A piece of a request, at an address of ours. */
struct segment { void *at; uint32_t len; bool device_writes; };

struct ring {
	unsigned index;
	struct vring_desc *desc;
	struct vring_avail *avail;
	struct vring_used *used;
	struct vring_desc *tables; /* ENTRIES_MAX for each descriptor */
	int kick, call, error;
	uint16_t free_head, avail_next, shown, used_next;
	unsigned free;
	uint16_t length[RING_SIZE]; /* descriptors of the chain that begins here */
	uint64_t kicks, calls;
};

struct guest {
	int fd, memory_fd;
	uint8_t *memory;
	size_t taken;
	uint64_t features;
	unsigned queues;
	struct ring rings[QUEUES_MAX];
	/* What threads that drive rings have cost, once they have ended. */
	uint64_t own_ns, own_switches;
};

/* Which disk, and how. */
struct disk {
	const char *path;
	uint32_t engine, flags, block;
	uint64_t capacity; /* 0: all of it */
};

extern const char *device_path;

/* Memory and rings; not the device. The memory is shared with processes that are forked. */
void guest_new(struct guest *guest, unsigned queues);
/* The same with memory of another kind: MEMORY_BYTES of a file, or -1 with MAP_ANONYMOUS. */
void guest_memory(struct guest *guest, unsigned queues, int fd, int flags);
/* Opens the device and says all that it has to know, for a ring too; starts nothing. */
void guest_open(struct guest *guest, uint64_t features);
/* The same with the device that guest->fd is. */
void guest_set_up(struct guest *guest, uint64_t features);
void guest_disk(struct guest *guest, const struct disk *disk);
/* Opens the disk; its size is stored where capacity is 0. */
int disk_open(struct disk *disk);
int try_disk(struct guest *guest, const struct disk *disk, int fd);
/* An empty ring, whatever was in it. The device must not have it. */
void ring_reset(struct ring *ring);
void ring_attach(struct guest *guest, unsigned index);
/* A worker of its own for each ring. */
void guest_workers(struct guest *guest);
void guest_start(struct guest *guest);
void guest_stop(struct guest *guest);
void guest_close(struct guest *guest);
/* All at once: open, disk, rings, workers, start. */
void guest_run(struct guest *guest, struct disk *disk, unsigned queues);
/* All but the memory. */
void guest_run_on(struct guest *guest, struct disk *disk);
struct ringdisk_vblk_stats stats_of(struct guest *guest, unsigned index);
int device_ioctl(struct guest *guest, unsigned long request, const void *argument);

void *take(struct guest *guest, size_t bytes, size_t align);
uint64_t guest_address(const struct guest *guest, const void *at);

/* Adds a chain, in a table when there is to be one. Returns its head, or -1: the ring is full. */
int ring_add(struct guest *guest, struct ring *ring, const struct segment *segments, unsigned count,
	bool indirect);
void ring_publish(struct ring *ring);
/* A kick, wanted or not. */
void eventfd_kick(struct ring *ring);
/* The head of a used chain, or -1. */
int ring_pop(struct ring *ring, uint32_t *written);
/* Waits for one, on the eventfd. */
int ring_wait(struct ring *ring, uint32_t *written, int limit_ms);
bool ring_reported_error(struct ring *ring, int limit_ms);

/* One request, waited for. Returns its status. */
int request(struct guest *guest, struct ring *ring, uint32_t type, uint64_t sector,
	const struct segment *data, unsigned count, bool indirect);
int transfer(struct guest *guest, struct ring *ring, bool write, uint64_t sector, void *at,
	uint32_t len);

#endif
