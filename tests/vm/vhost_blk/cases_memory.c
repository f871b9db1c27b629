/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Memory of all kinds as the guest's; disks that change or go away meanwhile; addresses that change
 * while they are used. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"

#define PIECE (64u << 10)

/* Writes and reads back, aligned and not. */
static void use(struct guest *guest, const char *kind)
{
	uint8_t *out = take(guest, 2 * PIECE, 4096), *in = take(guest, 2 * PIECE, 4096);

	for (unsigned i = 0; i < 16; i++) {
		struct ring *ring = &guest->rings[i % guest->queues];
		unsigned odd = i % 4 == 3;

		for (unsigned at = 0; at < PIECE; at++)
			out[odd + at] = at * 7 + (at >> 8) + i;
		memset(in, 0, 2 * PIECE);
		CHECK(transfer(guest, ring, true, 128 * i, out + odd, PIECE) == VIRTIO_BLK_S_OK,
			"%s: a write", kind);
		CHECK(transfer(guest, ring, false, 128 * i, in + odd, PIECE) == VIRTIO_BLK_S_OK,
			"%s: a read", kind);
		CHECK(!memcmp(in + odd, out + odd, PIECE), "%s: read back differently", kind);
	}
}

static int file_at(const char *path)
{
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	CHECK(fd >= 0 && !ftruncate(fd, MEMORY_BYTES), "%s", path);
	unlink(path);
	return fd;
}

/* The guest's memory as hosts have it: pages of several sizes, files, private or shared. */
void test_memory(struct disk *disk)
{
	static const char *const kinds[] = { "memfd", "hugetlb", "ext4", "tmpfs", "private",
		"private file" };

	for (unsigned kind = 0; kind < 6; kind++) {
		int fd = -1, flags = kind < 4 ? MAP_SHARED : MAP_PRIVATE;
		struct guest guest;

		switch (kind) {
		case 0: fd = memfd_create("guest", MFD_CLOEXEC); break;
		case 1: fd = memfd_create("guest", MFD_CLOEXEC | MFD_HUGETLB); break;
		case 2: fd = file_at("/var/tmp/guest"); break;
		case 3: case 5: fd = file_at("/dev/shm/guest"); break;
		case 4: flags |= MAP_ANONYMOUS; break;
		}
		CHECK((fd >= 0 && !ftruncate(fd, MEMORY_BYTES)) || kind == 4, "memory: %s", kinds[kind]);
		guest_memory(&guest, 2, fd, flags);
		guest_run_on(&guest, disk);
		use(&guest, kinds[kind]);
		guest_stop(&guest);
		guest_close(&guest);
		munmap(guest.memory, MEMORY_BYTES);
		if (fd >= 0)
			close(fd);
		printf("memory: %s\n", kinds[kind]);
	}
}

/* Pieces of the guest's memory that cannot be had: errors of the requests that name them, and
 * nothing else. */
