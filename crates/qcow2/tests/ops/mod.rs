//! What the tests of offline changes share: an image beside a model of what its disk and its
//! snapshots hold, changed by us or by QEMU, and compared with QEMU after each step.

// Each test binary uses its own part.
#![allow(dead_code, missing_docs, unreachable_pub)]
// Test images are small.
#![allow(clippy::cast_possible_truncation)]

use std::path::PathBuf;
use std::sync::Arc;

use ringdisk_qcow2::{
    Bytes, CompressionType, Error, GuestOffset, Nothing, OpenOptions, Preallocation, Qcow2,
    ResizeOptions, compress,
};
use ringdisk_ring::{IoBuf, Ring, Runtime};
use ringdisk_storage::{Lock, Storage};

use crate::common::{Images, assert_same, runtime};

pub fn storage(path: &std::path::Path) -> Arc<Storage> {
    let options = ringdisk_storage::OpenOptions { lock: Lock::None, ..Default::default() };
    Arc::new(Storage::open(path, &options).expect("the image file"))
}

/// A snapshot as the model knows it.
#[derive(Clone, Debug)]
pub struct Saved {
    pub id: String,
    pub name: String,
    pub content: Vec<u8>,
}

/// An image and what it should hold.
pub struct Subject {
    pub images: Images,
    pub runtime: Runtime,
    pub disk: Vec<u8>,
    pub saved: Vec<Saved>,
    pub options: String,
    /// How often it was opened for writing.
    opened: u32,
}

pub const NAME: &str = "image";

impl Subject {
    pub fn new(options: &str, size: u64) -> Subject {
        let images = Images::new();
        images.create(NAME, options, size);
        Subject {
            images,
            runtime: runtime(),
            disk: vec![0; size as usize],
            saved: Vec::new(),
            options: options.to_owned(),
            opened: 0,
        }
    }

    pub fn path(&self) -> PathBuf {
        self.images.path(NAME)
    }

    /// Opens the image for writing, each second time with no room for metadata, so that a change
    /// writes reference counts on the way; runs `work`, closes it.
    pub fn with<T>(&mut self, work: impl AsyncFnOnce(&mut Qcow2, &Ring) -> T) -> T {
        let ring = self.runtime.ring().clone();
        let file = storage(&self.images.path(NAME));
        let data = self.images.path("image.data");
        self.opened += 1;
        let metadata_cache_bytes = self.opened.is_multiple_of(2).then_some(Bytes::ZERO);
        self.runtime.block_on(async {
            let options =
                OpenOptions { writable: true, metadata_cache_bytes, ..OpenOptions::default() };
            let mut image = Qcow2::open(&ring, file, &options).await.expect("a good image");
            if image.info().external_data_file {
                image.set_data_file(storage(&data)).expect("a data file is wanted");
            }
            let result = work(&mut image, &ring).await;
            image.close(&ring).await.expect("a clean close");
            result
        })
    }

    pub fn write(&mut self, byte: u8, offset: u64, len: u64) {
        self.disk[offset as usize..(offset + len) as usize].fill(byte);
        self.with(async |image, ring| {
            let buf = IoBuf::new(len as usize, 4096);
            buf.fill(byte);
            let done = image.write(ring, GuestOffset(offset), &buf, &Nothing).await;
            assert_eq!(done, Ok(len as usize));
        });
    }

    pub fn zero(&mut self, offset: u64, len: u64, unmap: bool) {
        self.disk[offset as usize..(offset + len) as usize].fill(0);
        self.with(async |image, ring| {
            image
                .write_zeroes(ring, GuestOffset(offset), Bytes(len), unmap, &Nothing)
                .await
                .expect("zeroes");
        });
    }

    pub fn discard(&mut self, offset: u64, len: u64) {
        self.disk[offset as usize..(offset + len) as usize].fill(0);
        self.with(async |image, ring| {
            image
                .discard(ring, GuestOffset(offset), Bytes(len), &Nothing)
                .await
                .expect("a discard");
        });
    }

