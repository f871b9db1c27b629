/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Many devices: the kernel memory that they take, and the kernel's threads that work for them. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cgroup.h"

#define DEBUGFS "/sys/kernel/debug/vhost_blk"

/* What the kernel has allocated for itself, in KiB. Stacks of threads are in VmallocUsed. */
static long kernel_kib(void)
{
	static const char *const fields[] = { "Slab:", "Percpu:", "VmallocUsed:", "PageTables:" };
	FILE *file = fopen("/proc/meminfo", "r");
	char line[256], name[64];
	long value, sum = 0;

	CHECK(file, "/proc/meminfo");
	while (fgets(line, sizeof(line), file))
		for (unsigned i = 0; sscanf(line, "%63s %ld", name, &value) == 2 &&
				     i < sizeof(fields) / sizeof(*fields);
			i++)
			if (!strcmp(name, fields[i]))
				sum += value;
	fclose(file);
	return sum;
}

static unsigned entries(const char *directory)
{
	DIR *dir = opendir(directory);
	struct dirent *entry;
	unsigned count = 0;

	CHECK(dir, "%s", directory);
	while ((entry = readdir(dir)))
		count += entry->d_name[0] != '.';
	closedir(dir);
	return count;
}

/* Lines of all files in the directory of debugfs. */
static unsigned lines(void)
{
	FILE *file = popen("cat " DEBUGFS "/* | wc -l", "r");
	unsigned count;

	CHECK(file && fscanf(file, "%u", &count) == 1, "%s", DEBUGFS);
	pclose(file);
	return count;
}

/* Opens devices, as far as `owned` says, in this process, which is in the cgroup. */
static void open_many(struct guest *guest, unsigned count, bool owned)
{
	struct ringdisk_vblk_setup setup = { .version = RINGDISK_VBLK_VERSION, .queues = guest->queues };

	for (unsigned i = 0; i < count; i++) {
		if (owned) {
			guest_open(guest, BLK_FEATURES);
			continue;
		}
		guest->fd = open(device_path, O_RDWR | O_CLOEXEC);
		CHECK(guest->fd >= 0 && !device_ioctl(guest, RINGDISK_VBLK_SETUP, &setup), "device %u", i);
	}
}

/* How much of the kernel's memory for each of `count` devices is on nobody's account, in bytes. */
static long unaccounted(struct guest *guest, unsigned count, bool owned)
{
	long charged = counted_memory("\nkernel ") / 1024, host = kernel_kib(), rest;

	open_many(guest, count, owned);
	host = kernel_kib() - host;
	charged = counted_memory("\nkernel ") / 1024 - charged;
	rest = (host - charged) * 1024 / (long)count;
	printf("%u devices of %u queues%s: %ld KiB of the kernel, %ld of them on the cgroup's "
	       "account; for each %ld bytes on nobody's\n",
		count, guest->queues, owned ? " with an owner" : "", host, charged, rest);
	return rest;
}

static void many(struct guest *guest, struct disk *disk)
{
	struct rlimit limit = { 4096, 4096 };
	unsigned files, queues;
	long rest[2];

	(void)disk;
	CHECK(!setrlimit(RLIMIT_NOFILE, &limit), "RLIMIT_NOFILE");
	/* What the first ones make is for all. */
	open_many(guest, 4, true);
	rest[0] = unaccounted(guest, 500, false);
	files = entries(DEBUGFS);
	queues = lines();
	guest->queues = 8;
	rest[1] = unaccounted(guest, 100, true);
	CHECK(files <= 1, "%u files in " DEBUGFS, files);
	CHECK(queues == 504, "%u queues are in " DEBUGFS, queues);
	/* One that looks for leaks notes each allocation, in memory of its own. */
	CHECK(!access("/sys/kernel/debug/kmemleak", F_OK) || (rest[0] <= 2048 && rest[1] <= 8192),
	      "%ld and %ld bytes of a device are on nobody's account", rest[0], rest[1]);
}

/* Devices cost what the memory cgroup of who opens them counts, so its limit is theirs. */
void test_accounted(struct disk *disk)
{
	struct guest guest;

	if (!has_controller("memory")) {
		printf("this kernel has no limits of memory\n");
		return;
	}
	guest_new(&guest, 1);
	make_cgroup();
	CHECK(!in_cgroup(many, &guest, disk), "it failed");
	remove_cgroup();
	CHECK(!lines(), "%u queues are in " DEBUGFS " afterwards", lines());
}

/* Threads of the kernel itself that are in the module. */
static unsigned kworkers(void)
{
	char name[300], text[4096];
	struct dirent *entry;
	unsigned count = 0;
	DIR *dir = opendir("/proc");

	CHECK(dir, "/proc");
	while ((entry = readdir(dir))) {
		ssize_t len;
		int fd;

		if (!isdigit(entry->d_name[0]))
			continue;
		snprintf(name, sizeof(name), "/proc/%s/cmdline", entry->d_name);
		fd = open(name, O_RDONLY);
		len = fd < 0 ? 1 : read(fd, text, 1);
		close(fd);
		if (len)
			continue;
		snprintf(name, sizeof(name), "/proc/%s/stack", entry->d_name);
		fd = open(name, O_RDONLY);
		len = fd < 0 ? 0 : read(fd, text, sizeof(text) - 1);
		close(fd);
		text[len < 0 ? 0 : len] = 0;
		count += !!strstr(text, "[vhost_blk]");
	}
	closedir(dir);
	return count;
}

#define STUCK 40
/* As in the module (vblk.h). */
#define KWORKERS_MAX 64

