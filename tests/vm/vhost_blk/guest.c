/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#define _GNU_SOURCE
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

const char *device_path = "/dev/vhost-blk";

void fail(const char *format, ...)
{
	va_list words;

	va_start(words, format);
	fprintf(stderr, "FAILED: ");
	vfprintf(stderr, format, words);
	fprintf(stderr, " (errno now %d: %s)\n", errno, strerror(errno));
	va_end(words);
	fflush(NULL);
	_exit(1);
}

void nap_ms(unsigned ms)
{
	nanosleep(&(struct timespec){ ms / 1000, ms % 1000 * 1000000l }, NULL);
}

int device_ioctl(struct guest *guest, unsigned long request, const void *argument)
{
	return ioctl(guest->fd, request, argument);
}

static void must(struct guest *guest, unsigned long request, const void *argument, const char *what)
{
	CHECK(!device_ioctl(guest, request, argument), "%s", what);
}

void *take(struct guest *guest, size_t bytes, size_t align)
{
	guest->taken = (guest->taken + align - 1) / align * align;
	CHECK(guest->taken + bytes <= MEMORY_BYTES, "no memory of the guest is left");
	guest->taken += bytes;
	return guest->memory + guest->taken - bytes;
}

uint64_t guest_address(const struct guest *guest, const void *at)
{
	return (const uint8_t *)at - guest->memory + GUEST_BASE;
}

void ring_reset(struct ring *ring)
{
	memset(ring->avail, 0, 6 + 2 * RING_SIZE);
	memset(ring->used, 0, 6 + 8 * RING_SIZE);
	memset(ring->length, 0, sizeof(ring->length));
	for (unsigned i = 0; i < RING_SIZE; i++)
		ring->desc[i].next = i + 1;
	ring->free = RING_SIZE;
	ring->free_head = ring->avail_next = ring->shown = ring->used_next = 0;
}

static void ring_new(struct guest *guest, unsigned index)
{
	struct ring *ring = &guest->rings[index];

	*ring = (struct ring){ .index = index };
	ring->desc = take(guest, RING_SIZE * sizeof(*ring->desc), 16);
	ring->avail = take(guest, 6 + 2 * RING_SIZE, 64);
	ring->used = take(guest, 6 + 8 * RING_SIZE, 64);
	ring->tables = take(guest, RING_SIZE * ENTRIES_MAX * sizeof(*ring->tables), 16);
	ring_reset(ring);
	ring->kick = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	ring->call = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	ring->error = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	CHECK(ring->kick >= 0 && ring->call >= 0 && ring->error >= 0, "eventfd");
}

void guest_new(struct guest *guest, unsigned queues)
{
	int fd = memfd_create("guest", MFD_CLOEXEC);

	CHECK(fd >= 0 && !ftruncate(fd, MEMORY_BYTES), "memfd");
	guest_memory(guest, queues, fd, MAP_SHARED);
}

void guest_memory(struct guest *guest, unsigned queues, int fd, int flags)
{
	*guest = (struct guest){ .fd = -1, .queues = queues, .memory_fd = fd };
	guest->memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, flags, fd, 0);
	CHECK(guest->memory != MAP_FAILED, "mmap");
	for (unsigned i = 0; i < queues; i++)
		ring_new(guest, i);
}

void guest_set_up(struct guest *guest, uint64_t features)
{
	struct { struct vhost_memory head; struct vhost_memory_region region;
	} table = {
		.head.nregions = 1,
		.region = { .guest_phys_addr = GUEST_BASE,
			.memory_size = MEMORY_BYTES,
			.userspace_addr = (uintptr_t)guest->memory },
	};
	struct ringdisk_vblk_setup setup = { .version = RINGDISK_VBLK_VERSION, .queues = guest->queues };

	guest->features = features;
	must(guest, RINGDISK_VBLK_SETUP, &setup, "SETUP");
	must(guest, VHOST_SET_OWNER, NULL, "SET_OWNER");
	must(guest, VHOST_SET_FEATURES, &features, "SET_FEATURES");
	must(guest, VHOST_SET_MEM_TABLE, &table, "SET_MEM_TABLE");
}

void guest_open(struct guest *guest, uint64_t features)
{
	guest->fd = open(device_path, O_RDWR | O_CLOEXEC);
	CHECK(guest->fd >= 0, "open %s", device_path);
	guest_set_up(guest, features);
}

int disk_open(struct disk *disk)
{
	bool read_only = disk->flags & RINGDISK_VBLK_DISK_RO;
	int fd = open(disk->path, (read_only ? O_RDONLY : O_RDWR) | O_DIRECT | O_CLOEXEC);

	CHECK(fd >= 0, "open %s", disk->path);
	if (!disk->capacity)
		disk->capacity = lseek(fd, 0, SEEK_END);
	if (!disk->block)
		disk->block = 512;
	return fd;
}

