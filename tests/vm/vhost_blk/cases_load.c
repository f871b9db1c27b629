/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What happens when there is much of it: many requests, several queues, stop and start meanwhile.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"

#define DEPTH 32
#define BLOCK 4096u

struct slot {
	struct virtio_blk_outhdr header;
	uint8_t status;
	uint64_t block;
	int head;
	bool write;
	uint8_t *data;
};

struct load {
	struct guest *guest;
	struct ring *ring;
	struct slot *slots;
	/* This queue's part of the disk, in blocks. */
	uint64_t first, blocks;
	uint64_t requests;
	uint64_t done;
	bool verify, mixed;
	/* Errors are counted, not a failure. */
	bool may_fail;
	uint64_t failed;
	/* What each block holds: 0, nothing known; busy while a request for it is in flight. */
	uint32_t *generation;
	bool *busy;
	unsigned seed;
	pthread_t thread;
	atomic_bool *end;
};

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

static void stamp(uint8_t *data, uint64_t block, uint32_t generation)
{
	uint64_t *words = (uint64_t *)data;

	for (unsigned i = 0; i < BLOCK / 8; i++)
		words[i] = block * 0x9e3779b97f4a7c15ull + generation * 1000003ull + i;
}

static bool stamped(const uint8_t *data, uint64_t block, uint32_t generation)
{
	const uint64_t *words = (const uint64_t *)data;

	for (unsigned i = 0; i < BLOCK / 8; i++)
		if (words[i] != block * 0x9e3779b97f4a7c15ull + generation * 1000003ull + i)
			return false;
	return true;
}

static void submit(struct load *load, struct slot *slot)
{
	struct segment segments[3] = { { &slot->header, 16, false }, { slot->data, BLOCK, false },
		{ &slot->status, 1, true } };
	uint64_t block;

	do
		block = rand_r(&load->seed) % load->blocks;
	while (load->verify && load->busy[block]);
	slot->block = block;
	slot->write = load->verify ? !load->generation[block] || rand_r(&load->seed) % 2
				   : load->mixed && rand_r(&load->seed) % 2;
	if (load->verify) {
		load->busy[block] = true;
		if (slot->write)
			stamp(slot->data, load->first + block, ++load->generation[block]);
	}
	slot->status = 0xff;
	slot->header = (struct virtio_blk_outhdr){ .type = slot->write ? VIRTIO_BLK_T_OUT
								       : VIRTIO_BLK_T_IN,
		.sector = (load->first + block) * (BLOCK / 512) };
	segments[1].device_writes = !slot->write;
	slot->head = ring_add(load->guest, load->ring, segments, 3, true);
	CHECK(slot->head >= 0, "the ring is full");
}

static void finish(struct load *load, int head)
{
	struct slot *slot = load->slots;

	while (slot->head != head)
		slot++;
	CHECK(slot->status == VIRTIO_BLK_S_OK ||
			(load->may_fail && slot->status == VIRTIO_BLK_S_IOERR),
		"queue %u: status %u", load->ring->index, slot->status);
	load->failed += slot->status != VIRTIO_BLK_S_OK;
	if (load->verify) {
		CHECK(slot->write || stamped(slot->data, load->first + slot->block,
					     load->generation[slot->block]),
			"queue %u: block %llu is not as it was written", load->ring->index,
			(unsigned long long)slot->block);
		load->busy[slot->block] = false;
	}
	slot->head = -1;
	load->done++;
}

static void *run(void *argument)
{
	struct load *load = argument;
	uint64_t begun = 0;
	struct rusage usage;
	struct timespec spent;

	while (load->done < load->requests) {
		bool more = !load->end || !atomic_load(load->end);
		int head;

		for (unsigned i = 0; i < DEPTH && begun < load->requests && more; i++) {
			if (load->slots[i].head < 0) {
				submit(load, &load->slots[i]);
				begun++;
			}
		}
		if (begun == load->done)
			break;
		ring_publish(load->ring);
		head = ring_wait(load->ring, NULL, 120000);
		do
			finish(load, head);
		while ((head = ring_pop(load->ring, NULL)) >= 0);
	}
	getrusage(RUSAGE_THREAD, &usage);
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
	__atomic_fetch_add(&load->guest->own_ns, spent.tv_sec * 1000000000ull + spent.tv_nsec,
		__ATOMIC_RELAXED);
	__atomic_fetch_add(&load->guest->own_switches, usage.ru_nvcsw + usage.ru_nivcsw, __ATOMIC_RELAXED);
	return NULL;
}

