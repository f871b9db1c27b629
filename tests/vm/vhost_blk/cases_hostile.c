/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What a guest, an owner or a deadly signal may do. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"

#define IN_FLIGHT 20

/* Child: owns the device, begins requests, says so and waits to be killed. */
static void owner(struct guest *guest, struct disk *disk, int ready,
	struct virtio_blk_outhdr *headers, uint8_t *statuses, uint8_t *data)
{
	struct ring *ring = &guest->rings[0];
	struct ringdisk_vblk_stats stats;

	guest_open(guest, BLK_FEATURES);
	close(disk_open(disk));
	guest_disk(guest, disk);
	for (unsigned i = 0; i < guest->queues; i++)
		ring_attach(guest, i);
	guest_workers(guest);
	guest_start(guest);
	for (unsigned i = 0; i < IN_FLIGHT; i++) {
		headers[i] = (struct virtio_blk_outhdr){
			.type = i % 4 == 3 ? VIRTIO_BLK_T_OUT : VIRTIO_BLK_T_IN, .sector = 8 * i
		};
		statuses[i] = 0xff;
		/* Each fifth one misaligned: they go through a bounce. */
		CHECK(ring_add(guest, ring,
			      (struct segment[]){ { &headers[i], 16, false },
				      { data + 8192 * i + (i % 5 == 4), 4096,
					      headers[i].type == VIRTIO_BLK_T_IN },
				      { &statuses[i], 1, true } },
			      3, false) >= 0,
			"the ring is full");
	}
	ring_publish(ring);
	for (unsigned tries = 0; tries < 1000; tries++) {
		stats = stats_of(guest, 0);
		if (stats.reads + stats.writes == IN_FLIGHT)
			break;
		nap_ms(1);
	}
	CHECK(stats.reads + stats.writes == IN_FLIGHT, "only %llu were taken", stats.reads + stats.writes);
	CHECK(write(ready, "r", 1) == 1, "pipe");
	for (;;)
		pause();
}

/* The owner dies with requests in flight: each is answered all the same, and then it is gone. The
 * disk takes its time (null_blk, 1 s). */
void test_kill(struct disk *disk, unsigned times)
{
	for (unsigned time = 0; time < times; time++) {
		struct guest guest;
		struct virtio_blk_outhdr *headers;
		uint8_t *statuses, *data;
		uint16_t at_death, used = 0;
		int ready[2], status;
		char byte;
		pid_t child;

		guest_new(&guest, 2);
		headers = take(&guest, IN_FLIGHT * sizeof(*headers), 16);
		statuses = take(&guest, IN_FLIGHT, 1);
		data = take(&guest, IN_FLIGHT * 8192, 4096);
		CHECK(!pipe(ready), "pipe");
		child = fork();
		CHECK(child >= 0, "fork");
		if (!child)
			owner(&guest, disk, ready[1], headers, statuses, data);
		close(ready[1]);
		CHECK(read(ready[0], &byte, 1) == 1, "the owner failed");
		nap_ms(time * 7 % 50);
		at_death = __atomic_load_n(&guest.rings[0].used->idx, __ATOMIC_ACQUIRE);
		CHECK(!kill(child, SIGKILL), "kill");
		for (unsigned tries = 0; tries < 3000 && used < IN_FLIGHT; tries++) {
			used = __atomic_load_n(&guest.rings[0].used->idx, __ATOMIC_ACQUIRE);
			nap_ms(10);
		}
		CHECK(used == IN_FLIGHT, "%u of %u requests were used after the owner's death", used, IN_FLIGHT);
		for (unsigned i = 0; i < IN_FLIGHT; i++)
			CHECK(statuses[i] == VIRTIO_BLK_S_OK, "request %u has status %u", i, statuses[i]);
		CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "waitpid");
		printf("killed with %u of %u in flight\n", IN_FLIGHT - at_death, IN_FLIGHT);
		close(ready[0]);
		for (unsigned i = 0; i < guest.queues; i++) {
			close(guest.rings[i].kick);
			close(guest.rings[i].call);
			close(guest.rings[i].error);
		}
		munmap(guest.memory, MEMORY_BYTES);
		close(guest.memory_fd);
	}
}

static void kick(struct ring *ring)
{
	uint64_t one = 1;

	CHECK(write(ring->kick, &one, sizeof(one)) == sizeof(one), "kick");
}

/* Rings that break every rule. Each ends its own queue only, and STOP and START make it whole
 * again. */
