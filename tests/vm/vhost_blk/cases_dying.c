/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The owner of a device is killed while its worker waits for a page of the guest. What was taken
 * from the ring is answered, rightly; the rest is there for the next owner; and each request is
 * counted once.
 *
 * The kernel gets the page only from the handler of a userfaultfd, which gives none. So the worker
 * waits until the signal ends that, and whatever it did is told that the page cannot be had. When
 * the userfaultfd is closed the page is one of zeroes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"

#define UNKNOWN 99
#define LONG (2u << 20)
#define COUNT_MAX 4

/* Which page it is. */
enum page { STATUSES, USED, USED_END, DATA };

static const struct kind {
	const char *name;
	enum page page;
	/* Of the requests. */
	unsigned count;
	uint32_t type;
	uint32_t len;
	/* How far the data is from a page's beginning, and where in it the page is. */
	unsigned odd;
	uint32_t at;
	/* How many the dead owner took, and how all of them end. */
	unsigned taken;
	uint8_t status;
	/* The page is there at first, and gone when the disk is done: for disks that take their time. */
	bool later;
} kinds[] = {
	/* Answered with UNSUPP: what a page holds that was never written is 0, OK. */
	{ "the statuses", STATUSES, 4, UNKNOWN, 4096, 0, 0, 4, VIRTIO_BLK_S_UNSUPP, false },
	{ "the used ring's end, at its notification", USED_END, 4, UNKNOWN, 4096, 0, 0, 4,
		VIRTIO_BLK_S_UNSUPP, false },
	{ "the used ring, of what is refused", USED, 4, UNKNOWN, 4096, 0, 0, 4, VIRTIO_BLK_S_UNSUPP,
		false },
	{ "the used ring, at a completion", USED, 4, VIRTIO_BLK_T_IN, 4096, 0, 0, 4,
		VIRTIO_BLK_S_OK, true },
	{ "the place of an answer", DATA, 4, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_ID_BYTES, 0, 0, 0,
		VIRTIO_BLK_S_OK, false },
	{ "a page of a read", DATA, 2, VIRTIO_BLK_T_IN, 256 << 10, 0, 128 << 10, 1, VIRTIO_BLK_S_OK,
		false },
	{ "a page of a write", DATA, 2, VIRTIO_BLK_T_OUT, 256 << 10, 0, 128 << 10, 1,
		VIRTIO_BLK_S_OK, false },
	/* More than a bio has pages: the first part is on its way when the worker meets the page.
	 */
	{ "a page of a long read", DATA, 2, VIRTIO_BLK_T_IN, LONG, 0, LONG - (256 << 10), 1,
		VIRTIO_BLK_S_OK, false },
	{ "a page of a long write", DATA, 2, VIRTIO_BLK_T_OUT, LONG, 0, LONG - (256 << 10), 1,
		VIRTIO_BLK_S_OK, false },
	{ "a page of a misaligned write", DATA, 2, VIRTIO_BLK_T_OUT, 256 << 10, 1, 128 << 10, 1,
		VIRTIO_BLK_S_OK, false },
};

/* All of this is in memory that the owner and we share. */
struct dying {
	const struct kind *kind;
	struct guest guest;
	struct virtio_blk_outhdr *headers;
	uint8_t *data, *statuses, *page;
};

static int uffd_of(void *at)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register range = { .range = { (uintptr_t)at, 4096 },
		.mode = UFFDIO_REGISTER_MODE_MISSING };
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);

	CHECK(fd >= 0 && !ioctl(fd, UFFDIO_API, &api) && !ioctl(fd, UFFDIO_REGISTER, &range),
		"userfaultfd");
	return fd;
}

static void wait_fault(int uffd)
{
	struct pollfd event = { .fd = uffd, .events = POLLIN };
	struct uffd_msg message;

	CHECK(poll(&event, 1, 60000) == 1 && read(uffd, &message, sizeof(message)) == sizeof(message) &&
	      message.event == UFFD_EVENT_PAGEFAULT, "nobody waits for the page");
}

static void remove_page(uint8_t *page)
{
	CHECK(!madvise(page, 4096, MADV_REMOVE), "MADV_REMOVE");
}

static uint8_t *data_of(const struct dying *dying, unsigned i)
{
	return dying->data + i * (LONG + 4096) + dying->kind->odd;
}

