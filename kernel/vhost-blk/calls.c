// SPDX-License-Identifier: GPL-2.0-only
/*
 * What the module calls in vhost, with the types that the copied header gives it: nothing runs
 * here. check-layout finds this structure in the module's BTF and compares each member with the
 * function of the same name in the BTF of the kernel's vhost. A call that is not listed is found
 * by it, too.
 */
#include "vblk.h"

#define VBLK_CALLS(CALL)		\
	CALL(vhost_add_used_n)		\
	CALL(vhost_dev_check_owner)	\
	CALL(vhost_dev_cleanup)		\
	CALL(vhost_dev_flush)		\
	CALL(vhost_dev_init)		\
	CALL(vhost_dev_ioctl)		\
	CALL(vhost_dev_stop)		\
	CALL(vhost_disable_notify)	\
	CALL(vhost_enable_notify)	\
	CALL(vhost_exceeds_weight)	\
	CALL(vhost_get_vq_desc)		\
	CALL(vhost_poll_queue)		\
	CALL(vhost_signal)		\
	CALL(vhost_vq_access_ok)	\
	CALL(vhost_vq_init_access)	\
	CALL(vhost_vq_work_queue)	\
	CALL(vhost_vring_ioctl)		\
	CALL(vhost_work_init)		\
	CALL(vhost_worker_ioctl)

#define VBLK_MEMBER(name) typeof(&name) name;
struct vblk_vhost_calls {
	VBLK_CALLS(VBLK_MEMBER)
};

/* Without a variable of it the structure would not be in the BTF. */
static const struct vblk_vhost_calls vblk_vhost_calls __used;