void test_rings(struct disk *disk)
{
	struct guest guest;
	struct ring *ring, *other;
	uint8_t *data;

	guest_run(&guest, disk, 2);
	ring = &guest.rings[0];
	other = &guest.rings[1];
	data = take(&guest, 8192, 4096);
	for (unsigned kind = 0; kind < 13; kind++) {
		struct virtio_blk_outhdr *header = (void *)data;
		struct vring_desc *desc = ring->desc;
		uint32_t zero = 0;
		bool breaks = true;

		*header = (struct virtio_blk_outhdr){ .type = VIRTIO_BLK_T_IN };
		for (unsigned i = 0; i < 4; i++)
			desc[i] =
				(struct vring_desc){ .addr = guest_address(&guest, data + 1024 * i),
					.len = i ? 512 : 16,
					.flags = (i ? VRING_DESC_F_WRITE : 0) |
						 (i < 3 ? VRING_DESC_F_NEXT : 0),
					.next = i + 1 };
		ring->avail->ring[ring->avail_next % RING_SIZE] = 0;
		switch (kind) {
		case 0: desc[0].addr = 0; break;				/* not memory */
		case 1: desc[1].addr = GUEST_BASE + MEMORY_BYTES - 1; break;	/* over its end */
		case 2: desc[1].addr = UINT64_MAX - 100; break;			/* wraps around */
		case 3: desc[2].next = 1; desc[2].flags |= VRING_DESC_F_NEXT; break; /* a loop */
		case 4: desc[1].next = RING_SIZE; break;			/* no descriptor */
		case 5:
			desc[1].flags = VRING_DESC_F_NEXT;
			desc[0].flags |= VRING_DESC_F_WRITE;
			break; /* read behind written */
		case 6: desc[0].len = 15; break;				/* half a header */
		case 7: desc[0].flags = 0; break;				/* no status */
		case 8: ring->avail->ring[ring->avail_next % RING_SIZE] = RING_SIZE; break; /* no head */
		case 9: ring->avail_next += RING_SIZE; break;			/* more than there are */
		case 10: desc[0].flags = VRING_DESC_F_INDIRECT; desc[0].len = 17; break; /* part of a table */
		case 11: desc[0].flags = VRING_DESC_F_INDIRECT; desc[0].len = 16; /* a table in a table */
			((struct vring_desc *)data)[0] = (struct vring_desc){ .addr = GUEST_BASE, .len = 16,
				.flags = VRING_DESC_F_INDIRECT };
			break;
		case 12: /* lengths that are enormous: refused, not broken */
			desc[1].addr = GUEST_BASE;
			desc[1].len = MEMORY_BYTES;
			breaks = false;
			break;
		}
		ring->avail_next++;
		ring->kicks = 0;
		ring->shown = ring->avail_next - 1;
		ring_publish(ring);
		kick(ring);
		CHECK(ring_reported_error(ring, breaks ? 10000 : 300) == breaks,
			"ring %u: the error eventfd", kind);
		/* Vhost says it first, then the module, which then knows it. */
		for (unsigned tries = 0; breaks && tries < 1000 &&
					 stats_of(&guest, 0).state == RINGDISK_VBLK_RUNNING;
			tries++)
			nap_ms(10);
		CHECK(stats_of(&guest, 0).state ==
				(breaks ? RINGDISK_VBLK_BROKEN : RINGDISK_VBLK_RUNNING),
			"ring %u: state %u", kind, stats_of(&guest, 0).state);
		CHECK(transfer(&guest, other, false, 0, data, 4096) == VIRTIO_BLK_S_OK,
			"ring %u: the other queue", kind);
		CHECK(!device_ioctl(&guest, RINGDISK_VBLK_STOP, &zero), "STOP");
		/* Both have said it. */
		ring_reported_error(ring, 0);
		ring_reset(ring);
		ring_attach(&guest, 0);
		CHECK(!device_ioctl(&guest, RINGDISK_VBLK_START, &zero), "START");
		CHECK(transfer(&guest, ring, false, 0, data, 4096) == VIRTIO_BLK_S_OK,
			"ring %u: it is not whole again", kind);
	}
	/* Memory of the rings themselves goes away: an error, then nothing. */
	CHECK(mmap(guest.memory, 4096 * 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
		      0) != MAP_FAILED,
		"mmap");
	kick(ring);
	CHECK(ring_reported_error(ring, 10000), "rings without memory: the error eventfd");
	guest_close(&guest);
}

static void refused(struct guest *guest, unsigned long request, const void *argument, int error,
	const char *what)
{
	errno = 0;
	CHECK(device_ioctl(guest, request, argument) == -1 && errno == error,
		"%s was not refused with %d", what, error);
}

/* Ioctls in wrong orders, with wrong numbers, from another process; descriptors of the wrong kind.
 */
