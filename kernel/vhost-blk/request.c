// SPDX-License-Identifier: GPL-2.0-only
/*
 * Requests as a driver writes them (virtio 1.3, section 5.2.6).
 *
 * The guest's bytes are copied once and then used. Header, data and status may be split over
 * descriptors in any way. On a worker, under vq->mutex, with the chain in vq->iov: the device reads
 * the first `out` segments and writes the `in` behind them.
 */
#include <linux/overflow.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "vblk.h"

/* The byte that the status goes to: the last one that the device may write. */
static u8 __user *vblk_last_byte(const struct iovec *iov, unsigned int nr)
{
	while (nr-- > 0)
		if (iov[nr].iov_len)
			return (u8 __user *)iov[nr].iov_base + iov[nr].iov_len - 1;
	return NULL;
}

/*
 * Keeps `len` bytes of the chain from byte `skip` on as the request's buffers. The chain has them.
 */
static int vblk_keep_buffers(struct vblk_req *req, const struct iovec *iov, unsigned int nr,
			     size_t skip, size_t len)
{
	unsigned int used = 0;

	req->iov = req->fast_iov;
	if (nr > VBLK_FAST_IOVS) {
		req->iov = kmalloc_array(nr, sizeof(*iov), GFP_KERNEL_ACCOUNT);
		if (!req->iov)
			return -ENOMEM;
	}
	for (; nr > 0 && len > 0; nr--, iov++) {
		size_t part;

		if (skip >= iov->iov_len) {
			skip -= iov->iov_len;
			continue;
		}
		part = min(iov->iov_len - skip, len);
		req->iov[used].iov_base = iov->iov_base + skip;
		req->iov[used].iov_len = part;
		used++;
		len -= part;
		skip = 0;
	}
	req->iovs = used;
	return 0;
}

/* Whether the place is on the disk and of whole logical blocks. */
static bool vblk_place_ok(const struct vblk_disk *disk, u64 sector, u64 len, u64 *offset)
{
	u64 end;

	if (check_mul_overflow(sector, (u64)SECTOR_SIZE, offset) ||
	    check_add_overflow(*offset, len, &end))
		return false;
	return end <= disk->capacity && !((*offset | len) & disk->block_mask);
}

static void vblk_fail(struct vblk_req *req, u8 status)
{
	req->status = status;
	req->refused = true;
}

static void vblk_parse_transfer(struct vblk_req *req, u64 sector, const struct iovec *iov,
				unsigned int nr, size_t skip, u64 len)
{
	const struct vblk_disk *disk = req->queue->dev->disk;
	u64 offset;

	if (len > VBLK_REQUEST_BYTES_MAX || !vblk_place_ok(disk, sector, len, &offset) ||
	    (req->write && disk->read_only) || vblk_keep_buffers(req, iov, nr, skip, len)) {
		vblk_fail(req, VIRTIO_BLK_S_IOERR);
		return;
	}
	req->place = offset;
	req->total = len;
}

/* One range. Not VIRTIO_BLK_S_OK: it is refused. */
static u8 vblk_parse_range(const struct vblk_req *req, struct vblk_range *range,
			   const struct virtio_blk_discard_write_zeroes *raw)
{
	const struct vblk_disk *disk = req->queue->dev->disk;
	u32 sectors = le32_to_cpu(raw->num_sectors), flags = le32_to_cpu(raw->flags);
	u32 allowed = 0;

	if (req->type == VIRTIO_BLK_T_WRITE_ZEROES)
		allowed = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
	if (flags & ~allowed)
		return VIRTIO_BLK_S_UNSUPP;
	if (sectors > disk->range_sectors_max)
		return VIRTIO_BLK_S_IOERR;
	range->len = (u64)sectors << SECTOR_SHIFT;
	range->unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
	if (!vblk_place_ok(disk, le64_to_cpu(raw->sector), range->len, &range->offset))
		return VIRTIO_BLK_S_IOERR;
	return VIRTIO_BLK_S_OK;
}

/* Ranges of a discard or of a request to write zeroes; `iter` is behind the header. */
static void vblk_parse_ranges(struct vblk_req *req, struct iov_iter *iter)
{
	const struct vblk_disk *disk = req->queue->dev->disk;
	struct virtio_blk_discard_write_zeroes raw;
	size_t bytes = iov_iter_count(iter);
	u8 status;

	if (!bytes || bytes % sizeof(raw) || bytes / sizeof(raw) > disk->ranges_max ||
	    disk->read_only) {
		vblk_fail(req, VIRTIO_BLK_S_IOERR);
		return;
	}
	req->ranges = kmalloc_array(bytes / sizeof(raw), sizeof(*req->ranges), GFP_KERNEL_ACCOUNT);
	if (!req->ranges) {
		vblk_fail(req, VIRTIO_BLK_S_IOERR);
		return;
	}
	while (iov_iter_count(iter)) {
		if (!copy_from_iter_full(&raw, sizeof(raw), iter)) {
			vblk_fail(req, VIRTIO_BLK_S_IOERR);
			return;
		}
		status = vblk_parse_range(req, &req->ranges[req->nr_ranges], &raw);
		if (status != VIRTIO_BLK_S_OK) {
			vblk_fail(req, status);
			return;
		}
		req->nr_ranges++;
	}
}

