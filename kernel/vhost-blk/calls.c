// SPDX-License-Identifier: GPL-2.0-only
/*
 * What the module calls in vhost, with the types that the copied header gives it: nothing runs
 * here. check-layout finds this structure in the module's BTF and compares each member with the
 * function of the same name in the BTF of the kernel's vhost. A call that is not listed is found
 * by it, too.
 */
#include "vblk.h"

struct vblk_vhost_calls {
	typeof(vhost_add_used_n) *vhost_add_used_n;
	typeof(vhost_dev_check_owner) *vhost_dev_check_owner;
	typeof(vhost_dev_cleanup) *vhost_dev_cleanup;
	typeof(vhost_dev_flush) *vhost_dev_flush;
	typeof(vhost_dev_init) *vhost_dev_init;
	typeof(vhost_dev_ioctl) *vhost_dev_ioctl;
	typeof(vhost_dev_stop) *vhost_dev_stop;
	typeof(vhost_disable_notify) *vhost_disable_notify;
	typeof(vhost_enable_notify) *vhost_enable_notify;
	typeof(vhost_exceeds_weight) *vhost_exceeds_weight;
	typeof(vhost_get_vq_desc) *vhost_get_vq_desc;
	typeof(vhost_poll_queue) *vhost_poll_queue;
	typeof(vhost_signal) *vhost_signal;
	typeof(vhost_vq_access_ok) *vhost_vq_access_ok;
	typeof(vhost_vq_init_access) *vhost_vq_init_access;
	typeof(vhost_vq_work_queue) *vhost_vq_work_queue;
	typeof(vhost_vring_ioctl) *vhost_vring_ioctl;
	typeof(vhost_work_init) *vhost_work_init;
	typeof(vhost_worker_ioctl) *vhost_worker_ioctl;
};

/* Without a variable of it the structure would not be in the BTF. */
static const struct vblk_vhost_calls vblk_vhost_calls __used;
