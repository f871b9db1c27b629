/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What single requests do. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "guest.h"

#define KIB 1024u
#define MIB (1024u * KIB)

static void pattern(uint8_t *at, size_t len, unsigned seed)
{
	for (size_t i = 0; i < len; i++)
		at[i] = (i * 7 + (i >> 9) * 13 + seed * 31 + 1) & 0xff;
}

static void expect(int status, int wanted, const char *what)
{
	CHECK(status == wanted, "%s: status %d, not %d", what, status, wanted);
}

static bool is_filled(const uint8_t *at, size_t len, uint8_t byte)
{
	return !len || (at[0] == byte && !memcmp(at, at + 1, len - 1));
}

/* Writes and reads of all lengths, layouts and places. */
static void lengths(struct guest *guest, struct ring *ring, bool indirect)
{
	static const uint32_t lens[] = { 512, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB };
	uint8_t *out = take(guest, 4 * MIB, 4096), *in = take(guest, 4 * MIB, 4096);

	for (unsigned i = 0; i < sizeof(lens) / sizeof(*lens); i++) {
		struct segment data[32];
		unsigned pieces = lens[i] >= 16 * KIB ? 16 : 1;

		pattern(out, lens[i], i);
		memset(in, 0xee, lens[i]);
		for (unsigned p = 0; p < pieces; p++)
			data[p] = (struct segment){ out + p * (lens[i] / pieces), lens[i] / pieces, false };
		expect(request(guest, ring, VIRTIO_BLK_T_OUT, 2048 * i + 3 * 8, data, pieces,
			       indirect),
			VIRTIO_BLK_S_OK, "write");
		for (unsigned p = 0; p < pieces; p++)
			data[p] = (struct segment){ in + p * (lens[i] / pieces), lens[i] / pieces, true };
		expect(request(guest, ring, VIRTIO_BLK_T_IN, 2048 * i + 3 * 8, data, pieces,
			       indirect),
			VIRTIO_BLK_S_OK, "read");
		CHECK(!memcmp(in, out, lens[i]), "%u bytes were read back differently", lens[i]);
	}
}

/* Header, data and status divided in ways that no sane driver chooses; what the used element says.
 */
static void layouts(struct guest *guest, struct ring *ring)
{
	uint8_t *area = take(guest, 16 * KIB, 4096);
	struct virtio_blk_outhdr *header = take(guest, sizeof(*header), 16);
	uint32_t written;
	int head;

	/* The header in three pieces, the last with the data behind it in one descriptor. */
	*header = (struct virtio_blk_outhdr){ .type = VIRTIO_BLK_T_OUT, .sector = 8 };
	memcpy(area + 4096 - 8, (uint8_t *)header + 8, 8);
	pattern(area + 4096, 4096, 77);
	area[12 * KIB] = 0xff;
	head = ring_add(guest, ring,
		(struct segment[]){ { header, 3, false }, { (uint8_t *)header + 3, 5, false },
			{ area + 4096 - 8, 8 + 4096, false }, { area + 12 * KIB, 1, true } },
		4, false);
	ring_publish(ring);
	CHECK(ring_wait(ring, &written, 10000) == head && written == 1,
		"a write with a divided header: %u written", written);
	expect(area[12 * KIB], VIRTIO_BLK_S_OK, "a write with a divided header");
	/* Data and status in one descriptor. */
	*header = (struct virtio_blk_outhdr){ .type = VIRTIO_BLK_T_IN, .sector = 8 };
	memset(area + 8 * KIB, 0xff, 4097);
	head = ring_add(guest, ring,
		(struct segment[]){ { header, 16, false }, { area + 8 * KIB, 4097, true } }, 2,
		false);
	ring_publish(ring);
	CHECK(ring_wait(ring, &written, 10000) == head && written == 4097,
		"a read with status in its data: %u written", written);
	expect(area[12 * KIB], VIRTIO_BLK_S_OK, "a read with status in its data");
	CHECK(!memcmp(area + 8 * KIB, area + 4 * KIB, 4096),
		"a divided header's data were read back differently");
	/* No data. */
	expect(request(guest, ring, VIRTIO_BLK_T_IN, 0, NULL, 0, false), VIRTIO_BLK_S_OK,
		"a read of nothing");
	expect(request(guest, ring, VIRTIO_BLK_T_OUT, 0, NULL, 0, true), VIRTIO_BLK_S_OK,
		"a write of nothing");
}

