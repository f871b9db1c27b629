/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* How much a guest may ask of the host: at a time, on whose account, and of which disks. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cgroup.h"
#include "guest.h"

#define MIB (1u << 20)

/* Publishes requests at once, each with the same data or ranges. */
struct crowd {
	uint32_t type;
	unsigned count;
	/* Of a read. */
	uint32_t bytes;
	/* Of write zeroes: how many, each from the disk's beginning. */
	unsigned ranges;
	uint32_t range_sectors;
};

static uint8_t *publish(struct guest *guest, const struct crowd *crowd)
{
	struct ring *ring = &guest->rings[0];
	struct virtio_blk_outhdr *header = take(guest, sizeof(*header), 16);
	struct virtio_blk_discard_write_zeroes *ranges = take(guest, 16 * sizeof(*ranges), 16);
	uint8_t *statuses = take(guest, crowd->count, 1);
	struct segment data = { ranges, crowd->ranges * sizeof(*ranges), false };

	if (!crowd->ranges)
		data = (struct segment){ take(guest, crowd->bytes, 4096), crowd->bytes, true };
	header->type = crowd->type;
	memset(statuses, 0xff, crowd->count);
	for (unsigned i = 0; i < crowd->ranges; i++)
		ranges[i] = (struct virtio_blk_discard_write_zeroes){ .num_sectors = crowd->range_sectors };
	for (unsigned i = 0; i < crowd->count; i++) {
		struct segment segments[] = { { header, sizeof(*header), false }, data,
			{ &statuses[i], 1, true } };

		CHECK(ring_add(guest, ring, segments, 3, true) >= 0, "the ring is full");
	}
	ring_publish(ring);
	return statuses;
}

/* All are answered, and never more than `limit` are in flight. */
static void queues_up(struct guest *guest, const struct crowd *crowd, unsigned limit)
{
	uint64_t before = stats_of(guest, 0).starved;
	uint8_t *statuses = publish(guest, crowd);
	unsigned most = 0;

	for (unsigned done = 0; done < crowd->count;) {
		unsigned now = stats_of(guest, 0).in_flight;

		most = now > most ? now : most;
		CHECK(now <= limit, "%u requests of type %u are in flight, not %u", now, crowd->type, limit);
		if (ring_pop(&guest->rings[0], NULL) < 0)
			nap_ms(1);
		else
			done++;
	}
	for (unsigned i = 0; i < crowd->count; i++)
		CHECK(statuses[i] == VIRTIO_BLK_S_OK, "status %u", statuses[i]);
	CHECK(stats_of(guest, 0).starved > before, "nothing stayed in the ring");
	printf("type %u: at most %u in flight\n", crowd->type, most);
}

/* Large requests, and those for ranges, stay in the ring when there are many. */
void test_crowd(struct disk *disk)
{
	struct guest guest;

	guest_run(&guest, disk, 1);
	queues_up(&guest, &(struct crowd){ .type = VIRTIO_BLK_T_IN, .count = 24, .bytes = 16 * MIB }, 4);
	queues_up(&guest, &(struct crowd){ .type = VIRTIO_BLK_T_IN, .count = 3, .bytes = 64 * MIB }, 1);
	queues_up(&guest,
		&(struct crowd){ .type = VIRTIO_BLK_T_WRITE_ZEROES,
			.count = 64,
			.ranges = 2,
			.range_sectors = 2048 },
		4);
	queues_up(&guest,
		&(struct crowd){ .type = VIRTIO_BLK_T_DISCARD,
			.count = 64,
			.ranges = 2,
			.range_sectors = 2048 },
		4);
	guest_stop(&guest);
	guest_close(&guest);
}

/* Dies with requests to write zeroes: what was taken is done, as far as one range of each; the rest
 * stays in the ring. */
static void dies_with(struct disk *disk, unsigned ranges)
{
	struct crowd crowd = { .type = VIRTIO_BLK_T_WRITE_ZEROES,
		.count = 128,
		.ranges = ranges,
		.range_sectors = 32 * MIB / 512 };
	unsigned answered = 0, failed = 0;
	struct guest guest;
	uint8_t *statuses;
	pid_t child;
	int status;

	guest_new(&guest, 1);
	/* Where the child puts them, too: it takes them from the same place. */
	statuses = guest.memory;
	child = fork();
	CHECK(child >= 0, "fork");
	if (!child) {
		guest_run_on(&guest, disk);
		statuses = publish(&guest, &crowd);
		memcpy(guest.memory + MEMORY_BYTES - 4096, &statuses, sizeof(statuses));
		while (stats_of(&guest, 0).in_flight < 4)
			nap_ms(1);
		raise(SIGKILL);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "it was not killed");
	memcpy(&statuses, guest.memory + MEMORY_BYTES - 4096, sizeof(statuses));
	for (unsigned i = 0; i < crowd.count; i++) {
		answered += statuses[i] != 0xff;
		failed += statuses[i] != 0xff && statuses[i] != VIRTIO_BLK_S_OK;
	}
	printf("%u ranges: %u answered, %u of them with an error\n", ranges, answered, failed);
	CHECK(answered == guest.rings[0].used->idx, "the ring says %u", guest.rings[0].used->idx);
	CHECK(answered > 0 && answered < crowd.count / 2, "%u were done first", answered);
	/* One range is finished. Of several, those that are not make an error, of at most what was
	 * in flight. */
	CHECK(failed <= (ranges == 1 ? 0u : 4u), "%u failed", failed);
}

void test_closing(struct disk *disk)
{
	dies_with(disk, 1);
	dies_with(disk, 16);
}