    /// Makes whole clusters compressed, through QEMU, where they are not allocated.
    pub fn compress(&mut self, byte: u8, cluster: u64) {
        let len = self.with(async |image, _| image.info().cluster_size());
        let offset = GuestOffset::after(cluster * len);
        let end = offset + len;
        if end > GuestOffset(self.disk.len() as u64) {
            return;
        }
        let content = vec![byte; len.0 as usize];
        let done = self.with(async |image, ring| {
            image.discard(ring, offset, len, &Nothing).await.expect("a discard");
            let kind: CompressionType = image.info().compression;
            let packed = compress(kind, None, &content).expect("one byte");
            image.write_compressed(ring, offset, &packed).await
        });
        let value = if done.is_ok() { byte } else { 0 };
        self.disk[offset.0 as usize..end.0 as usize].fill(value);
    }

    pub fn create(&mut self, name: &str) -> Result<(), Error> {
        let result = self.with(async |image, ring| image.snapshot_create(ring, name).await);
        let id = result?;
        self.saved.push(Saved { id, name: name.to_owned(), content: self.disk.clone() });
        Ok(())
    }

    pub fn apply(&mut self, wanted: &str) -> Result<(), Error> {
        self.with(async |image, ring| image.snapshot_apply(ring, wanted).await)?;
        let by_id = self.saved.iter().find(|saved| saved.id == wanted);
        let saved = by_id.or_else(|| self.saved.iter().find(|saved| saved.name == wanted));
        self.disk = saved.expect("the model has it too").content.clone();
        Ok(())
    }

    pub fn delete(&mut self, wanted: &str) -> Result<(), Error> {
        self.with(async |image, ring| image.snapshot_delete(ring, wanted).await)?;
        let by_name = self.saved.iter().position(|saved| saved.name == wanted);
        let index = by_name.or_else(|| self.saved.iter().position(|saved| saved.id == wanted));
        self.saved.remove(index.expect("the model has it too"));
        Ok(())
    }

    pub fn resize(&mut self, size: u64, preallocation: Preallocation) -> Result<(), Error> {
        let options = ResizeOptions { shrink: true, preallocation };
        self.with(async |image, ring| {
            image.resize(ring, Bytes(size), &options, &Nothing).await?;
            assert_eq!(image.virtual_size(), Bytes(size));
            Ok::<(), Error>(())
        })?;
        self.disk.resize(size as usize, 0);
        Ok(())
    }

    pub fn make_empty(&mut self) {
        self.with(async |image, ring| image.make_empty(ring).await).expect("an empty disk");
        self.disk.fill(0);
    }

    /// What QEMU sees is what the model says; nothing is leaked or wrong.
    pub fn check(&self, what: &str) {
        self.check_clean(what);
        assert_same(what, &self.images.converted(NAME), &self.disk);
        self.check_list(what);
        for saved in &self.saved {
            let wanted = format!("snapshot.id={}", saved.id);
            let arguments =
                ["convert", "-f", "qcow2", "-l", &wanted, "-O", "raw", NAME, "snapshot.raw"];
            self.images.qemu_img(&arguments);
            let content = std::fs::read(self.images.path("snapshot.raw")).expect("converted");
            // QEMU reads a snapshot with the present size of the disk.
            let len = content.len().min(saved.content.len());
            let what = format!("{what}, snapshot {}", saved.id);
            assert_same(&what, &content[..len], &saved.content[..len]);
        }
    }

    pub fn check_clean(&self, what: &str) {
        let output = std::process::Command::new("qemu-img")
            .args(["check", "-f", "qcow2", NAME])
            .current_dir(self.images.0.path())
            .output()
            .expect("qemu-img");
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{} after {what}: {text}", self.options);
    }

    /// QEMU lists our snapshots, in order.
    fn check_list(&self, what: &str) {
        let json = self.images.qemu_img(&["info", "--output=json", NAME]);
        for saved in &self.saved {
            let (name, id) = (&saved.name, &saved.id);
            let listed = json.contains(&format!("\"name\": \"{name}\""))
                && json.contains(&format!("\"id\": \"{id}\""));
            assert!(listed, "{what}: snapshot {id} '{name}' is not in {json}");
        }
        assert_eq!(json.matches("\"vm-state-size\"").count(), self.saved.len(), "{what}: {json}");
    }
}