int try_disk(struct guest *guest, const struct disk *disk, int fd)
{
	struct ringdisk_vblk_disk wanted = {
		.fd = fd,
		.flags = disk->flags,
		.engine = disk->engine,
		.block_bytes = disk->block,
		.memory_align = 512,
		.ranges_max = 16,
		.range_sectors_max = 1 << 21,
		.capacity = disk->capacity,
		.id = "a disk of 20 letters",
	};

	return device_ioctl(guest, RINGDISK_VBLK_SET_DISK, &wanted);
}

void guest_disk(struct guest *guest, const struct disk *disk)
{
	struct disk opened = *disk;
	int fd = disk_open(&opened);

	CHECK(!try_disk(guest, &opened, fd), "SET_DISK %s", disk->path);
	close(fd);
}

void ring_attach(struct guest *guest, unsigned index)
{
	struct ring *ring = &guest->rings[index];
	struct vhost_vring_state number = { index, RING_SIZE }, base = { index, ring->used_next };
	struct vhost_vring_addr address = {
		.index = index,
		.desc_user_addr = (uintptr_t)ring->desc,
		.avail_user_addr = (uintptr_t)ring->avail,
		.used_user_addr = (uintptr_t)ring->used,
	};
	struct vhost_vring_file call = { index, ring->call }, error = { index, ring->error };

	must(guest, VHOST_SET_VRING_NUM, &number, "SET_VRING_NUM");
	must(guest, VHOST_SET_VRING_BASE, &base, "SET_VRING_BASE");
	must(guest, VHOST_SET_VRING_ADDR, &address, "SET_VRING_ADDR");
	must(guest, VHOST_SET_VRING_CALL, &call, "SET_VRING_CALL");
	must(guest, VHOST_SET_VRING_ERR, &error, "SET_VRING_ERR");
}

void guest_workers(struct guest *guest)
{
	for (unsigned i = 0; i < guest->queues; i++) {
		struct vhost_worker_state worker = { 0 };
		struct vhost_vring_worker attach = { .index = i };

		must(guest, VHOST_NEW_WORKER, &worker, "NEW_WORKER");
		attach.worker_id = worker.worker_id;
		must(guest, VHOST_ATTACH_VRING_WORKER, &attach, "ATTACH_VRING_WORKER");
	}
}

void guest_start(struct guest *guest)
{
	for (uint32_t i = 0; i < guest->queues; i++) {
		struct vhost_vring_file kick = { i, guest->rings[i].kick };

		must(guest, VHOST_SET_VRING_KICK, &kick, "SET_VRING_KICK");
		must(guest, RINGDISK_VBLK_START, &i, "START");
	}
}

void guest_stop(struct guest *guest)
{
	uint32_t all = RINGDISK_VBLK_ALL;

	must(guest, RINGDISK_VBLK_STOP, &all, "STOP");
	for (uint32_t i = 0; i < guest->queues; i++) {
		struct ring *ring = &guest->rings[i];
		struct vhost_vring_file kick = { i, -1 };
		struct vhost_vring_state base = { i, 0 };

		must(guest, VHOST_SET_VRING_KICK, &kick, "SET_VRING_KICK -1");
		must(guest, VHOST_GET_VRING_BASE, &base, "GET_VRING_BASE");
		/* A split ring has no other state: what was taken was used. */
		CHECK(base.num == __atomic_load_n(&ring->used->idx, __ATOMIC_ACQUIRE),
			"queue %u: base %u, used %u", i, base.num, ring->used->idx);
	}
}

void guest_close(struct guest *guest)
{
	CHECK(!close(guest->fd), "close");
	guest->fd = -1;
}

void guest_run(struct guest *guest, struct disk *disk, unsigned queues)
{
	guest_new(guest, queues);
	guest_run_on(guest, disk);
}

void guest_run_on(struct guest *guest, struct disk *disk)
{
	guest_open(guest, BLK_FEATURES);
	close(disk_open(disk));
	guest_disk(guest, disk);
	for (unsigned i = 0; i < guest->queues; i++)
		ring_attach(guest, i);
	guest_workers(guest);
	guest_start(guest);
}

struct ringdisk_vblk_stats stats_of(struct guest *guest, unsigned index)
{
	struct ringdisk_vblk_stats stats = { .queue = index };

	must(guest, RINGDISK_VBLK_STATS, &stats, "STATS");
	return stats;
}

static void write_desc(const struct guest *guest, struct vring_desc *desc,
	const struct segment *segment, bool more, uint16_t next)
{
	desc->addr = guest_address(guest, segment->at);
	desc->len = segment->len;
	desc->flags = (segment->device_writes ? VRING_DESC_F_WRITE : 0) | (more ? VRING_DESC_F_NEXT : 0);
	desc->next = next;
}

