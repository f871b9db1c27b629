/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A cgroup for one test at a time. Every call ends the program with a message when something is not
 * as it must be. */
#ifndef CGROUP_H
#define CGROUP_H

#include "guest.h"

#define CGROUPS "/sys/fs/cgroup"
#define CGROUP CGROUPS "/vhost-blk-test"

/* Writes a file of the kernel. */
void put(const char *name, const char *value);
bool has_controller(const char *name);
void make_cgroup(void);
/* Runs a child in the cgroup. Returns how it ended. */
int in_cgroup(void (*what)(struct guest *, struct disk *), struct guest *guest, struct disk *disk);
/* The sum of what stands behind a word in a file of the cgroup, or 0. */
uint64_t counted(const char *file, const char *word);
/* The same of memory.stat, once all of it is there: Linux gathers the last MiB or so of a machine
 * with few CPUs every two seconds. */
uint64_t counted_memory(const char *word);
void remove_cgroup(void);

#endif