static void begin(struct load *loads, struct guest *guest, const struct disk *disk,
	uint64_t requests, bool verify, bool mixed, atomic_bool *end)
{
	for (unsigned i = 0; i < guest->queues; i++) {
		struct load *load = &loads[i];
		uint64_t blocks = disk->capacity / BLOCK / guest->queues;

		*load = (struct load){ .guest = guest,
			.ring = &guest->rings[i],
			.first = i * blocks,
			.blocks = blocks < 4096 ? blocks : 4096,
			.requests = requests,
			.verify = verify,
			.mixed = mixed,
			.seed = i + 1,
			.end = end };
		load->slots = take(guest, DEPTH * sizeof(*load->slots), 64);
		load->generation = calloc(load->blocks, sizeof(*load->generation));
		load->busy = calloc(load->blocks, sizeof(*load->busy));
		for (unsigned s = 0; s < DEPTH; s++) {
			load->slots[s].head = -1;
			load->slots[s].data = take(guest, BLOCK, BLOCK);
		}
		CHECK(!pthread_create(&load->thread, NULL, run, load), "pthread_create");
	}
}

static uint64_t end_all(struct load *loads, struct guest *guest)
{
	uint64_t done = 0;

	for (unsigned i = 0; i < guest->queues; i++) {
		pthread_join(loads[i].thread, NULL);
		done += loads[i].done;
		free(loads[i].generation);
		free(loads[i].busy);
	}
	return done;
}

/* What the guest saw and what the module counted, per request. */
static void report(struct guest *guest, const char *what, uint64_t done, double seconds)
{
	uint64_t kicks = 0, calls = 0, rounds = 0, batches = 0;

	for (unsigned i = 0; i < guest->queues; i++) {
		struct ringdisk_vblk_stats stats = stats_of(guest, i);

		kicks += guest->rings[i].kicks;
		calls += guest->rings[i].calls;
		rounds += stats.rounds;
		batches += stats.batches;
	}
	printf("%s: %llu requests in %.2f s, %.0f/s; requests per kick %.1f, per call %.1f, per "
	       "batch %.1f, per look %.1f\n",
		what, (unsigned long long)done, seconds, done / seconds,
		(double)done / (kicks ? kicks : 1), (double)done / (calls ? calls : 1),
		(double)done / (batches ? batches : 1), (double)done / (rounds ? rounds : 1));
}

/* Each block is read back as it was last written, over four queues with a worker each. */
void test_verify(struct disk *disk)
{
	struct load loads[QUEUES_MAX];
	struct guest guest;
	double start;

	guest_run(&guest, disk, 4);
	start = now();
	begin(loads, &guest, disk, 5000, true, false, NULL);
	CHECK(end_all(loads, &guest) == 20000, "some are missing");
	report(&guest, "verify", 20000, now() - start);
	guest_stop(&guest);
	guest_close(&guest);
}

/* What workers have cost: nanoseconds and context switches. */
struct cost { uint64_t worker_ns, worker_switches, idle_ticks; };

/*
 * Of the workers; and how long the first CPU was idle, in ticks of 10 ms. Everything runs there
 * when instructions are counted (bench/vm/vhost-blk).
 */
static struct cost cost_now(void)
{
	struct cost cost = { 0 };
	DIR *directory = opendir("/proc/self/task");
	struct dirent *entry;
	char path[300], line[256];
	FILE *file;

	while (directory && (entry = readdir(directory))) {
		unsigned long long ns = 0, switches = 0, number;
		bool worker = false;

		if (entry->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "/proc/self/task/%s/schedstat", entry->d_name);
		if ((file = fopen(path, "r"))) {
			CHECK(fscanf(file, "%llu", &ns) == 1, "%s", path);
			fclose(file);
		}
		snprintf(path, sizeof(path), "/proc/self/task/%s/status", entry->d_name);
		file = fopen(path, "r");
		while (file && fgets(line, sizeof(line), file)) {
			worker |= !strncmp(line, "Name:\tvhost-", 12);
			if (sscanf(line, "voluntary_ctxt_switches: %llu", &number) == 1 ||
			    sscanf(line, "nonvoluntary_ctxt_switches: %llu", &number) == 1)
				switches += number;
		}
		if (file)
			fclose(file);
		if (worker) {
			cost.worker_ns += ns;
			cost.worker_switches += switches;
		}
	}
	if (directory)
		closedir(directory);
	if ((file = fopen("/proc/stat", "r"))) {
		unsigned long long idle = 0, iowait = 0;

		while (fgets(line, sizeof(line), file))
			if (sscanf(line, "cpu0 %*u %*u %*u %llu %llu", &idle, &iowait) == 2)
				cost.idle_ticks = idle + iowait;
		fclose(file);
	}
	return cost;
}