static void others(struct guest *guest, struct ring *ring, const struct disk *disk)
{
	uint8_t *data = take(guest, 64 * KIB, 4096);
	struct virtio_blk_discard_write_zeroes *ranges = take(guest, 32 * sizeof(*ranges), 16);
	struct segment segment = { data, 20, true };

	memset(data, 0, 64);
	expect(request(guest, ring, VIRTIO_BLK_T_GET_ID, 0, &segment, 1, false), VIRTIO_BLK_S_OK,
		"get-id");
	CHECK(!memcmp(data, "a disk of 20 letters", 20), "get-id says %.20s", data);
	expect(request(guest, ring, VIRTIO_BLK_T_FLUSH, 0, NULL, 0, false), VIRTIO_BLK_S_OK, "flush");
	expect(request(guest, ring, 99, 0, NULL, 0, false), VIRTIO_BLK_S_UNSUPP, "an unknown request");
	expect(request(guest, ring, VIRTIO_BLK_T_SECURE_ERASE, 0, NULL, 0, false),
		VIRTIO_BLK_S_UNSUPP, "secure erase");
	/* Past the end, also with numbers that wrap around. */
	expect(transfer(guest, ring, false, disk->capacity / 512, data, 512), VIRTIO_BLK_S_IOERR,
		"a read past the end");
	expect(transfer(guest, ring, true, disk->capacity / 512 - 1, data, 1024),
		VIRTIO_BLK_S_IOERR, "a write over the end");
	expect(transfer(guest, ring, false, UINT64_MAX / 512, data, 512), VIRTIO_BLK_S_IOERR,
		"a read far away");
	expect(transfer(guest, ring, false, UINT64_MAX, data, 512), VIRTIO_BLK_S_IOERR,
		"a read of sector -1");
	expect(transfer(guest, ring, true, 0, data, 100), VIRTIO_BLK_S_IOERR, "a part of a sector");
	/* Write zeroes, with and without unmap, two ranges at once. */
	for (unsigned unmap = 0; unmap < 2; unmap++) {
		memset(data, 0x5a, 64 * KIB);
		expect(transfer(guest, ring, true, 64, data, 64 * KIB), VIRTIO_BLK_S_OK, "write");
		ranges[0] = (struct virtio_blk_discard_write_zeroes){ 64 + 8, 16, unmap };
		ranges[1] = (struct virtio_blk_discard_write_zeroes){ 64 + 48, 8, unmap };
		segment = (struct segment){ ranges, 2 * sizeof(*ranges), false };
		expect(request(guest, ring, VIRTIO_BLK_T_WRITE_ZEROES, 0, &segment, 1, false),
			VIRTIO_BLK_S_OK, "write zeroes");
		expect(transfer(guest, ring, false, 64, data, 64 * KIB), VIRTIO_BLK_S_OK, "read");
		CHECK(is_filled(data, 4 * KIB, 0x5a) && is_filled(data + 4 * KIB, 8 * KIB, 0) &&
				is_filled(data + 12 * KIB, 12 * KIB, 0x5a) &&
				is_filled(data + 24 * KIB, 4 * KIB, 0) &&
				is_filled(data + 28 * KIB, 36 * KIB, 0x5a),
			"write zeroes (unmap %u) changed something else", unmap);
	}
	/* Discards: a hint, but no error; and ranges that are none. */
	ranges[0] = (struct virtio_blk_discard_write_zeroes){ 1024, 2048, 0 };
	segment = (struct segment){ ranges, sizeof(*ranges), false };
	expect(request(guest, ring, VIRTIO_BLK_T_DISCARD, 0, &segment, 1, false), VIRTIO_BLK_S_OK,
		"discard");
	ranges[0].flags = 1;
	expect(request(guest, ring, VIRTIO_BLK_T_DISCARD, 0, &segment, 1, false),
		VIRTIO_BLK_S_UNSUPP, "discard with a flag");
	ranges[0] = (struct virtio_blk_discard_write_zeroes){ disk->capacity / 512, 1, 0 };
	expect(request(guest, ring, VIRTIO_BLK_T_DISCARD, 0, &segment, 1, false),
		VIRTIO_BLK_S_IOERR, "discard past the end");
	ranges[0] = (struct virtio_blk_discard_write_zeroes){ 0, UINT32_MAX, 0 };
	expect(request(guest, ring, VIRTIO_BLK_T_WRITE_ZEROES, 0, &segment, 1, false),
		VIRTIO_BLK_S_IOERR, "too many sectors");
	segment.len = 15;
	expect(request(guest, ring, VIRTIO_BLK_T_DISCARD, 0, &segment, 1, false),
		VIRTIO_BLK_S_IOERR, "a part of a range");
	segment.len = 17 * sizeof(*ranges);
	expect(request(guest, ring, VIRTIO_BLK_T_DISCARD, 0, &segment, 1, false),
		VIRTIO_BLK_S_IOERR, "17 ranges");
	expect(request(guest, ring, VIRTIO_BLK_T_DISCARD, 0, NULL, 0, false), VIRTIO_BLK_S_IOERR,
		"no range");
}

