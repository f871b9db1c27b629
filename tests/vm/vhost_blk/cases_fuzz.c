/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Random ioctls for a time: of the module and of vhost, in any order, with arguments that are
 * right, nearly right or anything, changed while they are read, from several threads and processes,
 * with descriptors of every kind, on rings full of rubbish that is kicked meanwhile. Processes kill
 * themselves. What may come out of it is nothing: no complaint of the kernel, no process that does
 * not end, a device that works.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"

#define PROCESSES 4
#define THREADS 3
/* A device is used for so long. */
#define ROUND_MS 300
#define DESCRIPTORS 24
#define WORKERS_MAX 12

static const unsigned long requests[] = {
	RINGDISK_VBLK_INFO,
	RINGDISK_VBLK_SETUP,
	RINGDISK_VBLK_SET_DISK,
	RINGDISK_VBLK_START,
	RINGDISK_VBLK_STOP,
	RINGDISK_VBLK_SET_CACHE,
	RINGDISK_VBLK_STATS,
	VHOST_SET_OWNER,
	VHOST_RESET_OWNER,
	VHOST_GET_FEATURES,
	VHOST_SET_FEATURES,
	VHOST_SET_MEM_TABLE,
	VHOST_SET_LOG_BASE,
	VHOST_SET_LOG_FD,
	VHOST_SET_VRING_NUM,
	VHOST_SET_VRING_ADDR,
	VHOST_SET_VRING_BASE,
	VHOST_GET_VRING_BASE,
	VHOST_SET_VRING_KICK,
	VHOST_SET_VRING_CALL,
	VHOST_SET_VRING_ERR,
	VHOST_SET_VRING_BUSYLOOP_TIMEOUT,
	VHOST_GET_VRING_BUSYLOOP_TIMEOUT,
	VHOST_SET_VRING_ENDIAN,
	VHOST_GET_VRING_ENDIAN,
	VHOST_SET_BACKEND_FEATURES,
	VHOST_GET_BACKEND_FEATURES,
	VHOST_NEW_WORKER,
	_IOW(VHOST_VIRTIO, 0x9, struct vhost_worker_state),
	VHOST_ATTACH_VRING_WORKER,
	VHOST_GET_VRING_WORKER,
	_IOW(VHOST_VIRTIO, 0x84, uint8_t),
	_IOR(VHOST_VIRTIO, 0x85, uint8_t),
	_IOW(VHOST_VIRTIO, 0x83, uint64_t),
	_IOW(VHOST_VIRTIO, 0x30, struct vhost_vring_file),
};
#define REQUESTS (sizeof(requests) / sizeof(*requests))

/* What all processes count. */
struct tally { atomic_ulong called[REQUESTS], succeeded[REQUESTS], devices, kills, served; };

struct fuzz {
	struct guest guest;
	struct disk disk;
	struct tally *tally;
	/* Descriptors of every kind; [0] a disk. */
	int fds[DESCRIPTORS], shared;
	/* Of all threads: one changes what another one's call reads. */
	union {
		struct vhost_vring_state state;
		struct vhost_vring_addr address;
		struct vhost_vring_file file;
		struct vhost_vring_worker worker;
		struct { struct vhost_memory head; struct vhost_memory_region regions[4]; } table;
		struct ringdisk_vblk_setup setup;
		struct ringdisk_vblk_disk disk;
		struct ringdisk_vblk_stats stats;
		uint64_t word;
		uint32_t half;
	} argument[THREADS];
	atomic_bool end;
	atomic_uint workers;
};

struct thread { struct fuzz *fuzz; unsigned index, seed; pthread_t thread; };

static uint64_t random_word(unsigned *seed)
{
	static const uint64_t special[] = { 0, 1, 2, 511, 512, 4096, 0x7fffffff, 0x80000000,
		0xffffffff, 0x100000000, 0x7ffffffff000, 0x7fffffffffff, 0x800000000000,
		0xffff800000010000, 0xffff888000000000, 0xffffffff81000000, 0xfffffffffffff000,
		UINT64_MAX };
	uint64_t word = (uint64_t)rand_r(seed) << 40 ^ (uint64_t)rand_r(seed) << 20 ^ rand_r(seed);

	switch (rand_r(seed) % 4) {
	case 0: return special[word % (sizeof(special) / sizeof(*special))];
	case 1: return word % 8;
	default: return word;
	}
}

static int random_fd(struct fuzz *fuzz, unsigned *seed)
{
	unsigned which = rand_r(seed) % (DESCRIPTORS + 4);

	if (which < DESCRIPTORS)
		return fuzz->fds[which];
	return which == DESCRIPTORS       ? -1
	       : which == DESCRIPTORS + 1 ? fuzz->guest.fd
					  : (int)random_word(seed);
}

