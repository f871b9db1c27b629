// SPDX-License-Identifier: GPL-2.0-only
/*
 * The backend: a file that the daemon opened. No path is looked up here, so what may be done with
 * it is what its descriptor was opened for, and what who starts a ring may do (vblk_queue.cred).
 */
#include <linux/err.h>
#include <linux/file.h>
#include <linux/log2.h>
#include <linux/slab.h>

#include "vblk.h"

#define VBLK_BLOCK_BYTES_MAX 4096

static int vblk_disk_check(const struct ringdisk_vblk_disk *wanted)
{
	u32 flags = RINGDISK_VBLK_DISK_RO | RINGDISK_VBLK_DISK_WRITE_THROUGH;

	if (wanted->flags & ~flags || wanted->reserved0 ||
	    memchr_inv(wanted->reserved1, 0, sizeof(wanted->reserved1)))
		return -EINVAL;
	if (wanted->engine > RINGDISK_VBLK_ENGINE_BIO)
		return -EINVAL;
	if (!is_power_of_2(wanted->block_bytes) || wanted->block_bytes < SECTOR_SIZE ||
	    wanted->block_bytes > VBLK_BLOCK_BYTES_MAX)
		return -EINVAL;
	if (!is_power_of_2(wanted->memory_align) || wanted->memory_align > PAGE_SIZE)
		return -EINVAL;
	if (wanted->ranges_max > VBLK_RANGES_MAX ||
	    wanted->range_sectors_max > VBLK_RANGE_SECTORS_MAX)
		return -EINVAL;
	if (!wanted->capacity || wanted->capacity > MAX_LFS_FILESIZE ||
	    wanted->capacity & (wanted->block_bytes - 1))
		return -EINVAL;
	return 0;
}

/*
 * Whether the host swaps to it. write(2) is refused then, but bios, discards and zeroes would get
 * through, into the memory of others.
 */
static bool vblk_is_swap(const struct file *file)
{
	return IS_SWAPFILE(file->f_mapping->host);
}

bool vblk_disk_is_swap(const struct vblk_disk *disk)
{
	return vblk_is_swap(disk->file);
}

/* Whether the file is one that can be served, and as the guest was told. */
static int vblk_disk_check_file(struct file *file, const struct ringdisk_vblk_disk *wanted)
{
	struct inode *inode = file->f_mapping->host;

	if (!S_ISREG(inode->i_mode) && !S_ISBLK(inode->i_mode))
		return -EINVAL;
	if (!(file->f_mode & FMODE_READ) || !file->f_op->read_iter)
		return -EBADF;
	if (!(wanted->flags & RINGDISK_VBLK_DISK_RO) &&
	    (!(file->f_mode & FMODE_WRITE) || !file->f_op->write_iter))
		return -EBADF;
	if (!(wanted->flags & RINGDISK_VBLK_DISK_RO) && vblk_is_swap(file))
		return -ETXTBSY;
	/* Writes would go to the end of the file. */
	if (file->f_flags & O_APPEND)
		return -EINVAL;
	/* Buffered I/O would block the worker, and be a cache that nobody asked for. */
	if (!(file->f_mode & FMODE_CAN_ODIRECT))
		return -EOPNOTSUPP;
	if (wanted->capacity > (u64)i_size_read(inode))
		return -EFBIG;
	return 0;
}

/* Checks what is wanted and takes a reference to the file. */
struct vblk_disk *vblk_disk_open(const struct ringdisk_vblk_disk *wanted)
{
	struct vblk_disk *disk;
	int err;

	err = vblk_disk_check(wanted);
	if (err)
		return ERR_PTR(err);
	disk = kzalloc_obj(*disk, GFP_KERNEL_ACCOUNT);
	if (!disk)
		return ERR_PTR(-ENOMEM);
	disk->file = fget(wanted->fd);
	err = -EBADF;
	if (!disk->file)
		goto free;
	err = vblk_disk_check_file(disk->file, wanted);
	if (err)
		goto put;
	disk->memory_mask = wanted->memory_align - 1;
	err = -EINVAL;
	if (S_ISBLK(disk->file->f_mapping->host->i_mode)) {
		disk->bdev = I_BDEV(disk->file->f_mapping->host);
		if (wanted->block_bytes < bdev_logical_block_size(disk->bdev) ||
		    bdev_dma_alignment(disk->bdev) >= PAGE_SIZE)
			goto put;
		disk->memory_mask |= bdev_dma_alignment(disk->bdev);
	} else if (wanted->engine == RINGDISK_VBLK_ENGINE_BIO) {
		goto put;
	}
	/* By default the one with fewer instructions (docs/benchmarks/vhost-blk.md). */
	disk->use_bio = wanted->engine == RINGDISK_VBLK_ENGINE_BIO ||
			(wanted->engine == RINGDISK_VBLK_ENGINE_DEFAULT && disk->bdev);
	disk->read_only = wanted->flags & RINGDISK_VBLK_DISK_RO;
	disk->capacity = wanted->capacity;
	disk->block_mask = wanted->block_bytes - 1;
	disk->ranges_max = wanted->ranges_max;
	disk->range_sectors_max = wanted->range_sectors_max;
	memcpy(disk->id, wanted->id, sizeof(disk->id));
	vblk_charge_open(disk);
	return disk;

put:
	fput(disk->file);
free:
	kfree(disk);
	return ERR_PTR(err);
}

void vblk_disk_close(struct vblk_disk *disk)
{
	if (!disk)
		return;
	/*
	 * Others that have the device open, and did not use it while it was ours, must not find in
	 * its page cache what was there before. Discards and zeroes go past it with both engines.
	 */
	if (disk->bdev && !disk->read_only)
		invalidate_bdev(disk->bdev);
	vblk_charge_close(disk);
	fput(disk->file);
	kfree(disk);
}