void test_requests(struct disk *disk)
{
	struct guest guest;
	struct ringdisk_vblk_stats stats;

	guest_run(&guest, disk, 2);
	lengths(&guest, &guest.rings[0], false);
	lengths(&guest, &guest.rings[1], true);
	layouts(&guest, &guest.rings[0]);
	others(&guest, &guest.rings[1], disk);
	guest_stop(&guest);
	stats = stats_of(&guest, 0);
	CHECK(stats.state == RINGDISK_VBLK_IDLE && !stats.in_flight,
		"queue 0: state %u, %u in flight", stats.state, stats.in_flight);
	/* By default: bios for block devices. */
	bool device = !strncmp(disk->path, "/dev/", 5) && strncmp(disk->path, "/dev/shm/", 9);
	bool bios = disk->engine == RINGDISK_VBLK_ENGINE_BIO ||
		    (disk->engine == RINGDISK_VBLK_ENGINE_DEFAULT && device);
	CHECK(bios ? stats.bios > 0 : !stats.bios, "%llu bios", stats.bios);
	CHECK(stats.reads && stats.writes && !stats.errors && !stats.broken, "queue 0: %llu errors",
		stats.errors);
	guest_close(&guest);
}

/* Buffers at odd addresses and of odd lengths, small and long, with more of them at a time than
 * there are bounces. */
