/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "cgroup.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

void put(const char *name, const char *value)
{
	int fd = open(name, O_WRONLY);

	CHECK(fd >= 0 && write(fd, value, strlen(value)) == (ssize_t)strlen(value), "%s: %s", name,
		strerror(errno));
	close(fd);
}

uint64_t counted(const char *file, const char *word)
{
	char text[65536], name[128];
	uint64_t sum = 0;
	ssize_t len;
	int fd;

	snprintf(name, sizeof(name), CGROUP "/%s", file);
	fd = open(name, O_RDONLY);
	if (fd < 0)
		return 0;
	len = read(fd, text, sizeof(text) - 1);
	close(fd);
	CHECK(len >= 0, "%s", name);
	text[len] = 0;
	for (const char *at = text; (at = strstr(at, word)); at += strlen(word))
		sum += strtoull(at + strlen(word), NULL, 10);
	return sum;
}

uint64_t counted_memory(const char *word)
{
	nap_ms(2500);
	return counted("memory.stat", word);
}

bool has_controller(const char *name)
{
	char text[4096];
	int fd = open(CGROUPS "/cgroup.controllers", O_RDONLY);
	ssize_t len;

	CHECK(fd >= 0, "no cgroups");
	len = read(fd, text, sizeof(text) - 1);
	close(fd);
	CHECK(len >= 0, "cgroup.controllers");
	text[len] = 0;
	return strstr(text, name);
}

void make_cgroup(void)
{
	if (has_controller("memory"))
		put(CGROUPS "/cgroup.subtree_control", "+memory");
	if (has_controller("io"))
		put(CGROUPS "/cgroup.subtree_control", "+io");
	CHECK(!mkdir(CGROUP, 0700), "mkdir %s", CGROUP);
}

int in_cgroup(void (*what)(struct guest *, struct disk *), struct guest *guest, struct disk *disk)
{
	pid_t child = fork();
	int status;

	CHECK(child >= 0, "fork");
	if (!child) {
		put(CGROUP "/cgroup.procs", "0");
		what(guest, disk);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child, "waitpid");
	return status;
}

void remove_cgroup(void)
{
	for (unsigned tries = 0; rmdir(CGROUP); tries++) {
		CHECK(tries < 500, "rmdir %s: %s", CGROUP, strerror(errno));
		nap_ms(10);
	}
}
