/* SPDX-License-Identifier: GPL-2.0-only */
/* What differs between the kernels that the module is built for. */
#ifndef VBLK_COMPAT_H
#define VBLK_COMPAT_H

#include <linux/slab.h>

#include "vhost.h"

/* The first releases of 6.12 lack these. */
#ifndef kzalloc_obj
#define kzalloc_obj(what, gfp) kzalloc(sizeof(what), gfp)
#endif
#ifndef kvzalloc_obj
#define kvzalloc_obj(what, gfp) kvzalloc(sizeof(what), gfp)
#endif

/* Block devices do not use buffers in order. */
static inline int vblk_add_used(struct vhost_virtqueue *vq, struct vring_used_elem *heads,
				unsigned int nr)
{
#ifdef VBLK_IN_ORDER
	return vhost_add_used_n(vq, heads, NULL, nr);
#else
	return vhost_add_used_n(vq, heads, nr);
#endif
}

#endif