void test_control(struct disk *disk)
{
	struct guest guest;
	struct ringdisk_vblk_setup setup = { .version = RINGDISK_VBLK_VERSION + 1, .queues = 1 };
	struct ringdisk_vblk_info info;
	struct disk opened = *disk, wrong;
	struct vhost_vring_state number = { 0, 2048 };
	struct ringdisk_vblk_stats stats = { .queue = 0 };
	uint32_t zero = 0, many = 100, two = 2, all = RINGDISK_VBLK_ALL;
	uint64_t features = BLK_FEATURES, packed = features | 1ull << VIRTIO_F_RING_PACKED,
		 legacy = 1ull << VIRTIO_BLK_F_FLUSH;
	int fd, pipes[2], status;
	pid_t child;

	guest_new(&guest, 2);
	guest.fd = open(device_path, O_RDWR | O_CLOEXEC);
	CHECK(guest.fd >= 0, "open");
	CHECK(!device_ioctl(&guest, RINGDISK_VBLK_INFO, &info) &&
			info.version == RINGDISK_VBLK_VERSION && info.queues_max >= 16,
		"INFO");
	refused(&guest, RINGDISK_VBLK_INFO, (void *)1, EFAULT, "INFO nowhere");
	refused(&guest, RINGDISK_VBLK_START, &zero, EINVAL, "START before SETUP");
	refused(&guest, VHOST_SET_OWNER, NULL, EINVAL, "SET_OWNER before SETUP");
	refused(&guest, RINGDISK_VBLK_SETUP, &setup, EPROTONOSUPPORT, "SETUP of another version");
	setup.version--;
	setup.queues = info.queues_max + 1;
	refused(&guest, RINGDISK_VBLK_SETUP, &setup, EINVAL, "SETUP of too many queues");
	setup.queues = 0;
	refused(&guest, RINGDISK_VBLK_SETUP, &setup, EINVAL, "SETUP of no queue");
	close(guest.fd);
	guest.fd = open(device_path, O_RDWR | O_CLOEXEC);
	setup.queues = 2;
	CHECK(!device_ioctl(&guest, RINGDISK_VBLK_SETUP, &setup), "SETUP");
	refused(&guest, RINGDISK_VBLK_SETUP, &setup, EBUSY, "a second SETUP");
	refused(&guest, VHOST_SET_FEATURES, &features, EPERM, "SET_FEATURES before the owner");
	refused(&guest, RINGDISK_VBLK_START, &zero, EPERM, "START before the owner");
	refused(&guest, VHOST_NEW_WORKER, &zero, EPERM, "NEW_WORKER before the owner");
	close(guest.fd);

	/* Rings, but no memory. */
	guest.fd = open(device_path, O_RDWR | O_CLOEXEC);
	CHECK(!device_ioctl(&guest, RINGDISK_VBLK_SETUP, &setup) &&
			!device_ioctl(&guest, VHOST_SET_OWNER, NULL) &&
			!device_ioctl(&guest, VHOST_SET_FEATURES, &features),
		"a device without memory");
	close(disk_open(&opened));
	guest_disk(&guest, &opened);
	ring_attach(&guest, 0);
	refused(&guest, RINGDISK_VBLK_START, &zero, EFAULT, "START without memory");
	close(guest.fd);

	guest_open(&guest, features);
	refused(&guest, 0xdeadbeef, &zero, ENOTTY, "no ioctl at all");
	refused(&guest, VHOST_SET_OWNER, NULL, EBUSY, "a second SET_OWNER");
	refused(&guest, VHOST_SET_FEATURES, &packed, EOPNOTSUPP, "packed rings");
	refused(&guest, VHOST_SET_FEATURES, &legacy, EINVAL, "a legacy guest");
	refused(&guest, RINGDISK_VBLK_START, &zero, ENODEV, "START without a disk");
	refused(&guest, RINGDISK_VBLK_STOP, &many, ENOBUFS, "STOP of no queue");
	CHECK(!device_ioctl(&guest, RINGDISK_VBLK_STOP, &all), "STOP of idle queues");
	stats.queue = 2;
	refused(&guest, RINGDISK_VBLK_STATS, &stats, ENOBUFS, "STATS of no queue");
	/* Disks that are none. */
	fd = disk_open(&opened);
	CHECK(!pipe(pipes), "pipe");
	CHECK(try_disk(&guest, &opened, pipes[0]) == -1 && errno == EINVAL, "a pipe as disk");
	CHECK(try_disk(&guest, &opened, 9999) == -1 && errno == EBADF, "no descriptor as disk");
	int directory = open("/tmp", O_RDONLY), null = open("/dev/null", O_RDWR),
	    reader = open(disk->path, O_RDONLY | O_DIRECT);
	CHECK(try_disk(&guest, &opened, directory) == -1 && errno == EINVAL, "a directory as disk");
	CHECK(try_disk(&guest, &opened, null) == -1 && errno == EINVAL, "/dev/null as disk");
	CHECK(try_disk(&guest, &opened, reader) == -1 && errno == EBADF, "a disk that cannot be written");
	CHECK(try_disk(&guest, &opened, guest.fd) == -1 && errno == EINVAL, "the device as its own disk");
	int proc = open("/proc/self/mem", O_RDWR);
	CHECK(try_disk(&guest, &opened, proc) == -1, "a process as disk");
	int others[] = { eventfd(0, 0), epoll_create1(0), socket(AF_UNIX, SOCK_STREAM, 0),
		timerfd_create(CLOCK_MONOTONIC, 0), open(device_path, O_RDWR),
		open("/dev/zero", O_RDWR), open("/sys/kernel/debug", O_RDONLY), pipes[1] };
	for (unsigned i = 0; i < sizeof(others) / sizeof(*others); i++) {
		struct vhost_vring_file file = { 0, others[i] };

		CHECK(try_disk(&guest, &opened, others[i]) == -1 && errno == EINVAL,
			"descriptor of kind %u as disk", i);
		/* Only the first is an eventfd. */
		CHECK(!device_ioctl(&guest, VHOST_SET_VRING_KICK, &file) == !i,
			"descriptor of kind %u as kick", i);
		CHECK(!device_ioctl(&guest, VHOST_SET_VRING_CALL, &file) == !i,
			"descriptor of kind %u as call", i);
		CHECK(!device_ioctl(&guest, VHOST_SET_VRING_ERR, &file) == !i,
			"descriptor of kind %u as error", i);
		close(others[i]);
	}
	int path = open(disk->path, O_PATH);
	CHECK(try_disk(&guest, &opened, path) == -1 && errno == EBADF, "a path as disk");
	wrong = opened;
	wrong.capacity += wrong.block;
	CHECK(try_disk(&guest, &wrong, fd) == -1 && errno == EFBIG, "more than there is");
	wrong = opened;
	wrong.block = 513;
	CHECK(try_disk(&guest, &wrong, fd) == -1 && errno == EINVAL, "blocks of 513 bytes");
	wrong = opened;
	wrong.flags = 1 << 31;
	CHECK(try_disk(&guest, &wrong, fd) == -1 && errno == EINVAL, "unknown flags");
	wrong = opened;
	wrong.engine = 7;
	CHECK(try_disk(&guest, &wrong, fd) == -1 && errno == EINVAL, "an unknown engine");
	wrong = opened;
	wrong.capacity = 512 + 100;
	CHECK(try_disk(&guest, &wrong, fd) == -1 && errno == EINVAL, "a part of a block");
	CHECK(!try_disk(&guest, &opened, fd) && !try_disk(&guest, &opened, fd), "SET_DISK twice");
	refused(&guest, RINGDISK_VBLK_START, &zero, EFAULT, "START of a ring without memory");
	ring_attach(&guest, 0);
	ring_attach(&guest, 1);
	CHECK(!device_ioctl(&guest, VHOST_SET_VRING_NUM, &number), "SET_VRING_NUM");
	refused(&guest, RINGDISK_VBLK_START, &zero, E2BIG, "START of a ring that is too large");
	ring_attach(&guest, 0);
	guest_start(&guest);
	refused(&guest, RINGDISK_VBLK_START, &zero, EBUSY, "a second START");
	refused(&guest, VHOST_SET_FEATURES, &features, EBUSY, "SET_FEATURES of a running device");
	refused(&guest, VHOST_SET_VRING_NUM, &number, EBUSY, "SET_VRING_NUM of a running ring");
	refused(&guest, VHOST_SET_VRING_BASE, &number, EBUSY, "SET_VRING_BASE of a running ring");
	refused(&guest, VHOST_RESET_OWNER, NULL, EOPNOTSUPP, "RESET_OWNER");
	refused(&guest, RINGDISK_VBLK_SET_CACHE, &two, EINVAL, "SET_CACHE 2");
	CHECK(try_disk(&guest, &opened, fd) == -1 && errno == EBUSY, "another disk for running queues");
	/* Another process has the descriptor, and no right. */
	child = fork();
	CHECK(child >= 0, "fork");
	if (!child) {
		refused(&guest, RINGDISK_VBLK_STOP, &all, EPERM, "STOP by another process");
		refused(&guest, VHOST_SET_FEATURES, &features, EPERM, "SET_FEATURES by another process");
		refused(&guest, VHOST_NEW_WORKER, &zero, EPERM, "NEW_WORKER by another process");
		CHECK(try_disk(&guest, &opened, fd) == -1 && errno == EPERM, "a disk of another process");
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && !status, "the other process");
	CHECK(transfer(&guest, &guest.rings[1], false, 0, take(&guest, 4096, 4096), 4096) ==
			VIRTIO_BLK_S_OK,
		"a read after all that");
	guest_stop(&guest);
	guest_close(&guest);
}