/* An argument that is right, for most fields. */
static void fill(struct thread *thread, unsigned long request, void *at)
{
	struct fuzz *fuzz = thread->fuzz;
	struct guest *guest = &fuzz->guest;
	unsigned *seed = &thread->seed, index = rand_r(seed) % (guest->queues + 1);
	struct ring *ring = &guest->rings[index % guest->queues];

	switch (request) {
	case RINGDISK_VBLK_SETUP:
		*(struct ringdisk_vblk_setup *)at =
			(struct ringdisk_vblk_setup){ .version = RINGDISK_VBLK_VERSION,
				.queues = guest->queues };
		break;
	case RINGDISK_VBLK_SET_DISK:
		*(struct ringdisk_vblk_disk *)at =
			(struct ringdisk_vblk_disk){ .fd = rand_r(seed) % 3 ? fuzz->fds[0]
									    : random_fd(fuzz, seed),
				.engine = rand_r(seed) % 3,
				.flags = rand_r(seed) % 3,
				.block_bytes = 512u << rand_r(seed) % 4,
				.memory_align = 1u << rand_r(seed) % 13,
				.ranges_max = 16,
				.range_sectors_max = 1 << 16,
				.capacity = 1 << 20 };
		break;
	case VHOST_SET_FEATURES:
		*(uint64_t *)at = BLK_FEATURES ^ (rand_r(seed) % 3 ? 0 : 1ull << rand_r(seed) % 64);
		break;
	case VHOST_SET_MEM_TABLE: {
		struct {
			struct vhost_memory head;
			struct vhost_memory_region regions[4];
		} table = { .head.nregions = 1 + rand_r(seed) % 2 };

		table.regions[0] = (struct vhost_memory_region){ .guest_phys_addr = GUEST_BASE,
			.memory_size = MEMORY_BYTES,
			.userspace_addr = (uintptr_t)guest->memory };
		table.regions[1] =
			(struct vhost_memory_region){ .guest_phys_addr = random_word(seed),
				.memory_size = random_word(seed),
				.userspace_addr = random_word(seed) };
		memcpy(at, &table, sizeof(table));
		break;
	}
	case VHOST_SET_VRING_ADDR:
		*(struct vhost_vring_addr *)at = (struct vhost_vring_addr){ .index = index,
			.desc_user_addr = (uintptr_t)ring->desc,
			.avail_user_addr = (uintptr_t)ring->avail,
			.used_user_addr = (uintptr_t)ring->used };
		break;
	case VHOST_SET_VRING_NUM:
		*(struct vhost_vring_state *)at = (struct vhost_vring_state){ index, 1u << rand_r(seed) % 12 };
		break;
	case VHOST_SET_VRING_KICK:
		*(struct vhost_vring_file *)at = (struct vhost_vring_file){ index,
			rand_r(seed) % 3 ? ring->kick : random_fd(fuzz, seed) };
		break;
	case VHOST_SET_VRING_CALL:
	case VHOST_SET_VRING_ERR:
		*(struct vhost_vring_file *)at = (struct vhost_vring_file){ index,
			rand_r(seed) % 3 ? ring->call : random_fd(fuzz, seed) };
		break;
	case RINGDISK_VBLK_SET_CACHE:
		*(uint32_t *)at = rand_r(seed) % 3;
		break;
	case RINGDISK_VBLK_STOP:
		*(uint32_t *)at = rand_r(seed) % 4 ? index : RINGDISK_VBLK_ALL;
		break;
	default:
		*(struct vhost_vring_worker *)at = (struct vhost_vring_worker){ index, rand_r(seed) % 8 };
	}
	/* Nearly right. */
	if (rand_r(seed) % 6 == 0)
		((uint64_t *)at)[rand_r(seed) % 6] = random_word(seed);
}

static void *call(void *argument)
{
	struct thread *thread = argument;
	struct fuzz *fuzz = thread->fuzz;
	unsigned *seed = &thread->seed;

	while (!atomic_load(&fuzz->end)) {
		unsigned which = rand_r(seed) % REQUESTS;
		/* One's own argument, or one that another thread fills meanwhile. */
		void *at = &fuzz->argument[rand_r(seed) % 4 ? thread->index : (unsigned)rand_r(seed) % THREADS];
		int fd = rand_r(seed) % 16 ? fuzz->guest.fd : fuzz->shared;

		if (requests[which] == VHOST_NEW_WORKER && atomic_fetch_add(&fuzz->workers, 1) >= WORKERS_MAX)
			continue;
		fill(thread, requests[which], at);
		if (rand_r(seed) % 32 == 0)
			at = (void *)(uintptr_t)random_word(seed);
		if (rand_r(seed) % 64 == 0)
			ioctl(fd,
				(rand_r(seed) % 2 ? VHOST_VIRTIO : RINGDISK_VBLK_MAGIC) << 8 |
					rand_r(seed) % 256 | (unsigned)rand_r(seed) << 16,
				at);
		atomic_fetch_add(&fuzz->tally->called[which], 1);
		if (!ioctl(fd, requests[which], at))
			atomic_fetch_add(&fuzz->tally->succeeded[which], 1);
		/* What a guest does. */
		if (rand_r(seed) % 4 == 0) {
			struct ring *ring = &fuzz->guest.rings[rand_r(seed) % fuzz->guest.queues];

			if (rand_r(seed) % 4 == 0)
				ring->desc[rand_r(seed) % 64] =
					(struct vring_desc){ random_word(seed), random_word(seed),
						random_word(seed), random_word(seed) };
			if (rand_r(seed) % 4 == 0)
				ring->avail->idx += rand_r(seed) % 4;
			else if (rand_r(seed) % 64 == 0)
				memset(ring->avail, rand_r(seed), 512);
			(void)!write(ring->kick, &(uint64_t){ 1 }, 8);
		}
	}
	return NULL;
}