int ring_add(struct guest *guest, struct ring *ring, const struct segment *segments, unsigned count,
	bool indirect)
{
	uint16_t head = ring->free_head, at = head;

	CHECK(count && count <= ENTRIES_MAX, "%u segments", count);
	if (ring->free < (indirect ? 1 : count))
		return -1;
	if (indirect) {
		struct vring_desc *table = ring->tables + head * ENTRIES_MAX;

		for (unsigned i = 0; i < count; i++)
			write_desc(guest, &table[i], &segments[i], i + 1 < count, i + 1);
		at = ring->desc[head].next;
		ring->desc[head] = (struct vring_desc){ .addr = guest_address(guest, table),
			.len = count * sizeof(*table),
			.flags = VRING_DESC_F_INDIRECT,
			.next = at };
		count = 1;
	} else {
		for (unsigned i = 0; i < count; i++) {
			uint16_t next = ring->desc[at].next;

			write_desc(guest, &ring->desc[at], &segments[i], i + 1 < count, next);
			at = next;
		}
	}
	ring->free_head = at;
	ring->free -= count;
	ring->length[head] = count;
	ring->avail->ring[ring->avail_next++ % RING_SIZE] = head;
	return head;
}

void ring_publish(struct ring *ring)
{
	uint16_t old = ring->shown, event;

	ring->shown = ring->avail_next;
	__atomic_store_n(&ring->avail->idx, ring->shown, __ATOMIC_RELEASE);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	event = __atomic_load_n((uint16_t *)&ring->used->ring[RING_SIZE], __ATOMIC_RELAXED);
	if (!vring_need_event(event, ring->shown, old))
		return;
	ring->kicks++;
	CHECK(!eventfd_write(ring->kick, 1), "kick");
}

void eventfd_kick(struct ring *ring)
{
	CHECK(!eventfd_write(ring->kick, 1), "kick");
}

int ring_pop(struct ring *ring, uint32_t *written)
{
	struct vring_used_elem *used = &ring->used->ring[ring->used_next % RING_SIZE];
	uint16_t head, last;

	if (__atomic_load_n(&ring->used->idx, __ATOMIC_ACQUIRE) == ring->used_next)
		return -1;
	CHECK(used->id < RING_SIZE && ring->length[used->id],
		"chain %u was used, which is not in flight", used->id);
	head = used->id;
	if (written)
		*written = used->len;
	last = head;
	for (unsigned i = 1; i < ring->length[head]; i++)
		last = ring->desc[last].next;
	ring->desc[last].next = ring->free_head;
	ring->free_head = head;
	ring->free += ring->length[head];
	ring->length[head] = 0;
	ring->used_next++;
	return head;
}

int ring_wait(struct ring *ring, uint32_t *written, int limit_ms)
{
	struct pollfd call = { .fd = ring->call, .events = POLLIN };
	eventfd_t count;

	for (;;) {
		int head = ring_pop(ring, written);

		if (head >= 0)
			return head;
		/* A call at the next one. */
		__atomic_store_n(&ring->avail->ring[RING_SIZE], ring->used_next, __ATOMIC_RELEASE);
		__atomic_thread_fence(__ATOMIC_SEQ_CST);
		head = ring_pop(ring, written);
		if (head >= 0)
			return head;
		CHECK(poll(&call, 1, limit_ms) > 0,
			"queue %u: nothing was used within %d ms (in flight: %u descriptors)",
			ring->index, limit_ms, RING_SIZE - ring->free);
		if (!eventfd_read(ring->call, &count))
			ring->calls += count;
	}
}

bool ring_reported_error(struct ring *ring, int limit_ms)
{
	struct pollfd error = { .fd = ring->error, .events = POLLIN };
	eventfd_t count;

	return poll(&error, 1, limit_ms) > 0 && !eventfd_read(ring->error, &count);
}

int request(struct guest *guest, struct ring *ring, uint32_t type, uint64_t sector,
	const struct segment *data, unsigned count, bool indirect)
{
	static __thread struct { struct virtio_blk_outhdr header; uint8_t status; } *part;
	static __thread struct guest *part_of;
	struct segment segments[ENTRIES_MAX];
	uint32_t written;
	int head;

	if (part_of != guest) {
		part = take(guest, sizeof(*part), 16);
		part_of = guest;
	}
	part->header = (struct virtio_blk_outhdr){ .type = type, .sector = sector };
	part->status = 0xff;
	CHECK(count + 2 <= ENTRIES_MAX, "too many segments");
	segments[0] = (struct segment){ &part->header, sizeof(part->header), false };
	memcpy(segments + 1, data, count * sizeof(*data));
	segments[count + 1] = (struct segment){ &part->status, 1, true };
	head = ring_add(guest, ring, segments, count + 2, indirect);
	CHECK(head >= 0, "the ring is full");
	ring_publish(ring);
	CHECK(ring_wait(ring, &written, 60000) == head, "another chain was used");
	return part->status;
}

int transfer(
	struct guest *guest, struct ring *ring, bool write, uint64_t sector, void *at, uint32_t len)
{
	struct segment data = { at, len, !write };

	return request(guest, ring, write ? VIRTIO_BLK_T_OUT : VIRTIO_BLK_T_IN, sector, &data, 1, false);
}