/* One line for bench/vm/vhost-blk, each figure per request. */
static void report_cost(
	const struct guest *guest, const struct cost *from, uint64_t done, double seconds)
{
	struct cost to = cost_now();
	/* The guest's threads have ended, and have said what they took. */
	uint64_t own_ns = guest->own_ns, own_switches = guest->own_switches;
	double busy_ns = seconds * 1e9 - (to.idle_ticks - from->idle_ticks) * 1e7;

	printf("row: worker ns %.0f, all but the guest's threads ns %.0f, the guest's threads ns "
	       "%.0f, switches of workers %.3f, of the guest %.3f\n",
		(double)(to.worker_ns - from->worker_ns) / done, (busy_ns - own_ns) / done,
		(double)own_ns / done, (double)(to.worker_switches - from->worker_switches) / done,
		(double)own_switches / done);
}

/* Random reads; with `workers` 1, of one worker for all queues. */
void test_load(struct disk *disk, unsigned queues, unsigned workers)
{
	const char *requests = getenv("RINGDISK_LOAD_REQUESTS");
	struct load loads[QUEUES_MAX];
	struct guest guest;
	struct cost from;
	uint64_t done;
	double start, seconds;
	char what[64];

	CHECK(queues <= QUEUES_MAX, "at most %u queues", QUEUES_MAX);
	if (workers == 1) {
		guest_new(&guest, queues);
		guest_open(&guest, BLK_FEATURES);
		close(disk_open(disk));
		guest_disk(&guest, disk);
		for (unsigned i = 0; i < queues; i++)
			ring_attach(&guest, i);
		guest_start(&guest);
	} else {
		guest_run(&guest, disk, queues);
	}
	from = cost_now();
	start = now();
	begin(loads, &guest, disk, requests ? strtoul(requests, NULL, 0) : 20000, false, false, NULL);
	done = end_all(loads, &guest);
	seconds = now() - start;
	snprintf(what, sizeof(what), "load, %u queues, %u workers", queues, workers == 1 ? 1 : queues);
	report(&guest, what, done, seconds);
	if (requests)
		report_cost(&guest, &from, done, seconds);
	guest_stop(&guest);
	guest_close(&guest);
}

/* The rings are taken away and given back while the guest goes on: nothing is lost or done twice
 * (heads are checked when they are used). */
void test_round_trips(struct disk *disk, unsigned rounds)
{
	struct load loads[QUEUES_MAX];
	atomic_bool end = false;
	struct guest guest;
	double longest = 0, start = now();

	guest_run(&guest, disk, 4);
	begin(loads, &guest, disk, UINT64_MAX, true, false, &end);
	for (unsigned i = 0; i < rounds; i++) {
		double from = now();
		uint32_t all = RINGDISK_VBLK_ALL;

		CHECK(!device_ioctl(&guest, RINGDISK_VBLK_STOP, &all), "STOP");
		if (now() - from > longest)
			longest = now() - from;
		for (uint32_t q = 0; q < guest.queues; q++) {
			struct vhost_vring_state base = { q, 0 };

			CHECK(!device_ioctl(&guest, VHOST_GET_VRING_BASE, &base), "GET_VRING_BASE");
			CHECK(base.num == __atomic_load_n(
						  &guest.rings[q].used->idx, __ATOMIC_ACQUIRE),
				"base and used differ");
			CHECK(!device_ioctl(&guest, VHOST_SET_VRING_BASE, &base), "SET_VRING_BASE");
			CHECK(!device_ioctl(&guest, RINGDISK_VBLK_START, &q), "START");
		}
	}
	atomic_store(&end, true);
	report(&guest, "round trips", end_all(loads, &guest), now() - start);
	printf("%u round trips, the longest stop took %.1f ms\n", rounds, longest * 1e3);
	guest_stop(&guest);
	guest_close(&guest);
}

/* The write cache goes off and on under load. */
void test_cache(struct disk *disk)
{
	struct load loads[QUEUES_MAX];
	atomic_bool end = false;
	struct guest guest;
	double start = now();

	guest_run(&guest, disk, 2);
	begin(loads, &guest, disk, UINT64_MAX, true, false, &end);
	for (unsigned i = 0; i < 40; i++) {
		uint32_t on = i & 1;

		CHECK(!device_ioctl(&guest, RINGDISK_VBLK_SET_CACHE, &on), "SET_CACHE");
		usleep(5000);
	}
	atomic_store(&end, true);
	report(&guest, "cache", end_all(loads, &guest), now() - start);
	guest_stop(&guest);
	guest_close(&guest);
}

