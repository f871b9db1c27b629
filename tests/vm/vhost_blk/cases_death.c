/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Calls that are ended at the worst moment; a disk that makes all requests wait. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"

struct call { int fd; unsigned long request; void *argument; int begun; };

static int make_call(void *argument)
{
	struct call *call = argument;

	__atomic_store_n(&call->begun, 1, __ATOMIC_RELEASE);
	return ioctl(call->fd, call->request, call->argument) ? errno : 0;
}

/*
 * A call from a process of its own that shares our memory, so that the device takes it for the
 * owner; killed a while after it began. Returns how it ended, as waitpid says, or -1: it did not
 * end within 10 s of being killed.
 */
static int killed_call(
	struct guest *guest, unsigned long request, void *argument, unsigned after_ms)
{
	struct call call = { guest->fd, request, argument, 0 };
	char *stack = malloc(65536);
	int status = 0;
	pid_t child = clone(make_call, stack + 65536, CLONE_VM | SIGCHLD, &call);

	CHECK(child > 0, "clone");
	for (unsigned tries = 0; tries < 5000 && !__atomic_load_n(&call.begun, __ATOMIC_ACQUIRE); tries++)
		nap_ms(1);
	nap_ms(after_ms);
	kill(child, SIGKILL);
	for (unsigned tries = 0; tries < 1000; tries++) {
		if (waitpid(child, &status, WNOHANG) == child) {
			free(stack);
			return status;
		}
		nap_ms(10);
	}
	return -1;
}

/* Adds reads of 4 KiB, one behind the other. */
static void add_reads(
	struct guest *guest, struct ring *ring, unsigned count, uint8_t *statuses, uint32_t type)
{
	struct virtio_blk_outhdr *headers = take(guest, count * sizeof(*headers), 16);
	uint8_t *data = take(guest, count * 4096, 4096);

	for (unsigned i = 0; i < count; i++) {
		bool in = type == VIRTIO_BLK_T_IN;

		headers[i] = (struct virtio_blk_outhdr){ .type = type, .sector = 8 * i };
		CHECK(ring_add(guest, ring,
			      (struct segment[]){ { &headers[i], 16, false },
				      { data + 4096 * i, 4096, in }, { &statuses[i], 1, true } },
			      3, false) >= 0,
			"the ring is full");
	}
	ring_publish(ring);
}

static void wait_taken(struct guest *guest, unsigned count)
{
	for (unsigned tries = 0; tries < 2000; tries++) {
		if (stats_of(guest, 0).in_flight == count)
			return;
		nap_ms(1);
	}
	fail("%u of %u requests were taken", stats_of(guest, 0).in_flight, count);
}

/* STOP and SET_CACHE are killed while they wait for requests: the queue is whole afterwards. The
 * disk takes its time (null_blk, 1 s). */
