/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Whose rights a disk is written with: those of who starts its rings, not of who opened the device
 * or the disk, nor of who made the worker. On a file system whose blocks are used up but for those
 * that are reserved for root.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"

#define NOBODY 65534
/* Before that the file has its blocks (vhost-blk.job). */
#define HOLE_SECTOR 4096

static void become_nobody(void)
{
	CHECK(!setgroups(0, NULL) && !setresgid(NOBODY, NOBODY, NOBODY) &&
			!setresuid(NOBODY, NOBODY, NOBODY),
		"setresuid");
}

/* Takes all blocks that an ordinary user may have. */
static void fill(const char *directory)
{
	static const char bytes[65536];
	struct statvfs left;
	char name[400];
	pid_t child = fork();
	int status;

	CHECK(child >= 0, "fork");
	if (!child) {
		int fd;

		become_nobody();
		snprintf(name, sizeof(name), "%s/filler", directory);
		fd = open(name, O_WRONLY | O_CREAT | O_APPEND, 0600);
		CHECK(fd >= 0, "%s", name);
		/* Some blocks are kept for what is not in its place yet. */
		for (unsigned i = 0; i < 10; i++) {
			for (size_t part = sizeof(bytes); part >= 512; part /= 2)
				while (write(fd, bytes, part) > 0)
					;
			CHECK(errno == ENOSPC && !fsync(fd), "write");
		}
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && !status, "the file system could not be filled");
	CHECK(!statvfs(directory, &left) && !left.f_bavail && left.f_bfree * left.f_bsize > 8 << 20,
		"%lu blocks are left, %lu for all", left.f_bfree, left.f_bavail);
}

/* Statuses of what is asked of the disk: where it has blocks, and where it wants new ones. */
struct answers { int read, old, aligned, misaligned, zeroes; };

static struct answers ask(struct guest *guest, unsigned turn)
{
	struct ring *ring = &guest->rings[0];
	uint8_t *data = take(guest, 3 * 4096, 4096);
	struct virtio_blk_discard_write_zeroes *range = take(guest, sizeof(*range), 16);
	struct segment segment = { range, sizeof(*range), false };
	uint64_t hole = HOLE_SECTOR + 1024 * turn;
	struct answers answers;

	*range = (struct virtio_blk_discard_write_zeroes){ .sector = hole + 256, .num_sectors = 64 };
	answers.read = transfer(guest, ring, false, 0, data, 4096);
	answers.old = transfer(guest, ring, true, 0, data, 4096);
	answers.aligned = transfer(guest, ring, true, hole, data, 4096);
	answers.misaligned = transfer(guest, ring, true, hole + 128, data + 1, 4096);
	answers.zeroes = request(guest, ring, VIRTIO_BLK_T_WRITE_ZEROES, 0, &segment, 1, false);
	printf("read %d, write of a block that is there %d; that is not: %d, misaligned %d, zeroes "
	       "%d\n",
		answers.read, answers.old, answers.aligned, answers.misaligned, answers.zeroes);
	return answers;
}

/* When a process that began as root becomes an ordinary one. */
enum moment { NEVER, BEFORE_OWNER, AFTER_OWNER, AFTER_DISK, BETWEEN_STARTS };

static void serve(struct disk *disk, enum moment moment, unsigned turn)
{
	uint32_t all = RINGDISK_VBLK_ALL;
	struct disk opened = *disk;
	struct answers answers;
	struct guest guest;
	int fd = disk_open(&opened);
	int none = moment == NEVER ? VIRTIO_BLK_S_OK : VIRTIO_BLK_S_IOERR;

	guest_new(&guest, 1);
	if (moment == BEFORE_OWNER) {
		/* The device, too, is opened by root. */
		guest.fd = open(device_path, O_RDWR | O_CLOEXEC);
		CHECK(guest.fd >= 0, "%s", device_path);
		become_nobody();
		guest_set_up(&guest, BLK_FEATURES);
	} else {
		guest_open(&guest, BLK_FEATURES);
	}
	if (moment == AFTER_OWNER)
		become_nobody();
	CHECK(!try_disk(&guest, &opened, fd), "SET_DISK");
	ring_attach(&guest, 0);
	if (moment == AFTER_DISK)
		become_nobody();
	guest_start(&guest);
	if (moment == BETWEEN_STARTS) {
		CHECK(!device_ioctl(&guest, RINGDISK_VBLK_STOP, &all), "STOP");
		become_nobody();
		guest_start(&guest);
	}
	answers = ask(&guest, turn);
	CHECK(!answers.read && !answers.old, "blocks that are there");
	CHECK(answers.aligned == none && answers.misaligned == none && answers.zeroes == none,
		"blocks that are not there, moment %d", moment);
	guest_stop(&guest);
	guest_close(&guest);
	close(fd);
}

void test_rights(struct disk *disk)
{
	static const char *const moments[] = { "never", "before SET_OWNER", "before SET_DISK",
		"before START", "before the second START" };
	unsigned failed = 0;
	char directory[300];

	snprintf(directory, sizeof(directory), "%s", disk->path);
	*strrchr(directory, '/') = 0;
	fill(directory);
	/* Root last: it takes blocks. */
	for (int moment = BETWEEN_STARTS; moment >= NEVER; moment--) {
		pid_t child = fork();
		int status;

		CHECK(child >= 0, "fork");
		if (!child) {
			printf("an ordinary user %s\n", moments[moment]);
			serve(disk, moment, moment);
			_exit(0);
		}
		CHECK(waitpid(child, &status, 0) == child, "waitpid");
		failed += !!status;
	}
	CHECK(!failed, "%u of 5", failed);
}