/* Owner of the device until it is killed: goes on where the rings are. */
static void serve(struct guest *guest, struct disk *disk)
{
	guest_open(guest, BLK_FEATURES);
	guest_disk(guest, disk);
	for (unsigned i = 0; i < guest->queues; i++) {
		/* What was taken was used: a new owner needs to know no more than the used index. */
		guest->rings[i].used_next = __atomic_load_n(&guest->rings[i].used->idx, __ATOMIC_ACQUIRE);
		ring_attach(guest, i);
	}
	guest_workers(guest);
	guest_start(guest);
	for (;;)
		pause();
}

/*
 * The guest goes on while owners are killed and follow one another, at any step of theirs: nothing
 * is lost, answered twice or with an error, and every block holds what was written.
 */
void test_crash(struct disk *disk, unsigned times)
{
	struct load loads[QUEUES_MAX];
	atomic_bool end = false;
	struct guest guest;
	double start = now();
	unsigned seed = 1;
	uint64_t done = 0;
	int status;

	guest_new(&guest, 2);
	close(disk_open(disk));
	begin(loads, &guest, disk, UINT64_MAX, true, false, &end);
	for (unsigned i = 0; i <= times; i++) {
		pid_t child = fork();

		CHECK(child >= 0, "fork");
		if (!child)
			serve(&guest, disk);
		if (i == times) {
			atomic_store(&end, true);
			done = end_all(loads, &guest);
		} else {
			usleep(rand_r(&seed) % 150000);
		}
		CHECK(!kill(child, SIGKILL), "kill");
		CHECK(waitpid(child, &status, 0) == child, "waitpid");
		CHECK(WIFSIGNALED(status), "the owner failed");
	}
	printf("%llu requests of %u owners in %.1f s\n", (unsigned long long)done, times + 1,
		now() - start);
}

struct race { struct guest *guest; atomic_bool *end; unsigned seed; pthread_t thread; };

static void *race(void *argument)
{
	struct race *race = argument;

	while (!atomic_load(race->end)) {
		unsigned which = rand_r(&race->seed) % 8;
		uint32_t index = rand_r(&race->seed) % 6;
		struct ringdisk_vblk_stats stats = { .queue = index };
		struct vhost_vring_state state = { index, 0 };
		uint32_t all = RINGDISK_VBLK_ALL;

		if (which < 2)
			device_ioctl(race->guest, RINGDISK_VBLK_START, &index);
		else if (which == 2)
			device_ioctl(race->guest, RINGDISK_VBLK_STOP, &index);
		else if (which == 3)
			device_ioctl(race->guest, RINGDISK_VBLK_STOP, &all);
		else if (which == 4)
			device_ioctl(race->guest, RINGDISK_VBLK_STATS, &stats);
		else if (which == 5)
			device_ioctl(race->guest, VHOST_GET_VRING_BASE, &state);
		else if (which == 6)
			device_ioctl(race->guest, RINGDISK_VBLK_SET_CACHE, &(uint32_t){ index & 1 });
		else
			sched_yield();
	}
	return NULL;
}

/* Threads of the owner that call everything at once, while the guest goes on. */
void test_races(struct disk *disk)
{
	struct load loads[QUEUES_MAX];
	struct race races[4];
	atomic_bool end = false, load_end = false;
	struct guest guest;

	guest_run(&guest, disk, 4);
	begin(loads, &guest, disk, UINT64_MAX, true, false, &load_end);
	for (unsigned i = 0; i < 4; i++) {
		races[i] = (struct race){ .guest = &guest, .end = &end, .seed = i };
		CHECK(!pthread_create(&races[i].thread, NULL, race, &races[i]), "pthread_create");
	}
	sleep(5);
	atomic_store(&end, true);
	for (unsigned i = 0; i < 4; i++)
		pthread_join(races[i].thread, NULL);
	for (uint32_t i = 0; i < guest.queues; i++)
		CHECK(!device_ioctl(&guest, RINGDISK_VBLK_START, &i) || errno == EBUSY, "START");
	atomic_store(&load_end, true);
	printf("%llu requests among races\n", (unsigned long long)end_all(loads, &guest));
	guest_stop(&guest);
	guest_close(&guest);
}

/* Workers are threads of ours: as many as asked for, each with its ring, placed as the thread that
 * made them. */