void test_interrupted(struct disk *disk)
{
	uint32_t all = RINGDISK_VBLK_ALL, zero = 0;
	struct guest guest;
	struct ring *ring;
	uint8_t *statuses;
	int status;

	guest_run(&guest, disk, 2);
	ring = &guest.rings[0];
	statuses = take(&guest, 64, 1);
	memset(statuses, 0xff, 64);
	add_reads(&guest, ring, 4, statuses, VIRTIO_BLK_T_IN);
	wait_taken(&guest, 4);
	status = killed_call(&guest, RINGDISK_VBLK_STOP, &all, 50);
	CHECK(status != -1 && WIFSIGNALED(status), "STOP was not killed: %x", status);
	CHECK(stats_of(&guest, 0).state == RINGDISK_VBLK_DRAINING, "state %u after a killed STOP",
		stats_of(&guest, 0).state);
	CHECK(device_ioctl(&guest, RINGDISK_VBLK_START, &zero) == -1 && errno == EBUSY,
		"START of a queue that drains");
	CHECK(device_ioctl(&guest, RINGDISK_VBLK_SET_CACHE, &zero) == -1 && errno == EBUSY,
		"SET_CACHE of a queue that drains");
	CHECK(device_ioctl(&guest, VHOST_SET_VRING_NUM, &(struct vhost_vring_state){ 0, 64 }) ==
				-1 &&
			errno == EBUSY,
		"SET_VRING_NUM of a queue that drains");
	guest_stop(&guest);
	for (unsigned i = 0; i < 4; i++)
		CHECK(ring_wait(ring, NULL, 1000) >= 0 && statuses[i] == VIRTIO_BLK_S_OK,
			"a read after a killed STOP");
	for (unsigned i = 0; i < 2; i++)
		ring_attach(&guest, i);
	guest_start(&guest);

	add_reads(&guest, ring, 4, statuses, VIRTIO_BLK_T_IN);
	wait_taken(&guest, 4);
	status = killed_call(&guest, RINGDISK_VBLK_SET_CACHE, &zero, 50);
	CHECK(status != -1 && WIFSIGNALED(status), "SET_CACHE was not killed: %x", status);
	CHECK(stats_of(&guest, 0).state == RINGDISK_VBLK_RUNNING &&
			stats_of(&guest, 1).state == RINGDISK_VBLK_RUNNING,
		"states %u and %u after a killed SET_CACHE", stats_of(&guest, 0).state,
		stats_of(&guest, 1).state);
	add_reads(&guest, ring, 4, statuses + 4, VIRTIO_BLK_T_IN);
	for (unsigned i = 0; i < 8; i++)
		CHECK(ring_wait(ring, NULL, 10000) >= 0, "a read after a killed SET_CACHE");
	guest_stop(&guest);
	guest_close(&guest);
}

/*
 * A file system that is frozen keeps the worker waiting in a write. A process that has to wait for
 * it can be killed, one that asks for counters does not wait; then the worker goes on.
 */
void test_frozen(struct disk *disk)
{
	uint32_t all = RINGDISK_VBLK_ALL, one = 1, zero = 0;
	struct vhost_vring_file call = { 0, -1 };
	struct ringdisk_vblk_stats stats;
	struct guest guest;
	struct ring *ring;
	uint8_t *statuses;
	char directory[300];
	int fd, ended[4], thawed;

	guest_run(&guest, disk, 2);
	ring = &guest.rings[0];
	statuses = take(&guest, 8, 1);
	memset(statuses, 0xff, 8);
	snprintf(directory, sizeof(directory), "%s", disk->path);
	*strrchr(directory, '/') = 0;
	fd = open(directory, O_RDONLY | O_DIRECTORY);
	CHECK(fd >= 0 && !ioctl(fd, FIFREEZE, 0), "freeze %s", directory);
	add_reads(&guest, ring, 4, statuses, VIRTIO_BLK_T_OUT);
	nap_ms(300);
	ended[0] = killed_call(&guest, RINGDISK_VBLK_STOP, &all, 100);
	ended[1] = killed_call(&guest, RINGDISK_VBLK_SET_CACHE, &zero, 100);
	ended[2] = killed_call(&guest, VHOST_SET_VRING_CALL, &call, 100);
	/* Of another queue: it waits for all workers of the device. */
	ended[3] = killed_call(&guest, RINGDISK_VBLK_STOP, &one, 100);
	stats = stats_of(&guest, 0);
	thawed = ioctl(fd, FITHAW, 0);
	CHECK(!thawed, "thaw");
	CHECK(stats.in_flight > 0 && stats.in_flight <= 4, "%u in flight", stats.in_flight);
	for (unsigned i = 0; i < 4; i++)
		CHECK(ended[i] != -1 && WIFSIGNALED(ended[i]), "call %u could not be killed: %x", i, ended[i]);
	for (unsigned i = 0; i < 4; i++)
		CHECK(ring_wait(ring, NULL, 20000) >= 0, "a write after the thaw");
	for (unsigned i = 0; i < 4; i++)
		CHECK(statuses[i] == VIRTIO_BLK_S_OK, "a write after the thaw has status %u", statuses[i]);
	close(fd);
	guest_stop(&guest);
	guest_close(&guest);
}