static void layout(struct dying *dying, const struct kind *kind)
{
	struct guest *guest = &dying->guest;
	uint8_t *used;

	guest_new(guest, 1);
	dying->kind = kind;
	/* On two pages: what says when kicks are wanted lies at its end, and would be the first
	 * that is met. */
	used = take(guest, 8192, 4096);
	guest->rings[0].used = (struct vring_used *)(used + 4096 - 1024);
	dying->headers = take(guest, COUNT_MAX * sizeof(*dying->headers), 16);
	dying->statuses = take(guest, 4096, 4096);
	dying->data = take(guest, COUNT_MAX * (LONG + 4096), 4096);
	switch (kind->page) {
	case STATUSES: dying->page = dying->statuses; break;
	case USED: dying->page = used; break;
	case USED_END: dying->page = used + 4096; break;
	case DATA: dying->page = data_of(dying, 0) - kind->odd + kind->at; break;
	}
	if (kind->page != STATUSES)
		memset(dying->statuses, 0xff, COUNT_MAX);
}

static void add_requests(struct dying *dying)
{
	const struct kind *kind = dying->kind;
	struct ring *ring = &dying->guest.rings[0];

	for (unsigned i = 0; i < kind->count; i++) {
		bool in = kind->type == VIRTIO_BLK_T_IN || kind->type == VIRTIO_BLK_T_GET_ID;
		struct segment segments[3] = { { &dying->headers[i], 16, false },
			{ data_of(dying, i), kind->len, in }, { &dying->statuses[i], 1, true } };

		dying->headers[i] = (struct virtio_blk_outhdr){ .type = kind->type, .sector = i * (LONG / 512) };
		CHECK(ring_add(&dying->guest, ring, segments, 3, false) >= 0, "the ring is full");
	}
	/* Not ring_publish: it reads a page that may be missing. */
	ring->shown = ring->avail_next;
	__atomic_store_n(&ring->avail->idx, ring->shown, __ATOMIC_RELEASE);
	eventfd_kick(ring);
}

/* Never returns. When the worker waits it says which descriptors are the device and the
 * userfaultfd. */
static void own(struct dying *dying, struct disk *disk, int ready)
{
	struct guest *guest = &dying->guest;
	int uffd, fds[2];

	guest_open(guest, BLK_FEATURES);
	guest_disk(guest, disk);
	ring_attach(guest, 0);
	guest_start(guest);
	/* The worker looks at the ring, which is empty, once. */
	nap_ms(200);
	if (!dying->kind->later)
		remove_page(dying->page);
	uffd = uffd_of(dying->page);
	add_requests(dying);
	if (dying->kind->later) {
		while (stats_of(guest, 0).in_flight < dying->kind->count)
			nap_ms(1);
		remove_page(dying->page);
	}
	wait_fault(uffd);
	fds[0] = guest->fd;
	fds[1] = uffd;
	CHECK(write(ready, fds, sizeof(fds)) == sizeof(fds), "pipe");
	for (;;)
		pause();
}

/* A descriptor of the owner, for ourselves: what it is lives on. */
static int descriptor_of(pid_t owner, int fd)
{
	int pidfd = syscall(SYS_pidfd_open, owner, 0), copy = syscall(SYS_pidfd_getfd, pidfd, fd, 0);

	CHECK(copy >= 0, "pidfd_getfd");
	close(pidfd);
	return copy;
}

static void wait_used(const struct dying *dying, unsigned count)
{
	const struct vring_used *used = dying->guest.rings[0].used;

	for (unsigned tries = 0;
		tries < 6000 && __atomic_load_n(&used->idx, __ATOMIC_ACQUIRE) < count; tries++)
		nap_ms(10);
	CHECK(__atomic_load_n(&used->idx, __ATOMIC_ACQUIRE) == count,
		"%s: %u of %u requests were used", dying->kind->name, used->idx, count);
	for (unsigned i = 0; i < count; i++) {
		unsigned head = used->ring[i].id;

		CHECK(head % 3 == 0 && head / 3 < dying->kind->count &&
				dying->statuses[head / 3] == dying->kind->status,
			"%s: chain %u has status %u", dying->kind->name, head,
			head / 3 < COUNT_MAX ? dying->statuses[head / 3] : 0);
	}
}