void test_workers(struct disk *disk)
{
	cpu_set_t before, one;
	struct guest guest;
	unsigned tasks[2] = { 0, 0 };
	uint32_t ids[4];

	guest_new(&guest, 4);
	guest_open(&guest, BLK_FEATURES);
	guest_disk(&guest, (close(disk_open(disk)), disk));
	for (unsigned i = 0; i < 4; i++)
		ring_attach(&guest, i);
	CHECK(!sched_getaffinity(0, sizeof(before), &before), "sched_getaffinity");
	CPU_ZERO(&one);
	CPU_SET(1, &one);
	CHECK(!sched_setaffinity(0, sizeof(one), &one), "sched_setaffinity");
	guest_workers(&guest);
	CHECK(!sched_setaffinity(0, sizeof(before), &before), "sched_setaffinity");
	guest_start(&guest);
	for (unsigned i = 0; i < 4; i++) {
		struct vhost_vring_worker worker = { .index = i };

		CHECK(!device_ioctl(&guest, VHOST_GET_VRING_WORKER, &worker), "GET_VRING_WORKER");
		ids[i] = worker.worker_id;
		for (unsigned before_it = 0; before_it < i; before_it++)
			CHECK(ids[before_it] != ids[i], "two rings have one worker");
	}
	DIR *directory = opendir("/proc/self/task");
	struct dirent *entry;

	while ((entry = readdir(directory))) {
		char path[300], line[256];
		bool worker = false;
		FILE *file;

		snprintf(path, sizeof(path), "/proc/self/task/%s/status", entry->d_name);
		file = entry->d_name[0] == '.' ? NULL : fopen(path, "r");
		while (file && fgets(line, sizeof(line), file)) {
			if (!strncmp(line, "Name:\tvhost-", 12))
				worker = true;
			if (worker && !strcmp(line, "Cpus_allowed_list:\t1\n"))
				tasks[1]++;
		}
		tasks[0] += worker;
		if (file)
			fclose(file);
	}
	closedir(directory);
	CHECK(tasks[0] == 5 && tasks[1] == 4, "%u worker threads, %u of them on CPU 1", tasks[0],
		tasks[1]);
	CHECK(transfer(&guest, &guest.rings[3], false, 0, take(&guest, 4096, 4096), 4096) ==
			VIRTIO_BLK_S_OK,
		"a read");
	guest_stop(&guest);
	guest_close(&guest);
}

static int write_to(const char *path, const char *what)
{
	int fd = open(path, O_WRONLY), written = fd < 0 ? -1 : write(fd, what, strlen(what));

	if (fd >= 0)
		close(fd);
	return written;
}

/*
 * The disk goes away under load (null_blk, switched off and on again; scsi_debug, deleted for
 * good): errors from then on, and all is answered.
 */
void test_removal(struct disk *disk)
{
	struct load loads[QUEUES_MAX];
	atomic_bool end = false;
	struct guest guest;
	char path[PATH_MAX], real[PATH_MAX];
	bool scsi = !strcmp(disk->path, "/dev/scsi");
	uint64_t failed = 0, done;

	guest_run(&guest, disk, 4);
	begin(loads, &guest, disk, UINT64_MAX, false, true, &end);
	for (unsigned i = 0; i < guest.queues; i++)
		loads[i].may_fail = true;
	usleep(300000);
	CHECK(realpath(disk->path, real), "%s", disk->path);
	snprintf(path, sizeof(path),
		scsi ? "/sys/block/%.64s/device/delete" : "/sys/kernel/config/nullb/%.64s/power",
		strrchr(real, '/') + 1);
	CHECK(write_to(path, scsi ? "1" : "0") == 1, "%s", path);
	usleep(300000);
	atomic_store(&end, true);
	done = end_all(loads, &guest);
	for (unsigned i = 0; i < guest.queues; i++)
		failed += loads[i].failed;
	CHECK(failed && failed < done, "%llu of %llu requests failed", (unsigned long long)failed,
		(unsigned long long)done);
	printf("%llu requests, %llu of them after the removal\n", (unsigned long long)done,
		(unsigned long long)failed);
	/* Flushes and slow operations, too. */
	CHECK(request(&guest, &guest.rings[0], VIRTIO_BLK_T_FLUSH, 0, NULL, 0, false) !=
			VIRTIO_BLK_S_UNSUPP,
		"a flush");
	guest_stop(&guest);
	guest_close(&guest);
	CHECK(scsi || write_to(path, "1") == 1, "%s", path);
}