static void zero_sixteen(struct guest *guest, struct disk *disk)
{
	guest_run_on(guest, disk);
	queues_up(guest,
		&(struct crowd){ .type = VIRTIO_BLK_T_WRITE_ZEROES,
			.count = 16,
			.ranges = 16,
			.range_sectors = 2048 },
		4);
	guest_stop(guest);
	guest_close(guest);
}

/* What kworkers do for a guest is charged to its owner's cgroup: I/O of a disk, memory of a file in
 * memory. */
void test_charged(struct disk *disk)
{
	struct guest guest;
	struct stat stat;
	uint64_t before;

	guest_new(&guest, 1);
	make_cgroup();
	CHECK(!lstat(disk->path, &stat), "%s", disk->path);
	if (S_ISREG(stat.st_mode)) {
		int fd = open(disk->path, O_RDWR);

		CHECK(fd >= 0 && !fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
					 64 * MIB),
			"a hole");
		close(fd);
		disk->block = 4096;
		before = counted("memory.stat", "\nshmem ");
		CHECK(!in_cgroup(zero_sixteen, &guest, disk), "it failed");
		before = counted_memory("\nshmem ") - before;
		printf("%llu bytes of shmem are charged\n", (unsigned long long)before);
		CHECK(!has_controller("memory") || before >= MIB, "nobody pays");
	} else {
		CHECK(!in_cgroup(zero_sixteen, &guest, disk), "it failed");
		before = counted("io.stat", "wbytes=") + counted("io.stat", "dbytes=");
		printf("%llu bytes are charged\n", (unsigned long long)before);
		CHECK(!has_controller("io") || before >= 256 * MIB, "nobody pays");
	}
	remove_cgroup();
}

/* False: this kernel does not swap. */
static bool use_swap(const char *device)
{
	char command[256];

	snprintf(command, sizeof(command), "mkswap %s >/dev/null 2>&1", device);
	CHECK(!system(command), "mkswap %s", device);
	if (!swapon(device, 0))
		return true;
	CHECK(errno == ENOSYS, "swapon %s: %s", device, strerror(errno));
	printf("this kernel does not swap\n");
	return false;
}

/* Reads into memory that was never touched, more of it than the cgroup may have. */
static void read_eighty(struct guest *guest, struct disk *disk)
{
	uint8_t *data;

	guest_run_on(guest, disk);
	data = take(guest, 80 * MIB, 4096);
	for (unsigned i = 0; i < 80 * 16; i++)
		CHECK(!transfer(guest, &guest->rings[0], false, 128 * (i % 16), data + i * 65536,
			      65536),
			"read %u", i);
	guest_stop(guest);
	guest_close(guest);
}

/* At the limit of its cgroup a guest's memory is swapped out, as with any other reader: its owner
 * is not killed. */
void test_reclaim(struct disk *disk)
{
	struct guest guest;
	int status;

	if (!has_controller("memory")) {
		printf("this kernel has no limits of memory\n");
		return;
	}
	if (!use_swap("/dev/swap"))
		return;
	guest_new(&guest, 1);
	make_cgroup();
	put(CGROUP "/memory.max", "40M");
	status = in_cgroup(read_eighty, &guest, disk);
	printf("ends with %#x, %llu times out of memory\n", status,
		(unsigned long long)counted("memory.events", "oom_kill "));
	CHECK(!status && !counted("memory.events", "oom_kill "), "killed");
	/* There must be room for what comes back. */
	put(CGROUP "/memory.max", "max");
	CHECK(!swapoff("/dev/swap"), "swapoff: %s", strerror(errno));
	remove_cgroup();
}

/* Nobody writes to a disk that the host swaps to; write(2) may not, either. */
void test_swap(struct disk *disk)
{
	struct segment segment;
	struct virtio_blk_discard_write_zeroes *range;
	struct disk opened = *disk;
	struct guest guest;
	uint8_t *data;
	int fd;

	guest_run(&guest, disk, 1);
	data = take(&guest, 4096, 4096);
	range = take(&guest, sizeof(*range), 16);
	*range = (struct virtio_blk_discard_write_zeroes){ .sector = 65536, .num_sectors = 8 };
	segment = (struct segment){ range, sizeof(*range), false };
	CHECK(!transfer(&guest, &guest.rings[0], true, 65536, data, 4096), "a write before");
	if (!use_swap(disk->path)) {
		guest_stop(&guest);
		guest_close(&guest);
		return;
	}
	/* While it is served. */
	CHECK(transfer(&guest, &guest.rings[0], true, 65536, data, 4096) == VIRTIO_BLK_S_IOERR,
		"a write was taken");
	CHECK(request(&guest, &guest.rings[0], VIRTIO_BLK_T_WRITE_ZEROES, 0, &segment, 1, false) ==
			VIRTIO_BLK_S_IOERR,
		"zeroes were taken");
	CHECK(request(&guest, &guest.rings[0], VIRTIO_BLK_T_DISCARD, 0, &segment, 1, false) ==
			VIRTIO_BLK_S_IOERR,
		"a discard was taken");
	CHECK(!transfer(&guest, &guest.rings[0], false, 65536, data, 4096), "a read");
	guest_stop(&guest);
	/* And before it is. */
	fd = disk_open(&opened);
	CHECK(try_disk(&guest, &opened, fd) && errno == ETXTBSY, "taken while the host swaps to it");
	opened.flags = RINGDISK_VBLK_DISK_RO;
	CHECK(!try_disk(&guest, &opened, fd), "refused to be read");
	close(fd);
	guest_close(&guest);
	CHECK(!swapoff(disk->path), "swapoff: %s", strerror(errno));
}
