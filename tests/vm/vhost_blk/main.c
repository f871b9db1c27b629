/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Tests of the module vhost_blk, one for each run:  driver TEST DISK ENGINE [ARGUMENT]
 *
 * DISK: a block device or file, whose content is lost. ENGINE: kiocb, bio or default. Prints a line
 * for a test that passed; ends with 1 and a reason otherwise.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "guest.h"

void test_requests(struct disk *disk);
void test_verify(struct disk *disk);
void test_load(struct disk *disk, unsigned queues, unsigned workers);
void test_bounce(struct disk *disk);
void test_read_only(struct disk *disk);
void test_errors(struct disk *disk);
void test_round_trips(struct disk *disk, unsigned rounds);
void test_cache(struct disk *disk);
void test_kill(struct disk *disk, unsigned times);
void test_crash(struct disk *disk, unsigned times);
void test_rings(struct disk *disk);
void test_control(struct disk *disk);
void test_races(struct disk *disk);
void test_workers(struct disk *disk);
void test_removal(struct disk *disk);
void test_memory(struct disk *disk);
void test_holes(struct disk *disk);
void test_addresses(struct disk *disk);
void test_interrupted(struct disk *disk);
void test_frozen(struct disk *disk);
void test_dying(struct disk *disk);
void test_grace_periods(struct disk *disk);
void test_crowd(struct disk *disk);
void test_closing(struct disk *disk);
void test_charged(struct disk *disk);
void test_reclaim(struct disk *disk);
void test_swap(struct disk *disk);
void test_accounted(struct disk *disk);
void test_stuck(struct disk *disk);
void test_rights(struct disk *disk);
void test_fuzz(struct disk *disk, unsigned seconds);

int main(int argc, char **argv)
{
	struct disk disk = { 0 };
	unsigned number = argc > 4 ? atoi(argv[4]) : 0, second = argc > 5 ? atoi(argv[5]) : 0;
	const char *test = argc > 3 ? argv[1] : "";

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc < 4) {
		fprintf(stderr, "usage: driver TEST DISK kiocb|bio|default [ARGUMENT…]\n");
		return 2;
	}
	disk.path = argv[2];
	disk.engine = !strcmp(argv[3], "bio") ? RINGDISK_VBLK_ENGINE_BIO :
		!strcmp(argv[3], "kiocb") ? RINGDISK_VBLK_ENGINE_KIOCB : RINGDISK_VBLK_ENGINE_DEFAULT;
	if (!strcmp(test, "requests"))
		test_requests(&disk);
	else if (!strcmp(test, "verify"))
		test_verify(&disk);
	else if (!strcmp(test, "load"))
		test_load(&disk, number ? number : 4, second);
	else if (!strcmp(test, "bounce"))
		test_bounce(&disk);
	else if (!strcmp(test, "read-only"))
		test_read_only(&disk);
	else if (!strcmp(test, "errors"))
		test_errors(&disk);
	else if (!strcmp(test, "round-trips"))
		test_round_trips(&disk, number ? number : 200);
	else if (!strcmp(test, "cache"))
		test_cache(&disk);
	else if (!strcmp(test, "kill"))
		test_kill(&disk, number ? number : 5);
	else if (!strcmp(test, "crash"))
		test_crash(&disk, number ? number : 20);
	else if (!strcmp(test, "rings"))
		test_rings(&disk);
	else if (!strcmp(test, "control"))
		test_control(&disk);
	else if (!strcmp(test, "races"))
		test_races(&disk);
	else if (!strcmp(test, "workers"))
		test_workers(&disk);
	else if (!strcmp(test, "removal"))
		test_removal(&disk);
	else if (!strcmp(test, "memory"))
		test_memory(&disk);
	else if (!strcmp(test, "holes"))
		test_holes(&disk);
	else if (!strcmp(test, "addresses"))
		test_addresses(&disk);
	else if (!strcmp(test, "interrupted"))
		test_interrupted(&disk);
	else if (!strcmp(test, "frozen"))
		test_frozen(&disk);
	else if (!strcmp(test, "dying"))
		test_dying(&disk);
	else if (!strcmp(test, "grace-periods"))
		test_grace_periods(&disk);
	else if (!strcmp(test, "crowd"))
		test_crowd(&disk);
	else if (!strcmp(test, "closing"))
		test_closing(&disk);
	else if (!strcmp(test, "charged"))
		test_charged(&disk);
	else if (!strcmp(test, "reclaim"))
		test_reclaim(&disk);
	else if (!strcmp(test, "swap"))
		test_swap(&disk);
	else if (!strcmp(test, "accounted"))
		test_accounted(&disk);
	else if (!strcmp(test, "stuck"))
		test_stuck(&disk);
	else if (!strcmp(test, "rights"))
		test_rights(&disk);
	else if (!strcmp(test, "fuzz"))
		test_fuzz(&disk, number ? number : 10);
	else
		fail("there is no test %s", test);
	printf("passed: %s %s %s\n", test, disk.path, argv[3]);
	return 0;
}