void test_bounce(struct disk *disk)
{
	struct guest guest;
	struct ring *ring;
	uint8_t *out, *in;
	struct ringdisk_vblk_stats stats;

	guest_run(&guest, disk, 1);
	ring = &guest.rings[0];
	out = take(&guest, 2 * MIB, 4096);
	in = take(&guest, 3 * MIB, 4096);
	for (unsigned i = 0; i < 6; i++) {
		uint32_t len = i < 3 ? 4 * KIB : MIB + 512;
		unsigned odd = 1 + i * 3, third = len / 3 + 1;
		struct segment data[3] = { { in + odd, third, true }, { in + odd + third + 17, third, true },
			{ in + odd + 2 * third + 99, len - 2 * third, true } };

		pattern(out + odd, len, i);
		expect(transfer(&guest, ring, true, 8 * i, out + odd, len), VIRTIO_BLK_S_OK,
			"a misaligned write");
		memset(in, 0, 3 * MIB);
		expect(request(&guest, ring, VIRTIO_BLK_T_IN, 8 * i, data, 3, i & 1),
			VIRTIO_BLK_S_OK, "a misaligned read");
		CHECK(!memcmp(data[0].at, out + odd, third) &&
				!memcmp(data[1].at, out + odd + third, third) &&
				!memcmp(data[2].at, out + odd + 2 * third, len - 2 * third),
			"misaligned buffers of %u bytes were mixed up", len);
	}
	/* 80 of 4 KiB at a time: 32 bounces. */
	struct virtio_blk_outhdr *headers = take(&guest, 80 * sizeof(*headers), 16);
	uint8_t *statuses = take(&guest, 80, 1);
	unsigned done = 0;

	pattern(out + 1, MIB, 5);
	expect(transfer(&guest, ring, true, 0, out + 1, MIB), VIRTIO_BLK_S_OK, "a misaligned write");
	memset(in, 0, MIB);
	for (unsigned i = 0; i < 80; i++) {
		headers[i] = (struct virtio_blk_outhdr){ .type = VIRTIO_BLK_T_IN, .sector = 8 * i };
		statuses[i] = 0xff;
		CHECK(ring_add(&guest, ring,
			      (struct segment[]){ { &headers[i], 16, false },
				      { in + 3 + 4096 * i, 4096, true },
				      { &statuses[i], 1, true } },
			      3, false) >= 0,
			"the ring is full");
	}
	ring_publish(ring);
	for (; done < 80; done++)
		ring_wait(ring, NULL, 10000);
	for (unsigned i = 0; i < 80; i++)
		expect(statuses[i], VIRTIO_BLK_S_OK, "one of 80 misaligned reads");
	CHECK(!memcmp(in + 3, out + 1, 80 * 4096), "80 misaligned reads gave something else");
	stats = stats_of(&guest, 0);
	CHECK(stats.bounced >= 92, "%llu were bounced", stats.bounced);
	printf("bounced %llu, waited %llu\n", stats.bounced, stats.bounce_waits);
	guest_stop(&guest);
	guest_close(&guest);
}

void test_read_only(struct disk *disk)
{
	struct guest guest;
	struct virtio_blk_discard_write_zeroes *range;
	struct segment segment;
	uint8_t *data;

	disk->flags = RINGDISK_VBLK_DISK_RO;
	guest_run(&guest, disk, 1);
	data = take(&guest, 4096, 4096);
	range = take(&guest, sizeof(*range), 16);
	*range = (struct virtio_blk_discard_write_zeroes){ 0, 8, 0 };
	segment = (struct segment){ range, sizeof(*range), false };
	expect(transfer(&guest, &guest.rings[0], false, 0, data, 4096), VIRTIO_BLK_S_OK, "a read");
	expect(transfer(&guest, &guest.rings[0], true, 0, data, 4096), VIRTIO_BLK_S_IOERR,
		"a write of a read-only disk");
	expect(request(&guest, &guest.rings[0], VIRTIO_BLK_T_DISCARD, 0, &segment, 1, false),
		VIRTIO_BLK_S_IOERR, "a discard");
	expect(request(&guest, &guest.rings[0], VIRTIO_BLK_T_WRITE_ZEROES, 0, &segment, 1, false),
		VIRTIO_BLK_S_IOERR, "write zeroes");
	expect(request(&guest, &guest.rings[0], VIRTIO_BLK_T_FLUSH, 0, NULL, 0, false),
		VIRTIO_BLK_S_OK, "a flush");
	guest_stop(&guest);
	guest_close(&guest);
}

/* A device that fails (scsi_debug, bad blocks): everything is answered, with errors. */
void test_errors(struct disk *disk)
{
	struct guest guest;
	uint8_t *data;
	unsigned failed = 0;

	guest_run(&guest, disk, 1);
	data = take(&guest, 4096, 4096);
	for (unsigned i = 0; i < 64; i++) {
		int status = transfer(&guest, &guest.rings[0], i & 1, 8 * i, data, 4096);

		CHECK(status == VIRTIO_BLK_S_OK || status == VIRTIO_BLK_S_IOERR, "status %d", status);
		failed += status != VIRTIO_BLK_S_OK;
	}
	CHECK(failed, "nothing failed");
	CHECK(stats_of(&guest, 0).errors == failed, "%llu counted, %u failed",
		stats_of(&guest, 0).errors, failed);
	guest_stop(&guest);
	guest_close(&guest);
}