/* Requests that are right, so that something is in flight. */
static void seed_rings(struct fuzz *fuzz)
{
	for (unsigned q = 0; q < fuzz->guest.queues; q++) {
		struct ring *ring = &fuzz->guest.rings[q];
		struct virtio_blk_outhdr *headers = take(&fuzz->guest, 16 * sizeof(*headers), 16);
		uint8_t *data = take(&fuzz->guest, 16 * 8192, 4096);

		for (unsigned i = 0; i < 16; i++) {
			headers[i] = (struct virtio_blk_outhdr){ .type = i % 6, .sector = 8 * i };
			ring_add(&fuzz->guest, ring,
				(struct segment[]){ { &headers[i], 16, false },
					{ data + 8192 * i + i % 3, 4096, i % 6 == 0 },
					{ data + 8192 * i + 8000, 1, true } },
				3, i & 1);
		}
		for (unsigned i = 16; i < RING_SIZE; i++)
			ring->avail->ring[i] = ring->avail->ring[i % 16];
		ring->avail->idx = 16;
	}
}

static void one_device(struct fuzz *fuzz, unsigned *seed)
{
	struct thread threads[THREADS];
	bool proper = rand_r(seed) % 4;

	guest_new(&fuzz->guest, 1 + rand_r(seed) % 4);
	seed_rings(fuzz);
	atomic_store(&fuzz->workers, 0);
	atomic_store(&fuzz->end, false);
	if (proper) {
		struct disk disk = fuzz->disk;

		disk.engine = rand_r(seed) % 3;
		guest_open(&fuzz->guest, BLK_FEATURES);
		guest_disk(&fuzz->guest, &disk);
		for (unsigned i = 0; i < fuzz->guest.queues; i++)
			ring_attach(&fuzz->guest, i);
		guest_start(&fuzz->guest);
	} else {
		fuzz->guest.fd = open(device_path, O_RDWR | O_CLOEXEC);
	}
	atomic_fetch_add(&fuzz->tally->devices, 1);
	for (unsigned i = 0; i < THREADS; i++) {
		threads[i] = (struct thread){ .fuzz = fuzz, .index = i, .seed = rand_r(seed) };
		CHECK(!pthread_create(&threads[i].thread, NULL, call, &threads[i]), "pthread_create");
	}
	nanosleep(&(struct timespec){ 0, (rand_r(seed) % ROUND_MS) * 1000000l }, NULL);
	if (rand_r(seed) % 3 == 0) {
		atomic_fetch_add(&fuzz->tally->kills, 1);
		kill(getpid(), SIGKILL);
	}
	atomic_store(&fuzz->end, true);
	for (unsigned i = 0; i < THREADS; i++)
		pthread_join(threads[i].thread, NULL);
	for (unsigned i = 0; i < fuzz->guest.queues; i++) {
		struct ringdisk_vblk_stats stats = { .queue = i };

		if (!device_ioctl(&fuzz->guest, RINGDISK_VBLK_STATS, &stats))
			atomic_fetch_add(&fuzz->tally->served, stats.reads + stats.writes);
		close(fuzz->guest.rings[i].kick);
		close(fuzz->guest.rings[i].call);
		close(fuzz->guest.rings[i].error);
	}
	close(fuzz->guest.fd);
	close(fuzz->guest.memory_fd);
	munmap(fuzz->guest.memory, MEMORY_BYTES);
}

