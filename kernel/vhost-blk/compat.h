/* SPDX-License-Identifier: GPL-2.0-only */
/* What differs between the kernels that the module is built for. */
#ifndef VBLK_COMPAT_H
#define VBLK_COMPAT_H

#include <linux/version.h>

#include "vhost.h"

/*
 * After 6.12 the core can use buffers in order and then wants to know how many descriptors each
 * had. Block devices do not use them in order. (When exactly it came does not matter: Kbuild
 * refuses a series without a header of its own.)
 */
static inline int vblk_add_used(struct vhost_virtqueue *vq, struct vring_used_elem *heads,
				unsigned int nr)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
	return vhost_add_used_n(vq, heads, NULL, nr);
#else
	return vhost_add_used_n(vq, heads, nr);
#endif
}

#endif
