//! One image that is open, and what is asked of its bitmaps.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ringdisk_qcow2::{Bytes, Error, GuestOffset, Nothing, OpenOptions, Qcow2};
use ringdisk_ring::{Errno, IoBuf, Ring, Runtime};
use ringdisk_storage::{Lock, Storage};

use crate::common::Images;

/// Something to do with an open image.
pub(crate) type Work = dyn Fn(&mut Session<'_>) -> Result<(), Error>;

/// One open image and the ring that works on it.
pub(crate) struct Session<'a> {
    pub(crate) runtime: &'a mut Runtime,
    pub(crate) ring: Ring,
    pub(crate) image: Qcow2,
}

impl<'a> Session<'a> {
    pub(crate) fn new(
        runtime: &'a mut Runtime,
        storage: Arc<Storage>,
        writable: bool,
    ) -> Session<'a> {
        let options = OpenOptions { writable, ..Default::default() };
        let ring = runtime.ring().clone();
        let image = runtime
            .block_on(Qcow2::open(&ring, storage, &options))
            .unwrap_or_else(|error| panic!("{error}"));
        Session { runtime, ring, image }
    }

    pub(crate) fn open(runtime: &'a mut Runtime, path: &Path) -> Session<'a> {
        let options = ringdisk_storage::OpenOptions { lock: Lock::None, ..Default::default() };
        let storage = Arc::new(Storage::open(path, &options).expect("the image file"));
        Session::new(runtime, storage, true)
    }

    pub(crate) fn write(&mut self, offset: u64, len: usize) {
        assert_eq!(self.try_write(offset, len), Ok(len));
    }

    pub(crate) fn try_write(&mut self, offset: u64, len: usize) -> Result<usize, Errno> {
        let buf = IoBuf::new(len, 4096);
        buf.fill(0x5a);
        let write = self.image.write(&self.ring, GuestOffset(offset), &buf, &Nothing);
        self.runtime.block_on(write)
    }

    pub(crate) fn try_flush(&mut self) -> Result<(), Errno> {
        self.runtime.block_on(self.image.flush(&self.ring))
    }

    pub(crate) fn try_close(&mut self) -> Result<(), Errno> {
        self.runtime.block_on(self.image.close(&self.ring))
    }

    pub(crate) fn close(self) {
        self.runtime.block_on(self.image.close(&self.ring)).expect("a clean close");
    }

    pub(crate) fn add(&mut self, name: &str, granularity: Option<u64>) -> Result<(), Error> {
        self.runtime.block_on(self.image.bitmap_add(&self.ring, name, granularity.map(Bytes)))
    }

    pub(crate) fn remove(&mut self, name: &str) -> Result<(), Error> {
        self.runtime.block_on(self.image.bitmap_remove(&self.ring, name))
    }

    pub(crate) fn clear(&mut self, name: &str) -> Result<(), Error> {
        self.runtime.block_on(self.image.bitmap_clear(&self.ring, name))
    }

    pub(crate) fn enable(&mut self, name: &str, on: bool) -> Result<(), Error> {
        let (image, ring) = (&mut self.image, &self.ring);
        match on {
            true => self.runtime.block_on(image.bitmap_enable(ring, name)),
            false => self.runtime.block_on(image.bitmap_disable(ring, name)),
        }
    }

    pub(crate) fn merge(&mut self, from: &str, to: &str) -> Result<(), Error> {
        let (image, ring) = (&mut self.image, &self.ring);
        self.runtime.block_on(async {
            let source = image.bitmap_contents(ring, from).await?;
            image.bitmap_merge(ring, to, &source).await
        })
    }

    pub(crate) fn ranges(&mut self, name: &str) -> Result<Vec<Range<u64>>, Error> {
        let contents = self.runtime.block_on(self.image.bitmap_contents(&self.ring, name))?;
        Ok(contents.ranges().map(|range| range.start.0..range.end.0).collect())
    }

    /// Name, in use, records.
    pub(crate) fn list(&self) -> Vec<(String, bool, bool)> {
        let bitmaps = &self.image.info().bitmaps;
        bitmaps.iter().map(|one| (one.name.clone(), one.in_use, one.auto)).collect()
    }
}

pub(crate) fn ranges(runtime: &mut Runtime, path: &Path, name: &str) -> Vec<Range<u64>> {
    let mut session = Session::new(runtime, crate::common::storage(path), false);
    session.ranges(name).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn check(images: &Images, name: &str) {
    images.qemu_img(&["check", "-q", name]);
}

/// What `qemu-img info` says about bitmaps.
pub(crate) fn info(images: &Images, name: &str) -> String {
    let text = images.qemu_img(&["info", name]);
    let from = text.find("bitmaps:").unwrap_or(text.len());
    let to = text[from..].find("refcount bits").unwrap_or(text.len() - from);
    text[from..from + to].to_owned()
}

/// What QEMU reads in a bitmap: it merges it into one of its own, which we read.
pub(crate) fn according_to_qemu(
    runtime: &mut Runtime,
    images: &Images,
    name: &str,
    bitmap: &str,
    granularity: &str,
) -> Vec<Range<u64>> {
    std::fs::copy(images.path(name), images.path("copy")).expect("a copy");
    images.qemu_img(&["bitmap", "--add", "--disable", "-g", granularity, "copy", "theirs"]);
    images.qemu_img(&["bitmap", "--merge", bitmap, "copy", "theirs"]);
    ranges(runtime, &images.path("copy"), "theirs")
}
