/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What a hand-over waits for, traced: grace periods of RCU. Each is some milliseconds on an idle
 * host and many more on a busy one, while nobody serves the guest, so their number must not grow
 * with the number of queues.
 *
 * Ftrace writes down each call of this thread to what waits for a grace period. In an instance of
 * its own: others may trace as well.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/membarrier.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guest.h"

#define TRACING "/sys/kernel/tracing/instances/ringdisk"
/* Over, or back. */
#define PERIODS_MAX 2
#define IN_FLIGHT 20

static void trace_write(const char *name, const char *words, int flags)
{
	char path[128];
	int fd;

	snprintf(path, sizeof(path), TRACING "/%s", name);
	fd = open(path, O_WRONLY | O_CLOEXEC | flags);
	CHECK(fd >= 0, "open %s", path);
	CHECK(write(fd, words, strlen(words)) == (ssize_t)strlen(words), "%s: %s", name, words);
	close(fd);
}

static void trace_begin(void)
{
	static const char *const waits[] = { "synchronize_rcu", "synchronize_rcu_expedited",
		"synchronize_srcu", "synchronize_srcu_expedited", "rcu_barrier" };
	char thread[16];

	CHECK(!mkdir(TRACING, 0700) || errno == EEXIST, "mkdir %s", TRACING);
	snprintf(thread, sizeof(thread), "%d", gettid());
	trace_write("tracing_on", "0", 0);
	trace_write("current_tracer", "nop", 0);
	trace_write("set_ftrace_pid", thread, O_TRUNC);
	for (unsigned i = 0; i < sizeof(waits) / sizeof(*waits); i++)
		trace_write("set_ftrace_filter", waits[i], i ? O_APPEND : O_TRUNC);
	trace_write("current_tracer", "function", 0);
	trace_write("tracing_on", "1", 0);
}

static void trace_end(void)
{
	trace_write("tracing_on", "0", 0);
	trace_write("current_tracer", "nop", 0);
	CHECK(!rmdir(TRACING), "rmdir %s", TRACING);
}

/* Grace periods that were waited for since the last time; says what they were. */
static unsigned periods(const char *what)
{
	FILE *trace = fopen(TRACING "/trace", "r");
	unsigned count = 0;
	char line[512];

	CHECK(trace, "open the trace");
	while (fgets(line, sizeof(line), trace)) {
		char *call = strstr(line, ": "), *caller = strstr(line, "<-");

		if (line[0] == '#' || !call || !caller)
			continue;
		/* One that is written in terms of another one is counted once. */
		if (strstr(caller, "synchronize_"))
			continue;
		printf("%s: %s", what, call + 2);
		count++;
	}
	fclose(trace);
	trace_write("trace", "\n", O_TRUNC);
	printf("%s: %u grace periods\n", what, count);
	return count;
}

/* Reads that are in flight when the ring is stopped. */
static void begin_reads(struct guest *guest, struct ring *ring, uint8_t *data)
{
	struct virtio_blk_outhdr *headers = (void *)data;
	uint8_t *statuses = data + 1024;

	for (unsigned i = 0; i < IN_FLIGHT; i++) {
		headers[i] = (struct virtio_blk_outhdr){ .type = VIRTIO_BLK_T_IN, .sector = 8 * i };
		statuses[i] = 0xff;
		CHECK(ring_add(guest, ring,
			      (struct segment[]){ { &headers[i], 16, false },
				      { data + 4096 * (i + 1), 4096, true },
				      { &statuses[i], 1, true } },
			      3, true) >= 0,
			"the ring is full");
	}
	ring_publish(ring);
}

/* Over and back, with four queues, of a new device and of one that was used before; the disk takes
 * its time (null_blk, 30 ms). */
void test_grace_periods(struct disk *disk)
{
	struct guest guest;
	uint8_t *data;
	unsigned count;

	guest_new(&guest, 4);
	data = take(&guest, (IN_FLIGHT + 1) * 4096, 4096);
	trace_begin();
	/* This one waits for a grace period by contract: the trace would show one. */
	CHECK(!syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0), "membarrier");
	CHECK(periods("membarrier") >= 1, "a grace period is not traced");

	guest_run_on(&guest, disk);
	CHECK(periods("over, a new device") <= PERIODS_MAX, "too many grace periods");
	for (unsigned round = 0; round < 3; round++) {
		for (unsigned i = 0; i < guest.queues; i++)
			begin_reads(&guest, &guest.rings[i], data);
		guest_stop(&guest);
		CHECK(periods("back, in flight") <= PERIODS_MAX, "too many grace periods");
		for (unsigned i = 0; i < guest.queues; i++) {
			while (ring_pop(&guest.rings[i], NULL) >= 0)
				;
			ring_attach(&guest, i);
		}
		guest_disk(&guest, disk);
		guest_start(&guest);
		CHECK(periods("over again, with SET_DISK") <= PERIODS_MAX, "too many grace periods");
	}
	guest_stop(&guest);
	count = periods("back, idle");
	guest_close(&guest);
	count += periods("close");
	CHECK(count <= PERIODS_MAX, "too many grace periods");
	trace_end();
}