void test_holes(struct disk *disk)
{
	struct guest guest;
	struct ring *ring;
	uint8_t *none, *read_only, *secret, *gone, *fine;
	int secret_fd, file = file_at("/dev/shm/guest");
	struct disk opened = *disk;

	guest_run(&guest, disk, 2);
	ring = &guest.rings[0];
	fine = take(&guest, 4096, 4096);
	none = take(&guest, 8192, 4096);
	read_only = take(&guest, 8192, 4096);
	secret = take(&guest, 8192, 4096);
	gone = take(&guest, 8192, 4096);
	memset(none, 1, 8192);
	CHECK(!mprotect(none, 8192, PROT_NONE) && !mprotect(read_only, 8192, PROT_READ), "mprotect");
	CHECK(mmap(gone, 8192, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == gone &&
			!ftruncate(file, 0),
		"mmap");
	/* Two of each kind: an engine, and by copies. */
	for (unsigned odd = 0; odd < 2; odd++) {
		CHECK(transfer(&guest, ring, false, 0, none + odd, 4096) == VIRTIO_BLK_S_IOERR,
			"a read to PROT_NONE");
		CHECK(transfer(&guest, ring, true, 0, none + odd, 4096) == VIRTIO_BLK_S_IOERR,
			"a write of PROT_NONE");
		CHECK(transfer(&guest, ring, false, 0, read_only + odd, 4096) == VIRTIO_BLK_S_IOERR,
			"a read to read-only memory");
		CHECK(transfer(&guest, ring, true, 0, read_only + odd, 4096) == VIRTIO_BLK_S_OK,
			"a write of read-only memory");
		CHECK(transfer(&guest, ring, false, 0, gone + odd, 4096) == VIRTIO_BLK_S_IOERR,
			"a read to a file that is too short");
		CHECK(transfer(&guest, ring, true, 0, gone + odd, 4096) == VIRTIO_BLK_S_IOERR,
			"a write of a file that is too short");
	}
	/* Memory that cannot be pinned. What is copied is the kernel's affair; that it is answered
	 * is ours. */
	secret_fd = syscall(SYS_memfd_secret, 0);
	if (secret_fd >= 0 && !ftruncate(secret_fd, 8192) &&
	    mmap(secret, 8192, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, secret_fd, 0) == secret) {
		secret[0] = 1;
		CHECK(transfer(&guest, ring, false, 0, secret, 4096) == VIRTIO_BLK_S_IOERR,
			"a read to secret memory");
		CHECK(transfer(&guest, ring, true, 0, secret, 4096) == VIRTIO_BLK_S_IOERR,
			"a write of secret memory");
		printf("memory that cannot be pinned: refused\n");
	} else {
		printf("no memory here that cannot be pinned (errno %d)\n", errno);
	}
	CHECK(transfer(&guest, ring, false, 0, fine, 4096) == VIRTIO_BLK_S_OK, "a read after all that");
	CHECK(stats_of(&guest, 0).state == RINGDISK_VBLK_RUNNING, "state %u", stats_of(&guest, 0).state);

	/* A device that becomes read-only while it is served; for the guest it is not. */
	close(disk_open(&opened));
	if (!strncmp(disk->path, "/dev/", 5) && strncmp(disk->path, "/dev/shm", 8)) {
		int fd = open(disk->path, O_RDONLY), on = 1, off = 0;

		memset(fine, 0x11, 4096);
		CHECK(transfer(&guest, ring, true, 0, fine, 4096) == VIRTIO_BLK_S_OK, "a write");
		CHECK(!ioctl(fd, BLKROSET, &on), "BLKROSET");
		memset(fine, 0x22, 4096);
		CHECK(transfer(&guest, ring, true, 0, fine, 4096) == VIRTIO_BLK_S_IOERR,
			"a write of a device that became read-only");
		CHECK(transfer(&guest, ring, true, 0, fine + 1, 2048) == VIRTIO_BLK_S_IOERR,
			"a copied write of it");
		CHECK(!ioctl(fd, BLKROSET, &off), "BLKROSET 0");
		CHECK(transfer(&guest, ring, false, 0, fine, 4096) == VIRTIO_BLK_S_OK &&
				fine[0] == 0x11,
			"it was written");
		close(fd);
	}
	guest_stop(&guest);

	/* Who reads the device buffered after it was given back does not find what was there before. */
	if (!strncmp(disk->path, "/dev/", 5) && strncmp(disk->path, "/dev/shm", 8)) {
		struct ringdisk_vblk_disk no_disk = { .fd = -1 };
		int fd = open(disk->path, O_RDONLY);
		uint8_t first[512];

		CHECK(pread(fd, first, 512, 0) == 512, "a buffered read");
		for (unsigned i = 0; i < 2; i++)
			ring_attach(&guest, i);
		guest_start(&guest);
		memset(fine, first[0] ^ 0xff, 4096);
		CHECK(transfer(&guest, ring, true, 0, fine, 4096) == VIRTIO_BLK_S_OK, "a write");
		guest_stop(&guest);
		CHECK(!device_ioctl(&guest, RINGDISK_VBLK_SET_DISK, &no_disk), "SET_DISK of none");
		CHECK(pread(fd, first, 512, 0) == 512 && first[0] == fine[0], "the page cache is stale");
		close(fd);
	}
	guest_close(&guest);
}

struct change {
	struct guest *guest;
	struct vhost_vring_addr *address;
	atomic_bool *end;
	atomic_ulong calls;
};

static void *change_addresses(void *argument)
{
	struct change *change = argument;

	while (!atomic_load(change->end)) {
		device_ioctl(change->guest, VHOST_SET_VRING_ADDR, change->address);
		atomic_fetch_add(&change->calls, 1);
	}
	return NULL;
}

/*
 * A ring is broken with requests in flight, and its owner says another address for it: one of the
 * kernel's, with an index that changes between the check of the module and that of vhost.
 * Completions must not go there. For a disk that takes its time (null_blk, 30 ms).
 */
void test_addresses(struct disk *disk)
{
	struct guest guest;
	struct ring *ring = &guest.rings[0];
	uint8_t *data;
	/* A hole: nothing is ever mapped there. */
	struct vhost_vring_addr address = { .desc_user_addr = 0xffff800000010000,
		.avail_user_addr = 0xffff800000020000,
		.used_user_addr = 0xffff800000030000 };
	volatile unsigned *index = &address.index;
	atomic_bool end = false;
	struct change change = { &guest, &address, &end, 0 };
	pthread_t thread;

	guest_run(&guest, disk, 2);
	data = take(&guest, 128 * 1024, 4096);
	for (unsigned round = 0; round < 20; round++) {
		struct virtio_blk_outhdr *header = (void *)data;
		uint32_t zero = 0, one = 1;

		CHECK(!device_ioctl(&guest, RINGDISK_VBLK_STOP, &one), "STOP");
		for (unsigned i = 0; i < 8; i++) {
			header[i] = (struct virtio_blk_outhdr){ .type = VIRTIO_BLK_T_IN, .sector = 8 * i };
			CHECK(ring_add(&guest, ring,
				      (struct segment[]){ { &header[i], 16, false },
					      { data + 4096 * (i + 1), 4096, true },
					      { data + 1024 + i, 1, true } },
				      3, false) >= 0,
				"the ring is full");
		}
		/* And one that breaks the ring. */
		ring->avail->ring[ring->avail_next++ % RING_SIZE] = RING_SIZE;
		ring_publish(ring);
		eventfd_kick(ring);
		atomic_store(&end, false);
		CHECK(!pthread_create(&thread, NULL, change_addresses, &change), "pthread_create");
		for (unsigned i = 0; i < 3000000; i++)
			*index = i & 1;
		atomic_store(&end, true);
		pthread_join(thread, NULL);
		CHECK(ring_reported_error(ring, 10000), "the ring is not broken");
		CHECK(!device_ioctl(&guest, RINGDISK_VBLK_STOP, &zero), "STOP");
		CHECK(__atomic_load_n(&ring->used->idx, __ATOMIC_ACQUIRE) == 8,
			"round %u: %u of 8 were used", round, ring->used->idx);
		ring_reset(ring);
		ring_attach(&guest, 0);
		ring_attach(&guest, 1);
		CHECK(!device_ioctl(&guest, RINGDISK_VBLK_START, &zero) &&
				!device_ioctl(&guest, RINGDISK_VBLK_START, &one),
			"START");
	}
	printf("%lu changes of addresses\n", atomic_load(&change.calls));
	CHECK(transfer(&guest, ring, false, 0, data, 4096) == VIRTIO_BLK_S_OK, "a read after all that");
	guest_stop(&guest);
	guest_close(&guest);
}