/* Publishes four requests to write zeroes. */
static uint8_t *publish_zeroes(struct guest *guest)
{
	struct virtio_blk_outhdr *header = take(guest, sizeof(*header), 16);
	struct virtio_blk_discard_write_zeroes *range = take(guest, sizeof(*range), 16);
	uint8_t *statuses = take(guest, 4, 1);

	header->type = VIRTIO_BLK_T_WRITE_ZEROES;
	*range = (struct virtio_blk_discard_write_zeroes){ .num_sectors = 8 };
	memset(statuses, 0xff, 4);
	for (unsigned i = 0; i < 4; i++) {
		struct segment segments[] = { { header, sizeof(*header), false },
			{ range, sizeof(*range), false }, { &statuses[i], 1, true } };

		CHECK(ring_add(guest, &guest->rings[0], segments, 3, false) >= 0, "the ring is full");
	}
	ring_publish(&guest->rings[0]);
	return statuses;
}

/* A process that does the same, after all others, and is killed with it. Where its statuses are is
 * stored at the end of the guest's memory. */
static pid_t die_stuck(struct guest *guest, struct disk *disk)
{
	volatile uint8_t *is_stuck = guest->memory + MEMORY_BYTES - 1;
	pid_t child = fork();

	CHECK(child >= 0, "fork");
	if (!child) {
		uint8_t *at;

		guest_run_on(guest, disk);
		at = publish_zeroes(guest);
		memcpy(guest->memory + MEMORY_BYTES - 4096, &at, sizeof(at));
		while (!stats_of(guest, 0).in_flight)
			nap_ms(1);
		*is_stuck = 1;
		nap_ms(100);
		raise(SIGKILL);
	}
	while (!*is_stuck)
		nap_ms(1);
	nap_ms(500);
	return child;
}

/* What was taken of the killed one is answered, and rightly. */
static void check_died(struct guest *guest, pid_t child)
{
	unsigned answered = 0, failed = 0;
	uint8_t *statuses;
	int status;

	CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "it was not killed");
	memcpy(&statuses, guest->memory + MEMORY_BYTES - 4096, sizeof(statuses));
	for (unsigned i = 0; i < 4; i++) {
		answered += statuses[i] != 0xff;
		failed += statuses[i] != 0xff && statuses[i] != VIRTIO_BLK_S_OK;
	}
	printf("of a killed process %u are answered, %u of them with an error\n", answered, failed);
	CHECK(answered && !failed && answered == guest->rings[0].used->idx,
		"%u answered, %u failed, used %u", answered, failed, guest->rings[0].used->idx);
}

/*
 * Disks of a file system that is frozen, many of them, all of whose zeroes wait: the kernel's
 * threads that wait with them are limited, and the disk of another process is served. One of them
 * is killed.
 */
void test_stuck(struct disk *disk)
{
	static struct guest guests[STUCK], other, dead;
	struct disk others = { .path = "/dev/shm/disk", .block = 4096 };
	struct virtio_blk_discard_write_zeroes *range;
	struct segment data;
	uint8_t *statuses[STUCK];
	char directory[300];
	unsigned waiting, done[3], most;
	pid_t child;
	int fd;

	for (unsigned i = 0; i < STUCK; i++)
		guest_run(&guests[i], disk, 1);
	guest_new(&dead, 1);
	snprintf(directory, sizeof(directory), "%s", disk->path);
	*strrchr(directory, '/') = 0;
	fd = open(directory, O_RDONLY | O_DIRECTORY);
	CHECK(fd >= 0 && !ioctl(fd, FIFREEZE, 0), "freeze %s", directory);
	for (unsigned i = 0; i < STUCK; i++)
		statuses[i] = publish_zeroes(&guests[i]);
	do {
		nap_ms(100);
		waiting = 0;
		for (unsigned i = 0; i < STUCK; i++)
			waiting += !!stats_of(&guests[i], 0).in_flight;
	} while (waiting < STUCK);
	/* Each that is to be there had time. */
	nap_ms(1000);
	most = kworkers();
	child = die_stuck(&dead, disk);
	guest_run(&other, &others, 1);
	range = take(&other, sizeof(*range), 16);
	*range = (struct virtio_blk_discard_write_zeroes){ .num_sectors = 8 };
	data = (struct segment){ range, sizeof(*range), false };
	done[0] = request(&other, &other.rings[0], VIRTIO_BLK_T_WRITE_ZEROES, 0, &data, 1, false);
	done[1] = request(&other, &other.rings[0], VIRTIO_BLK_T_DISCARD, 0, &data, 1, false);
	done[2] = request(&other, &other.rings[0], VIRTIO_BLK_T_FLUSH, 0, NULL, 0, false);
	CHECK(!ioctl(fd, FITHAW, 0), "thaw");
	printf("%u threads of the kernel wait with %u disks\n", most, STUCK);
	CHECK(most && most <= KWORKERS_MAX, "%u threads", most);
	check_died(&dead, child);
	CHECK(!done[0] && !done[1] && !done[2], "the other disk: %u %u %u", done[0], done[1], done[2]);
	for (unsigned i = 0; i < STUCK; i++) {
		for (unsigned each = 0; each < 4; each++)
			CHECK(ring_wait(&guests[i].rings[0], NULL, 20000) >= 0, "disk %u after the thaw", i);
		for (unsigned each = 0; each < 4; each++)
			CHECK(statuses[i][each] == VIRTIO_BLK_S_OK, "disk %u: status %u", i, statuses[i][each]);
		guest_stop(&guests[i]);
		guest_close(&guests[i]);
	}
	guest_stop(&other);
	guest_close(&other);
	close(fd);
}
