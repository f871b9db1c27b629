// SPDX-License-Identifier: GPL-2.0-only
/*
 * Reads and writes of block devices by bios made here, and their flushes.
 *
 * A request is one bio of up to BIO_MAX_VECS (256) pages, 1 MiB where pages lie anywhere; a longer
 * one is left to the kiocb engine, which chains bios itself. The guest's pages are pinned until the
 * worker releases them: that may sleep (folio locks), so it is not done when the bio ends.
 *
 * The page cache of the device is not looked at. The daemon has claimed the device and emptied its
 * cache, and nobody may use it buffered; what the cache holds is dropped in the end (disk.c).
 */
#include <linux/bio.h>
#include <linux/mm.h>

#include "vblk.h"

/* Bios that can always be had, for all queues. */
#define VBLK_BIOS 64
/* Pages that are pinned at a time. */
#define VBLK_PIN_PAGES 16

static struct bio_set vblk_bios;

int vblk_bio_init(void)
{
	return bioset_init(&vblk_bios, VBLK_BIOS, 0, BIOSET_NEED_BVECS | BIOSET_PERCPU_CACHE);
}

void vblk_bio_exit(void)
{
	bioset_exit(&vblk_bios);
}

/* Any context. */
static void vblk_bio_end(struct bio *bio)
{
	struct vblk_req *req = bio->bi_private;

	if (bio->bi_status)
		req->error = blk_status_to_errno(bio->bi_status);
	vblk_req_done(req);
}

/*
 * A bio for the request, or NULL. Never waits for one: the worker itself is who gives them back.
 */
static struct bio *vblk_bio_alloc(struct vblk_req *req, unsigned short vecs, blk_opf_t opf)
{
	struct block_device *bdev = req->queue->dev->disk->bdev;
	struct bio *bio;

	bio = bio_alloc_bioset(bdev, vecs, opf | REQ_ALLOC_CACHE, GFP_NOWAIT | __GFP_NOWARN,
			       &vblk_bios);
	if (bio) {
		bio->bi_private = req;
		bio->bi_end_io = vblk_bio_end;
	}
	return bio;
}

/*
 * Adds a part of a page, together with the one before where both are one piece: pins are counted by
 * pages.
 */
static void vblk_bio_add(struct bio *bio, struct page *page, unsigned int len, unsigned int offset)
{
	struct bio_vec *last = bio->bi_vcnt ? &bio->bi_io_vec[bio->bi_vcnt - 1] : NULL;
	unsigned int end = last ? last->bv_offset + last->bv_len : 0;

	if (last && !offset && !(end & ~PAGE_MASK) &&
	    page_folio(page) == page_folio(last->bv_page) &&
	    page_to_pfn(page) == page_to_pfn(last->bv_page) + (end >> PAGE_SHIFT)) {
		last->bv_len += len;
		bio->bi_iter.bi_size += len;
	} else {
		__bio_add_page(bio, page, len, offset);
	}
}

/* Pins the request's buffers and adds them. Not 0: some may be in the bio. */
static int vblk_bio_fill(struct bio *bio, struct iov_iter *iter)
{
	while (iov_iter_count(iter)) {
		struct page *array[VBLK_PIN_PAGES], **pages = array;
		size_t offset;
		ssize_t got;

		got = iov_iter_extract_pages(iter, &pages, iov_iter_count(iter),
					     ARRAY_SIZE(array), 0, &offset);
		if (got <= 0)
			return got ? got : -EFAULT;
		for (unsigned int i = 0; got > 0; i++) {
			unsigned int len = min_t(size_t, got, PAGE_SIZE - offset);

			vblk_bio_add(bio, pages[i], len, offset);
			got -= len;
			offset = 0;
		}
	}
	return 0;
}

/* Submits req->iter at req->pos. False: another engine has to. May sleep. */
bool vblk_bio_submit(struct vblk_req *req)
{
	struct iov_iter saved = req->iter;
	int vecs = iov_iter_npages(&req->iter, BIO_MAX_VECS + 1);
	blk_opf_t opf = REQ_OP_READ;
	struct bio *bio;

	if (vecs > BIO_MAX_VECS)
		return false;
	if (req->write) {
		/*
		 * It became so since it was opened. The block layer only warns of such a bio, or
		 * takes it; the other engine is refused.
		 */
		if (bdev_read_only(req->queue->dev->disk->bdev) ||
		    vblk_disk_is_swap(req->queue->dev->disk))
			return false;
		opf = REQ_OP_WRITE | REQ_SYNC | REQ_IDLE;
		if (req->queue->write_through)
			opf |= REQ_FUA;
	}
	bio = vblk_bio_alloc(req, vecs, opf);
	if (!bio)
		return false;
	bio->bi_iter.bi_sector = req->pos >> SECTOR_SHIFT;
	bio_set_flag(bio, BIO_PAGE_PINNED);
	if (vblk_bio_fill(bio, &req->iter)) {
		/* The other engine meets the same and says what it is. */
		bio_release_pages(bio, false);
		bio_put(bio);
		req->iter = saved;
		return false;
	}
	req->bio = bio;
	submit_bio(bio);
	return true;
}

/* Flushes the device's write cache. False: there was no bio. */
bool vblk_bio_flush(struct vblk_req *req)
{
	struct bio *bio = vblk_bio_alloc(req, 0, REQ_OP_WRITE | REQ_PREFLUSH);

	if (!bio)
		return false;
	req->bio = bio;
	submit_bio(bio);
	return true;
}

/* Gives the bio and its pages back. May sleep. */
void vblk_bio_release(struct vblk_req *req)
{
	/* After the data: a page that was cleaned meanwhile is dirty again. */
	bio_release_pages(req->bio, !req->write && !req->error);
	bio_put(req->bio);
	req->bio = NULL;
}