static void open_all(struct fuzz *fuzz)
{
	int *fds = fuzz->fds, n = 0;
	sigset_t signals;

	sigemptyset(&signals);
	fds[n++] = disk_open(&fuzz->disk);
	CHECK(!pipe(fds + n), "pipe");
	n += 2;
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, fds + n), "socketpair");
	n += 2;
	fds[n++] = eventfd(0, EFD_NONBLOCK);
	fds[n++] = eventfd(0, EFD_NONBLOCK | EFD_SEMAPHORE);
	fds[n++] = epoll_create1(0);
	fds[n++] = open("/tmp", O_RDONLY | O_DIRECTORY);
	fds[n++] = open(device_path, O_RDWR);
	fds[n++] = fuzz->shared;
	fds[n++] = open("/dev/null", O_RDWR);
	fds[n++] = open("/dev/zero", O_RDWR);
	fds[n++] = open("/proc/self/mem", O_RDWR);
	fds[n++] = memfd_create("disk", 0);
	fds[n++] = open(fuzz->disk.path, O_RDONLY | O_DIRECT);
	fds[n++] = open(fuzz->disk.path, O_RDWR);
	fds[n++] = open(fuzz->disk.path, O_PATH);
	fds[n++] = signalfd(-1, &signals, 0);
	fds[n++] = timerfd_create(CLOCK_MONOTONIC, 0);
	fds[n++] = open("/sys/kernel/debug", O_RDONLY);
	fds[n++] = open("/dev/shm/disk", O_RDWR | O_DIRECT);
	fds[n++] = open("/var/tmp/disk", O_RDWR | O_DIRECT);
	fds[n++] = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(n == DESCRIPTORS, "%d descriptors", n);
}

/* A process that fuzzes until it dies or the time is over. */
static void fuzz_until(struct fuzz *fuzz, unsigned seed, time_t end)
{
	/* Its memory may be overwritten, as it asks for that: what becomes of it does not matter. */
	while (time(NULL) < end)
		one_device(fuzz, &seed);
	_exit(0);
}

void test_fuzz(struct disk *disk, unsigned seconds)
{
	time_t end = time(NULL) + seconds;
	static struct fuzz fuzz;
	struct guest guest;
	pid_t children[PROCESSES];
	unsigned long total = 0;
	const char *given = getenv("RINGDISK_SEED");
	unsigned seed = given ? strtoul(given, NULL, 0) : (unsigned)time(NULL) * 2654435761u;

	printf("seed %u, %u s\n", seed, seconds);
	fuzz.disk = *disk;
	fuzz.shared = open(device_path, O_RDWR | O_CLOEXEC);
	fuzz.tally = mmap(NULL, sizeof(*fuzz.tally), PROT_READ | PROT_WRITE,
		MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(fuzz.tally != MAP_FAILED, "mmap");
	/* Errors of children are theirs. */
	int silent = open("/dev/null", O_WRONLY);
	open_all(&fuzz);
	memset(children, 0, sizeof(children));
	while (time(NULL) < end) {
		for (unsigned i = 0; i < PROCESSES; i++) {
			if (children[i] && waitpid(children[i], NULL, WNOHANG) != children[i])
				continue;
			seed = seed * 1664525 + 1013904223;
			fflush(NULL);
			children[i] = fork();
			CHECK(children[i] >= 0, "fork");
			if (!children[i]) {
				dup2(silent, 2);
				fuzz_until(&fuzz, seed, end);
			}
		}
		nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
	}
	for (unsigned i = 0; i < PROCESSES; i++) {
		unsigned tries = 0;

		while (children[i] && waitpid(children[i], NULL, WNOHANG) != children[i]) {
			if (tries++ == 100)
				kill(children[i], SIGKILL);
			CHECK(tries < 1000, "a process does not end, 9 s after it was killed");
			nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
		}
	}
	for (unsigned i = 0; i < REQUESTS; i++) {
		unsigned long called = atomic_load(&fuzz.tally->called[i]),
			      succeeded = atomic_load(&fuzz.tally->succeeded[i]);

		total += called;
		printf("%s%02lx.%02lx %lu of %lu",
			i % 6 ? ", "
			: i   ? "\n  "
			      : "  ",
			requests[i] >> 8 & 0xff, requests[i] & 0xff, succeeded, called);
		if (requests[i] == RINGDISK_VBLK_START || requests[i] == RINGDISK_VBLK_STOP ||
			requests[i] == VHOST_ATTACH_VRING_WORKER)
			CHECK(succeeded, "call %lx never succeeded", requests[i]);
	}
	printf("\n%lu calls on %lu devices, %lu processes killed, %lu requests served\n", total,
		atomic_load(&fuzz.tally->devices), atomic_load(&fuzz.tally->kills),
		atomic_load(&fuzz.tally->served));
	CHECK(atomic_load(&fuzz.tally->served), "nothing was served");
	/* The device works as ever. */
	guest_run(&guest, disk, 2);
	CHECK(transfer(&guest, &guest.rings[1], true, 0, take(&guest, 4096, 4096), 4096) ==
			VIRTIO_BLK_S_OK,
		"a write after all that");
	guest_stop(&guest);
	guest_close(&guest);
}