/* Each request once, however often it was begun, put back or announced. */
static void check_counters(struct dying *dying, unsigned taken)
{
	struct ringdisk_vblk_stats stats = stats_of(&dying->guest, 0);
	const struct kind *kind = dying->kind;
	bool in = kind->type == VIRTIO_BLK_T_IN, out = kind->type == VIRTIO_BLK_T_OUT;

	CHECK(stats.reads == (in ? taken : 0) && stats.read_bytes == stats.reads * kind->len,
		"%s: %llu reads of %llu bytes were counted", kind->name, stats.reads,
		stats.read_bytes);
	CHECK(stats.writes == (out ? taken : 0) && stats.write_bytes == stats.writes * kind->len,
		"%s: %llu writes of %llu bytes were counted", kind->name, stats.writes,
		stats.write_bytes);
	CHECK(stats.get_ids == (kind->type == VIRTIO_BLK_T_GET_ID ? taken : 0),
		"%s: %llu get-ids were counted", kind->name, stats.get_ids);
	CHECK(!stats.errors && !stats.broken, "%s: %llu errors were counted", kind->name, stats.errors);
	CHECK(stats.unsupported == (kind->type == UNKNOWN ? taken : 0),
		"%s: %llu unknown requests were counted", kind->name, stats.unsupported);
}

/* Copies between the disk and `bytes`, at the place of request i. */
static void disk_copy(const struct disk *disk, unsigned i, void *bytes, uint32_t len, bool write)
{
	int fd = open(disk->path, (write ? O_RDWR : O_RDONLY) | O_DIRECT | O_CLOEXEC);
	ssize_t done = write ? pwrite(fd, bytes, len, (off_t)i * LONG)
			     : pread(fd, bytes, len, (off_t)i * LONG);

	CHECK(done == (ssize_t)len, "%s", disk->path);
	close(fd);
}

static void fill(uint8_t *bytes, uint32_t len, unsigned seed)
{
	for (uint32_t at = 0; at < len; at++)
		bytes[at] = at * 7 + (at >> 8) * 3 + (at >> 16) + seed + 1;
}

static void dies(const struct kind *kind, struct disk *disk, uint8_t *bytes)
{
	bool in = kind->type == VIRTIO_BLK_T_IN, out = kind->type == VIRTIO_BLK_T_OUT;
	struct dying dying;
	int ready[2], fds[2], status, uffd;
	pid_t child;

	layout(&dying, kind);
	for (unsigned i = 0; (in || out) && i < kind->count; i++) {
		fill(bytes, kind->len, 16 * (kind - kinds) + i + (out ? 8 : 0));
		disk_copy(disk, i, bytes, kind->len, true);
		if (out)
			fill(data_of(&dying, i), kind->len, 16 * (kind - kinds) + i);
	}
	CHECK(!pipe(ready), "pipe");
	child = fork();
	CHECK(child >= 0, "fork");
	if (!child)
		own(&dying, disk, ready[1]);
	close(ready[1]);
	CHECK(read(ready[0], fds, sizeof(fds)) == sizeof(fds), "%s: the owner failed", kind->name);
	close(ready[0]);
	dying.guest.fd = descriptor_of(child, fds[0]);
	uffd = descriptor_of(child, fds[1]);
	CHECK(!kill(child, SIGKILL), "kill");
	/* Time for the worker to find that it dies before the page is there. With too little of it
	 * the test passes as well. */
	nap_ms(300);
	close(uffd);
	CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "waitpid");
	wait_used(&dying, kind->taken);
	while (stats_of(&dying.guest, 0).in_flight)
		nap_ms(1);
	check_counters(&dying, kind->taken);
	guest_close(&dying.guest);
	wait_used(&dying, kind->taken);

	/* The next owner finds the rest. */
	guest_open(&dying.guest, BLK_FEATURES);
	guest_disk(&dying.guest, disk);
	dying.guest.rings[0].used_next = kind->taken;
	ring_attach(&dying.guest, 0);
	guest_start(&dying.guest);
	wait_used(&dying, kind->count);
	guest_stop(&dying.guest);
	check_counters(&dying, kind->count - kind->taken);
	guest_close(&dying.guest);

	for (unsigned i = 0; (in || out) && i < kind->count; i++) {
		disk_copy(disk, i, bytes, kind->len, false);
		CHECK(!memcmp(bytes, data_of(&dying, i), kind->len),
			"%s: request %u moved something else", kind->name, i);
	}
	munmap(dying.guest.memory, MEMORY_BYTES);
	close(dying.guest.memory_fd);
	printf("the owner died for want of %s\n", kind->name);
}

void test_dying(struct disk *disk)
{
	uint8_t *bytes = aligned_alloc(4096, LONG);

	close(disk_open(disk));
	for (unsigned i = 0; i < sizeof(kinds) / sizeof(*kinds); i++)
		/* The disk that takes a second is for these alone. */
		if (kinds[i].later == !strcmp(disk->path, "/dev/slow"))
			dies(&kinds[i], disk, bytes);
	free(bytes);
}