/* Answers get-id: no engine is needed. */
static void vblk_get_id(struct vblk_req *req, const struct iovec *iov, unsigned int nr, u64 room)
{
	const u8 *id = req->queue->dev->disk->id;
	struct iov_iter iter;
	size_t len = min_t(u64, room, VIRTIO_BLK_ID_BYTES);

	iov_iter_init(&iter, ITER_DEST, iov, nr, len);
	if (copy_to_iter(id, len, &iter) != len)
		vblk_fail(req, VIRTIO_BLK_S_IOERR);
	else if (len != room)
		/*
		 * What the used element says is written without a gap: the status lies behind one.
		 */
		req->written_ok = len;
}

/*
 * Reads a request from the chain. Not 0: it has no header or no status, and cannot be answered. A
 * request that is to be refused is 0, with its status.
 */
int vblk_request_parse(struct vblk_req *req, unsigned int out, unsigned int in)
{
	const struct iovec *iov = req->queue->vq.iov;
	u64 readable = iov_length(iov, out), writable = iov_length(iov + out, in);
	struct virtio_blk_outhdr header;
	struct iov_iter iter;
	u64 sector;

	req->status = VIRTIO_BLK_S_OK;
	req->write = false;
	req->type = U32_MAX;
	req->refused = false;
	req->error = 0;
	req->place = 0;
	req->total = 0;
	req->dying = false;
	req->iov = NULL;
	req->iovs = 0;
	req->bounce = NULL;
	req->bio = NULL;
	req->ranges = NULL;
	req->nr_ranges = 0;
	if (readable < sizeof(header) || !writable)
		return -EBADMSG;
	iov_iter_init(&iter, ITER_SOURCE, iov, out, readable);
	if (!copy_from_iter_full(&header, sizeof(header), &iter))
		return -EFAULT;
	req->status_addr = vblk_last_byte(iov + out, in);
	req->type = le32_to_cpu((__force __le32)header.type);
	sector = le64_to_cpu((__force __le64)header.sector);
	/* The status counts as written where nothing lies before it. */
	req->written_ok = writable == 1 ? 1 : 0;
	req->written_error = req->written_ok;
	switch (req->type) {
	case VIRTIO_BLK_T_IN:
		vblk_parse_transfer(req, sector, iov + out, in, 0, writable - 1);
		req->written_ok = min_t(u64, writable, U32_MAX);
		break;
	case VIRTIO_BLK_T_OUT:
		req->write = true;
		vblk_parse_transfer(req, sector, iov, out, sizeof(header),
				    readable - sizeof(header));
		break;
	case VIRTIO_BLK_T_FLUSH:
		break;
	case VIRTIO_BLK_T_GET_ID:
		req->written_ok = min_t(u64, writable, U32_MAX);
		vblk_get_id(req, iov + out, in, writable - 1);
		break;
	case VIRTIO_BLK_T_DISCARD:
	case VIRTIO_BLK_T_WRITE_ZEROES:
		vblk_parse_ranges(req, &iter);
		break;
	default:
		vblk_fail(req, VIRTIO_BLK_S_UNSUPP);
	}
	return 0;
}

/*
 * Counts a request as taken. Not when it is parsed: it may go back into the ring, and is counted by
 * the worker or process that takes it then.
 */
void vblk_request_count(const struct vblk_req *req)
{
	struct ringdisk_vblk_stats *stats = &req->queue->stats;

	switch (req->type) {
	case VIRTIO_BLK_T_IN:
		stats->reads++;
		stats->read_bytes += req->total;
		break;
	case VIRTIO_BLK_T_OUT:
		stats->writes++;
		stats->write_bytes += req->total;
		break;
	case VIRTIO_BLK_T_FLUSH:
		stats->flushes++;
		break;
	case VIRTIO_BLK_T_GET_ID:
		stats->get_ids++;
		break;
	case VIRTIO_BLK_T_DISCARD:
		stats->discards++;
		break;
	case VIRTIO_BLK_T_WRITE_ZEROES:
		stats->write_zeroes++;
		break;
	}
}

/* Gives a read or write with aligned buffers to an engine. */
void vblk_request_transfer(struct vblk_req *req)
{
	struct vblk_disk *disk = req->queue->dev->disk;

	iov_iter_init(&req->iter, req->write ? ITER_SOURCE : ITER_DEST, req->iov, req->iovs,
		      req->len);
	if (disk->use_bio && vblk_bio_submit(req)) {
		req->queue->stats.bios++;
		return;
	}
	req->queue->stats.kiocbs++;
	vblk_kiocb_submit(req);
}

/*
 * Begins what was parsed. Each request that comes here is announced by vblk_req_done, maybe before
 * this returns.
 */
void vblk_request_submit(struct vblk_req *req)
{
	struct vblk_disk *disk = req->queue->dev->disk;

	req->pos = req->place;
	req->len = req->total;
	if (req->refused) {
		vblk_req_done(req);
		return;
	}
	switch (req->type) {
	case VIRTIO_BLK_T_IN:
	case VIRTIO_BLK_T_OUT:
		if (!req->len)
			vblk_req_done(req);
		else if (vblk_bounce_needed(req, disk))
			vblk_bounce_start(req);
		else
			vblk_request_transfer(req);
		break;
	case VIRTIO_BLK_T_FLUSH:
		if (!disk->bdev || !vblk_bio_flush(req))
			vblk_slow_submit(req);
		break;
	case VIRTIO_BLK_T_DISCARD:
	case VIRTIO_BLK_T_WRITE_ZEROES:
		vblk_slow_submit(req);
		break;
	default:
		/* Answered already. */
		vblk_req_done(req);
	}
}

/* Frees what the request has allocated. */
void vblk_request_clear(struct vblk_req *req)
{
	if (req->iov != req->fast_iov)
		kfree(req->iov);
	req->iov = NULL;
	kfree(req->ranges);
	req->ranges = NULL;
}
